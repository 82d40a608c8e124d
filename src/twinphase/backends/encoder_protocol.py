"""The `EncoderBackend` protocol: the operations that models which only embed are written in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from twinphase.weights.checkpoint import Checkpoint

Array = Any  # opaque to models


class EncoderBackend(Protocol):
    """The operations of an encoder, on the rows of several texts: no KV cache, no steps.

    A row's bits depend on its text alone. Rows beyond those of the texts are padding.

    Attributes:
        row_multiple: the number of rows has to be a multiple of it.
    """

    row_multiple: int

    def matrix(self, checkpoint: Checkpoint, name: str) -> Array:
        """Weights of a linear layer or of an embedding, [outputs, inputs]."""

    def vector(self, checkpoint: Checkpoint, name: str) -> Array:
        """Float32 values of a norm's weight or of a bias, [width]."""

    def rows(self, table: Array, indices: Sequence[int]) -> Array:
        """Rows of an embedding, [len(indices), width]."""

    def add(self, x: Array, y: Array) -> Array:
        """x + y; may overwrite x. A single row is added to all."""

    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> Array:
        """(x - mean) / sqrt(variance + eps) * weight + bias of each row (Ba et al., 2016)."""

    def linear(self, x: Array, weight: Array, bias: Array) -> Array:
        """x @ weight.T + bias, [rows, outputs]."""

    def gelu(self, x: Array) -> Array:
        """x * (1 + erf(x / sqrt(2))) / 2 (Hendrycks and Gimpel, 2016); may overwrite x."""

    def tanh(self, x: Array) -> Array:
        """Elementwise; may overwrite x."""

    def attention(
        self, q: Array, k: Array, v: Array, num_heads: int, lengths: Sequence[int]
    ) -> Array:
        """softmax(q k^T / sqrt(head_dim)) v of each head within each text, [rows, width].

        `lengths`: rows of each text, in their order; best sorted.
        """

    def pool(self, x: Array, pooling: str, lengths: Sequence[int]) -> list[Array]:
        """For each text a vector of length 1: its "mean", first ("cls") or "last" row."""
