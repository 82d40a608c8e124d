"""The memory of a step: how decode's KV tiles are shared out, and that memory stays modest."""

from __future__ import annotations

import numpy as np
import pytest

from twinphase.backends.base import KVCacheSpec, StepInputs
from twinphase.backends.cpu.kv_layout import TILE
from twinphase.backends.cpu.step import StepMemory
from twinphase.blueprint import Blueprint


def step_memory(seqs: int, positions: int, kv_heads: int = 3, threads: int = 2) -> StepMemory:
    """For a model of 3 query heads on each KV head."""
    blueprint = Blueprint(
        "llama", 64, 30, 3 * kv_heads, kv_heads, 64, 64, 320, positions, 1e-5, (None,) * 30, (None,) * 30, tied=True
    )
    spec = KVCacheSpec(30, kv_heads, 64, num_blocks=seqs * positions // 16)
    return StepMemory(1024, seqs, positions, spec, blueprint, threads)


def decodes(contexts: list[int]) -> StepInputs:
    """One row for each context length."""
    count = len(contexts)
    rows, positions = np.arange(count + 1, dtype=np.int32), np.array(contexts, np.int32) - 1
    tables = np.zeros((count, -(-max(contexts) // 16)), np.int32)
    return StepInputs(rows[:-1], positions, positions.astype(np.int64), rows, tables, count, rows[:-1])


def test_memory_does_not_grow_with_the_cache() -> None:
    memory = step_memory(256, 8192)
    arrays = [value for value in vars(memory).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) < 8e6


@pytest.mark.parametrize("threads", (1, 2, 16))
@pytest.mark.parametrize("kv_heads", (1, 3, 8))
def test_every_tile_is_in_one_unit(threads: int, kv_heads: int) -> None:
    rng = np.random.default_rng(0)
    memory = step_memory(64, 8192, kv_heads, threads)
    plans = [[1], [8192], [8192] * 64, [8192, *[20] * 63], *(rng.integers(1, 8193, n).tolist() for n in (2, 5, 9, 64))]
    plans += [(1 + 8000 * (rng.random(64) < 0.1)).tolist()]
    for contexts in plans:
        counts = memory.fill(decodes(contexts))
        assert counts["decode_units"] <= len(memory.decode_units)
        seen, partials, spread = set(), set(), {}
        for sequence, head, row, context, first, end, piece, base in memory.decode_units[: counts["decode_units"]]:
            assert row == sequence and context == contexts[sequence]
            assert piece or (first == 0 and end == -(-context // TILE))
            for tile in range(first, end):
                seen.add((sequence, head, tile))
                if piece:
                    partials.add(base + tile)
                    spread[sequence, head] = base
        tiles = -(-np.array(contexts) // TILE)
        assert len(seen) == tiles.sum() * kv_heads
        merges = memory.merges[: counts["decode_merges"]].tolist()
        assert spread == {(s, head): base + head * n for s, n, base, _ in merges for head in range(kv_heads)}
        places = memory.partials.nbytes // (4 * 3 * (16 + 64))
        assert len(partials) == sum(n for _, n, _, _ in merges) * kv_heads
        assert max(partials, default=-1) < places


def test_a_sequence_without_room_is_refused() -> None:
    memory = step_memory(4, 64)
    memory.fill(decodes([64, 3]))
    with pytest.raises(ValueError, match="a sequence has 65 tokens; there is room for 64"):
        memory.fill(decodes([3, 65]))
