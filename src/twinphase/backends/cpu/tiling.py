"""How kernels cut rows into tiles; the backend counts tiles by the same numbers."""

from __future__ import annotations

__all__ = ["ROWS_PER_TILE", "ROW_CHUNK", "SILU_PARTS"]

ROW_CHUNK = 192  # rows of a linear layer that stay in the second-level cache while strips of weights pass by
ROWS_PER_TILE = 4  # rows of an elementwise tile
SILU_PARTS = 2  # tiles of one SwiGLU row, so that a single row still feeds two threads
