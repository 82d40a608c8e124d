"""Divides the attention of a step into units of KV tiles, and plans the merges of partials."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.cpu.kv_layout import (
    BEGINS_WITH_STATE,
    LEAVES_PARTIALS,
    LEAVES_STATE,
    MERGE_INTS,
    TILE_TOKENS,
    UNIT_INTS,
    WHOLE,
    decode_rows,
    padded_group,
    query_tile_tokens,
)
from twinphase.backends.cpu.memory import aligned
from twinphase.backends.cpu.shared_prefixes import SharedPrefix, shared_prefixes
from twinphase.blueprint import KVShape

# Number of units per thread for sequences with few rows, so that threads end together.
UNITS_PER_THREAD = 8
# Query heads of a group times tokens. A sequence with more rows has enough work for all threads, so
# its tiles stay together.
FEW_ROWS = 64
# Up to this number of tokens of a sequence, int8 values are best converted by decode's kernel: in
# registers, once for each register tile (with matrix tiles in memory, once for each KV tile).
INT8_TOKENS = 3
# With fewer units per thread, they are cut until threads are busy for that part of the time.
FEW_UNITS = 6
BUSY = 0.93
# Threads must be busy with shared prefixes for this part of the time. Otherwise it is faster to
# compute the prefix for each sequence, cut into more units.
SHARING_BUSY = 0.7
# Partial results of this many tokens have room where the longest sequences are cut.
PARTIAL_TOKENS = 4
Ints = NDArray[np.int32]
# The lists of units, and the kernel of each: for few rows or for many. Units of the last two
# continue rows whose shared prefix is computed by units of the first two.
KERNELS = {
    "decode": "decode",
    "prefill": "prefill",
    "decode_rest": "decode",
    "prefill_rest": "prefill",
}


@dataclass(frozen=True)
class Limits:
    """The largest step.

    Attributes:
        rows: number of rows.
        runs: number of runs, each of successive rows of a sequence.
        positions: tokens of the longest sequence.
        dtype: element type of the KV cache.
        prefill_rows: height of prefill's register tile.
        block_size: tokens of a block of the KV cache.
        sharing_tiles: fewest KV tiles of a prefix for which it pays to compute it once for all.
    """

    rows: int
    runs: int
    positions: int
    threads: int
    dtype: str = "auto"
    prefill_rows: int = 6
    block_size: int = 16
    sharing_tiles: int = 1


def spread_heads(shape: KVShape, limits: Limits) -> int:
    """The most KV heads of sequences whose tiles are spread over several units.

    Each has more tiles than a share, so that there are fewer of them than shares.
    """
    return min(UNITS_PER_THREAD * limits.threads, limits.runs * shape.num_heads)


def partial_room(shape: KVShape, group: int, limits: Limits) -> int:
    """Number of partial results that there is room for."""
    tiles = -(-limits.positions // TILE_TOKENS)
    # Where prefill's kernel takes few rows, they are padded to whole register tiles.
    rows = -(-padded_group(group) * PARTIAL_TOKENS // limits.prefill_rows) * limits.prefill_rows
    return spread_heads(shape, limits) * tiles * rows


class AttentionUnits:
    """The units of a step: a unit takes a KV head's tiles for some rows.

    Nothing here grows with the whole cache: partial results are bounded by the few sequences whose
    tiles are spread over several units.

    Attributes:
        lists: units by name of the list (`KERNELS`), int32 [most, UNIT_INTS].
        merges: of the rows whose tiles are in several units, int32 [most, MERGE_INTS].
        row_numbers: of units' rows, int32: first those of the step in order, then those of shared
            prefixes.
        shares_prefixes: whether tiles that several sequences begin with may be computed once for
            all.
    """

    # "auto" shares where it pays; tests and benchmarks choose the others. The bits are the same.
    sharing: ClassVar[Literal["auto", "always", "never"]] = "auto"

    def __init__(self, shape: KVShape, group: int, limits: Limits, shares_prefixes: bool) -> None:
        """`group` is the number of query heads on a KV head."""
        self.shares_prefixes = shares_prefixes
        self._limits = limits
        self._threads = limits.threads
        self._kv_heads = shape.num_heads
        self._group = group
        shares = UNITS_PER_THREAD * limits.threads
        self._heights = {"decode": decode_rows(group), "prefill": limits.prefill_rows}
        self._few = max(1, FEW_ROWS // group)
        self._short = min(self._few, INT8_TOKENS) if limits.dtype == "int8" else self._few
        # Pieces of spread sequences: each has at least half a share's tiles, but for its last
        # piece. Few chunks are cut into 4 * FEW_UNITS units a thread at most. A prefix belongs to
        # two runs or more. One more, since kernels look one unit ahead.
        most = limits.rows // query_tile_tokens(group) + 2 * limits.runs + 1
        self.lists: dict[str, Ints] = {
            name: aligned((most * self._kv_heads + 10 * shares + 1) * UNIT_INTS, np.int32)
            .view(np.int32)
            .reshape(-1, UNIT_INTS)
            for name in KERNELS
            if shares_prefixes or not name.endswith("_rest")
        }
        spread = spread_heads(shape, limits)
        self.merges = aligned(spread * self._few * MERGE_INTS, np.int32).reshape(-1, MERGE_INTS)
        self._room = partial_room(shape, group, limits)
        self.row_numbers = aligned(2 * limits.rows, np.int32)
        self.row_numbers[: limits.rows] = np.arange(limits.rows)
        self._filled: tuple[str, Ints, NDArray[np.integer[Any]]] | None = None

    def fill(self, plan: Ints, tables: NDArray[np.integer[Any]]) -> dict[str, int]:
        """Share out a step's work; returns how many units each list has, and the merges.

        `plan` is that of `runs_of`, `tables` the block numbers of each sequence.

        Only a sequence of few rows whose tiles, once for each row, are more than a fair share is
        cut, so that few long sequences still feed all threads; its pieces leave partial results.
        Either way gives the same bits.
        """
        if not self._advance(plan, tables):
            self._share_out(plan, tables)
        # Other layers' units do not depend on which blocks the tables hold.
        self._filled = (self.sharing, plan, tables.copy() if self.shares_prefixes else tables)
        return {**self._counts, "merges": len(self._merges)}

    def _advance(self, plan: Ints, tables: NDArray[np.integer[Any]]) -> bool:
        """Move the units of the last step on by one token, if nothing else differs in this step.

        That is so when a decode step follows a decode step of the same sequences, unless one of
        them begins a KV tile. Sharing the work out again takes 5 % of the step of a small model.
        """
        if self._filled is None or self._filled[0] != self.sharing or not (plan[:, 1] == 1).all():
            return False
        _, last, last_tables = self._filled
        if not np.array_equal(plan, last + (0, 0, 1, 0, 0)):
            return False
        if self.shares_prefixes and self._prefixes_differ(plan, tables, last_tables):
            return False
        for name, count in self._counts.items():
            units = self.lists[name][:count]
            units[units[:, 7] != LEAVES_STATE, 4] += 1
        contexts = self.merges[: len(self._merges), 1]
        np.add(contexts, 1, out=contexts)
        return True

    def _prefixes_differ(
        self, plan: Ints, tables: NDArray[np.integer[Any]], last: NDArray[np.integer[Any]]
    ) -> bool:
        """Whether the blocks of any sequence's whole KV tiles have changed since the last step.

        They change when another request takes the row of one that ended.
        """
        sequences = plan[:, 4]
        tokens = plan[:, 2] // TILE_TOKENS * TILE_TOKENS
        blocks = -(-tokens // self._limits.block_size)
        most = blocks.max(initial=0)
        differ = tables[sequences, :most] != last[sequences, :most]
        return bool((differ & (np.arange(most) < blocks[:, None])).any())

    def _share_out(self, plan: Ints, tables: NDArray[np.integer[Any]]) -> None:
        self._plan = plan
        self._first = np.zeros(len(plan), np.int32)  # First tile of each run's own units.
        self._counts = dict.fromkeys(self.lists, 0)
        self._merges: list[tuple[int, ...]] = []
        self._partials_used = 0
        if self.shares_prefixes and self.sharing != "never":
            self._share(tables)
        rows = plan[:, 1]
        tiles = plan[:, 3] - self._first
        few = rows <= self._few
        work = rows * tiles
        share = max(1, int(work @ few) * self._kv_heads // (UNITS_PER_THREAD * self._threads))
        cut = few & (work > share) & (tiles > 1)
        short = rows <= self._short
        for name in self.lists:
            ours = (self._first > 0) == name.endswith("_rest")
            its = ours & (short if KERNELS[name] == "decode" else few & ~short)
            self._whole_units(name, np.flatnonzero(its & ~cut))
            for run in np.flatnonzero(its & cut).tolist():
                self._pieces(name, run, share)
            if KERNELS[name] == "prefill":
                self._chunks(name, np.flatnonzero(ours & ~few))
        if self._merges:
            self.merges[: len(self._merges)] = self._merges

    def _add(self, name: str, units: Iterable[tuple[int, ...]] | Ints) -> None:
        """Append units to a list."""
        new = np.array(units, np.int32).reshape(-1, UNIT_INTS)
        count = self._counts[name]
        self.lists[name][count : count + len(new)] = new
        self._counts[name] += len(new)

    def _share(self, tables: NDArray[np.integer[Any]]) -> None:
        """Units of the prefixes that runs share, where all threads find work in them."""
        plan = self._plan
        # A row's own unit has a tile at least: it divides by the sum.
        limits = plan[:, 2] // TILE_TOKENS
        least = 1 if self.sharing == "always" else self._limits.sharing_tiles
        if (limits >= least).sum() < 2:
            return
        prefixes = shared_prefixes(tables[plan[:, 4]], limits, self._limits.block_size)
        prefixes = [prefix for prefix in prefixes if prefix.tiles >= least]
        if not prefixes:
            return
        tokens = np.array([int(plan[prefix.runs, 1].sum()) for prefix in prefixes])
        parts = -(-tokens // query_tile_tokens(self._group))
        parts *= self._even(int(parts.sum()) * self._kv_heads)
        busy = self._busy(int(parts.sum()) * self._kv_heads)
        if busy < SHARING_BUSY and self.sharing != "always":
            return
        first = self._limits.rows
        for prefix, count, cuts in zip(prefixes, tokens.tolist(), parts.tolist(), strict=True):
            self._share_one(prefix, first, count, cuts)
            first += count

    def _share_one(self, prefix: SharedPrefix, first: int, count: int, parts: int) -> None:
        """Units of one prefix, the numbers of its `count` rows beginning at number `first`."""
        runs = self._plan[prefix.runs]
        self._first[prefix.runs] = prefix.tiles
        self.row_numbers[first : first + count] = np.concatenate(
            [np.arange(row, row + tokens) for row, tokens in runs[:, :2].tolist()]
        )
        name = "decode" if count <= self._short else "prefill"
        size = self._unit_tokens(count, parts, self._heights[name])
        position = prefix.tiles * TILE_TOKENS - 1  # The rows see all of the tiles.
        self._add(
            name,
            [
                (
                    int(runs[0, 4]),
                    head,
                    first + i,
                    min(size, count - i),
                    position,
                    0,
                    prefix.tiles,
                    LEAVES_STATE,
                )
                for head in range(self._kv_heads)
                for i in range(0, count, size)
            ],
        )

    def _whole_units(self, name: str, runs: NDArray[np.int64]) -> None:
        """A unit for each KV head and run: a head's shared tiles stay in the caches."""
        units = np.empty((self._kv_heads, len(runs), UNIT_INTS), np.int32)
        units[:, :, 0] = self._plan[runs, 4]
        units[:, :, 1] = np.arange(self._kv_heads)[:, None]
        units[:, :, 2:5] = self._plan[runs, :3]
        units[:, :, 5] = self._first[runs]
        units[:, :, 6] = self._plan[runs, 3]
        units[:, :, 7] = np.where(self._first[runs] > 0, BEGINS_WITH_STATE, WHOLE)
        self._add(name, units)

    def _pieces(self, name: str, run: int, share: int) -> None:
        """Cut a run's tiles into units, with merges.

        Where there is no room for its partial results, its tiles stay together.
        """
        row, tokens, position, end, table = self._plan[run].tolist()
        start = int(self._first[run])
        kv_heads = self._kv_heads
        height = self._heights[KERNELS[name]]
        per_tile = -(-tokens * self._group // height) * height  # Number of partial results.
        per_head = (end - start) * per_tile
        base = self._partials_used
        if base + kv_heads * per_head > self._room:
            self._whole_units(name, np.array([run]))
            return
        self._partials_used += kv_heads * per_head
        step = max(1, share // tokens)
        pieces = []
        for head in range(kv_heads):
            for first in range(start, end, step):
                partial = base + head * per_head + (first - start) * per_tile
                last = min(end, first + step)
                result = LEAVES_PARTIALS + partial
                pieces.append((table, head, row, tokens, position, first, last, result))
        self._add(name, pieces)
        self._merges += [
            (row + i, position + 1 + i, base + i * self._group, per_tile, per_head, start)
            for i in range(tokens)
        ]

    def _busy(self, count: int) -> float:
        """The part of the time for which threads are busy with that many equal units."""
        return count / (-(-count // self._threads) * self._threads)

    def _even(self, count: int) -> int:
        """Factor that cuts few units further, so that no thread waits for another's last unit.

        Each unit converts the keys and values it reads, so that fewer are better where threads end
        together.
        """
        if not 0 < count < FEW_UNITS * self._threads:
            return 1
        busy = [self._busy(count * times) for times in (1, 2, 3, 4)]
        return 1 + next((i for i, part in enumerate(busy) if part >= BUSY), busy.index(max(busy)))

    def _unit_tokens(self, tokens: int, parts: int, height: int) -> int:
        """Tokens of a unit when `tokens` are cut into `parts`: whole register tiles."""
        size = -(-tokens // parts)
        size += -size * self._group % height // self._group
        return min(size, query_tile_tokens(self._group))

    def _chunks(self, name: str, runs: NDArray[np.int64]) -> None:
        """Cut runs of many rows by their rows."""
        parts = -(-self._plan[runs, 1] // query_tile_tokens(self._group))
        parts *= self._even(int(parts.sum()) * self._kv_heads)
        for run, count in zip(runs.tolist(), parts.tolist(), strict=True):
            row, tokens, position, _, table = self._plan[run].tolist()
            start = int(self._first[run])
            size = self._unit_tokens(tokens, count, self._heights["prefill"])
            units = []
            for head in range(self._kv_heads):
                # Late query tiles see more keys. They come first, so that no thread begins one at
                # the end.
                for i in reversed(range(0, tokens, size)):
                    end = -(-(position + min(i + size, tokens)) // TILE_TOKENS)
                    number = min(size, tokens - i)
                    result = BEGINS_WITH_STATE if start else WHOLE
                    units.append((table, head, row + i, number, position + i, start, end, result))
            self._add(name, units)
