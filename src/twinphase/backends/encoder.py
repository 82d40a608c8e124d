"""The operations of encoders in NumPy float32, whichever backend was asked for.

The rows of several texts are computed together, and a text's bits must not depend on the others.
Attention is computed per text, and a row's norm and GELU from the row alone. A product's rows are
computed ROWS at a time, or in larger numbers that were found to give the same bits: equal calls of
one BLAS do, and those of different sizes may not. docs/design/0011-embeddings.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinphase.blueprint import Rope
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.quant import dequantize

F32 = NDArray[np.float32]

# Rows of the smallest product: with fewer, as many bytes of weights would be read for less work.
ROWS = 16
# Larger numbers of rows, which read the weights less often.
LARGER_ROWS = (256, 128, 64, 32)

# erf(x) = x P(x^2) / Q(x^2) on [-4, 4], where float32 has reached 1; lowest power first. The
# coefficients are those of Eigen's `generic_fast_erf_float` (MPL 2.0 code; the numbers are a
# minimax fit); largest error 4.2e-7.
P = (
    -1.60960333262415e-02,
    -2.95459980854025e-03,
    -7.34990630326855e-04,
    -5.69250639462346e-05,
    -2.10102402082508e-06,
    2.77068142495902e-08,
    -2.72614225801306e-10,
)
Q = (
    -1.42647390514189e-02,
    -7.37332916720468e-03,
    -1.68282697438203e-03,
    -2.13374055278905e-04,
    -1.45660718464996e-05,
)


def erf(x: F32) -> F32:
    """The error function, elementwise, to 4.2e-7 (NumPy has none)."""
    x = np.maximum(x, np.float32(-4))
    np.minimum(x, np.float32(4), out=x)
    square = x * x
    x *= _polynomial(P, square)
    x /= _polynomial(Q, square)
    return x


def _polynomial(coefficients: Sequence[float], x: F32) -> F32:
    """Evaluate a polynomial by Horner's rule."""
    out = x * np.float32(coefficients[-1])
    out += np.float32(coefficients[-2])
    for coefficient in coefficients[-3::-1]:
        out *= x
        out += np.float32(coefficient)
    return out


def pooled(x: F32, pooling: str) -> F32:
    """One row of x [rows, width], of length 1; `pooling` is "mean", "cls" (first) or "last"."""
    row: F32 = (
        x.mean(axis=0, dtype=np.float64).astype(np.float32)
        if pooling == "mean"
        else x[0 if pooling == "cls" else -1]
    )
    length = np.sqrt(np.sum(np.square(row, dtype=np.float64)))
    vector: F32 = (row / max(length, 1e-12)).astype(np.float32)
    return vector


@dataclass(frozen=True)
class Table:
    """An embedding: the stored bytes of each row, [rows, bytes], its width, and its type."""

    stored: NDArray[np.uint8]
    width: int
    type: str


class NumpyEncoder:
    """The `EncoderBackend` protocol; weights of any type are dequantized to float32."""

    row_multiple = ROWS

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, ...], tuple[int, ...]] = {}  # by the shape of a weight

    def matrix(self, checkpoint: Checkpoint, name: str) -> F32:
        """Float32 of the tensor's shape; one that is stored as float32 stays in the mapped file."""
        info = checkpoint.tensors[name]
        if info.type == "F32":
            return checkpoint.raw(name).view(np.float32).reshape(info.shape)
        return dequantize(checkpoint.raw(name), info.shape, info.type)

    def table(self, checkpoint: Checkpoint, name: str) -> Table:
        """Keep the table as it is stored, since few of its rows are read."""
        info = checkpoint.tensors[name]
        stored = checkpoint.raw(name).reshape(info.shape[0], -1)
        return Table(stored, info.shape[1], info.type)

    def vector(self, checkpoint: Checkpoint, name: str, plus: float = 0.0) -> F32:
        """Float32 of the tensor's shape."""
        return self.matrix(checkpoint, name) + np.float32(plus)

    def rows(self, table: F32 | Table, indices: Sequence[int]) -> F32:
        """A copy of the rows."""
        if isinstance(table, Table):
            stored = table.stored[np.asarray(indices)]
            return dequantize(stored.reshape(-1), (len(indices), table.width), table.type).copy()
        found: F32 = table[np.asarray(indices)]
        return found

    def stack(self, rows: Sequence[F32]) -> F32:
        """Stack single rows, padded with zeros."""
        x = np.zeros((len(rows) + -len(rows) % ROWS, len(rows[0])), np.float32)
        x[: len(rows)] = rows
        return x

    def scale(self, x: F32, factor: float) -> F32:
        """In place."""
        x *= np.float32(factor)
        return x

    def add(self, x: F32, y: F32) -> F32:
        """In place."""
        x += y
        return x

    def layer_norm(self, x: F32, weight: F32, bias: F32, eps: float) -> F32:
        """(x - mean) / sqrt(variance + eps) * weight + bias."""
        x = x - x.mean(axis=1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.float32(eps))
        x *= weight
        x += bias
        return x

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """x / sqrt(mean(x^2) + eps) * weight."""
        parts = x.reshape(-1, len(weight))
        scale = np.sqrt(np.square(parts).mean(axis=1, keepdims=True) + np.float32(eps))
        out: F32 = parts / scale * weight
        return out.reshape(x.shape)

    def rotate(self, x: F32, rope: Rope, positions: Sequence[int]) -> F32:
        """Angles are computed in float64."""
        angles = np.multiply.outer(np.array(positions, np.float64), np.array(rope.frequencies))
        cos, sin = (part[:, None].astype(np.float32) for part in (np.cos(angles), np.sin(angles)))
        heads = x.reshape(len(x), -1, rope.dim)
        first, second = np.split(heads, 2, axis=2)
        rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)
        return rotated.reshape(x.shape)

    def gelu_mul(self, gate: F32, up: F32) -> F32:
        """Write into the gate's memory."""
        inner = gate * gate
        inner *= np.float32(0.044715)
        inner += 1
        inner *= gate
        inner *= np.float32(math.sqrt(2 / math.pi))
        np.tanh(inner, out=inner)
        inner += 1
        gate *= 0.5
        gate *= inner
        gate *= up
        return gate

    def linear(self, x: F32, weight: F32, bias: F32 | None) -> F32:
        """x @ weight.T + bias."""
        sizes = self._sizes.get(weight.shape)
        if sizes is None:
            sizes = self._sizes[weight.shape] = product_sizes(weight)
        out = np.empty((len(x), len(weight)), np.float32)
        start = 0
        while start < len(x):
            end = start + next(size for size in sizes if size <= len(x) - start)
            np.matmul(x[start:end], weight.T, out=out[start:end])
            start = end
        if bias is not None:
            out += bias
        return out

    def gelu(self, x: F32) -> F32:
        """Write in place, a few rows at a time so that they stay in the processor's cache."""
        for start in range(0, len(x), ROWS):
            rows = x[start : start + ROWS]
            gate = erf(rows * np.float32(math.sqrt(0.5)))
            gate += 1
            gate *= 0.5
            rows *= gate
        return x

    def tanh(self, x: F32) -> F32:
        """In place."""
        return np.tanh(x, out=x)

    def attention(
        self,
        q: F32,
        k: F32,
        v: F32,
        num_heads: int,
        lengths: Sequence[int],
        *,
        scale: float | None = None,
        reach: int | None = None,
    ) -> F32:
        """Texts of one length that follow one another are computed at once, with all heads."""
        out = np.zeros_like(q)
        start = 0
        for length, texts in itertools.groupby(lengths):
            end = start + length * len(list(texts))
            rows = slice(start, end)
            found = _attention(
                q[rows], k[rows], v[rows], num_heads, length, scale=scale, reach=reach
            )
            out[rows] = found
            start = end
        return out

    def pool(self, x: F32, pooling: str, lengths: Sequence[int]) -> list[F32]:
        ends = itertools.accumulate(lengths)
        return [
            pooled(x[end - length : end], pooling)
            for end, length in zip(ends, lengths, strict=True)
        ]


def product_sizes(weight: F32) -> tuple[int, ...]:
    """Numbers of rows whose product with the weight gives each row the same bits, largest first.

    BLAS promises that for none. Its kernels take the same path for each row of a product of many
    rows, and another for few, so that it is tried: with rows in another order, and in larger
    numbers. If it does not hold even for ROWS, each row is computed by itself.
    """
    rng = np.random.default_rng(0)
    count = max(LARGER_ROWS)
    x = rng.standard_normal((count, weight.shape[1]), dtype=np.float32)

    def product(x: F32, size: int) -> F32:
        return np.concatenate(
            [x[start : start + size] @ weight.T for start in range(0, count, size)]
        )

    expected = product(x, ROWS)
    order = rng.permutation(count)

    def same(size: int) -> bool:
        return np.array_equal(product(x, size), expected) and np.array_equal(
            product(x[order], size), expected[order]
        )

    return (*filter(same, LARGER_ROWS), ROWS) if same(ROWS) else (1,)


def _attention(
    q: F32,
    k: F32,
    v: F32,
    num_heads: int,
    length: int,
    *,
    scale: float | None,
    reach: int | None,
) -> F32:
    """Attention of texts of one length, computed for all texts and heads at once."""
    rows, width = q.shape
    head_dim = width // num_heads
    heads = k.shape[1] // head_dim

    def by_head(part: F32) -> F32:
        """[texts, KV heads, heads of each, length, head_dim]."""
        shape = (-1, length, heads, part.shape[1] // head_dim // heads, head_dim)
        return part.reshape(shape).transpose(0, 2, 3, 1, 4)

    scores: F32 = by_head(q) @ by_head(k).swapaxes(3, 4)
    scores *= np.float32(1 / math.sqrt(head_dim) if scale is None else scale)
    if reach is not None and length > reach:
        at = np.arange(length)
        scores[..., np.abs(at[:, None] - at) > reach] = -np.inf
    scores -= scores.max(axis=4, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=4, keepdims=True)
    out: F32 = scores @ by_head(v)
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, width)
