"""The memory of a step's inputs: kernels know it by address, so it never moves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import KVCacheSpec, StepInputs
from twinphase.backends.cpu.kv_layout import (
    MERGE_INTS,
    TILE_TOKENS,
    UNIT_INTS,
    decode_rows,
    padded_group,
    query_tile_tokens,
)
from twinphase.backends.cpu.threads import aligned
from twinphase.blueprint import Blueprint

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
COUNTS = (
    "tokens",
    "logits",
    "decode_units",
    "prefill_units",
    "merges",
    "sequences",
    "states",
)  # what differs from step to step
Ints = NDArray[np.int32]


class StepMemory:
    """Fixed arrays for the inputs of a step, its int8 queries and attention's partial results.

    Nothing here grows with the whole cache: a sequence's blocks are bounded by the positions a
    model was loaded for, partial results by the few sequences whose tiles are spread over several
    units.

    Attributes:
        units: attention's work, int32 [most, UNIT_INTS], for the kernels of few rows ("decode") and
            of many ("prefill").
    """

    def __init__(
        self,
        max_tokens: int,
        max_seqs: int,
        max_positions: int,
        spec: KVCacheSpec,
        blueprint: Blueprint,
        threads: int,
        dtype: str = "auto",
        prefill_rows: int = 6,
    ) -> None:
        """Reserve memory; `dtype` is the KV cache's, `prefill_rows` prefill's tile height."""
        self._blueprint = blueprint
        self._threads = threads
        self._group = blueprint.group
        self._block_size = spec.block_size
        max_seqs = min(max_seqs, max_tokens)
        self.token_ids = aligned(max_tokens, np.int32)
        self.positions = aligned(max_tokens, np.int32)
        self.slots = aligned(max_tokens, np.int64)
        self.logit_rows = aligned(max_tokens, np.int32)
        columns = -(-max_positions // spec.block_size)
        self.block_tables = aligned(max_seqs * columns, np.int32).reshape(max_seqs, columns)
        heads = blueprint.num_heads
        shares = UNITS_PER_THREAD * threads
        self.queries = [
            aligned(max_tokens * heads * blueprint.head_dim, np.int8),
            aligned(max_tokens * heads, np.float32),
            aligned(max_tokens * heads, np.int32),
        ]
        self._heights = {"decode": decode_rows(self._group), "prefill": prefill_rows}
        self._few = max(1, FEW_ROWS // self._group)
        self._short = min(self._few, INT8_TOKENS) if dtype == "int8" else self._few
        # Pieces of spread sequences: each has at least half a share's tiles, but for its last
        # piece. Few chunks are cut into 4 * FEW_UNITS units a thread at most. One more, since
        # kernels look one unit ahead.
        most = {
            "decode": max_seqs,
            "prefill": max_tokens // query_tile_tokens(self._group) + max_seqs + 1,
        }
        self.units: dict[str, Ints] = {
            phase: aligned((count * blueprint.num_kv_heads + 7 * shares + 1) * UNIT_INTS, np.int32)
            .view(np.int32)
            .reshape(-1, UNIT_INTS)
            for phase, count in most.items()
        }
        # A spread sequence has more than a share's tiles in each KV head, so that fewer heads than
        # shares are spread. Pages are taken when first written: an upper bound costs nothing.
        spread = min(shares, max_seqs * blueprint.num_kv_heads)
        self.merges = aligned(spread * self._few * MERGE_INTS, np.int32).reshape(-1, MERGE_INTS)
        self._room = (
            spread * -(-max_positions // TILE_TOKENS) * padded_group(self._group) * PARTIAL_TOKENS
        )
        self.partials = aligned(self._room * (16 + blueprint.head_dim), np.float32)

    @property
    def query_addresses(self) -> list[int]:
        """Addresses of the int8 queries, their scales and their sums."""
        return [array.ctypes.data for array in self.queries]

    def fill(self, inputs: StepInputs) -> dict[str, int]:
        """Copy a step's inputs in; returns its counts by name."""
        tokens = inputs.num_tokens
        logits = len(inputs.logit_rows)
        self.token_ids[:tokens] = inputs.token_ids
        self.positions[:tokens] = inputs.positions
        self.slots[:tokens] = inputs.slot_mapping
        self.logit_rows[:logits] = inputs.logit_rows
        sequences = len(inputs.block_tables)
        width = inputs.block_tables.shape[1]
        if (
            width > self.block_tables.shape[1]
        ):  # fine as long as every sequence fits into the reserved columns
            width = self.block_tables.shape[1]
            longest = int(inputs.context_lens.max())
            if longest > width * self._block_size:
                raise ValueError(
                    f"a sequence has {longest} tokens; there is room for {width * self._block_size}"
                )
        self.block_tables[:sequences, :width] = inputs.block_tables[:, :width]
        return {"tokens": tokens, "logits": logits, **self._fill_units(inputs)}

    def _fill_units(self, inputs: StepInputs) -> dict[str, int]:
        """Share out attention's work: a unit takes a KV head's tiles for some rows of a sequence.

        Only a sequence of few rows whose tiles, once for each row, are more than a fair share is
        cut, so that few long sequences still feed all threads; its pieces leave partial results.
        Either way gives the same bits.
        """
        first = inputs.query_start[:-1]
        rows = inputs.query_start[1:] - first
        tiles = -(-inputs.context_lens // TILE_TOKENS)
        plan = np.empty((len(rows), 4), np.int32)
        plan[:, 0] = first
        plan[:, 1] = rows
        plan[:, 2] = inputs.positions[first]
        plan[:, 3] = tiles
        few = rows <= self._few
        work = rows * tiles
        share = max(
            1, int(work @ few) * self._blueprint.num_kv_heads // (UNITS_PER_THREAD * self._threads)
        )
        cut = few & (work > share) & (tiles > 1)
        counts = {"decode": 0, "prefill": 0}
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
        parts = -(-rows[chunks] // query_tile_tokens(self._group))
        parts *= self._even(int(parts.sum()) * self._blueprint.num_kv_heads)
        for sequence, count in zip(chunks.tolist(), parts.tolist(), strict=True):
            counts["prefill"] += self._query_tiles(counts["prefill"], sequence, plan, count)
        if merges:
            self.merges[: len(merges)] = merges
        return {
            "decode_units": counts["decode"],
            "prefill_units": counts["prefill"],
            "merges": len(merges),
        }

    def _whole_units(self, units: Ints, sequences: NDArray[np.int64], plan: Ints) -> int:
        """A unit for each of these sequences and KV heads; returns how many."""
        kv_heads = self._blueprint.num_kv_heads
        count = len(sequences) * kv_heads
        if count:
            out = units[:count].reshape(-1, kv_heads, UNIT_INTS)
            out[:, :, 0] = sequences[:, None]
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
        row, tokens, position, end = plan[sequence].tolist()
        kv_heads = self._blueprint.num_kv_heads
        height = self._heights[phase]
        per_tile = -(-tokens * self._group // height) * height  # partial results
        per_head = end * per_tile
        base = self._partials_used
        if base + kv_heads * per_head > self._room:
            return self._whole_units(self.units[phase][at:], np.array([sequence]), plan)
        self._partials_used += kv_heads * per_head
        step = max(1, share // tokens)
        pieces = [
            (
                sequence,
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
            (row + i, position + 1 + i, base + i * self._group, per_tile, per_head)
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
        row, tokens, position, _ = plan[sequence].tolist()
        size = -(-tokens // parts)
        size += (
            -size * self._group % self._heights["prefill"] // self._group
        )  # whole register tiles
        size = min(size, query_tile_tokens(self._group))
        units = [
            (
                sequence,
                head,
                row + i,
                min(size, tokens - i),
                position + i,
                0,
                -(-(position + min(i + size, tokens)) // TILE_TOKENS),
                0,
            )
            for head in range(self._blueprint.num_kv_heads)
            # Late query tiles see more keys: first, so that no thread is left with one at the end.
            for i in reversed(range(0, tokens, size))
        ]
        self.units["prefill"][at : at + len(units)] = units
        return len(units)
