"""Finds rows of different sequences whose KV begins with the same blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.cpu.kv_layout import TILE_TOKENS

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class SharedPrefix:
    """KV tiles that several runs of rows share.

    Attributes:
        runs: numbers of the runs.
        tiles: number of shared tiles, from the first; every row of the runs sees all of them.
    """

    runs: Ints
    tiles: int

    @property
    def saved_tiles(self) -> int:
        """Number of tiles that are not read again."""
        return (len(self.runs) - 1) * self.tiles


def shared_prefixes(tables: Ints, limits: Ints, block_size: int) -> list[SharedPrefix]:
    """The prefixes that save the most tiles, no run being in two of them.

    Args:
        tables: block numbers of each run's sequence, [runs, blocks].
        limits: most tiles that a run may share, [runs].
        block_size: tokens of a block.
    """
    tables = tables[:, : -(-int(limits.max(initial=0)) * TILE_TOKENS // block_size)]

    def among(runs: Ints, tiles: int) -> list[SharedPrefix]:
        """The best prefixes of runs that share their first `tiles` tiles, and more."""
        runs = runs[limits[runs] > tiles]
        if len(runs) < 2:
            return []
        last_block = ((tiles + 1) * TILE_TOKENS - 1) // block_size
        _, group, counts = np.unique(
            tables[runs, last_block], return_inverse=True, return_counts=True
        )
        found: list[SharedPrefix] = []
        for number in np.flatnonzero(counts > 1):
            alike = runs[group == number]
            same = np.logical_and.accumulate(tables[alike] == tables[alike[0]], axis=1).sum(axis=1)
            common = np.minimum(same * block_size // TILE_TOKENS, limits[alike])
            alike = alike[common > tiles]
            if len(alike) > 1:
                whole = SharedPrefix(alike, int(common[common > tiles].min()))
                deeper = among(alike, whole.tiles)
                better = sum(prefix.saved_tiles for prefix in deeper) > whole.saved_tiles
                found += deeper if better else [whole]
        return found

    return among(np.arange(len(tables)), 0)
