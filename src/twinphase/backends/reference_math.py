"""Formulas of the reference backend that need nothing of its state."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def unit_rows(x: F32) -> F32:
    """Rows of length 1."""
    out: F32 = x / np.sqrt(np.sum(np.square(x), axis=-1, keepdims=True) + np.float32(1e-6))
    return out


def changed_state(state: F32, key: F32, change: F32, kept: F32) -> F32:
    """States [heads, key_dim, value_dim] after a row."""
    out: F32 = kept[:, None, None] * state + key[:, :, None] * change[:, None, :]
    return out


def product_in_blocks(x: F32, weight: F32) -> F32:
    """x @ weight.T, 32 outputs at a time: BLAS orders sums by the shape, which ranks change."""
    missing = -len(weight) % 32
    if missing:
        weight = np.concatenate([weight, np.zeros((missing, weight.shape[1]), np.float32)])
    blocks: F32 = x @ weight.reshape(-1, 32, weight.shape[1]).transpose(0, 2, 1)
    return np.moveaxis(blocks, 0, 1).reshape(len(x), len(weight))[:, : len(weight) - missing]


def softcap_of(x: F32, cap: float) -> F32:
    out: F32 = np.float32(cap) * np.tanh(x / np.float32(cap))
    return out
