"""The longer operations in plain torch.

In attention keys and values are gathered, and all scores made at once.

In float32 on a processor a head, or an output, has the same bits whichever others are computed with
it, and on however many threads: ranks have fewer of both.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Shares of ranks are multiples of it.
BLOCK_OUTPUTS = 32


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in blocks of `BLOCK_OUTPUTS`: BLAS orders sums by shape, which ranks change.

    Not in 16 bits, where prefill would take several times as long, nor on a GPU, which has kernels
    of our own.
    """
    if x.device.type != "cpu" or x.dtype.itemsize < 4:
        return x @ weight.T
    end = len(weight) // BLOCK_OUTPUTS * BLOCK_OUTPUTS
    blocks = [_block_product(x, weight[:end])] if end else []
    if end < len(weight):
        rest = F.pad(weight[end:], (0, 0, 0, end + BLOCK_OUTPUTS - len(weight)))
        blocks.append(_block_product(x, rest)[:, : len(weight) - end])
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)


def _block_product(x: Tensor, weight: Tensor) -> Tensor:
    blocks = weight.view(-1, BLOCK_OUTPUTS, weight.shape[1]).mT
    return (
        _bmm(x.expand(len(blocks), *x.shape), blocks).transpose(0, 1).reshape(len(x), len(weight))
    )


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """`torch.bmm` on at most one thread per product: with more threads it would split sums."""
    threads = torch.get_num_threads()
    if a.device.type != "cpu" or a.dtype.itemsize < 4 or len(a) >= threads:
        return torch.bmm(a, b)
    torch.set_num_threads(len(a))
    try:
        return torch.bmm(a, b)
    finally:
        torch.set_num_threads(threads)


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
    """softmax(scale * q k^T) v, causal and within the window, of sequences with equal rows.

    `q` is [sequences, rows, heads, head_dim], `positions` int64 [sequences, rows], `tables` int64
    [sequences, blocks], whose first `length` tokens are looked at, and `cache` [2, slots, kv_heads,
    head_dim].
    """
    at = torch.arange(length, device=q.device)
    k, v = cache[:, tables[:, at // block_size] * block_size + at % block_size]
    group = q.shape[2] // k.shape[2]
    # The causal mask.
    hidden = at > positions[:, :, None]
    # After a sequence's end lies old data of others, and 0 times NaN is not 0.
    v = v.masked_fill(hidden[:, -1, :, None, None], 0)
    by_head = q.transpose(1, 2).flatten(0, 1)
    shape = (*q.shape[:3:2], q.shape[1])
    k, v = (x.transpose(1, 2).repeat_interleave(group, 1).flatten(0, 1) for x in (k, v))
    scores = _bmm(by_head, k.mT).view(*shape, length)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = capped(scores, softcap)
    if window is not None:
        hidden = hidden | (at <= positions[:, :, None] - window)
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    p = torch.softmax(scores, -1)[..., :length].to(q.dtype)
    return _bmm(p.flatten(0, 1), v).view(*shape, -1).transpose(1, 2)


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)."""
    return cap * torch.tanh(x / cap)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs of x [rows, heads, head_dim] rotated; `cos` and `sin` are [rows, 1, pairs]."""
    half = cos.shape[-1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of [rows, 2 * width] = (gate, up).

    Of `exp` and `tanh` alone, as torch's activations give a vector's last elements other bits than
    the rest.
    """
    gate, up = gate_up.chunk(2, -1)
    if activation == "gelu":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)
        return 0.5 * gate * (1 + torch.tanh(inner)) * up
    if activation == "swiglu_oai":  # clamped, alpha 1.702 (gpt-oss's published code)
        gate = gate.clamp(max=7)
        up = up.clamp(-7, 7)
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    return gate / (1 + torch.exp(-gate)) * up
