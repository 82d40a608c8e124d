"""Slow, plain NumPy float32: the oracle of the tests. Reads like the papers; nothing here is tuned.

Weights are dequantized to float32 and the KV cache is float32 too, so that nothing but summation order stands
between it and a textbook implementation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import Forward, KVCacheSpec, ModelShape, RopeSpec, StepInputs
from twinphase.backends.rope_tables import rope_tables
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.quant import dequantize

__all__ = ["ReferenceBackend"]

F32 = NDArray[np.float32]


class ReferenceBackend:
    """The `Backend` protocol in NumPy float32."""

    name = "reference"
    block_multiple = 1
    kv_cache_dtypes: tuple[str, ...] = ("auto",)

    def prepare(self, checkpoint: Checkpoint, shape: ModelShape) -> None:
        """Nothing to prepare."""

    def matrix(self, checkpoint: Checkpoint, names: Sequence[str]) -> F32:
        """Dequantized weights, float32 [outputs, inputs]."""
        return np.concatenate([self.vector(checkpoint, name) for name in names])

    def vector(self, checkpoint: Checkpoint, name: str) -> F32:
        """A dequantized tensor, float32 of its shape."""
        info = checkpoint.tensors[name]
        return dequantize(checkpoint.raw(name), info.shape, info.type)

    def embedding(self, checkpoint: Checkpoint, name: str) -> F32:
        """Dequantized embedding, float32 [vocab_size, hidden_size]."""
        return self.vector(checkpoint, name)

    def rope(self, checkpoint: Checkpoint, spec: RopeSpec, max_positions: int) -> tuple[F32, F32, bool]:
        """Cosines, sines and whether pairs are interleaved."""
        return (*rope_tables(checkpoint, spec, max_positions), spec.interleaved)

    def allocate_kv_cache(self, spec: KVCacheSpec) -> None:
        """Float32 [layers, slots, kv_heads, head_dim], keys and values apart."""
        shape = (spec.num_layers, spec.num_blocks * spec.block_size, spec.num_kv_heads, spec.head_dim)
        self.kv_spec = spec
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.kv_memory = [self.keys, self.values]

    def kv_bytes_per_token(self, dtype: str | None = None) -> int:
        """2 L H_kv d b, with b = 4."""
        return 2 * self.kv_spec.num_layers * self.kv_spec.num_kv_heads * self.kv_spec.head_dim * 4

    def execute(self, forward: Forward, inputs: StepInputs) -> F32:
        """Run the forward pass operation by operation."""
        self.inputs = inputs
        logits: F32 = forward(self)
        return logits

    def embed(self, table: F32) -> F32:
        """Rows of the table."""
        return table[self.inputs.token_ids]

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """x / sqrt(mean(x^2) + eps) * weight."""
        mean: F32 = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
        root: F32 = np.sqrt(mean + np.float32(eps), dtype=np.float32)
        return x / root * weight

    def linear(self, x: F32, weight: F32, residual: F32 | None = None) -> F32:
        """x @ weight.T + residual."""
        out: F32 = x @ weight.T
        return out if residual is None else out + residual

    def rope_kv_write(self, qkv: F32, rope: tuple[F32, F32, bool], layer: int, num_heads: int) -> F32:
        """Rotate, write the cache, return queries [num_tokens, num_heads, head_dim]."""
        spec, inputs = self.kv_spec, self.inputs
        heads = qkv.reshape(len(qkv), -1, spec.head_dim)
        q, k, v = np.split(heads, [num_heads, num_heads + spec.num_kv_heads], axis=1)
        self.keys[layer, inputs.slot_mapping] = self._rotate(k, rope)
        self.values[layer, inputs.slot_mapping] = v
        return self._rotate(q, rope)

    def _rotate(self, x: F32, rope: tuple[F32, F32, bool]) -> F32:
        cos_table, sin_table, interleaved = rope
        half = cos_table.shape[1]
        cos, sin = (table[self.inputs.positions][:, None, :] for table in (cos_table, sin_table))
        first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
        second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
        out = x.copy()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out

    def attention(self, q: F32, layer: int, num_heads: int) -> F32:
        """softmax(q k^T / sqrt(d)) v, causal, sequence by sequence."""
        spec, inputs = self.kv_spec, self.inputs
        out = np.empty_like(q)
        for i, context_len in enumerate(inputs.context_lens):
            rows = slice(inputs.query_start[i], inputs.query_start[i + 1])
            at = np.arange(context_len)
            slots = inputs.block_tables[i][at // spec.block_size] * spec.block_size + at % spec.block_size
            k, v = self.keys[layer, slots], self.values[layer, slots]  # [context, kv_heads, head_dim]
            hidden = at[None, :] > inputs.positions[rows][:, None]  # the causal mask
            for head in range(num_heads):
                kv_head = head * spec.num_kv_heads // num_heads
                scores = q[rows, head] @ k[:, kv_head].T * np.float32(spec.head_dim**-0.5)
                scores[hidden] = -np.inf
                p = np.exp(scores - scores.max(axis=1, keepdims=True))
                out[rows, head] = (p / p.sum(axis=1, keepdims=True)) @ v[:, kv_head]
        return out.reshape(len(out), -1)

    def silu_mul(self, gate_up: F32) -> F32:
        """silu(gate) * up."""
        gate, up = np.split(gate_up, 2, axis=1)
        out: F32 = gate / (1 + np.exp(-gate)) * up
        return out

    def logit_rows(self, x: F32) -> F32:
        """The wanted rows."""
        return x[self.inputs.logit_rows]
