"""The `EncoderBackend` protocol: the operations that models which only embed are written in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from twinphase.blueprint import Rope
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
        """Weights of a linear layer, [outputs, inputs]."""

    def table(self, checkpoint: Checkpoint, name: str) -> Array:
        """An embedding, [rows, width], for `rows`."""

    def vector(self, checkpoint: Checkpoint, name: str, plus: float = 0.0) -> Array:
        """Float32 values of a norm's weight or of a bias, [width], and `plus` more."""

    def rows(self, table: Array, indices: Sequence[int]) -> Array:
        """Rows of a table, or of other rows, [len(indices), width]."""

    def stack(self, rows: Sequence[Array]) -> Array:
        """Single rows as one array, [rows, width], padded to a multiple of `row_multiple`."""

    def scale(self, x: Array, factor: float) -> Array:
        """x * factor; may overwrite x."""

    def add(self, x: Array, y: Array) -> Array:
        """x + y; may overwrite x. A single row is added to all."""

    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> Array:
        """(x - mean) / sqrt(variance + eps) * weight + bias of each row (Ba et al., 2016)."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight of each row, or of each part as wide as the weight."""

    def rotate(self, x: Array, rope: Rope, positions: Sequence[int]) -> Array:
        """Each row's heads rotated by its position; a head is `rope.dim` wide, its pairs halves."""

    def gelu_mul(self, gate: Array, up: Array) -> Array:
        """GELU (tanh) of the gate, times `up`; may overwrite both."""

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """x @ weight.T + bias, [rows, outputs]."""

    def gelu(self, x: Array) -> Array:
        """x * (1 + erf(x / sqrt(2))) / 2 (Hendrycks and Gimpel, 2016); may overwrite x."""

    def tanh(self, x: Array) -> Array:
        """Elementwise; may overwrite x."""

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        num_heads: int,
        lengths: Sequence[int],
        *,
        scale: float | None = None,
        reach: int | None = None,
    ) -> Array:
        """softmax(scale q k^T) v of each head within each text, [rows, width].

        Args:
            q: [rows, num_heads * head_dim].
            k: [rows, KV heads * head_dim]; several heads of q may share one.
            v: as k.
            num_heads: of q.
            lengths: rows of each text, in their order; best sorted.
            scale: None is 1 / sqrt(head_dim).
            reach: how many positions to either side a token sees; None is all.
        """

    def pool(self, x: Array, pooling: str, lengths: Sequence[int]) -> list[Array]:
        """For each text a vector of length 1: its "mean", first ("cls") or "last" row."""
