"""Attention over the paged KV cache in plain torch: keys and values are gathered, all scores made at once."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attention", "capped"]


def attention(
    q: Tensor,
    positions: Tensor,
    tables: Tensor,
    length: int,
    cache: Tensor,
    block_size: int,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """softmax(scale * q k^T) v, causal and within the window, of sequences with as many rows each.

    `q` is [sequences, rows, heads, head_dim], `positions` int64 [sequences, rows], `tables` int64 [sequences, blocks],
    whose first `length` tokens are looked at, and `cache` [2, slots, kv_heads, head_dim].
    """
    at = torch.arange(length, device=q.device)
    k, v = cache[:, tables[:, at // block_size] * block_size + at % block_size]
    group, hidden = q.shape[2] // k.shape[2], at > positions[:, :, None]  # the causal mask
    # Behind a sequence's end lies what others left, and 0 times NaN is not 0.
    v = v.masked_fill(hidden[:, -1, :, None, None], 0).repeat_interleave(group, 2)
    scores = torch.einsum("sqhd,skhd->shqk", q, k.repeat_interleave(group, 2))
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = capped(scores, softcap)
    if window is not None:
        hidden = hidden | (at <= positions[:, :, None] - window)
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    p = torch.softmax(scores, -1)[..., :length].to(q.dtype)
    return torch.einsum("shqk,skhd->sqhd", p, v)


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)."""
    return cap * torch.tanh(x / cap)
