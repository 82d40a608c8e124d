"""Computes a multi-token prediction (MTP) layer on its own backend, for `speculation/mtp.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import Backend, StepInputs
from twinphase.models.mtp import MtpHead
from twinphase.speculation.mtp import LayerRows


class MtpRunner:
    """The MTP layer on a backend whose KV cache is allocated."""

    def __init__(self, head: MtpHead, backend: Backend, block_size: int) -> None:
        self._head = head
        self._backend = backend
        self._block_size = block_size
        # A first call pays one-time costs before any request; its keys and values are overwritten.
        nothing = np.zeros((1, head.blueprint.hidden_size), np.float32)
        self([LayerRows([0], 0, [0], nothing)])

    def __call__(self, parts: Sequence[LayerRows]) -> tuple[list[int], NDArray[np.float32]]:
        """The most likely token after each part's last row, and the layer's output for that row."""
        counts = [len(rows.token_ids) for rows in parts]
        ends = np.cumsum(counts)
        tables = np.zeros((len(parts), max(len(rows.blocks) for rows in parts)), np.int32)
        positions = []
        slots = []
        for table, rows in zip(tables, parts, strict=True):
            table[: len(rows.blocks)] = rows.blocks
            at = np.arange(rows.start, rows.start + len(rows.token_ids), dtype=np.int32)
            positions.append(at)
            block_ids = table[at // self._block_size].astype(np.int64)
            slots.append(block_ids * self._block_size + at % self._block_size)
        inputs = StepInputs(
            token_ids=np.concatenate([rows.token_ids for rows in parts]).astype(np.int32),
            positions=np.concatenate(positions),
            slot_mapping=np.concatenate(slots),
            query_start=np.concatenate([[0], ends]).astype(np.int32),
            block_tables=tables,
            num_decodes=len(parts) if max(counts) == 1 else 0,
            logit_rows=(ends - 1).astype(np.int32),
            hidden=np.concatenate([rows.hidden for rows in parts]),
        )
        logits = self._backend.execute(self._head.forward, inputs)
        best: list[int] = logits.argmax(axis=1).tolist()
        return best, self._backend.kept()[0].copy()
