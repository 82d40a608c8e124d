"""The float32 model that ours is measured against: transformers, on the weights of a GGUF file.

Reader, dequantization and forward pass are those of transformers and the `gguf` package: nothing is
shared with what is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

F32 = NDArray[np.float32]
CHUNK = 512  # rows whose logits are in memory at a time

# transformers makes this map anew for each of a model's 400 modules.
gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)


def _in_large_groups(
    func: Callable[[Any], Any], arr: NDArray[Any], otype: Any, oshape: Sequence[int]
) -> NDArray[Any]:
    """As the package has it, but not 16 rows at a time, which takes longer than the arithmetic."""
    rows = np.asarray(arr).reshape(-1, arr.shape[-1])
    groups = np.array_split(rows, -(-len(rows) // 1024))
    out = np.concatenate([func(group).ravel() for group in groups])
    return out.astype(otype, copy=False).reshape(oshape)


gguf.quants._apply_over_grouped_rows = _in_large_groups


class Oracle:
    """transformers' model in float32."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    def logits(self, ids: Sequence[int]) -> Iterator[tuple[slice, F32]]:
        """Positions and their logits [positions, vocab_size] in chunks, to save memory."""
        with torch.inference_mode():
            hidden = self.model.model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[
                0
            ]
            for rows in chunks(len(ids)):
                yield rows, self.model.lm_head(hidden[rows]).numpy()


def chunks(count: int) -> Iterator[slice]:
    """Positions 0 to `count` in chunks."""
    return (slice(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK))


def negative_log_likelihood(ids: Sequence[int], at: slice, logits: F32) -> float:
    """Sum of -log p(the id that follows) over the positions `at`; the last of all has none."""
    next_ids = ids[at.start + 1 : at.stop + 1]
    rows = logits[: len(next_ids)] - logits[: len(next_ids)].max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(rows).sum(axis=1, dtype=np.float64))
    return float((log_sum - rows[np.arange(len(rows)), list(next_ids)]).sum())


def rewritten(source: Path, target: Path, tensor_type: str | None = None) -> Path:
    """The model without its vocabulary, which transformers would read for longer than the weights.

    With a `tensor_type`, the matrices of its layers are rounded to that format; the embedding stays
    as it is.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith(f"{architecture}.") and name != f"{architecture}.vocab_size":
            add = (
                writer.add_float32
                if field.types[0] == gguf.GGUFValueType.FLOAT32
                else writer.add_uint32
            )
            add(name, field.contents())
    for tensor in reader.tensors:
        data = tensor.data
        kind = tensor.tensor_type
        if tensor.name == "token_embd.weight":
            writer.add_vocab_size(int(tensor.shape[1]))
        elif tensor_type and tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            data = gguf.quants.dequantize(data, kind)
            kind = gguf.GGMLQuantizationType[tensor_type]
            data = gguf.quants.quantize(data, kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
