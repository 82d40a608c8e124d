"""The memory that one step's inputs are copied into: kernels know it by address, so it never moves."""

from __future__ import annotations

import numpy as np

from twinphase.backends.base import KVCacheSpec, ModelShape, StepInputs
from twinphase.backends.cpu.kv_layout import CELL, TILE, padded_group, query_tile_tokens
from twinphase.backends.cpu.threads import aligned

__all__ = ["StepMemory"]

UNIT = 8  # int32 numbers of an attention unit


class StepMemory:
    """Fixed arrays for the inputs of a step, its int8 queries and decode's partial results."""

    def __init__(self, max_tokens: int, max_seqs: int, spec: KVCacheSpec, shape: ModelShape, threads: int) -> None:
        self._spec, self._shape, self._threads = spec, shape, threads
        self._group = shape.num_heads // shape.num_kv_heads
        self.most_tiles = -(-spec.num_blocks * spec.block_size // TILE)
        self.token_ids, self.positions = aligned(max_tokens, np.int32), aligned(max_tokens, np.int32)
        self.slots, self.logit_rows = aligned(max_tokens, np.int64), aligned(max_tokens, np.int32)
        self.context_lens = aligned(max_seqs, np.int32)
        # One column more: the last cell of a tile may lie behind the table's end.
        columns = spec.num_blocks + TILE // CELL
        self.block_tables = aligned(max_seqs * columns, np.int32).reshape(max_seqs, columns)
        heads = shape.num_heads
        self.queries = [aligned(max_tokens * heads * shape.head_dim, np.int8),
                        aligned(max_tokens * heads, np.float32), aligned(max_tokens * heads, np.int32)]  # fmt: skip
        self.decode_units = aligned(max_seqs * shape.num_kv_heads * self.most_tiles * UNIT, np.int32).reshape(-1, UNIT)
        most_units = (max_tokens // query_tile_tokens(self._group) + max_seqs + 1) * shape.num_kv_heads
        self.prefill_units = aligned(most_units * UNIT, np.int32).reshape(-1, UNIT)
        partial = 16 + shape.head_dim
        count = max_seqs * self.most_tiles * shape.num_kv_heads * padded_group(self._group)
        self.partials = aligned(count * partial, np.float32)

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
        sequences, width = inputs.block_tables.shape
        self.block_tables[:sequences, :width] = inputs.block_tables
        self.context_lens[:sequences] = inputs.context_lens
        starts = inputs.query_start.tolist()
        decodes = 0  # leading sequences with a single row: decode's kernel, row number = sequence number
        while decodes < sequences and starts[decodes + 1] - starts[decodes] == 1:
            decodes += 1
        return {
            "tokens": tokens,
            "logits": logits,
            "decodes": decodes,
            "decode_units": self._decode_units(decodes, inputs.context_lens.tolist()),
            "prefill_units": self._prefill_units(decodes, starts, inputs.positions),
        }

    def _decode_units(self, decodes: int, contexts: list[int]) -> int:
        """Cut each decoding sequence's KV tiles so that all threads have work; returns the number of units."""
        kv_heads = self._shape.num_kv_heads
        wanted = 8 * self._threads
        units = []
        for sequence in range(decodes):
            tiles = -(-contexts[sequence] // TILE)
            step = max(1, tiles * decodes * kv_heads // wanted)
            for kv_head in range(kv_heads):
                for first in range(0, tiles, step):
                    end = min(tiles, first + step)
                    units.append((sequence, kv_head, sequence, contexts[sequence], first, end, 0, 0))
        if units:
            self.decode_units[: len(units)] = units
        return len(units)

    def _prefill_units(self, decodes: int, starts: list[int], positions: np.typing.NDArray[np.int32]) -> int:
        """Cut each prefill chunk into query tiles; returns the number of units."""
        units, size = [], query_tile_tokens(self._group)
        for sequence in range(decodes, len(starts) - 1):
            for kv_head in range(self._shape.num_kv_heads):
                # Late query tiles see more keys: first, so that no thread is left with one at the end.
                for first in reversed(range(starts[sequence], starts[sequence + 1], size)):
                    count = min(size, starts[sequence + 1] - first)
                    units.append((sequence, kv_head, first, count, int(positions[first]), 0, 0, 0))
        if units:
            self.prefill_units[: len(units)] = units
        return len(units)
