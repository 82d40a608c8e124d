"""How kernels cut rows into tiles; the backend counts tiles by the same numbers."""

from __future__ import annotations

from twinphase.backends.cpu.formats import FORMATS, GROUP, STRIP, PackedFormat

# Inputs of a linear layer that stay in the second-level cache while strips of weights pass by.
CHUNK_BYTES = 384 << 10
# The same in matrix tiles, whose processors have 2 MB of it: a strip is unpacked for each chunk.
MATRIX_CHUNK_BYTES = 1 << 20
MATRIX_CHUNK_ROWS = 512
MATRIX_ROWS = 16  # rows of a matrix tile
# rows from which tiles are worth unpacking cold weights for; see docs/design/0013-matrix-tiles.md
MATRIX_LEAST = 96
MATRIX_PANEL = 16  # groups of a strip that are unpacked at once
MATRIX_BATCH = 4  # groups that are multiplied before they are scaled
DENSE_TILE = 32  # inputs of a matrix tile of BF16 weights
# Matrix tiles of inputs per panel: a panel of many rows stays in the second-level cache.
DENSE_PANEL = 32
DENSE_PANEL_BYTES = 2 * DENSE_TILE * DENSE_PANEL  # of a row
DENSE_STRIPS = 8  # strips that many rows pass together
ROWS_PER_TILE = 4  # rows of an elementwise tile
SLOT = 3  # int32 numbers of an expert that has rows: its number, its first row, the end of its rows
GATE_PARTS = 2  # tiles of one gated row, so that a single row still feeds two threads
LOGIT_PARTS = 8  # tiles of one row of logits


def row_chunk(
    rows: int, row_bytes: int, strips: int, tiles: int, matrix_tiles: bool = False
) -> int:
    """Rows of a linear layer's tile, for `rows` rows of `row_bytes` bytes each; at least 1.

    As many as the cache holds, but few enough that `strips` strips of weights give about `tiles`
    tiles; in chunks of equal size, of whole matrix tiles where there are such.
    """
    matrix_tiles &= rows >= MATRIX_LEAST
    chunks = -(-rows * row_bytes // (MATRIX_CHUNK_BYTES if matrix_tiles else CHUNK_BYTES))
    chunks = max(chunks, min(-(-tiles // strips), rows // 48), 1)
    if not matrix_tiles:
        return max(1, -(-rows // chunks))
    return min(MATRIX_CHUNK_ROWS, -(-rows // (chunks * MATRIX_ROWS)) * MATRIX_ROWS)


def unpacked_bytes(fmt: PackedFormat) -> int:
    """Bytes of an unpacked group of a strip: a byte per code, float32 scales and minima."""
    return STRIP * GROUP + 4 * STRIP * (GROUP // fmt.group) * (2 if fmt.minimum else 1)


def matrix_areas(fmt: PackedFormat) -> tuple[int, int, int]:
    """Offsets of integer sums, unpacked panel and waiting rows in scratch memory; shapes at 0."""
    panel = 64 + MATRIX_BATCH * (GROUP // fmt.group) * MATRIX_ROWS * 64
    return 64, panel, panel + (MATRIX_PANEL + 1) * unpacked_bytes(fmt)


def matrix_scratch_bytes(type_name: str, rows: int) -> int:
    """Scratch memory of a linear layer in matrix tiles with up to `rows` rows in a chunk."""
    return matrix_areas(FORMATS[type_name])[2] + (rows + MATRIX_ROWS) * STRIP * 4
