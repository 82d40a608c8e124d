"""How kernels cut rows into tiles; the backend counts tiles by the same numbers."""

from __future__ import annotations

__all__ = ["GATE_PARTS", "LOGIT_PARTS", "ROWS_PER_TILE", "SLOT", "row_chunk"]

CHUNK_BYTES = (
    384 << 10
)  # of a linear layer's inputs that stay in the second-level cache while strips of weights pass by
ROWS_PER_TILE = 4  # rows of an elementwise tile
SLOT = 3  # int32 numbers of an expert that has rows: its number, its first row, the end of its rows
GATE_PARTS = 2  # tiles of one gated row, so that a single row still feeds two threads
LOGIT_PARTS = 8  # tiles of one row of logits


def row_chunk(rows: int, row_bytes: int, strips: int, tiles: int) -> int:
    """Rows of a linear layer's tile, for `rows` rows of `row_bytes` bytes of inputs each; at least 1.

    As many as the cache holds, but few enough that `strips` strips of weights give about `tiles` tiles; in chunks of
    equal size.
    """
    chunks = max(-(-rows * row_bytes // CHUNK_BYTES), min(-(-tiles // strips), rows // 48), 1)
    return max(1, -(-rows // chunks))
