"""The machine's NUMA nodes: the cores of each rank of a model, and binding threads there.

Linux gives a page of memory to the node of the core that first writes it, so that threads that are
on their cores before weights and KV cache are made have both beside them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

NODES = Path("/sys/devices/system/node")  # Documentation/ABI/stable/sysfs-devices-node


class Place(NamedTuple):
    """Where a rank computes: its node numbers, none if there is only one, and its cores."""

    nodes: tuple[int, ...]
    cores: frozenset[int]


def cpu_list(text: str) -> frozenset[int]:
    """The numbers in a list such as "0-3,8"."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return frozenset(core for part in ends for core in range(int(part[0]), int(part[-1]) + 1))


def usable_cores() -> frozenset[int]:
    """The cores that this thread may use."""
    return frozenset(
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )


def rank_places(ranks: int) -> list[Place]:
    """The place of each rank on this thread's cores: nodes are divided or shared evenly."""
    usable = usable_cores()
    nodes = []
    for folder in sorted(NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            cores = usable & cpu_list((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cores:  # Some nodes have only memory, or are not available to this process.
            nodes.append((int(folder.name[4:]), cores))
    if len(nodes) < 2:
        return [Place((), usable)] * ranks
    places = []
    for rank in range(ranks):
        first = rank * len(nodes) // ranks
        mine = nodes[first : max(first + 1, (rank + 1) * len(nodes) // ranks)]
        places.append(
            Place(
                tuple(number for number, _ in mine),
                frozenset().union(*(cores for _, cores in mine)),
            )
        )
    return places


@contextmanager
def bound_to(cores: Collection[int]) -> Iterator[None]:
    """Bind the calling thread and what it starts meanwhile to these cores; none is any core."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
