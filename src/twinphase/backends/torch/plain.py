"""The longer operations in plain torch. In attention keys and values are gathered, and all scores made at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attention", "capped", "gated", "rotated"]


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


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs of x [rows, heads, head_dim] turned by the angles of `cos` and `sin` [rows, 1, pairs]."""
    half = cos.shape[-1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of [rows, 2 * width] = (gate, up)."""
    gate, up = gate_up.chunk(2, -1)
    if activation == "gelu":
        return F.gelu(gate, approximate="tanh") * up
    if activation == "swiglu_oai":  # clamped, alpha 1.702 (gpt-oss's published code)
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return F.silu(gate) * up
