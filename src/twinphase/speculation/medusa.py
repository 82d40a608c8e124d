"""Medusa (Cai et al., 2024, arXiv:2401.10774): one head per position, on the last hidden state.

A head has a few residual blocks, x + SiLU(W x + b), and an output matrix for the vocabulary or a
part of it. The draft is a chain of the most likely tokens, not a tree. `load_heads.py` loads the
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinphase.batch import Batch, StepOutput
from twinphase.speculation.hidden_states import HiddenStateProposer, silu

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class MedusaWeights:
    """Weights of all heads, float32.

    Attributes:
        blocks: [heads, hidden_size, hidden_size] for each residual block.
        biases: [heads, hidden_size] for each residual block; zeros for a block without bias.
        lm_heads: [heads, tokens, hidden_size], or [1, tokens, hidden_size] if all heads share one.
        token_map: int64 [tokens], the target's token id of each row; None if rows are token ids.
    """

    blocks: list[F32]
    biases: list[F32]
    lm_heads: F32
    token_map: NDArray[np.int64] | None


class Medusa(HiddenStateProposer):
    """Keeps one hidden state per request."""

    source = "medusa"

    def __init__(self, weights: MedusaWeights, num_layers: int, num_tokens: int) -> None:
        """Draft up to `num_tokens` tokens, one per head, for a target of `num_layers` layers."""
        super().__init__()
        self.layers = (num_layers,)
        self.num_tokens = min(num_tokens, weights.blocks[0].shape[0])
        self._weights = weights
        # Input of the target's output head for the last known token.
        self._last: dict[str, F32] = {}

    def logits(self, hidden: F32) -> F32:
        """Logits [num_tokens, rows, tokens] for inputs of the output head [rows, hidden_size]."""
        weights = self._weights
        heads = self.num_tokens
        x = np.broadcast_to(hidden, (heads, *hidden.shape))
        for block, bias in zip(weights.blocks, weights.biases, strict=True):
            x = x + silu(x @ block[:heads].transpose(0, 2, 1) + bias[:heads, None])
        if len(weights.lm_heads) == 1:
            out: F32 = (x.reshape(-1, x.shape[2]) @ weights.lm_heads[0].T).reshape(*x.shape[:2], -1)
            return out
        out = x @ weights.lm_heads[:heads].transpose(0, 2, 1)
        return out

    def update(self, batch: Batch, output: StepOutput, hidden: Sequence[F32]) -> None:
        """Keep the row of each request's last accepted token."""
        row = 0
        for share in batch.scheduled:
            new = output.token_ids.get(share.request_id)
            if new:
                self._last[share.request_id] = hidden[0][
                    row + len(share.scored) + len(new) - 1
                ].copy()
            row += share.num_logits

    def draft_batch(self, names: Sequence[str]) -> list[list[int]]:
        best = self.logits(np.stack([self._last[name] for name in names])).argmax(axis=2).T
        if self._weights.token_map is not None:
            best = self._weights.token_map[best]
        drafts: list[list[int]] = best.tolist()
        return drafts

    def discard(self, name: str) -> None:
        self._last.pop(name, None)
