"""EAGLE-3 (Li et al., 2025, arXiv:2503.01840): one decoder layer on the target's hidden states.

`fc` joins the hidden states of a low, a middle and a high layer at position p. From that and the
embedding of the token at p + 1, the layer predicts the token at p + 2. For later tokens the layer's
own output replaces the target's hidden state. The layer has its own keys and values, only for
tokens that the target computed here, so that it attends to fewer tokens after a prefix hit.
`load_heads.py` loads the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from twinphase.batch import Batch, ScheduledRequest, StepOutput
from twinphase.speculation.hidden_states import HiddenStateProposer, right_rows, silu

F32 = NDArray[np.float32]
INITIAL_KV_TOKENS = 256


@dataclass(frozen=True)
class Eagle3Shape:
    """Sizes of the layer; `norm_before_residual`: the residual is the normalized hidden state."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    eps: float
    norm_before_residual: bool


@dataclass(frozen=True)
class Eagle3Weights:
    """Float32 matrices [outputs, inputs] and weights of norms, named as in the published files.

    Attributes:
        qkv: queries, keys and values, from embedding and hidden state concatenated.
        gate_up: gate, then up.
        token_ids: int64 [draft_vocab_size], the target's token id of each row of `lm_head`.
    """

    fc: F32
    input_layernorm: F32
    hidden_norm: F32
    qkv: F32
    o_proj: F32
    post_attention_layernorm: F32
    gate_up: F32
    down_proj: F32
    norm: F32
    lm_head: F32
    token_ids: NDArray[np.int64]


@dataclass
class _Sequence:
    """A request's keys and values by position, and the pair that its next draft starts from."""

    keys: F32
    values: F32
    positions: NDArray[np.int64]
    count: int = 0
    token_id: int = 0
    hidden: F32 = field(default_factory=lambda: np.empty(0, np.float32))


class Eagle3(HiddenStateProposer):
    """Keeps keys and values per request."""

    source = "eagle3"

    def __init__(
        self,
        weights: Eagle3Weights,
        shape: Eagle3Shape,
        layers: Sequence[int],
        embed: Callable[[Sequence[int]], F32],
        num_tokens: int,
    ) -> None:
        """Draft `num_tokens` tokens from the inputs of `layers`; `embed` embeds token ids."""
        super().__init__()
        self.layers = tuple(layers)
        self.num_tokens = num_tokens
        self._weights = weights
        self._shape = shape
        self._embed = embed
        self._sequences: dict[str, _Sequence] = {}
        half = shape.head_dim // 2
        self._frequencies = shape.rope_theta ** (-np.arange(half) / half)

    def update(self, batch: Batch, output: StepOutput, hidden: Sequence[F32]) -> None:
        """Compute keys and values of all rows except those of rejected drafts."""
        for share, first, token_ids in right_rows(batch, output):
            end = first + len(token_ids)
            rows = np.concatenate([layer[first:end] for layer in hidden], axis=1)
            self._extend(share, token_ids, rows @ self._weights.fc.T)

    def _extend(self, share: ScheduledRequest, token_ids: Sequence[int], fused: F32) -> None:
        """Add pairs of the hidden state at p and the token at p + 1."""
        count = len(fused)
        start = share.num_computed_tokens
        positions = np.arange(start, start + count)
        _, keys, values = self._qkv(self._pairs(token_ids, fused)[0], positions)
        sequence = self._sequences.get(share.request_id)
        if sequence is None:
            sequence = self._sequences[share.request_id] = self._room(INITIAL_KV_TOKENS)
        # Positions from `start` on are replaced.
        sequence.count = int(np.searchsorted(sequence.positions[: sequence.count], start))
        self._put(sequence, sequence.count, positions, keys, values)
        sequence.count += count
        sequence.token_id = token_ids[-1]
        sequence.hidden = fused[-1]

    def draft_batch(self, names: Sequence[str]) -> list[list[int]]:
        sequences = [self._sequences[name] for name in names]
        token_ids = [each.token_id for each in sequences]
        hidden = np.stack([each.hidden for each in sequences])
        positions = np.array([each.positions[each.count - 1] for each in sequences])
        drafts = []
        for ahead in range(self.num_tokens):
            logits, hidden = self._forward(sequences, token_ids, hidden, positions + ahead, ahead)
            token_ids = self._weights.token_ids[logits.argmax(axis=1)].tolist()
            drafts.append(token_ids)
        return [list(row) for row in zip(*drafts, strict=True)]

    def discard(self, name: str) -> None:
        self._sequences.pop(name, None)

    def _forward(
        self,
        sequences: Sequence[_Sequence],
        token_ids: Sequence[int],
        hidden: F32,
        positions: NDArray[np.int64],
        ahead: int,
    ) -> tuple[F32, F32]:
        """Logits [requests, draft_vocab_size] and the layer's output for one pair per request.

        `ahead` is the number of drafted pairs after the target's last pair, whose keys and values
        exist.
        """
        weights = self._weights
        shape = self._shape
        pairs, residual = self._pairs(token_ids, hidden)
        queries, keys, values = self._qkv(pairs, positions)
        mixed = np.empty((len(sequences), shape.num_heads * shape.head_dim), np.float32)
        for index, each in enumerate(sequences):
            end = each.count + ahead
            if ahead:
                row = slice(index, index + 1)
                self._put(each, end - 1, positions[row], keys[row], values[row])
            mixed[index] = self._attend(queries[index], each.keys[:end], each.values[:end])
        x = residual + mixed @ weights.o_proj.T
        gate, up = np.split(
            self._norm(x, weights.post_attention_layernorm) @ weights.gate_up.T, 2, axis=1
        )
        x = x + (silu(gate) * up) @ weights.down_proj.T
        return self._norm(x, weights.norm) @ weights.lm_head.T, x

    def _pairs(self, token_ids: Sequence[int], hidden: F32) -> tuple[F32, F32]:
        """Normalized embeddings and hidden states, concatenated; and the residual."""
        normed = self._norm(hidden, self._weights.hidden_norm)
        embedded = self._norm(self._embed(token_ids), self._weights.input_layernorm)
        return np.concatenate(
            [embedded, normed], axis=1
        ), normed if self._shape.norm_before_residual else hidden

    def _norm(self, x: F32, weight: F32) -> F32:
        mean = np.mean(np.square(x), axis=1, keepdims=True, dtype=np.float32)
        root: F32 = np.sqrt(mean + np.float32(self._shape.eps), dtype=np.float32)
        return x / root * weight

    def _qkv(self, pairs: F32, positions: NDArray[np.int64]) -> tuple[F32, F32, F32]:
        """Rotated queries, rotated keys, and values, each [rows, heads, head_dim]."""
        shape = self._shape
        heads = (pairs @ self._weights.qkv.T).reshape(len(pairs), -1, shape.head_dim)
        turned = shape.num_heads + shape.num_kv_heads
        angles = positions[:, None, None] * self._frequencies
        cos = np.cos(angles).astype(np.float32)
        sin = np.sin(angles).astype(np.float32)
        first, second = np.split(heads[:, :turned], 2, axis=2)
        rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)
        return rotated[:, : shape.num_heads], rotated[:, shape.num_heads :], heads[:, turned:]

    def _attend(self, query: F32, keys: F32, values: F32) -> F32:
        """softmax(q k^T / sqrt(head_dim)) v for one row [heads, head_dim], flattened."""
        shape = self._shape
        grouped = query.reshape(shape.num_kv_heads, -1, shape.head_dim)
        scores = grouped @ keys.transpose(1, 2, 0) * np.float32(shape.head_dim**-0.5)
        p = np.exp(scores - scores.max(axis=2, keepdims=True))
        out: F32 = (p / p.sum(axis=2, keepdims=True)) @ values.transpose(1, 0, 2)
        return out.reshape(-1)

    def _room(self, num_tokens: int) -> _Sequence:
        size = num_tokens, self._shape.num_kv_heads, self._shape.head_dim
        return _Sequence(
            np.empty(size, np.float32), np.empty(size, np.float32), np.empty(num_tokens, np.int64)
        )

    def _put(
        self, sequence: _Sequence, start: int, positions: NDArray[np.int64], keys: F32, values: F32
    ) -> None:
        """Write rows after the first `start`; they become valid when `sequence.count` is raised."""
        end = start + len(keys)
        if end > len(sequence.positions):
            room = self._room(2 * end)
            for name in ("keys", "values", "positions"):
                getattr(room, name)[:start] = getattr(sequence, name)[:start]
                setattr(sequence, name, getattr(room, name))
        sequence.keys[start:end] = keys
        sequence.values[start:end] = values
        sequence.positions[start:end] = positions
