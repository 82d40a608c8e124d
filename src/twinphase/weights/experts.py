"""Expert matrices of a Hugging Face folder, stacked as in GGUF: [experts, outputs, inputs].

Folders store them separately (`experts.3.gate_proj.weight`; Mixtral's `w1`, `w3`, `w2`), or stacked
with gate and up in one tensor; GPT-OSS interleaves the rows and transposes the matrices of these.
`canonical.py` renames tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.weights.block_formats import FORMATS
from twinphase.weights.source import FLOATS, Source, stacked

_Words = NDArray[np.unsignedinteger]
_SINGLE = re.compile(r"(.+\.experts)\.(\d{1,6})\.(\w+)\.weight")
_STACKED = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(_bias)?")
# Granite's names for these.
_GRANITE = {
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
}


def stack_experts(sources: Mapping[str, Source], architecture: str) -> dict[str, Source]:
    """All tensors, with experts stacked as `X.experts.{gate,up,down}_proj.{weight,bias}`.

    Mixtral's are named `w1`, `w3` and `w2`.

    Raises:
        CheckpointError: experts are missing, or differ in shape or type.
        UnsupportedModelError: stacked experts are of a type that cannot be split.
    """
    found: dict[str, Source] = {}
    single: dict[str, dict[int, Source]] = {}
    for name, source in sources.items():
        for other, usual in _GRANITE.items():
            if name.endswith(other):
                name = name.removesuffix(other) + usual
        if match := _SINGLE.fullmatch(name):
            single.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = source
        elif match := _STACKED.fullmatch(name):
            if source.type not in FLOATS:
                raise UnsupportedModelError(
                    f"Tensor {name} has type {source.type}.", f"Use {', '.join(FLOATS)}."
                )
            kind = "bias" if match[3] else "weight"
            for part, matrices in _taken_apart(name, source, match[2], architecture == "gpt-oss"):
                found[f"{match[1]}.{part}_proj.{kind}"] = matrices
        else:
            found[name] = source
    for name, parts in single.items():
        absent = next((i for i in range(len(parts)) if i not in parts), None)
        if absent is not None:
            raise CheckpointError(
                f"{name} has no expert {absent} of {max(parts) + 1}.", "Fetch the model again."
            )
        found[name] = stacked(name, [parts[i] for i in range(len(parts))])
    return found


def _taken_apart(
    name: str, source: Source, what: str, gpt_oss: bool
) -> Iterator[tuple[str, Source]]:
    """(part, tensor) of a stacked tensor: gate and up, or down.

    GPT-OSS: gate_up [E, hidden, 2 * ffn] or its bias [E, 2 * ffn], gate at even indices; down [E,
    ffn, hidden]. Others: gate_up [E, 2 * ffn, hidden], gate in the first half; down [E, hidden,
    ffn]. A bias has no inputs to transpose.
    """
    shape = source.shape
    if (
        len(shape) != (2 if name.endswith("_bias") else 3)
        or what == "gate_up"
        and shape[-1 if gpt_oss else 1] % 2
    ):
        raise CheckpointError(f"Tensor {name} has the shape {shape}.", "Fetch the model again.")
    if what == "down":
        yield "down", _rearranged(source, _transposed) if gpt_oss else source
        return
    half = shape[1] // 2
    if gpt_oss:
        yield "gate", _rearranged(source, lambda words: _transposed(words[..., 0::2]))
        yield "up", _rearranged(source, lambda words: _transposed(words[..., 1::2]))
    else:
        yield "gate", _rearranged(source, lambda words: words[:, :half])
        yield "up", _rearranged(source, lambda words: words[:, half:])


def _transposed(words: _Words) -> _Words:
    return words.swapaxes(1, 2) if words.ndim == 3 else words


def _rearranged(source: Source, arrange: Callable[[_Words], _Words]) -> Source:
    """The tensor with its elements in another order; `arrange` permutes an array of elements."""
    word = np.dtype(f"<u{FORMATS[source.type].block_bytes}")
    shape = arrange(np.broadcast_to(np.zeros((), word), source.shape)).shape

    def read() -> NDArray[np.uint8]:
        words = source.read().view(word).reshape(source.shape)
        return np.ascontiguousarray(arrange(words)).reshape(-1).view(np.uint8)

    return Source(shape, source.type, read)
