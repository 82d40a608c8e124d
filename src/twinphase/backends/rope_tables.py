"""Tables of the rotary embedding by position, the same for every backend."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twinphase.blueprint import Rope

F32 = NDArray[np.float32]


def rope_tables(rope: Rope, max_positions: int) -> tuple[F32, F32]:
    """Cosines and sines, float32 [max_positions, dim / 2] each, computed in float64."""
    angle = np.arange(max_positions, dtype=np.float64)[:, None] * np.array(rope.frequencies)
    cos = rope.magnitude * np.cos(angle)
    sin = rope.magnitude * np.sin(angle)
    return cos.astype(np.float32), sin.astype(np.float32)


def query_scales(rope: Rope, max_positions: int) -> F32 | None:
    """What multiplies the queries of each position, float32 [max_positions]; None if nothing."""
    if not rope.temperature:
        return None
    spans = np.arange(max_positions, dtype=np.int64) // rope.temperature_length
    return (1.0 + rope.temperature * np.log1p(spans)).astype(np.float32)
