"""Cosines and sines of the rotary embedding, the same for every backend."""

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
