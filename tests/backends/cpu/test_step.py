"""The memory of a step: the division of attention's KV tiles, and a modest memory size."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import pytest

from twinphase.backends.base import KVCacheSpec, StepInputs
from twinphase.backends.cpu.attention_units import KERNELS, AttentionUnits, Limits
from twinphase.backends.cpu.attention_work import AttentionWork, runs_of
from twinphase.backends.cpu.kv_layout import LEAVES_PARTIALS, LEAVES_STATE, TILE_TOKENS, WHOLE
from twinphase.backends.cpu.shared_prefixes import shared_prefixes
from twinphase.backends.cpu.step import StepMemory
from twinphase.blueprint import KVShape


def attention_work(
    seqs: int, positions: int, kv_heads: int = 3, threads: int = 2, dtype: str = "auto"
) -> AttentionWork:
    """Attention work of a model with 3 query heads per KV head."""
    limits = Limits(1024, min(seqs, 1024), positions, threads, dtype)
    return AttentionWork("tokens", KVShape(kv_heads, 64), 3 * kv_heads, limits)


def step_of(contexts: list[int], rows: list[int], shared: int = 0) -> StepInputs:
    """The last rows of sequences of these lengths, which share their first `shared` tokens."""
    starts = np.cumsum([0, *rows], dtype=np.int32)
    positions = np.concatenate(
        [np.arange(c - n, c, dtype=np.int32) for c, n in zip(contexts, rows, strict=True)]
    )
    width = -(-max(contexts) // 16)
    tables = np.arange(len(contexts) * width, dtype=np.int32).reshape(-1, width)
    tables[:, : shared // 16] = tables[0, : shared // 16]
    every = np.arange(starts[-1], dtype=np.int32)
    return StepInputs(
        every, positions, positions.astype(np.int64), starts, tables, len(contexts), every
    )


def filled(
    memory: AttentionWork, contexts: list[int], rows: list[int], shared: int = 0
) -> dict[str, int]:
    """Shares out a step of these rows; returns the counts."""
    step = step_of(contexts, rows, shared)
    return memory.units(True).fill(runs_of(step, "tokens"), step.block_tables)


def test_memory_does_not_grow_with_the_cache():
    memory = attention_work(256, 8192)
    units = memory.units(True)
    arrays = [units.merges, units.row_numbers, memory.states, *units.lists.values()]
    assert sum(array.nbytes for array in [*memory.queries, memory.partials, *arrays]) < 8e6


@pytest.mark.parametrize("dtype", ("auto", "int8"))
@pytest.mark.parametrize("threads", (1, 2, 16))
@pytest.mark.parametrize("kv_heads", (1, 3))
def test_every_tile_is_in_one_unit(threads, kv_heads, dtype, monkeypatch):
    monkeypatch.setattr(AttentionUnits, "sharing", "always")
    rng = np.random.default_rng(0)
    memory = attention_work(64, 8192, kv_heads, threads, dtype)
    continued = 0
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
                for shared in (0, 128, 1500):
                    counts = filled(memory, contexts, rows, shared)
                    cut += check_plan(memory, counts, contexts, rows, shared)
                    continued += counts["decode_rest"] + counts["prefill_rest"]
    assert cut
    assert continued


def check_plan(
    memory: AttentionWork,
    counts: dict[str, int],
    contexts: list[int],
    rows: list[int],
    shared: int = 0,
) -> int:
    """Each row's tiles are in one unit each, and merges find each piece's results."""
    starts = np.cumsum([0, *rows]).tolist()
    kv_heads = memory.shape.num_heads
    units = memory.units(True)
    seen: set[tuple[int, int, int]] = set()  # row, KV head, tile
    places: dict[int, tuple[int, int, int, int]] = {}  # of partial results
    first_tiles: dict[int, int] = {}  # of the rows of cut sequences
    states: dict[tuple[int, int], int] = {}  # by row and KV head: tiles that are computed
    for name, kernel in KERNELS.items():
        height = {"decode": 3, "prefill": 6}[kernel]
        assert counts[name] < len(units.lists[name])
        listed = units.lists[name][: counts[name]].tolist()
        for sequence, head, number, tokens, position, first, end, result in listed:
            its = units.row_numbers[number : number + tokens].tolist()
            if result == LEAVES_STATE:
                assert not name.endswith("_rest")
                assert (first, end) == (0, (position + 1) // TILE_TOKENS) and position < shared
                states |= {(row, head): end for row in its}
            else:
                assert number == its[0]
                assert starts[sequence] <= number and its[-1] < starts[sequence + 1]
                assert position == contexts[sequence] - rows[sequence] + number - starts[sequence]
                last = -(-(position + tokens) // TILE_TOKENS)
                assert result >= LEAVES_PARTIALS or end == last
                if name.endswith("_rest"):
                    begin = {states[row, head] for row in its}
                    assert result >= LEAVES_PARTIALS or begin == {first}
                else:
                    assert result >= LEAVES_PARTIALS or (result, first) == (WHOLE, 0)
            assert tokens * 3 <= 192
            for tile in range(first, end):
                for row in its:
                    assert (row, head, tile) not in seen
                    seen.add((row, head, tile))
                if result >= LEAVES_PARTIALS:
                    for r in range(-(-3 * tokens // height) * height):  # whole register tiles
                        place = (
                            result
                            - LEAVES_PARTIALS
                            + (tile - first) * (-(-3 * tokens // height) * height)
                        )
                        assert place + r not in places
                        places[place + r] = number + r // 3, head, tile, r % 3
            if result >= LEAVES_PARTIALS:
                first_tiles |= {row: states.get((row, head), 0) for row in its}
    for i, (context, n) in enumerate(zip(contexts, rows, strict=True)):
        for token in range(n):
            tiles = -(-(context - n + token + 1) // TILE_TOKENS)
            row = starts[i] + token
            assert all((row, h, t) in seen for h in range(kv_heads) for t in range(tiles))
    assert max(places, default=-1) < memory.partials.nbytes // (4 * (16 + 64))
    merged = set()
    for row, context, base, per_tile, per_head, first in units.merges[: counts["merges"]].tolist():
        merged.add(row)
        assert first == first_tiles[row]
        for head in range(kv_heads):
            for tile in range(first, -(-context // TILE_TOKENS)):
                place = base + head * per_head + (tile - first) * per_tile
                assert [places[place + h] for h in range(3)] == [
                    (row, head, tile, h) for h in range(3)
                ]
    assert merged == first_tiles.keys()
    return len(merged)


def test_prefixes_are_shared_where_it_pays():
    """The grouping with the largest saving is chosen, but only if every thread gets work."""
    tables = np.arange(7 * 24).reshape(7, 24)
    tables[:6, :8] = tables[0, :8]
    tables[3:5, :23] = tables[3, :23]
    limits = np.array([2, 2, 2, 2, 2, 0, 2])
    (prefix,) = shared_prefixes(tables, limits, 16)
    assert (prefix.runs.tolist(), prefix.tiles) == ([0, 1, 2, 3, 4], 1)
    (prefix,) = shared_prefixes(tables[2:], limits[2:] + 0, 16)
    assert (prefix.runs.tolist(), prefix.tiles) == ([0, 1, 2], 1)
    tables[2:5, :23] = tables[3, :23]
    (prefix,) = shared_prefixes(tables[1:], limits[1:], 16)
    assert (prefix.runs.tolist(), prefix.tiles) == ([1, 2, 3], 2)
    for threads, kv_heads, shares in ((2, 1, True), (16, 1, False), (16, 16, True)):
        counts = filled(attention_work(64, 8192, kv_heads, threads), [2000] * 4, [1] * 4, 1024)
        assert bool(counts["decode_rest"]) == shares
    memory = AttentionWork("tokens", KVShape(1, 64), 3, Limits(64, 8, 8192, 1, sharing_tiles=9))
    assert not filled(memory, [2000] * 4, [1] * 4, 1024)["decode_rest"]


@pytest.mark.parametrize("tokens", (32, 48, 64, 80, 96, 144))
@pytest.mark.parametrize(("threads", "kv_heads"), ((1, 1), (2, 1), (2, 3), (3, 2), (4, 3)))
def test_a_chunk_is_cut_so_that_threads_end_together(threads, kv_heads, tokens):
    memory = attention_work(1, 8192, kv_heads, threads)
    counts = filled(memory, [4096], [tokens])
    check_plan(memory, counts, [4096], [tokens])
    units = memory.units(True).lists["prefill"][: counts["prefill"], 3]
    ranges = np.arange(threads + 1) * len(units) // threads  # as the program shares tiles out
    loads = [int(units[first:end].sum()) for first, end in pairwise(ranges)]
    assert max(loads) <= 1.15 * kv_heads * tokens / threads


def test_tiles_stay_together_where_partial_results_have_no_room():
    memory = attention_work(64, 8192)
    counts = filled(memory, [8192] * 5, [21] * 5)
    assert 21 <= counts["merges"] < 5 * 21
    check_plan(memory, counts, [8192] * 5, [21] * 5)


def test_a_sequence_without_room_is_refused():
    spec = KVCacheSpec((KVShape(1, 16),), num_blocks=16)
    memory = StepMemory(spec, Mock(num_heads=1, shared_kv_layers=0), Limits(1024, 4, 64, 2))
    memory.fill(step_of([64, 3], [1, 1]))
    with pytest.raises(ValueError, match="a sequence has 65 tokens; there is room for 64"):
        memory.fill(step_of([3, 65], [1, 2]))


def test_units_of_a_decode_step_follow_those_of_the_last_one(monkeypatch):
    monkeypatch.setattr(AttentionUnits, "sharing", "always")
    memory = attention_work(8, 8192)
    steps: list[tuple[list[int], int]] = []
    for contexts, shared in (([1500], 0), ([300, 5000, 129, 700], 0), ([300, 520, 250, 700], 256)):
        steps += [([context + step for context in contexts], shared) for step in range(140)]
    steps += [([301, 401], 0), ([302, 402], 256), ([303, 403], 0)]  # Other blocks in the tables.
    steps += [([304, 405], 0), ([305], 0)]
    shared_out = 0
    share_out = AttentionUnits._share_out

    def count(*args):
        nonlocal shared_out
        shared_out += 1
        share_out(*args)

    monkeypatch.setattr(AttentionUnits, "_share_out", count)
    for contexts, shared in steps:
        anew = attention_work(8, 8192)
        rows = [1] * len(contexts)
        counts = filled(memory, contexts, rows, shared)
        assert counts == filled(anew, contexts, rows, shared)
        ours = memory.units(True)
        theirs = anew.units(True)
        for name, units in theirs.lists.items():
            assert (ours.lists[name][: counts[name]] == units[: counts[name]]).all()
        merges = counts["merges"]
        assert (ours.merges[:merges] == theirs.merges[:merges]).all()
    assert len(steps) < shared_out < 1.1 * len(steps)


def test_units_of_rows_that_nobody_decodes():
    """Chunks of a prompt have no rows of logits before its end."""
    units = attention_work(8, 8192).units(True)
    for context in (32, 64):
        step = replace(step_of([context], [32]), logit_rows=np.empty(0, np.int32))
        counts = units.fill(runs_of(step, "logits"), step.block_tables)
        assert not any(counts.values())


def test_units_move_on_when_a_short_sequence_gets_a_block(monkeypatch):
    share_out = Mock(wraps=AttentionUnits._share_out)
    monkeypatch.setattr(AttentionUnits, "_share_out", lambda *args: share_out(*args))
    units = attention_work(8, 8192).units(True)
    tables = np.arange(2 * 64, dtype=np.int32).reshape(2, 64)
    for context in range(290, 310):
        held = tables.copy()
        held[0, -(-context // 16) :] = 0
        units.fill(runs_of(step_of([context, context + 400], [1, 1]), "tokens"), held)
    assert share_out.call_count == 1


@pytest.mark.parametrize("block_size", (48, 256))
def test_units_follow_tables_of_blocks_that_do_not_divide_a_tile(block_size, monkeypatch):
    monkeypatch.setattr(AttentionUnits, "sharing", "always")
    limits = Limits(1024, 8, 8192, 2, "auto", block_size=block_size)
    shape = KVShape(3, 64)
    units = AttentionUnits(shape, 3, limits, True)
    apart = np.arange(80, dtype=np.int32).reshape(2, 40)
    together = np.stack([apart[0], apart[0]])
    last_block = apart.copy()
    # All of a tile but its last block.
    last_block[1, : (TILE_TOKENS - 1) // block_size] = apart[0, : (TILE_TOKENS - 1) // block_size]
    steps = ([250, 250], together), ([251, 251], last_block), ([252, 252], together)
    for contexts, tables in steps:
        plan = runs_of(step_of(contexts, [1, 1]), "tokens")
        anew = AttentionUnits(shape, 3, limits, True)
        counts = units.fill(plan, tables)
        assert counts == anew.fill(plan, tables)
        for name, expected in anew.lists.items():
            assert (units.lists[name][: counts[name]] == expected[: counts[name]]).all()
