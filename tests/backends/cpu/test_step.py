"""The memory of a step: how attention's KV tiles are shared out, and that memory stays modest."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import pytest

from twinphase.backends.base import KVCacheSpec, StepInputs
from twinphase.backends.cpu.attention_units import KERNELS, AttentionUnits, Limits
from twinphase.backends.cpu.attention_work import AttentionWork, runs_of
from twinphase.backends.cpu.kv_layout import TILE_TOKENS
from twinphase.backends.cpu.step import StepMemory
from twinphase.blueprint import KVShape


def attention_work(
    seqs: int, positions: int, kv_heads: int = 3, threads: int = 2, dtype: str = "auto"
) -> AttentionWork:
    """For a model of 3 query heads on each KV head."""
    limits = Limits(1024, min(seqs, 1024), positions, threads, dtype)
    return AttentionWork("tokens", KVShape(kv_heads, 64), 3 * kv_heads, limits)


def step_of(contexts: list[int], rows: list[int]) -> StepInputs:
    """The last rows of sequences of these context lengths."""
    starts = np.cumsum([0, *rows], dtype=np.int32)
    positions = np.concatenate(
        [np.arange(c - n, c, dtype=np.int32) for c, n in zip(contexts, rows, strict=True)]
    )
    tables = np.zeros((len(contexts), -(-max(contexts) // 16)), np.int32)
    every = np.arange(starts[-1], dtype=np.int32)
    return StepInputs(
        every, positions, positions.astype(np.int64), starts, tables, len(contexts), every
    )


def test_memory_does_not_grow_with_the_cache():
    memory = attention_work(256, 8192)
    arrays = [value for value in vars(memory).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) < 8e6


@pytest.mark.parametrize("dtype", ("auto", "int8"))
@pytest.mark.parametrize("threads", (1, 2, 16))
@pytest.mark.parametrize("kv_heads", (1, 3))
def test_every_tile_is_in_one_unit(threads, kv_heads, dtype):
    rng = np.random.default_rng(0)
    memory = attention_work(64, 8192, kv_heads, threads, dtype)
    plans = [
        [1],
        [8192],
        [8192] * 64,
        [8192, *[20] * 63],
        *(rng.integers(1, 8193, n).tolist() for n in (2, 5, 9, 64)),
    ]
    plans += [(1 + 8000 * (rng.random(64) < 0.1)).tolist()]
    cut = 0
    for contexts in plans:
        for most in (1, 4, 21, 150):  # rows of a sequence; three heads on each KV head
            rows = np.minimum(rng.integers(1, most + 1, len(contexts)), contexts).tolist()
            if sum(rows) <= 150:
                counts = memory.fill(runs_of(step_of(contexts, rows), "tokens"))
                cut += check_plan(memory, counts, contexts, rows, kv_heads)
    assert cut


def check_plan(
    memory: AttentionWork,
    counts: dict[str, int],
    contexts: list[int],
    rows: list[int],
    kv_heads: int,
) -> int:
    """Each row's tiles are in one unit each, and merges find each piece's results."""
    starts = np.cumsum([0, *rows]).tolist()
    seen: set[tuple[int, int, int]] = set()  # row, KV head, tile
    places: dict[int, tuple[int, int, int, int]] = {}  # of partial results
    cut_rows: set[int] = set()
    height = {"decode": 3, "prefill": 6}
    for phase, units in memory.units.items():
        assert counts[phase] < len(units)
        for sequence, head, row, tokens, position, first, end, base in units[
            : counts[phase]
        ].tolist():
            assert starts[sequence] <= row and row + tokens <= starts[sequence + 1]
            assert position == contexts[sequence] - rows[sequence] + row - starts[sequence]
            assert base or (first == 0 and end == -(-(position + tokens) // TILE_TOKENS))
            per_tile = (
                -(-3 * tokens // height[phase]) * height[phase]
            )  # the kernel writes whole register tiles
            cut_rows |= set(range(row, row + tokens)) if base else set()
            for tile in range(first, end):
                for token in range(tokens):
                    assert (row + token, head, tile) not in seen
                    seen.add((row + token, head, tile))
                for r in range(per_tile if base else 0):
                    place = base - 1 + tile * per_tile + r
                    assert place not in places
                    places[place] = row + r // 3, head, tile, r % 3
    for i, (context, n) in enumerate(zip(contexts, rows, strict=True)):
        for token in range(n):
            tiles = -(-(context - n + token + 1) // TILE_TOKENS)
            assert all(
                (starts[i] + token, head, t) in seen
                for head in range(kv_heads)
                for t in range(tiles)
            )
    assert max(places, default=-1) < memory.partials.nbytes // (4 * (16 + 64))
    merged = set()
    for row, context, base, per_tile, per_head in memory.merges[: counts["merges"]].tolist():
        merged.add(row)
        for head in range(kv_heads):
            for tile in range(-(-context // TILE_TOKENS)):
                found = [places[base + head * per_head + tile * per_tile + h] for h in range(3)]
                assert found == [(row, head, tile, h) for h in range(3)]
    assert merged == cut_rows
    return len(merged)


@pytest.mark.parametrize("tokens", (32, 48, 64, 80, 96, 144))
@pytest.mark.parametrize(("threads", "kv_heads"), ((1, 1), (2, 1), (2, 3), (3, 2), (4, 3)))
def test_a_chunk_is_cut_so_that_threads_end_together(threads, kv_heads, tokens):
    memory = attention_work(1, 8192, kv_heads, threads)
    counts = memory.fill(runs_of(step_of([4096], [tokens]), "tokens"))
    check_plan(memory, counts, [4096], [tokens], kv_heads)
    units = memory.units["prefill"][: counts["prefill"], 3]
    ranges = np.arange(threads + 1) * len(units) // threads  # as the program shares tiles out
    loads = [int(units[first:end].sum()) for first, end in pairwise(ranges)]
    assert max(loads) <= 1.15 * kv_heads * tokens / threads


def test_tiles_stay_together_where_partial_results_have_no_room():
    memory = attention_work(64, 8192)
    counts = memory.fill(runs_of(step_of([8192] * 5, [21] * 5), "tokens"))
    assert 21 <= counts["merges"] < 5 * 21
    check_plan(memory, counts, [8192] * 5, [21] * 5, 3)


def test_a_sequence_without_room_is_refused():
    spec = KVCacheSpec((KVShape(1, 16),), num_blocks=16)
    memory = StepMemory(spec, Mock(num_heads=1, shared_kv_layers=0), Limits(1024, 4, 64, 2))
    memory.fill(step_of([64, 3], [1, 1]))
    with pytest.raises(ValueError, match="a sequence has 65 tokens; there is room for 64"):
        memory.fill(step_of([3, 65], [1, 2]))
