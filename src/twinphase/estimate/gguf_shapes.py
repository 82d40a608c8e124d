"""The shape of a decoder from a GGUF file's header, weights and bytes counted tensor by tensor. Reads no weights."""

from __future__ import annotations

import math
import re
from pathlib import Path

from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.estimate.shapes import CONFIG_FIX, DecoderShape, Fields, StoredBytes, alternating_windows
from twinphase.weights.gguf import open_gguf, quantization_name

__all__ = ["from_gguf"]

ARCHITECTURES = ("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi3")
# For a file that names a sliding window: every n-th layer has none (0: every layer has it). That is the architecture's
# rule; the file itself does not carry it.
FULL_ATTENTION_EVERY = {"gemma2": 2, "gemma3": 6, "phi3": 0, "llama": 0}


def from_gguf(path: Path, name: str) -> DecoderShape:
    """The shape that a GGUF file's header gives.

    Raises:
        CheckpointError: not a GGUF file, or one without a field, which the message names.
        UnsupportedModelError: another architecture.
    """
    checkpoint = open_gguf(path, mark_used=False)
    arch = checkpoint.architecture
    if arch not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"The architecture {arch!r} of {path.name} is not known here.", f"Known are: {', '.join(ARCHITECTURES)}."
        )
    fields = Fields({key.removeprefix(f"{arch}."): value for key, value in checkpoint.metadata.items()}, path.name)
    hidden, layers, heads = (fields.number(k) for k in ("embedding_length", "block_count", "attention.head_count"))
    embedding, head = checkpoint.tensors.get("token_embd.weight"), checkpoint.tensors.get("output.weight")
    if embedding is None:
        raise CheckpointError(f"{path.name} has no token_embd.weight.", "Convert the model again.")
    counts, sizes = dict.fromkeys(("layers", "experts", "other"), 0), dict.fromkeys(("layers", "experts", "other"), 0)
    for tensor in checkpoint.tensors.values():
        if tensor is embedding or tensor is head or tensor.name.startswith("rope_"):  # frequencies are not weights
            continue
        matrix = re.match(r"blk\.\d+\.", tensor.name) and len(tensor.shape) > 1
        kind = ("layers" if len(tensor.shape) == 2 else "experts") if matrix else "other"
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
        windows=_windows(fields, arch, layers, path.name),
        context_length=fields.number("context_length", 0, least=0) or None,
        dtype=quantization_name(checkpoint),
        stored=StoredBytes(
            layers=sizes["layers"],
            experts=sizes["experts"],
            head=(head or embedding).nbytes,
            total=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        ),
    )


def _windows(fields: Fields, arch: str, layers: int, name: str) -> tuple[int | None, ...]:
    window = fields.number("attention.sliding_window", 0, least=0)
    if not window:
        return (None,) * layers
    if arch not in FULL_ATTENTION_EVERY:
        raise UnsupportedModelError(f"{name} does not say which layers use its attention.sliding_window.", CONFIG_FIX)
    return alternating_windows(window, FULL_ATTENTION_EVERY[arch], layers)
