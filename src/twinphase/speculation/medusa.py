"""Medusa (Cai et al., 2024, arXiv:2401.10774): heads that read the target's last hidden state, one for each position.

Each is a few residual blocks, x + SiLU(W x + b), and a matrix to the vocabulary, or to the tokens
of a map. A chain of the likeliest tokens is guessed; no tree. Not for loading them (`heads.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinphase.batch import Batch, StepOutput
from twinphase.speculation.hidden import HiddenProposer, silu

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class MedusaWeights:
    """Weights of all heads, float32.

    Attributes:
        blocks: [heads, hidden_size, hidden_size] for each residual block.
        biases: [heads, hidden_size] for each residual block; zeros where it has none.
        lm_heads: [heads, tokens, hidden_size], or [1, tokens, hidden_size] where all heads share
            one.
        token_map: int64 [tokens], the target's id of each row; None where a row's number is the id.
    """

    blocks: list[F32]
    biases: list[F32]
    lm_heads: F32
    token_map: NDArray[np.int64] | None


class Medusa(HiddenProposer):
    """Keeps one hidden state for each request."""

    source = "medusa"

    def __init__(self, weights: MedusaWeights, num_layers: int, num_tokens: int) -> None:
        """Draft `num_tokens` tokens, at most as many as there are heads; the target has `num_layers`."""
        super().__init__()
        self.layers = (num_layers,)
        self.num_tokens = min(num_tokens, weights.blocks[0].shape[0])
        self._weights = weights
        self._last: dict[str, F32] = {}  # what the target's head read for the last known token

    def logits(self, hidden: F32) -> F32:
        """For rows [rows, hidden_size] of what the target's head reads, [num_tokens, rows, tokens]."""
        weights = self._weights
        heads = self.num_tokens
        x = np.broadcast_to(hidden, (heads, *hidden.shape))
        for block, bias in zip(weights.blocks, weights.biases, strict=True):
            x = x + silu(x @ block[:heads].transpose(0, 2, 1) + bias[:heads, None])
        if len(weights.lm_heads) == 1:  # its weights are read once for all
            out: F32 = (x.reshape(-1, x.shape[2]) @ weights.lm_heads[0].T).reshape(*x.shape[:2], -1)
            return out
        out = x @ weights.lm_heads[:heads].transpose(0, 2, 1)
        return out

    def follow(self, batch: Batch, output: StepOutput, hidden: Sequence[F32]) -> None:
        """See `HiddenProposer`: the row of the last draft that was right."""
        row = 0
        for share in batch.scheduled:
            new = output.token_ids.get(share.request_id)
            if new:
                self._last[share.request_id] = hidden[0][
                    row + len(share.scored) + len(new) - 1
                ].copy()
            row += share.num_logits

    def guess(self, names: Sequence[str]) -> list[list[int]]:
        """See `HiddenProposer`."""
        best = self.logits(np.stack([self._last[name] for name in names])).argmax(axis=2).T
        if self._weights.token_map is not None:
            best = self._weights.token_map[best]
        drafts: list[list[int]] = best.tolist()
        return drafts

    def drop(self, name: str) -> None:
        """See `HiddenProposer`."""
        self._last.pop(name, None)
