"""The NUMA nodes of each rank; parallel/test_ranks.py checks where its threads run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from twinphase import numa
from twinphase.config import EngineConfig
from twinphase.engine.process.messages import RankFacts
from twinphase.numa import rank_places
from twinphase.terminal import describe_ranks


def make_nodes(
    monkeypatch: pytest.MonkeyPatch, folder: Path, lists: Sequence[str], usable: Sequence[int]
) -> None:
    for number, cores in enumerate(lists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(numa, "NODES", folder)
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(usable), raising=False)


@pytest.mark.parametrize(
    ("lists", "usable", "ranks", "nodes", "threads"),
    [
        (["0-3"], range(4), 3, [(), (), ()], 1),
        (["0-1,4-5", "2-3,6-7"], range(8), 2, [(0,), (1,)], 4),
        (["0-1,4-5", "2-3,6-7"], [0, 1, 4, 5], 2, [(), ()], 2),  # started on one node
        (["0-1,4-5", "2-3,6-7"], [0, 1, 2], 2, [(0,), (1,)], 1),
        (["0-3", "", "4-7"], range(8), 3, [(0,), (0,), (2,)], 2),  # one is only memory
        (["0", "1", "2", "3"], range(4), 2, [(0, 1), (2, 3)], 2),
        (
            [f"{core}" for core in range(11)],
            range(11),
            11,
            [(core,) for core in range(11)],
            1,
        ),  # 10 is behind 9
    ],
)
def test_nodes_are_divided_or_shared(
    tmp_path,
    monkeypatch,
    lists,
    usable,
    ranks,
    nodes,
    threads,
):
    make_nodes(monkeypatch, tmp_path, lists, usable)
    places = rank_places(ranks)
    assert [place.nodes for place in places] == nodes
    for place in places:
        own = (
            {core for number in place.nodes for core in numa.cpu_list(lists[number])}
            if place.nodes
            else set(usable)
        )
        assert place.cores == own & set(usable)
    config = EngineConfig(tensor_parallel_size=ranks, threads=None if ranks > 1 else 1)
    assert config.resolve(512).threads == threads
    assert EngineConfig(tensor_parallel_size=ranks, threads=5).resolve(512).threads == 5


def test_a_start_line_tells_what_ranks_have():
    ranks = [
        RankFacts(4, [0], 70_000_000, 30_000_000),
        RankFacts(4, [1, 2], 80_000_000, 15_000_000),
    ]
    line = "2 ranks of 4 threads, each with up to 80 MB of weights and 30 MB of KV cache"
    assert describe_ranks(ranks) == f"{line}, bound to NUMA nodes 0, 1+2"
    assert describe_ranks([structs.replace(rank, nodes=[]) for rank in ranks]) == line
