"""A checkpoint whose tensors are rows of another's; `models/share.py` selects the rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twinphase.weights.checkpoint import Checkpoint

Runs = list[tuple[int, int]]  # (first row, number of rows).


@dataclass(frozen=True, kw_only=True)
class RowsCheckpoint(Checkpoint):
    """Single runs of rows are views of the original's files; other rows are copied when read.

    Attributes:
        original: the checkpoint with all rows.
        copied: the original's name, the axis of the rows (1 for rows of every expert), and the
            rows.
    """

    original: Checkpoint
    copied: dict[str, tuple[str, int, Runs]]
    copies: dict[str, Any] = field(default_factory=dict)

    def raw(self, name: str) -> Any:
        if name not in self.copied:
            return super().raw(name)
        if name not in self.copies:
            source, axis, runs = self.copied[name]
            shape = self.original.tensors[source].shape
            rows = self.original.raw(source).reshape(*(shape[:2] if axis else (1, shape[0])), -1)
            parts = [rows[:, first : first + size] for first, size in runs]
            self.copies[name] = np.concatenate(parts, axis=1).reshape(-1)
        return self.copies[name]

    def release(self, name: str) -> None:
        if name not in self.copied:
            return super().release(name)
        self.copies.pop(name, None)
        return self.original.release(self.copied[name][0])
