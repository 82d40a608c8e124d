"""How kernels cut rows into tiles; the backend counts tiles by the same numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from twinphase.backends.cpu.formats import FORMATS, GROUP_INPUTS, STRIP_OUTPUTS, PackedFormat
from twinphase.backends.cpu.isa import Isa

# Inputs of a linear layer that stay in the second-level cache while strips of weights pass by.
CHUNK_BYTES = 384 << 10
# The same in matrix tiles, whose processors have 2 MB of it: a strip is unpacked for each chunk.
MATRIX_CHUNK_BYTES = 1 << 20
MATRIX_CHUNK_ROWS = 512
MATRIX_TILE_ROWS = 16
# From this number of rows on, unpacking cold weights for tiles pays off; see
# docs/design/0013-matrix-tiles.md
MATRIX_MIN_ROWS = 96
# Groups of a strip that are unpacked at once and stay in the first-level cache.
PANEL_GROUPS = 16
# Groups are multiplied in batches before they are scaled.
MATRIX_BATCH_GROUPS = 4
DENSE_TILE_INPUTS = 32
# Linear layers in bfloat16 tiles: bytes of 32 inputs of a strip, and such tiles in a panel of it,
# which leaves most of the first-level cache to the rows that pass by.
WEIGHT_TILE_BYTES = 2 * STRIP_OUTPUTS * DENSE_TILE_INPUTS
WEIGHT_PANEL_TILES = 9
# Weights that are loaded as they are: with up to this number of rows memory bounds them, which
# longer panels read faster.
STREAMED_ROWS = 64
STREAMED_PANEL_TILES = 24
# Up to this number of rows, sums stay in registers for all of a strip's weights.
FEW_TILE_ROWS = 2 * MATRIX_TILE_ROWS
# Rows of a tile: their bfloat16 numbers stay in the second-level cache, all of them, or a panel
# that a number of strips share.
BF16_CHUNK_ROWS = 256
BF16_CHUNK_BYTES = 3 << 19
BF16_PANEL_STRIPS = 4
# Bytes of the record that a linear layer's tile leaves for its gate (`kernels/gate_tile.py`).
GATE_RECORD_BYTES = 64
# Offsets in a thread's scratch memory; the tiles' shapes are at 0, and sums come last.
BF16_AREAS = {"numbers": 64, "gate": 64 + 4 * 4 * STRIP_OUTPUTS}
BF16_AREAS["panel"] = BF16_AREAS["gate"] + GATE_RECORD_BYTES
BF16_AREAS["sums"] = BF16_AREAS["panel"] + WEIGHT_TILE_BYTES * WEIGHT_PANEL_TILES
# Rows times strips whose sums wait; a tile of more takes its strips in turn.
BF16_SUM_ROWS = BF16_CHUNK_ROWS * BF16_PANEL_STRIPS
BF16_SCRATCH_BYTES = BF16_AREAS["sums"] + 4 * STRIP_OUTPUTS * BF16_SUM_ROWS
ELEMENTWISE_TILE_ROWS = 4
# A claim word holds numbers below 2^18.
MAX_LINEAR_TILES = 1 << 17
# A slot is an expert that has rows: its number, its first row, and the end of its rows, in int32.
SLOT_INTS = 3
# Numbers of a state's plan (`recurrent.StateMemory`).
PLAN_INTS = 8
# Partial sums over the rows of a recurrent state's matrix.
SUM_PARTS = 4
# Two, so that a single row still feeds two threads.
GATE_TILES_PER_ROW = 2
LOGIT_TILES_PER_ROW = 8
# Sampling: groups of 32 logits in a block whose weights are added up; kinds of edits; int64 numbers
# of a row's plan, of its result and of the step's record (`backends/cpu/sampling.py`), and values
# of the token to score that are no token.
GROUPS_PER_EDGE = 8
EDITS = 3
PLANNED_INTS = 8
SAMPLED_INTS = 5
RECORD_INTS = 11
NOT_SCORED = -2
SAMPLED_TOKEN = -1
# The bits of an infinite float32, the largest key of a logit.
KEY_OF_INFINITY = 0x7F800000


def row_chunk(
    rows: int, row_bytes: int, strips: int, tiles: int, matrix_tiles: bool = False
) -> int:
    """Rows of a linear layer's tile, for `rows` rows of `row_bytes` bytes each; at least 1.

    As many as the cache holds, but few enough that `strips` strips of weights give about `tiles`
    tiles; in chunks of equal size, of whole matrix tiles where there are such.
    """
    matrix_tiles &= rows >= MATRIX_MIN_ROWS
    chunks = -(-rows * row_bytes // (MATRIX_CHUNK_BYTES if matrix_tiles else CHUNK_BYTES))
    chunks = max(chunks, min(-(-tiles // strips), rows // 48), 1)
    if not matrix_tiles:
        return max(1, -(-rows // chunks))
    return min(MATRIX_CHUNK_ROWS, -(-rows // (chunks * MATRIX_TILE_ROWS)) * MATRIX_TILE_ROWS)


def bf16_chunk(rows: int, row_bytes: int, strips: int, tiles: int) -> tuple[int, int]:
    """Rows and strips of a linear layer's tile in bfloat16, rows in whole matrix tiles.

    Few rows take strips in about `tiles` tiles.
    """
    if rows <= FEW_TILE_ROWS:
        return FEW_TILE_ROWS, max(1, strips // tiles)
    per_tile = 1 if BF16_CHUNK_ROWS * row_bytes <= BF16_CHUNK_BYTES else BF16_PANEL_STRIPS
    chunks = max(-(-rows // BF16_CHUNK_ROWS), min(-(-tiles // strips), rows // 64))
    chunk = -(-rows // (chunks * FEW_TILE_ROWS)) * FEW_TILE_ROWS
    return chunk, max(1, min(per_tile, strips * chunks // tiles))


def gated_results(rows: int, chunk_rows: int, pairs: int, tiles: int) -> int:
    """Scratch memory of the results that wait in a tile for its gate.

    Up to FEW_TILE_ROWS rows divide the `pairs` of strips among about `tiles` tiles; more rows take
    a few pairs per tile.
    """
    few = FEW_TILE_ROWS * max(1, pairs // tiles)
    most = 2 * chunk_rows + rows * pairs // MAX_LINEAR_TILES
    return GATE_RECORD_BYTES + 2 * 4 * STRIP_OUTPUTS * max(few, most)


def most_chunk_rows(row_bytes: int) -> int:
    """The most that `row_chunk` returns for rows of that size."""
    return max(MATRIX_CHUNK_ROWS, CHUNK_BYTES // row_bytes + 1)


def delta_columns(isa: Isa, value_dim: int) -> int:
    """Columns of a recurrent state's matrix in a strip, whose sums stay in registers."""
    return math.gcd(value_dim, isa.lanes * (2 if isa.registers == 32 else 1))


@dataclass(frozen=True)
class PanelLayout:
    """Where the numbers of an unpacked group of a strip are, in bytes.

    Attributes:
        small: of float32 scales and minima, or of whole ones (int32), [part][output] each. Before
            them is a byte for each code, [block][quad][output][input], or a word of 16 bits: those
            of inputs 0 and 2 of each quad, then those of inputs 1 and 3.
        shared: of the float32 numbers that a superblock shares, in its first group.
        size: of it all.
    """

    small: int
    shared: int
    size: int

    @classmethod
    def of(cls, isa: Isa, fmt: PackedFormat) -> PanelLayout:
        """The layout of a format on a path."""
        whole = isa.whole_scales(fmt)
        kinds = 2 if fmt.minimum else 1
        small = STRIP_OUTPUTS * GROUP_INPUTS * (2 if isa.takes_words(fmt) else 1)
        shared = small + 4 * STRIP_OUTPUTS * fmt.parts * kinds
        return cls(small, shared, shared + 4 * STRIP_OUTPUTS * kinds * whole)


def panel_min_rows(isa: Isa, fmt: PackedFormat) -> int:
    """Rows from which on unpacking weights in panels for register tiles pays off."""
    if isa.registers == 16:
        return 5
    # Scales of 16 inputs take as much to unpack as codes that are more than a nibble.
    return 24 if fmt.has_plain_codes and fmt.parts == 1 else 12


def panel_groups(isa: Isa, fmt: PackedFormat) -> int:
    """Groups of a panel of register tiles; words take twice the memory."""
    return PANEL_GROUPS // 2 if isa.takes_words(fmt) else PANEL_GROUPS


def panel_areas(isa: Isa, fmt: PackedFormat) -> tuple[int, int, int]:
    """Offsets of rows' numbers, rows' words and waiting rows in scratch memory; a panel at 0."""
    groups = panel_groups(isa, fmt)
    numbers = groups * PanelLayout.of(isa, fmt).size
    words = numbers + (1 + fmt.parts) * 4 * groups * isa.linear_rows
    size = 2 * GROUP_INPUTS * groups * isa.linear_rows if isa.takes_words(fmt) else 0
    return numbers, words, words + size


def matrix_areas(isa: Isa, fmt: PackedFormat) -> tuple[int, int, int]:
    """Offsets of integer sums, unpacked panel and waiting rows in scratch memory; shapes at 0."""
    panel = 64 + MATRIX_BATCH_GROUPS * fmt.parts * MATRIX_TILE_ROWS * 64
    return 64, panel, panel + (PANEL_GROUPS + 1) * PanelLayout.of(isa, fmt).size


def scratch_bytes(isa: Isa, type_name: str, rows: int) -> int:
    """Scratch memory of a quantized linear layer with up to `rows` rows in a chunk."""
    fmt = FORMATS[type_name]
    waiting = rows + MATRIX_TILE_ROWS
    areas = panel_areas(isa, fmt)[2]
    if isa.matrix_tiles:
        areas = max(areas, matrix_areas(isa, fmt)[2])
    return areas + waiting * STRIP_OUTPUTS * 4
