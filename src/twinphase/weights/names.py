"""Which tensors a model of the Llama family must have, by GGUF name, and their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.weights.checkpoint import Checkpoint

__all__ = ["Shape", "check_tensors", "expected_tensors", "optional_tensors"]


class Shape(Protocol):
    """The sizes that determine the tensors' shapes; `models.config.ModelConfig` has them."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def rope_dim(self) -> int: ...


def expected_tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, row-major shape) of every required tensor."""
    hidden, ffn = shape.hidden_size, shape.ffn_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "token_embd.weight", (shape.vocab_size, hidden)
    yield "output_norm.weight", (hidden,)
    for i in range(shape.num_layers):
        yield f"blk.{i}.attn_norm.weight", (hidden,)
        yield f"blk.{i}.attn_q.weight", (queries, hidden)
        yield f"blk.{i}.attn_k.weight", (keys, hidden)
        yield f"blk.{i}.attn_v.weight", (keys, hidden)
        yield f"blk.{i}.attn_output.weight", (hidden, queries)
        yield f"blk.{i}.ffn_norm.weight", (hidden,)
        yield f"blk.{i}.ffn_gate.weight", (ffn, hidden)
        yield f"blk.{i}.ffn_up.weight", (ffn, hidden)
        yield f"blk.{i}.ffn_down.weight", (hidden, ffn)


def optional_tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, row-major shape) of the tensors that a model may have: an output head of its own, frequency factors."""
    yield "output.weight", (shape.vocab_size, shape.hidden_size)
    yield "rope_freqs.weight", (shape.rope_dim // 2,)


def check_tensors(checkpoint: Checkpoint, shape: Shape) -> None:
    """Check names and shapes before anything is allocated.

    Raises:
        CheckpointError: names the first tensor that is missing or misshapen.
        UnsupportedModelError: names a tensor that would be ignored, such as a bias or an expert.
    """
    required, optional = dict(expected_tensors(shape)), dict(optional_tensors(shape))
    for name in checkpoint.tensors:
        if name not in required and name not in optional:
            raise UnsupportedModelError(
                f"{checkpoint.path.name} has a tensor {name}, which this architecture does not use here.",
                "Use a model without it: ignoring it would change the answers.",
            )
    for name, expected in {**required, **optional}.items():
        info = checkpoint.tensors.get(name)
        if info is None:
            if name in optional:
                continue
            raise CheckpointError(f"{checkpoint.path.name} has no tensor {name}.", "Convert the model again.")
        if info.shape != expected:
            raise CheckpointError(
                f"Tensor {name} has shape {info.shape}, expected {expected}.", "Convert the model again."
            )
