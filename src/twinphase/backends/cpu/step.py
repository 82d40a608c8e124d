"""The memory that one step's inputs are copied into: kernels know it by address, so it never moves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import KVCacheSpec, StepInputs
from twinphase.backends.cpu.kv_layout import TILE, padded_group, query_tile_tokens
from twinphase.backends.cpu.threads import aligned
from twinphase.blueprint import Blueprint

__all__ = ["COUNTS", "StepMemory"]

UNIT = 8  # int32 numbers of an attention unit
MERGE = 4  # int32 numbers of a merge
UNITS_PER_THREAD = 8  # shares of decode's KV tiles that a thread should find, so that threads end together
COUNTS = ("tokens", "logits", "decode_units", "decode_merges", "prefill_units")  # what differs from step to step
Ints = NDArray[np.int32]


class StepMemory:
    """Fixed arrays for the inputs of a step, its int8 queries and decode's partial results.

    Nothing here grows with the whole cache: a sequence's blocks are bounded by the positions a model was loaded for,
    partial results by the few rows whose tiles are spread over several units.
    """

    def __init__(
        self,
        max_tokens: int,
        max_seqs: int,
        max_positions: int,
        spec: KVCacheSpec,
        blueprint: Blueprint,
        threads: int,
    ) -> None:
        self._blueprint, self._threads = blueprint, threads
        self._group = blueprint.group
        self._block_size = spec.block_size
        max_seqs = min(max_seqs, max_tokens)
        self.token_ids, self.positions = aligned(max_tokens, np.int32), aligned(max_tokens, np.int32)
        self.slots, self.logit_rows = aligned(max_tokens, np.int64), aligned(max_tokens, np.int32)
        columns = -(-max_positions // spec.block_size)
        self.block_tables = aligned(max_seqs * columns, np.int32).reshape(max_seqs, columns)
        heads, shares = blueprint.num_heads, UNITS_PER_THREAD * threads
        self.queries = [aligned(max_tokens * heads * blueprint.head_dim, np.int8),
                        aligned(max_tokens * heads, np.float32), aligned(max_tokens * heads, np.int32)]  # fmt: skip
        # Pieces of spread rows: each has at least one share's tiles, but for its last piece.
        # One more, since decode looks one unit ahead.
        self.decode_units = aligned((max_tokens * blueprint.num_kv_heads + 2 * shares + 1) * UNIT, np.int32).reshape(
            -1, UNIT
        )
        most_units = (max_tokens // query_tile_tokens(self._group) + max_seqs + 1) * blueprint.num_kv_heads
        self.prefill_units = aligned(most_units * UNIT, np.int32).reshape(-1, UNIT)
        # A spread row has more than a share's tiles in each KV head, so that fewer heads than shares are spread.
        # Pages are taken when first written: an upper bound costs nothing.
        spread = min(shares, max_tokens * blueprint.num_kv_heads)
        self.merges = aligned(spread * MERGE, np.int32).reshape(-1, MERGE)
        count = spread * -(-max_positions // TILE) * padded_group(self._group)
        self.partials = aligned(count * (16 + blueprint.head_dim), np.float32)

    @property
    def query_addresses(self) -> list[int]:
        """Addresses of the int8 queries, their scales and their sums."""
        return [array.ctypes.data for array in self.queries]

    def fill(self, inputs: StepInputs) -> dict[str, int]:
        """Copy a step's inputs in; returns its counts by name."""
        tokens, logits = inputs.num_tokens, len(inputs.logit_rows)
        self.token_ids[:tokens] = inputs.token_ids
        self.positions[:tokens] = inputs.positions
        self.slots[:tokens] = inputs.slot_mapping
        self.logit_rows[:logits] = inputs.logit_rows
        sequences = len(inputs.block_tables)
        width = inputs.block_tables.shape[1]
        if width > self.block_tables.shape[1]:  # fine as long as nobody looks behind what was made room for
            width, longest = self.block_tables.shape[1], int(inputs.context_lens.max())
            if longest > width * self._block_size:
                raise ValueError(f"a sequence has {longest} tokens; there is room for {width * self._block_size}")
        self.block_tables[:sequences, :width] = inputs.block_tables[:, :width]
        starts = inputs.query_start.tolist()
        decodes = inputs.num_decodes  # and leading chunks of a single row: decode's kernel suits them too
        while decodes < sequences and starts[decodes + 1] - starts[decodes] == 1:
            decodes += 1
        owners = np.repeat(np.arange(decodes), np.diff(inputs.query_start[: decodes + 1]))
        units, merges = self._decode_units(owners, inputs.positions[: len(owners)] + 1)
        prefills = self._prefill_units(decodes, starts, inputs.positions)
        return dict(zip(COUNTS, (tokens, logits, units, merges, prefills), strict=True))

    def _decode_units(self, owners: NDArray[np.int64], contexts: Ints) -> tuple[int, int]:
        """Share out the KV tiles of the decoding rows; returns the number of units and of rows to merge.

        A unit takes all tiles of one row and KV head, and merges them itself. Only a row with more tiles than a fair
        share is cut, so that few long sequences still feed all threads; its pieces leave partial results.

        Args:
            owners: each row's sequence; the rows of one adjoin, and each sees one token more than the row before.
            contexts: tokens that each row attends to.
        """
        if not len(contexts):
            return 0, 0
        kv_heads = self._blueprint.num_kv_heads
        tiles = -(-contexts // TILE)
        share = max(1, int(tiles.sum()) * kv_heads // (UNITS_PER_THREAD * self._threads))
        spread = tiles > share
        whole = np.flatnonzero(~spread)
        count = len(whole) * kv_heads
        if count:
            units = self.decode_units[:count].reshape(-1, kv_heads, UNIT)
            units[:] = 0
            units[:, :, 0], units[:, :, 2] = owners[whole, None], whole[:, None]
            units[:, :, 1] = np.arange(kv_heads)
            units[:, :, 3] = contexts[whole, None]
            units[:, :, 5] = tiles[whole, None]
        if len(whole) == len(contexts):
            return count, 0
        rows, merges, base = [], [], 0
        for row in np.flatnonzero(spread).tolist():
            sequence, context, end = int(owners[row]), int(contexts[row]), int(tiles[row])
            merges.append((row, end, base, context))
            for kv_head in range(kv_heads):
                for first in range(0, end, share):
                    last = min(end, first + share)
                    rows.append((sequence, kv_head, row, context, first, last, 1, base + kv_head * end))
            base += end * kv_heads
        self.decode_units[count : count + len(rows)] = rows
        self.merges[: len(merges)] = merges
        return count + len(rows), len(merges)

    def _prefill_units(self, decodes: int, starts: list[int], positions: Ints) -> int:
        """Cut each prefill chunk into query tiles; returns the number of units."""
        units, size = [], query_tile_tokens(self._group)
        for sequence in range(decodes, len(starts) - 1):
            for kv_head in range(self._blueprint.num_kv_heads):
                # Late query tiles see more keys: first, so that no thread is left with one at the end.
                for first in reversed(range(starts[sequence], starts[sequence + 1], size)):
                    count = min(size, starts[sequence + 1] - first)
                    units.append((sequence, kv_head, first, count, int(positions[first]), 0, 0, 0))
        if units:
            self.prefill_units[: len(units)] = units
        return len(units)
