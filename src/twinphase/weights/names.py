"""Which tensors a model of the Llama family must have, by GGUF name, and their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from twinphase.errors import CheckpointError
from twinphase.weights.checkpoint import Checkpoint

__all__ = ["Shape", "check_tensors", "expected_tensors"]


class Shape(Protocol):
    """The sizes that determine the tensors' shapes; `models.config.ModelConfig` has them."""

    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def num_heads(self) -> int: ...  # noqa: D102
    @property
    def num_kv_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102
    @property
    def ffn_size(self) -> int: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102


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


def check_tensors(checkpoint: Checkpoint, shape: Shape) -> None:
    """Raise CheckpointError naming the first tensor that is missing or misshapen, before anything is allocated."""
    for name, expected in expected_tensors(shape):
        info = checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{checkpoint.path.name} has no tensor {name}.", "Convert the model again.")
        if info.shape != expected:
            raise CheckpointError(
                f"Tensor {name} has shape {info.shape}, expected {expected}.", "Convert the model again."
            )
