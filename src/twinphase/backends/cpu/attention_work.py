"""How attention's work of a step is shared out among threads: units of KV tiles, and merges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import StepInputs
from twinphase.backends.cpu.kv_layout import (
    MERGE_INTS,
    TILE_TOKENS,
    UNIT_INTS,
    decode_rows,
    padded_group,
    query_tile_tokens,
)
from twinphase.backends.cpu.threads import aligned
from twinphase.blueprint import KVShape

UNITS_PER_THREAD = (
    8  # shares of the KV tiles of few rows that a thread should find, so that threads end together
)
# heads of a group times tokens; a sequence with more in a step has work enough, its tiles stay
# together
FEW_ROWS = 64
# of a sequence, up to which int8 values are best converted in registers, once for each register
# tile
INT8_TOKENS = 3
# units a thread, below which they are cut until threads are busy for that part of the time
FEW_UNITS = 6
BUSY = 0.93
# Partial results of this many tokens have room where the longest sequences are cut.
PARTIAL_TOKENS = 4
Ints = NDArray[np.int32]
# Kernels of few rows, and of many.
PHASES = ("decode", "prefill")


@dataclass(frozen=True)
class Limits:
    """The largest step.

    Attributes:
        rows: of the step.
        runs: of successive rows of a sequence.
        positions: tokens of the longest sequence.
        dtype: of the KV cache.
        prefill_rows: height of prefill's register tile.
    """

    rows: int
    runs: int
    positions: int
    threads: int
    dtype: str = "auto"
    prefill_rows: int = 6


class AttentionWork:
    """The int8 queries of layers with one shape of KV, and the units that compute their attention.

    Nothing here grows with the whole cache: partial results are bounded by the few sequences whose
    tiles are spread over several units.

    Attributes:
        units: attention's work, int32 [most, UNIT_INTS], by phase.
        group: query heads on a KV head.
    """

    def __init__(self, rows: str, shape: KVShape, num_heads: int, limits: Limits) -> None:
        """Reserve memory for the step's "tokens" or "logits" rows."""
        self.rows = rows
        self.shape = shape
        self.group = num_heads // shape.num_heads
        self._threads = limits.threads
        kv_heads = shape.num_heads
        shares = UNITS_PER_THREAD * limits.threads
        self.queries = [
            aligned(limits.rows * num_heads * shape.head_dim, np.int8),
            aligned(limits.rows * num_heads, np.float32),
            aligned(limits.rows * num_heads, np.int32),
        ]
        self._heights = {"decode": decode_rows(self.group), "prefill": limits.prefill_rows}
        self._few = max(1, FEW_ROWS // self.group)
        self._short = min(self._few, INT8_TOKENS) if limits.dtype == "int8" else self._few
        # Pieces of spread sequences: each has at least half a share's tiles, but for its last
        # piece. Few chunks are cut into 4 * FEW_UNITS units a thread at most. One more, since
        # kernels look one unit ahead.
        most = {
            "decode": limits.runs,
            "prefill": limits.rows // query_tile_tokens(self.group) + limits.runs + 1,
        }
        self.units: dict[str, Ints] = {
            phase: aligned((most[phase] * kv_heads + 7 * shares + 1) * UNIT_INTS, np.int32)
            .view(np.int32)
            .reshape(-1, UNIT_INTS)
            for phase in PHASES
        }
        # A spread sequence has more than a share's tiles in each KV head, so that fewer heads than
        # shares are spread. Pages are taken when first written: an upper bound costs nothing.
        spread = min(shares, limits.runs * kv_heads)
        self.merges = aligned(spread * self._few * MERGE_INTS, np.int32).reshape(-1, MERGE_INTS)
        self._room = (
            spread * -(-limits.positions // TILE_TOKENS) * padded_group(self.group) * PARTIAL_TOKENS
        )
        self.partials = aligned(self._room * (16 + shape.head_dim), np.float32)

    @property
    def query_addresses(self) -> list[int]:
        """Addresses of the int8 queries, their scales and their sums."""
        return [array.ctypes.data for array in self.queries]

    def count(self, name: str) -> str:
        """The name of a count of this work among those of a step: units of a phase, or merges."""
        return f"{name}:{self.rows}:{self.shape.num_heads}:{self.shape.head_dim}"

    def fill(self, plan: Ints) -> dict[str, int]:
        """Share out attention's work: a unit takes a KV head's tiles for some rows of a sequence.

        `plan` is that of `runs_of`; returns the units of each phase, and the merges.

        Only a sequence of few rows whose tiles, once for each row, are more than a fair share is
        cut, so that few long sequences still feed all threads; its pieces leave partial results.
        Either way gives the same bits.
        """
        rows = plan[:, 1]
        tiles = plan[:, 3]
        few = rows <= self._few
        work = rows * tiles
        kv_heads = self.shape.num_heads
        share = max(1, int(work @ few) * kv_heads // (UNITS_PER_THREAD * self._threads))
        cut = few & (work > share) & (tiles > 1)
        counts = dict.fromkeys(PHASES, 0)
        merges: list[tuple[int, ...]] = []
        self._partials_used = 0
        short = rows <= self._short
        for phase, ours in (("decode", short), ("prefill", few & ~short)):
            whole = np.flatnonzero(ours & ~cut)
            pieces = np.flatnonzero(ours & cut)
            counts[phase] = self._whole_units(self.units[phase], whole, plan)
            for sequence in pieces.tolist():
                counts[phase] += self._pieces(phase, counts[phase], sequence, plan, share, merges)
        chunks = np.flatnonzero(~few)
        parts = -(-rows[chunks] // query_tile_tokens(self.group))
        parts *= self._even(int(parts.sum()) * kv_heads)
        for sequence, count in zip(chunks.tolist(), parts.tolist(), strict=True):
            counts["prefill"] += self._query_tiles(counts["prefill"], sequence, plan, count)
        if merges:
            self.merges[: len(merges)] = merges
        counts["merges"] = len(merges)
        return counts

    def _whole_units(self, units: Ints, sequences: NDArray[np.int64], plan: Ints) -> int:
        """A unit for each of these sequences and KV heads; returns how many."""
        kv_heads = self.shape.num_heads
        count = len(sequences) * kv_heads
        if count:
            out = units[:count].reshape(-1, kv_heads, UNIT_INTS)
            out[:, :, 0] = plan[sequences, None, 4]
            out[:, :, 1] = np.arange(kv_heads)
            out[:, :, 2:5] = plan[sequences, None, :3]
            out[:, :, 5] = out[:, :, 7] = 0
            out[:, :, 6] = plan[sequences, None, 3]
        return count

    def _pieces(
        self,
        phase: str,
        at: int,
        sequence: int,
        plan: Ints,
        share: int,
        merges: list[tuple[int, ...]],
    ) -> int:
        """Cut a sequence's tiles into units from number `at` on, with merges; returns how many.

        Where there is no room for its partial results, its tiles stay together.
        """
        row, tokens, position, end, table = plan[sequence].tolist()
        kv_heads = self.shape.num_heads
        height = self._heights[phase]
        per_tile = -(-tokens * self.group // height) * height  # partial results
        per_head = end * per_tile
        base = self._partials_used
        if base + kv_heads * per_head > self._room:
            return self._whole_units(self.units[phase][at:], np.array([sequence]), plan)
        self._partials_used += kv_heads * per_head
        step = max(1, share // tokens)
        pieces = [
            (
                table,
                head,
                row,
                tokens,
                position,
                first,
                min(end, first + step),
                1 + base + head * per_head,
            )
            for head in range(kv_heads)
            for first in range(0, end, step)
        ]
        self.units[phase][at : at + len(pieces)] = pieces
        merges += [
            (row + i, position + 1 + i, base + i * self.group, per_tile, per_head)
            for i in range(tokens)
        ]
        return len(pieces)

    def _even(self, count: int) -> int:
        """Factor that cuts few units further, so that no thread waits for another's last unit.

        Each unit converts the keys and values it reads, so that fewer are better where threads end
        together.
        """
        if not 0 < count < FEW_UNITS * self._threads:
            return 1
        busy = [
            count * times / (-(-count * times // self._threads) * self._threads)
            for times in (1, 2, 3, 4)
        ]
        return 1 + next((i for i, part in enumerate(busy) if part >= BUSY), busy.index(max(busy)))

    def _query_tiles(self, at: int, sequence: int, plan: Ints, parts: int) -> int:
        """Cut a chunk into `parts` units per KV head, from number `at` on; returns how many."""
        row, tokens, position, _, table = plan[sequence].tolist()
        size = -(-tokens // parts)
        size += -size * self.group % self._heights["prefill"] // self.group  # whole register tiles
        size = min(size, query_tile_tokens(self.group))
        units = [
            (
                table,
                head,
                row + i,
                min(size, tokens - i),
                position + i,
                0,
                -(-(position + min(i + size, tokens)) // TILE_TOKENS),
                0,
            )
            for head in range(self.shape.num_heads)
            # Late query tiles see more keys: first, so that no thread is left with one at the end.
            for i in reversed(range(0, tokens, size))
        ]
        self.units["prefill"][at : at + len(units)] = units
        return len(units)


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
