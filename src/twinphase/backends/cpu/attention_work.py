"""The memory of attention in a step: queries, units of work, and what units leave for others."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import StepInputs
from twinphase.backends.cpu.attention_units import AttentionUnits, Ints, Limits, partial_room
from twinphase.backends.cpu.kv_layout import STATE_BYTES, TILE_TOKENS
from twinphase.backends.cpu.memory import aligned
from twinphase.blueprint import KVShape


class AttentionWork:
    """The int8 queries of layers with one shape of KV, and the units that compute their attention.

    Attributes:
        group: query heads on a KV head.
        partials: results of units that leave them for the merge, float32.
        states: of rows whose shared prefix is computed, [rows, query heads] of STATE_BYTES.
    """

    def __init__(self, rows: str, shape: KVShape, num_heads: int, limits: Limits) -> None:
        """Reserve memory for the step's "tokens" or "logits" rows."""
        self.rows = rows
        self.shape = shape
        self.group = num_heads // shape.num_heads
        self._limits = limits
        self.queries = [
            aligned(limits.rows * num_heads * shape.head_dim, np.int8),
            aligned(limits.rows * num_heads, np.float32),
            aligned(limits.rows * num_heads, np.int32),
        ]
        self.states = aligned(limits.rows * num_heads * STATE_BYTES, np.uint8)
        # Pages are taken when first written: an upper bound costs nothing.
        room = partial_room(shape, self.group, limits)
        self.partials = aligned(room * (16 + shape.head_dim), np.float32)
        # By whether prefixes are shared: made when the first layer asks for them.
        self._units: dict[bool, AttentionUnits] = {}

    @property
    def query_addresses(self) -> list[int]:
        """Addresses of the int8 queries, their scales and their sums."""
        return [array.ctypes.data for array in self.queries]

    def units(self, shares_prefixes: bool) -> AttentionUnits:
        """The units of layers that may share prefixes, or of those that may not."""
        if shares_prefixes not in self._units:
            units = AttentionUnits(self.shape, self.group, self._limits, shares_prefixes)
            self._units[shares_prefixes] = units
        return self._units[shares_prefixes]

    def count(self, name: str, shares_prefixes: bool) -> str:
        """The name of a count of this work among those of a step: units of a list, or merges."""
        kind = "sharing" if shares_prefixes else "apart"
        return f"{name}:{kind}:{self.rows}:{self.shape.num_heads}:{self.shape.head_dim}"

    def fill(self, plan: Ints, tables: NDArray[np.integer[Any]]) -> dict[str, int]:
        """Share out attention's work (`AttentionUnits.fill`); returns the counts by their names."""
        return {
            self.count(name, sharing): number
            for sharing, units in self._units.items()
            for name, number in units.fill(plan, tables).items()
        }


def runs_of(inputs: StepInputs, rows: str) -> Ints:
    """Successive rows of one sequence, of the "tokens" or "logits" rows of a step, int32 [runs, 5].

    The numbers are the first row, the count of rows, the position of the first, the KV tiles up to
    the last, and the sequence.
    """
    first: NDArray[np.integer]
    if rows == "tokens":
        first = inputs.query_start[:-1]
        count = inputs.query_start[1:] - first
        start = first
        sequences = np.arange(len(first))
    else:
        numbers = inputs.logit_rows
        owners = np.searchsorted(inputs.query_start, numbers, side="right") - 1
        new = np.ones(len(numbers), bool)
        new[1:] = (np.diff(numbers) != 1) | (np.diff(owners) != 0)
        first = np.flatnonzero(new)
        count = np.diff(first, append=len(numbers))
        start = numbers[first]
        sequences = owners[first]
    position = inputs.positions[start]
    tiles = -(-(position + count) // TILE_TOKENS)
    return np.stack([first, count, position, tiles, sequences], axis=1).astype(np.int32)
