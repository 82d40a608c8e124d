"""Finds the fastest tile for each shape of a model's matrices on this device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from statistics import median

import torch

from twinphase.backends.torch.device import mark, seconds_between
from twinphase.backends.torch.kernels.linear import TritonError, linear
from twinphase.backends.torch.kernels.tiles import FEW, Tile, key_of, tile_for
from twinphase.backends.torch.weights import Matrix, Packed

# Representatives of few and of many rows.
ROWS = {True: 1, False: 512}
CANDIDATES = {
    True: [Tile(16, *rest) for rest in product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5))],
    False: [Tile(*sizes) for sizes in product((64, 128), (64, 128), (4, 8), (2, 3, 4))],
}
WGMMA_CAPABILITY = 90
READINGS = 20
# Any cache holds less.
FLUSH_BYTES = 256 << 20
# A tile is kept if it takes less of the shipped tile's time: a gain below 3 % may be noise.
MAX_TIME_SHARE = 0.97


def tune(
    matrices: Sequence[Matrix],
    dtype: torch.dtype,
    capability: int,
    progress: Callable[[int, int], None],
) -> dict[str, Tile]:
    """Tiles by shape that beat the ones in use; those that do not fit the device are skipped."""
    shapes = {
        (few, w.bits, w.codes.shape[-2], w.padded): w for w in _parts(matrices) for few in ROWS
    }
    found: dict[str, Tile] = {}
    for done, (shape, weight) in enumerate(shapes.items()):
        progress(done, len(shapes))
        few = shape[0]
        used = tile_for(*shape, capability)
        x = torch.ones(ROWS[few], weight.inputs, dtype=dtype, device=weight.codes.device)
        best = used
        least = MAX_TIME_SHARE * _seconds(x, weight, used)
        for tile in candidates(few, capability):
            with suppress(TritonError):  # out of shared memory or registers
                seconds = _seconds(x, weight, tile)
                if seconds < least:
                    best = tile
                    least = seconds
        if best != used:
            found[key_of(*shape)] = best
    progress(len(shapes), len(shapes))
    return found


def candidates(few: bool, capability: int) -> list[Tile]:
    """Tiles to try; on 9.0 those that the same unit multiplies, since units round differently.

    `wgmma` takes 64 outputs or more, and four warps together.
    """
    return [
        tile
        for tile in CANDIDATES[few]
        if capability != WGMMA_CAPABILITY or (tile.outputs >= 64 and tile.num_warps >= 4)
    ]


def _parts(matrices: Sequence[Matrix]) -> Iterator[Packed]:
    for matrix in matrices:
        for part in matrix.parts:
            yield part if part.codes.dim() == 2 else part[0]  # the first expert


def _seconds(x: torch.Tensor, weight: Packed, tile: Tile) -> float:
    if len(x) == ROWS[True]:
        linear(x.expand(FEW, -1), weight, tile=tile)  # The most rows have to fit too.
    return cold_seconds(x.device, lambda: linear(x, weight, tile=tile))


def cold_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Median time of `work` after compiling, with cold caches as in a real step."""
    work()
    spoiled = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    marks = []
    for _ in range(READINGS):
        spoiled.zero_()
        start = mark(device)
        work()
        marks.append((start, mark(device)))
    return median(seconds_between(*both) for both in marks)
