"""Cosines and sines of the rotary embedding, the same for every backend."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import RopeSpec
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.quant import dequantize

__all__ = ["rope_tables"]

F32 = NDArray[np.float32]


def rope_tables(checkpoint: Checkpoint, spec: RopeSpec, max_positions: int) -> tuple[F32, F32]:
    """Cosines and sines, float32 [max_positions, dim / 2] each, computed in float64."""
    frequency = spec.theta ** (-np.arange(0, spec.dim, 2, dtype=np.float64) / spec.dim)
    if spec.factors is not None:
        info = checkpoint.tensors[spec.factors]
        frequency = frequency / dequantize(checkpoint.raw(spec.factors), info.shape, info.type).astype(np.float64)
    angle = np.arange(max_positions, dtype=np.float64)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
