"""The shape of a decoder from a GGUF file's header, weights and bytes counted tensor by tensor. Reads no weights."""

from __future__ import annotations

import math
import re
from pathlib import Path

from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.estimate.shapes import DecoderShape, Fields, StoredBytes
from twinphase.weights.gguf import open_gguf, quantization_name

__all__ = ["from_gguf"]

_FIX = "Give the config.json of the model instead."
# Every how many layers one has no window, where the file names a window: the architecture's rule, which the file itself
# does not carry. 0: every layer has the window.
_GGUF_WINDOWS = {"gemma2": 2, "gemma3": 6, "phi3": 0, "llama": 0}
_GGUF = ("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi3")


def from_gguf(path: Path, name: str) -> DecoderShape:
    """The shape that a GGUF file's header gives; weights and bytes are counted tensor by tensor.

    Raises:
        CheckpointError: not a GGUF file, or one without a field, which the message names.
        UnsupportedModelError: another architecture.
    """
    checkpoint = open_gguf(path, mark_used=False)
    arch = checkpoint.architecture
    if arch not in _GGUF:
        raise UnsupportedModelError(
            f"The architecture {arch!r} of {path.name} is not known here.", f"Known are: {', '.join(_GGUF)}."
        )
    prefix = f"{arch}."
    fields = Fields({key.removeprefix(prefix): value for key, value in checkpoint.metadata.items()}, path.name)
    hidden, layers, heads = (fields.number(k) for k in ("embedding_length", "block_count", "attention.head_count"))
    embedding, head = checkpoint.tensors.get("token_embd.weight"), checkpoint.tensors.get("output.weight")
    if embedding is None:
        raise CheckpointError(f"{path.name} has no token_embd.weight.", "Convert the model again.")
    counts, sizes = {"layers": 0, "experts": 0, "other": 0}, {"layers": 0, "experts": 0, "other": 0}
    for tensor in checkpoint.tensors.values():
        if tensor is embedding or tensor is head:
            continue
        matrix = re.match(r"blk\.\d+\.", tensor.name) and len(tensor.shape) > 1
        kind = ("layers" if len(tensor.shape) == 2 else "experts") if matrix else "other"
        if tensor.name.startswith("rope_"):  # frequencies are no weights
            continue
        counts[kind] += math.prod(tensor.shape)
        sizes[kind] += tensor.nbytes
    experts = fields.number("expert_count", 0, least=0)
    return DecoderShape(
        name=name,
        source=f"header of {path.name}",
        architecture=arch,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.number("attention.head_count_kv", heads),
        head_dim=fields.number("attention.key_length", hidden // heads),
        vocab_size=embedding.shape[0],
        layer_parameters=counts["layers"],
        expert_parameters=counts["experts"],
        num_experts=experts,
        experts_per_token=fields.number("expert_used_count") if experts else 0,
        other_parameters=counts["other"],
        tied=head is None,
        windows=_gguf_windows(fields, arch, layers, path.name),
        context_length=fields.number("context_length", 0, least=0) or None,
        dtype=quantization_name(checkpoint),
        stored=StoredBytes(
            layers=sizes["layers"],
            experts=sizes["experts"],
            head=(head or embedding).nbytes,
            total=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        ),
    )


def _gguf_windows(fields: Fields, arch: str, layers: int, name: str) -> tuple[int | None, ...]:
    window = fields.number("attention.sliding_window", 0, least=0)
    if not window:
        return (None,) * layers
    if arch not in _GGUF_WINDOWS:
        raise UnsupportedModelError(f"Which layers of {name} have its attention.sliding_window is not known.", _FIX)
    every = _GGUF_WINDOWS[arch]
    return tuple(window if not every or (i + 1) % every else None for i in range(layers))
