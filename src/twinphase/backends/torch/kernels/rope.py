"""Normalizes and rotates queries and keys, and writes keys and values to the cache, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rope_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    scale_ptr,
    q_norm_ptr,
    k_norm_ptr,
    positions_ptr,
    slots_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one row: of the queries, the keys or the values, in this order."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < DIM
    base = qkv_ptr + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    x = tl.load(base + d, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if INTERLEAVED:
            partner = d ^ 1
            pair = d // 2
            first = d % 2 == 0
        else:
            partner = tl.where(d < HALF, d + HALF, d - HALF)
            pair = tl.where(d < HALF, d, d - HALF)
            first = d < HALF
        turned = d < 2 * HALF
        other = tl.load(base + partner, mask=turned, other=0.0).to(tl.float32)
        if HAS_NORM:
            root = tl.sqrt(tl.sum(x * x, 0) / DIM + eps)
            weight_ptr = q_norm_ptr if head < HEADS else k_norm_ptr
            x = x / root * tl.load(weight_ptr + d, mask=inside, other=0.0)
            other = other / root * tl.load(weight_ptr + partner, mask=turned, other=0.0)
        if HALF > 0:
            at = tl.load(positions_ptr + row) * HALF + pair
            cos = tl.load(cos_ptr + at, mask=turned, other=1.0)
            sin = tl.load(sin_ptr + at, mask=turned, other=0.0)
            x = x * cos + tl.where(first, -other, other) * sin
        if HAS_SCALE:  # noqa: SIM102 (no pointer to load from where there is none)
            if head < HEADS:
                x = x * tl.load(scale_ptr + tl.load(positions_ptr + row))
    x = x.to(q_ptr.dtype.element_ty)
    if head < HEADS:
        tl.store(q_ptr + (row * HEADS + head) * DIM + d, x, mask=inside)
    else:
        slot = tl.load(slots_ptr + row) * KV_HEADS
        if head < HEADS + KV_HEADS:
            tl.store(keys_ptr + (slot + head - HEADS) * DIM + d, x, mask=inside)
        else:
            tl.store(values_ptr + (slot + head - HEADS - KV_HEADS) * DIM + d, x, mask=inside)


def rope_kv_write(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor, bool, Tensor | None] | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
) -> Tensor:
    """The queries [rows, num_heads, head_dim]; keys and values are written at `slots`.

    `keys` and `values` are [slots, kv_heads, head_dim]; `norms` are the weights [head_dim] of the
    queries' and the keys' RMSNorm.
    """
    rows = len(qkv)
    (_, kv_heads, dim) = keys.shape
    q = torch.empty(rows, num_heads, dim, dtype=keys.dtype, device=keys.device)
    cos, sin, interleaved, scales = rope if rope is not None else (None, None, False, None)
    q_norm, k_norm = norms if norms is not None else (None, None)
    rope_kernel[(rows, num_heads + 2 * kv_heads)](
        qkv,
        cos,
        sin,
        scales,
        q_norm,
        k_norm,
        positions,
        slots,
        q,
        keys,
        values,
        eps,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=0 if cos is None else cos.shape[1],
        INTERLEAVED=interleaved,
        HAS_NORM=norms is not None,
        HAS_SCALE=scales is not None,
        BLOCK=triton.next_power_of_2(dim),
        num_warps=1,
    )
    return q
