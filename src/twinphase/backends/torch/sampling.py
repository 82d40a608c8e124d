"""Draws tokens on the device: the arithmetic of `sampling/` on all rows of a step at once.

Logits are edited, compared and divided in their own float32, so that a greedy choice and the tokens
that top-k leaves are the host's exactly. Exponentials may differ from the host's in their last bit,
and so may sums, in float64: a draw, or the border of top-p, parts from the host's where it falls
within about 1e-7 of another token's share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinphase.backends.base import SampledRows, SamplingPlan
from twinphase.backends.torch.device import pinned


def sample(logits: Tensor, plan: SamplingPlan) -> SampledRows:
    """Sample from `logits` [rows, vocab_size], unchanged; one array is copied to the host."""
    best, ids = logits.max(-1)  # the first of equal ones
    finite = best.isfinite()
    processed = _process(logits, plan)
    if processed is not logits:
        best, ids = processed.max(-1)
        finite &= best.isfinite()
    warm = np.flatnonzero(plan.temperature > 0)
    if len(warm):
        rows = _put(warm, logits)
        ids[rows] = _draw(processed[rows] - best[rows, None], plan, warm)
    ids = torch.where(finite, ids, -1)
    top = min(plan.num_top, logits.shape[1])
    wanted = np.flatnonzero(plan.scored > -2)
    table = torch.zeros(
        len(ids), 3 + 2 * top if len(wanted) else 1, dtype=torch.float64, device=logits.device
    )
    table[:, 0] = ids
    if len(wanted):
        rows = _put(wanted, logits)
        table[rows, 1:] = _logprobs(logits[rows], ids[rows], _put(plan.scored[wanted], logits), top)
    found = table.cpu().numpy()
    whole = found[:, : 2 + top].astype(np.int64)
    found = found[:, 2 + top :]
    return SampledRows(
        whole[:, 0], found[:, :1].ravel(), whole[:, 1:2].ravel(), whole[:, 2:], found[:, 1:]
    )


def _put(array: NDArray[Any], like: Tensor) -> Tensor:
    return pinned(array, like.device).to(like.device, non_blocking=True)


def _process(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """The logits after bias, penalties and masks; the same tensor if none applies."""
    rows, bits = plan.masks
    if not len(rows) and not any(len(at) for at, _ in plan.edits):
        return logits
    out = logits.clone()
    flat = out.view(-1)
    for edited, (places, operands) in zip(EDITS, plan.edits, strict=True):
        if len(places):
            at = _put(places, logits)
            flat[at] = edited(flat[at], _put(operands, logits))
    if len(rows):
        masked = _put(rows, logits)
        packed = _put(bits, logits)
        allowed = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
        mask = allowed.flatten(1)[:, : logits.shape[1]].bool()
        out[masked] = out[masked].masked_fill(~mask, -torch.inf)
    return out


def _repeat(old: Tensor, penalty: Tensor) -> Tensor:
    return torch.where(old > 0, old / penalty, old * penalty)


EDITS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (torch.add, _repeat, torch.sub)


def _draw(below: Tensor, plan: SamplingPlan, rows: NDArray[np.signedinteger]) -> Tensor:
    """Ids drawn from logits `below` the largest of each of `rows`; the weights are exponentials."""
    top_k = plan.top_k[rows]
    top_p = plan.top_p[rows]
    nats = below / _put(plan.temperature[rows], below)[:, None]
    with np.errstate(divide="ignore"):
        floor = _put(np.log(plan.min_p[rows]), below).to(nats.dtype)[:, None]
    size = nats.shape[1]
    limited = (top_k > 0) & (top_k < size)
    if limited.any():
        largest = nats.topk(int(top_k[limited].max())).values
        last = largest.gather(1, _put(np.where(limited, top_k, 1) - 1, below)[:, None])
        floor = torch.where(_put(limited, below)[:, None], torch.maximum(floor, last), floor)
    weights = torch.where(nats >= floor, nats.exp(), 0)
    if (top_p < 1).any():
        falling = nats.sort(-1, descending=True).values
        kept = torch.where(falling >= floor, falling.exp(), 0).double()
        mass = _put(top_p, below)[:, None] * weights.sum(-1, keepdim=True, dtype=torch.float64)
        index = torch.searchsorted(kept.cumsum(-1), mass)
        index = torch.minimum(index, (kept > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
        border = falling.gather(1, index)
        weights = torch.where((nats >= border) | _put(top_p >= 1, below)[:, None], weights, 0)
    edges = weights.double().cumsum(-1)
    target = _put(plan.uniform[rows], below)[:, None] * edges[:, -1:]
    index = torch.searchsorted(edges, target, right=True)
    last = (
        torch.where(weights > 0, torch.arange(size, device=below.device), 0)
        .max(-1, keepdim=True)
        .values
    )
    return torch.minimum(index, last)[:, 0]  # rounding may put the target on the end


def _logprobs(logits: Tensor, ids: Tensor, scored: Tensor, num_top: int) -> Tensor:
    """Float64 columns: the scored token's rank, the top ids, then their log probabilities."""
    best = logits.max(-1, keepdim=True).values
    total = (logits - best).exp().sum(-1, keepdim=True, dtype=torch.float64)
    normalizer = best.double() + total.log()
    values = logits.gather(1, torch.where(scored < 0, ids, scored).clamp(min=0)[:, None])
    columns = [(logits >= values).sum(-1, keepdim=True).double(), values.double() - normalizer]
    if num_top:
        values, order = (
            part[:, :num_top] for part in logits.sort(dim=-1, descending=True, stable=True)
        )
        columns = [columns[0], order.double(), columns[1], values.double() - normalizer]
    return torch.cat(columns, 1)
