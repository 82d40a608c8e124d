"""EAGLE-3 (Li et al., 2025, arXiv:2503.01840): one decoder layer that goes on from the target's hidden states.

The hidden states of a low, a middle and a high layer at position p become one (`fc`); with the
embedding of the token at p + 1 beside it, the layer says what comes at p + 2. Further tokens follow
from the layer's own output in the place of the target's. It has keys and values of its own, of the
tokens that the target computed while it was watched: behind a prefix hit it sees less. Not for
loading it (`heads.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from twinphase.batch import Batch, ScheduledRequest, StepOutput
from twinphase.speculation.hidden import HiddenProposer, silu

F32 = NDArray[np.float32]
FIRST_ROOM = 256  # tokens that a request's keys and values begin with


@dataclass(frozen=True)
class Eagle3Shape:
    """Numbers of the layer. `norm_before_residual`: what is added back is the normalized hidden state."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    eps: float
    norm_before_residual: bool


@dataclass(frozen=True)
class Eagle3Weights:
    """Float32 matrices [outputs, inputs] and the norms' weights; names as in the published files.

    Attributes:
        qkv: queries, keys and values, of embedding and hidden state side by side.
        gate_up: gate, then up.
        token_ids: int64 [draft_vocab_size], the target's id of each of the head's rows.
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
class _Seen:
    """What the layer knows of a request: keys and values by position, and the pair that the next guess starts from."""

    keys: F32
    values: F32
    positions: NDArray[np.int64]
    count: int = 0
    token_id: int = 0
    hidden: F32 = field(default_factory=lambda: np.empty(0, np.float32))


class Eagle3(HiddenProposer):
    """Keeps keys and values for each request."""

    source = "eagle3"

    def __init__(
        self,
        weights: Eagle3Weights,
        shape: Eagle3Shape,
        layers: Sequence[int],
        embed: Callable[[Sequence[int]], F32],
        num_tokens: int,
    ) -> None:
        """Draft `num_tokens` tokens from the inputs of the target's `layers`; `embed` gives rows for token ids."""
        super().__init__()
        self.layers = tuple(layers)
        self.num_tokens = num_tokens
        self._weights = weights
        self._shape = shape
        self._embed = embed
        self._seen: dict[str, _Seen] = {}
        half = shape.head_dim // 2
        self._frequencies = shape.rope_theta ** (-np.arange(half) / half)

    def follow(self, batch: Batch, output: StepOutput, hidden: Sequence[F32]) -> None:
        """See `HiddenProposer`: fused, and into keys and values, all rows but those of wrong drafts."""
        row = 0
        for share in batch.scheduled:
            new = output.token_ids.get(share.request_id, [])
            count = len(share.token_ids) - (share.num_drafts + 1 - len(new) if share.samples else 0)
            if new or not share.samples:
                rows = np.concatenate([layer[row : row + count] for layer in hidden], axis=1)
                self._extend(share, new, rows @ self._weights.fc.T)
            row += len(share.token_ids)

    def _extend(self, share: ScheduledRequest, new: Sequence[int], fused: F32) -> None:
        count = len(fused)
        start = share.num_computed_tokens
        token_ids = _tokens(share, new, start + 1, start + 1 + count)
        positions = np.arange(start, start + count)
        _, keys, values = self._qkv(self._pairs(token_ids, fused)[0], positions)
        seen = self._seen.get(share.request_id) or self._seen.setdefault(
            share.request_id, self._room(FIRST_ROOM)
        )
        seen.count = int(
            np.searchsorted(seen.positions[: seen.count], start)
        )  # what lay behind is computed again
        self._put(seen, seen.count, positions, keys, values)
        seen.count += count
        seen.token_id = token_ids[-1]
        seen.hidden = fused[-1]

    def guess(self, names: Sequence[str]) -> list[list[int]]:
        """See `HiddenProposer`."""
        seen = [self._seen[name] for name in names]
        token_ids = [each.token_id for each in seen]
        hidden = np.stack([each.hidden for each in seen])
        positions = np.array([each.positions[each.count - 1] for each in seen])
        drafts = []
        for ahead in range(self.num_tokens):
            logits, hidden = self._forward(seen, token_ids, hidden, positions + ahead, ahead)
            token_ids = self._weights.token_ids[logits.argmax(axis=1)].tolist()
            drafts.append(token_ids)
        return [list(row) for row in zip(*drafts, strict=True)]

    def drop(self, name: str) -> None:
        """See `HiddenProposer`."""
        self._seen.pop(name, None)

    # The layer.
    def _forward(
        self,
        seen: Sequence[_Seen],
        token_ids: Sequence[int],
        hidden: F32,
        positions: NDArray[np.int64],
        ahead: int,
    ) -> tuple[F32, F32]:
        """Logits [requests, draft_vocab_size], and the layer's output, for a pair of each request.

        `ahead` of them lie between this pair and the last of the target's, which has its keys and
        values already.
        """
        weights = self._weights
        shape = self._shape
        pairs, residual = self._pairs(token_ids, hidden)
        queries, keys, values = self._qkv(pairs, positions)
        mixed = np.empty((len(seen), shape.num_heads * shape.head_dim), np.float32)
        for index, each in enumerate(seen):
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
        """Embeddings and hidden states, normalized, side by side; and what is added back."""
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
        """Rotated queries and keys, and values, [rows, heads, head_dim] each."""
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
        """softmax(q k^T / sqrt(head_dim)) v for one row [heads, head_dim]; flat."""
        shape = self._shape
        grouped = query.reshape(shape.num_kv_heads, -1, shape.head_dim)
        scores = grouped @ keys.transpose(1, 2, 0) * np.float32(shape.head_dim**-0.5)
        p = np.exp(scores - scores.max(axis=2, keepdims=True))
        out: F32 = (p / p.sum(axis=2, keepdims=True)) @ values.transpose(1, 0, 2)
        return out.reshape(-1)

    # Its memory.
    def _room(self, num_tokens: int) -> _Seen:
        size = num_tokens, self._shape.num_kv_heads, self._shape.head_dim
        return _Seen(
            np.empty(size, np.float32), np.empty(size, np.float32), np.empty(num_tokens, np.int64)
        )

    def _put(
        self, seen: _Seen, start: int, positions: NDArray[np.int64], keys: F32, values: F32
    ) -> None:
        """Write rows behind the first `start`; they count when `seen.count` is raised."""
        end = start + len(keys)
        if end > len(seen.positions):
            room = self._room(2 * end)
            for name in ("keys", "values", "positions"):
                getattr(room, name)[:start] = getattr(seen, name)[:start]
                setattr(seen, name, getattr(room, name))
        seen.keys[start:end] = keys
        seen.values[start:end] = values
        seen.positions[start:end] = positions


def _tokens(share: ScheduledRequest, new: Sequence[int], start: int, end: int) -> list[int]:
    """Tokens at positions `start` .. `end` - 1 of prompt, output and `new`."""
    found: list[int] = []
    for part in (share.prompt_token_ids, share.output_token_ids, new):
        found += part[max(0, start) : max(0, end)]
        start = start - len(part)
        end = end - len(part)
    return found
