"""Slow, plain NumPy float32: the oracle of the tests. Reads like the papers; nothing here is tuned.

Weights are dequantized to float32 and the KV cache is float32 too, so that nothing but summation
order stands between it and a textbook implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import Forward, KVCacheSpec, StepInputs
from twinphase.backends.group import Group
from twinphase.backends.kv_frames import is_finite, kv_fingerprint, pack_frames, unpack_frames
from twinphase.backends.reference_math import product_in_blocks, softcap_of
from twinphase.backends.reference_recurrence import ReferenceRecurrence
from twinphase.backends.rope_tables import query_scales, rope_tables
from twinphase.backends.states import slot_layout
from twinphase.blueprint import Blueprint, Experts, KVShape, MatrixStates, Rope, Span
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.quant import dequantize

F32 = NDArray[np.float32]
RopeTables = tuple[F32, F32, bool, F32 | None]


class ReferenceBackend(ReferenceRecurrence):
    """The `Backend` protocol in NumPy float32."""

    name = "reference"
    block_multiple = 1
    kv_cache_dtypes: tuple[str, ...] = ("auto",)
    device_sampler = None
    group: Group | None = None  # of ranks, where there are several
    in_blocks = (
        False  # whether one rank multiplies as several do, which takes several times as long
    )
    _shared: F32 | None = None

    def prepare(
        self, checkpoint: Checkpoint, blueprint: Blueprint, forward_on: Callable[..., Forward]
    ) -> None:
        """Remember the model's files and blueprint."""
        self.blueprint = blueprint
        self._checkpoint = checkpoint

    def matrix(self, checkpoint: Checkpoint, names: Sequence[str]) -> F32:
        """Dequantized weights, float32 [outputs, inputs]."""
        return np.concatenate([self._tensor(checkpoint, name) for name in names])

    exact_matrix = matrix

    def experts(self, checkpoint: Checkpoint, names: Sequence[str]) -> F32:
        """Dequantized weights, float32 [experts, outputs, inputs]."""
        return np.concatenate([self._tensor(checkpoint, name) for name in names], axis=1)

    def vector(self, checkpoint: Checkpoint, names: Sequence[str], plus: float = 0.0) -> F32:
        """Dequantized tensors side by side, float32 of their shape."""
        return np.concatenate(
            [self._tensor(checkpoint, name) for name in names], axis=-1
        ) + np.float32(plus)

    def _tensor(self, checkpoint: Checkpoint, name: str) -> F32:
        info = checkpoint.tensors[name]
        return dequantize(checkpoint.raw(name), info.shape, info.type)

    def embedding(self, checkpoint: Checkpoint, name: str) -> F32:
        """Dequantized embedding, float32 [vocab_size, hidden_size]."""
        return self._tensor(checkpoint, name)

    def rope(self, rope: Rope, max_positions: int) -> RopeTables:
        """Cosines, sines, whether pairs are interleaved, and scales of the queries."""
        tables = rope_tables(rope, max_positions)
        return *tables, rope.interleaved, query_scales(rope, max_positions)

    def allocate_kv_cache(self, spec: KVCacheSpec) -> None:
        """Float32 [slots, kv_heads, head_dim] of each layer, keys and values apart."""
        slots = spec.num_blocks * spec.block_size
        self.kv_spec = spec
        self.keys, self.values = (
            [np.zeros((slots, s.num_heads, s.head_dim), np.float32) for s in spec.layers]
            for _ in range(2)
        )
        if spec.num_state_slots:
            layout = slot_layout(self.blueprint, spec.state_log_rows)
            states = layout.num_layers, spec.num_state_slots
            self.histories = np.zeros((*states, layout.history_rows, layout.channels), np.float32)
            if isinstance(matrix := self.blueprint.recurrence, MatrixStates):
                heads = (matrix.value_heads, matrix.key_dim, matrix.value_dim)
                self.matrices = np.zeros((*states, *heads), np.float32)
                # Of each row of the log and head: key, change and decay.
                row = (matrix.value_heads, matrix.key_dim + matrix.value_dim + 1)
                self.logs = np.zeros((*states, spec.state_log_rows, *row), np.float32)

    def kv_bytes_per_token(
        self, dtype: str | None = None, layers: Sequence[KVShape] | None = None
    ) -> int:
        """The sum of 2 H_kv d b over layers, with b = 4."""
        return sum(2 * s.num_heads * s.head_dim * 4 for s in layers or self.kv_spec.layers)

    @cached_property
    def kv_fingerprint(self) -> str:
        """Name NumPy's version, which fixes the order of the sums in its products."""
        facts = {"backend": self.name, "numpy": np.__version__, "kv_cache_dtype": "float32"}
        return kv_fingerprint(self._checkpoint, self.blueprint, self.kv_spec, **facts)

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Keys of each layer, then values, float32 [block_size, kv_heads, head_dim] each."""
        parts = [view[list(block_ids)].reshape(len(block_ids), -1) for view in self._blocks()]
        return pack_frames(self.kv_fingerprint, np.concatenate(parts, axis=1).view(np.uint8))

    def write_blocks(self, block_ids: Sequence[int], frames: Sequence[bytes | memoryview]) -> None:
        nbytes = self.kv_bytes_per_token() * self.kv_spec.block_size
        blocks = unpack_frames(self.kv_fingerprint, frames, nbytes).view(np.float32)
        start = 0
        for view in self._blocks():
            end = start + view[0].size
            view[list(block_ids)] = blocks[:, start:end].reshape(-1, *view.shape[1:])
            start = end

    def frame_parts(self) -> list[tuple[int, int, int]]:
        """List the keys of each layer, then the values."""
        spec = self.kv_spec
        groups = list(spec.groups)
        return 2 * [(groups.index(s), spec.block_size, 4 * s.head_dim) for s in spec.layers]

    def has_finite_numbers(self, frame: bytes | bytearray | memoryview) -> bool:
        return is_finite(frame, "float32")

    def _blocks(self) -> list[F32]:
        """Views [blocks, block_size, kv_heads, head_dim] of each layer's keys, then values."""
        size = self.kv_spec.block_size
        return [a.reshape(-1, size, *a.shape[1:]) for a in (*self.keys, *self.values)]

    def execute(self, forward: Forward, inputs: StepInputs) -> F32:
        """Run the forward pass operation by operation."""
        self.inputs = inputs
        self._kept = list[F32]()
        logits: F32 = forward(self)
        return logits

    def kept(self) -> list[F32]:
        return self._kept

    def keep(self, x: F32) -> None:
        """No operation writes into an array that it reads."""
        self._kept.append(x)

    def embed(self, table: F32, scale: float = 1.0) -> F32:
        """Rows of the table, scaled."""
        return table[self.inputs.token_ids] * np.float32(scale)

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """x / sqrt(mean(x^2) + eps) * weight."""
        mean: F32 = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
        root: F32 = np.sqrt(mean + np.float32(eps), dtype=np.float32)
        return x / root * weight

    def linear(
        self,
        x: F32,
        weight: F32,
        *,
        residual: F32 | None = None,
        first: int = 0,
        bias: F32 | None = None,
    ) -> F32:
        """x @ weight.T + residual + bias."""
        out: F32 = product_in_blocks(x, weight) if self.in_blocks or self.group else x @ weight.T
        if residual is not None:
            out = out + residual[:, first : first + len(weight)]
        return out if bias is None else out + bias

    def gather(self, x: F32, span: Span | None) -> F32:
        """Copy every rank's columns out of the shared memory before it is written again."""
        if span is None:
            return x
        assert self.group is not None
        if self._shared is None:
            self._shared = self.group.take().view(np.float32)
        whole = self._shared[: len(x) * span.total].reshape(len(x), span.total)
        for here, there, size in span.pieces:
            whole[:, there : there + size] = x[:, here : here + size]
        self.group.meet()
        whole = whole.copy()
        self.group.meet()
        return whole

    def add(self, x: F32, h: F32, scale: float = 1.0) -> F32:
        """x + scale * h."""
        return x + np.float32(scale) * h

    def add_norm(
        self,
        x: F32,
        h: F32,
        weight: F32,
        eps: float,
        *,
        scale: float = 1.0,
        factor: F32 | None = None,
    ) -> F32:
        """(x + scale * rms_norm(h)) * factor, the norm by parts of a row as wide as the weight."""
        parts = h.reshape(len(h), h.shape[1] // len(weight), len(weight))
        normed = self.rms_norm(parts, weight, eps).reshape(h.shape)
        out = self.add(x, normed, scale)
        return out if factor is None else out * factor

    def rope_kv_write(
        self,
        qkv: F32,
        rope: RopeTables | None,
        layer: int,
        q_norm: F32 | None = None,
        k_norm: F32 | None = None,
    ) -> F32:
        """Normalize, rotate, write the cache, return queries [num_tokens, num_heads, head_dim]."""
        b = self.blueprint
        inputs = self.inputs
        shape = self.kv_spec.layers[layer]
        queries = b.num_heads * (1 + b.attention_gate)
        heads = qkv.reshape(len(qkv), -1, shape.head_dim)
        q, k, v = np.split(heads, [queries, queries + shape.num_heads], axis=1)
        v = v if v.size else k  # keys are values, too
        q = q[:, :: 1 + b.attention_gate]
        if q_norm is not None:
            q = self._normalize(q, q_norm, b.norm_spans[0])
        if k_norm is not None:
            k = self._normalize(k, k_norm, b.norm_spans[1])
        if b.value_norm:
            v = self.rms_norm(v, np.ones(shape.head_dim, np.float32), b.norm_eps)
        if rope is not None:
            q = self._rotate(q, rope)
            k = self._rotate(k, rope)
            if rope[3] is not None:
                q = q * rope[3][inputs.positions][:, None, None]
        if k.size:
            self.keys[layer][inputs.slot_mapping] = k
            self.values[layer][inputs.slot_mapping] = v
        return q

    def _normalize(self, x: F32, weight: F32, span: Span | None) -> F32:
        """RMSNorm of each head of x [rows, heads, head_dim], or of rows as wide as the weight."""
        rows = (
            x.reshape(len(x), -1, len(weight))
            if span is None
            else self.gather(x.reshape(len(x), -1), span)
        )
        out = self.rms_norm(rows, weight, self.blueprint.norm_eps)
        return (out if span is None else out[:, span.first : span.first + span.size]).reshape(
            x.shape
        )

    def _rotate(self, x: F32, rope: RopeTables) -> F32:
        cos_table, sin_table, interleaved, _ = rope
        half = cos_table.shape[1]
        positions = self.inputs.positions[self._rows_of(x)]
        cos, sin = (table[positions][:, None, :] for table in (cos_table, sin_table))
        first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
        second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
        out = x.copy()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out

    def attention(
        self, q: F32, layer: int, window: int | None = None, sinks: F32 | None = None
    ) -> F32:
        """softmax(scale * q k^T) v, causal and within the window, sequence by sequence."""
        spec = self.kv_spec
        inputs = self.inputs
        b = self.blueprint
        out = np.empty_like(q)
        group = b.num_heads // spec.layers[layer].num_heads
        numbers = self._rows_of(q)
        for i, context_len in enumerate(inputs.context_lens):
            first, end = inputs.query_start[i : i + 2]
            rows = np.flatnonzero((first <= numbers) & (numbers < end))
            at = np.arange(context_len)
            slots = (
                inputs.block_tables[i][at // spec.block_size] * spec.block_size
                + at % spec.block_size
            )
            # [context, kv_heads, head_dim]
            k = self.keys[layer][slots]
            v = self.values[layer][slots]
            position = inputs.positions[numbers[rows]][:, None]
            hidden = at[None, :] > position  # the causal mask
            if window is not None:
                hidden |= at[None, :] <= position - window
            for head in range(b.num_heads):
                scores = q[rows, head] @ k[:, head // group].T * np.float32(b.scale)
                if b.attention_softcap is not None:
                    scores = softcap_of(scores, b.attention_softcap)
                scores[hidden] = -np.inf
                sink = np.full(
                    (len(scores), 1), -np.inf if sinks is None else sinks[head], np.float32
                )
                top = np.maximum(scores.max(axis=1, keepdims=True), sink)
                p = np.exp(scores - top)
                out[rows, head] = (p / (p.sum(axis=1, keepdims=True) + np.exp(sink - top))) @ v[
                    :, head // group
                ]
        return out.reshape(len(out), -1)

    def _rows_of(self, x: F32) -> NDArray[np.int32]:
        """The numbers of these rows in the step: those with logits, unless there are more."""
        wanted = self.inputs.logit_rows
        return wanted if len(x) == len(wanted) else np.arange(len(x), dtype=np.int32)

    def gated_linear(self, x: F32, weight: F32, *, bias: F32 | None = None) -> F32:
        """activation(gate) * up of the linear layer of both."""
        return self.gate_mul(self.linear(x, weight, bias=bias))

    def gate_mul(self, gate_up: F32, up: F32 | None = None, first: int = 0) -> F32:
        """activation(gate) * up."""
        out: F32
        if up is None:
            gate, up = np.split(gate_up, 2, axis=1)
        else:
            gate = gate_up
            up = up[:, first : first + gate.shape[1]]
        if (
            self.blueprint.activation == "gelu"
        ):  # by tanh (Hendrycks and Gimpel, 2016, arXiv:1606.08415)
            inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
            out = np.float32(0.5) * gate * (1 + np.tanh(inner)) * up
            return out
        if (
            self.blueprint.activation == "swiglu_oai"
        ):  # clamped, alpha 1.702 (gpt-oss's published code)
            gate = np.minimum(gate, np.float32(7))
            up = np.clip(up, np.float32(-7), np.float32(7))
            out = gate / (1 + np.exp(np.float32(-1.702) * gate)) * (up + 1)
            return out
        if self.blueprint.activation == "relu":
            out = np.maximum(gate, np.float32(0)) * up
            return out
        out = gate / (1 + np.exp(-gate)) * up
        return out

    def moe(
        self,
        x: F32,
        router: F32,
        gate_up: F32,
        down: F32,
        experts: Experts,
        *,
        router_bias: F32 | None = None,
        choice_bias: F32 | None = None,
        gate_up_bias: F32 | None = None,
        down_bias: F32 | None = None,
    ) -> F32:
        """Each row through its chosen experts; results are added in the order of their rank."""
        logits = self.linear(x, router, bias=router_bias)
        order, p = _route(logits, experts, choice_bias)
        results = np.empty((*order.shape, down.shape[1]), np.float32)
        for expert in np.unique(order).tolist():
            rows, rank = np.nonzero(order == expert)
            biases = [None if bias is None else bias[expert] for bias in (gate_up_bias, down_bias)]
            h = self.gate_mul(self.linear(x[rows], gate_up[expert], bias=biases[0]))
            h = self.gather(h, self.blueprint.span("experts"))
            results[rows, rank] = self.linear(h, down[expert], bias=biases[1])
        out = np.zeros_like(results[:, 0])
        for k in range(experts.used):
            out += p[:, k, None] * results[:, k]
        return out

    def logit_rows(self, x: F32) -> F32:
        """The wanted rows."""
        return x[self.inputs.logit_rows]

    def cap_logits(self, logits: F32, scale: float, softcap: float | None) -> F32:
        """Scaled, then capped."""
        logits = logits * np.float32(scale)
        return logits if softcap is None else softcap_of(logits, softcap)


def _route(logits: F32, experts: Experts, choice_bias: F32 | None) -> tuple[NDArray[np.int64], F32]:
    """The numbers of each row's chosen experts, the best first, and their weights."""
    p: F32
    order: NDArray[np.int64]
    if experts.scores == "sigmoid":
        p = (1 / (1 + np.exp(-logits))).astype(np.float32)
        rank = p if choice_bias is None else p + choice_bias
    else:
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p = p / p.sum(axis=1, keepdims=True)
        rank = logits
    order = np.argsort(-rank, axis=1, kind="stable")[:, : experts.used]
    p = np.take_along_axis(p, order, axis=1)
    if experts.renormalize:
        p = p / (p.sum(axis=1, keepdims=True) + np.float32(1e-6 * (experts.scores == "sigmoid")))
    return order, p * np.float32(experts.scale)
