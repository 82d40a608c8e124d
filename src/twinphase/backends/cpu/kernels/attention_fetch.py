"""How decode's attention asks for the next KV tile while it computes one.

Few rows are bound by memory, so that what counts is that some lines are always on their way, and
that the hardware prefetcher works on several pages at a time (docs/design/0005).
"""

from __future__ import annotations

from typing import Any

from twinphase.backends.cpu.emit import I64, Emit, Value
from twinphase.backends.cpu.intrinsics import emitted
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.kv_layout import CELLS_PER_TILE, key_bytes, value_bytes

# The next tile is asked for in steps, spread over the work on the tile before: the first of them
# with the scores, the last with the weighted values, the others between the rows' softmax.
FETCH_STEPS = 16
SCORES_STEPS = 4
VALUES_STEPS = 8


def fetch(e: Emit, coming: Value, step: Value, dim: int, dtype: str) -> None:
    """Ask for the lines of the tile at `coming` that are one of FETCH_STEPS.

    They are a quarter of two cells' keys and values. Each of the four runs through its own pages,
    and their lines take turns, so that the hardware prefetcher works on four pages at a time.
    """
    pair = e.mul(e.b.ashr(step, e.i64(2)), 8)
    quarter = e.b.and_(step, e.i64(3))
    keys = key_bytes(dim) // 4
    values = value_bytes(dim, dtype) // 4
    for line in range(0, keys, 64):
        for cell in (0, CELLS_PER_TILE // 2):
            for size, kind in ((keys, 0), (values, 2)):
                place = e.load(I64, coming, pair, 8 * (CELLS_PER_TILE * kind + cell))
                part = e.mul(quarter, size)
                for at in range(line * size // keys, (line + 64) * size // keys, 64):
                    e.prefetch(place, part, at)


def fetch_kernel(isa: Isa, dim: int, dtype: str) -> Any:
    """Numba-callable (next places, step): ask for the lines of a step."""
    return emitted(isa, lambda e, coming, step: fetch(e, coming, step, dim, dtype))


def fetch_scales_kernel(isa: Isa) -> Any:
    """Numba-callable (places): ask for the scales of a tile's cells."""

    def write(e: Emit, places):
        for c in range(CELLS_PER_TILE):
            e.prefetch(e.load(I64, places, 8 * (CELLS_PER_TILE + c)))

    return emitted(isa, write)
