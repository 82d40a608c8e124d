"""Temperature, min-p, top-k and top-p, in the order and with the semantics of vLLM.

Every function takes one row of edited logits (`logit_edits.py`), float32 [vocab_size], and does not
change its arguments. The vocabulary is never sorted as a whole: `threshold` bisects.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twinphase.request import SamplingParams

F32 = NDArray[np.float32]
Ids = NDArray[np.intp]

# With this many values left, sorting is faster than bisecting.
_MAX_SORTED = 512
# Lowest finite threshold below the best token: exp(-64) does not change a float32 sum.
_MAX_DEPTH_NATS = 64.0


def candidates(logits: F32, params: SamplingParams) -> tuple[Ids | None, F32]:
    """Tokens that min-p, top-k and top-p keep, with unnormalized probabilities.

    Tokens that tie with the last kept token are kept too, so that no sort order matters.

    Args:
        logits: edited logits, float32 [vocab_size]; the largest is finite.
        params: temperature above zero.

    Returns:
        Token ids in ascending order (None: the whole vocabulary) and one float32 weight per id.
    """
    # Relative to the best token, which is at 0 nats with weight 1.
    nats = (logits - logits.max()) / np.float32(params.temperature)
    ids: Ids | None = None
    floor = -np.inf
    if params.min_p > 0:
        floor = float(np.log(params.min_p))
    if 0 < params.top_k < len(nats):
        floor = max(floor, threshold(nats, None, params.top_k))
    if floor > -np.inf:
        ids = np.flatnonzero(nats >= np.float32(floor))
        nats = nats[ids]
    weights = np.exp(nats)
    if params.top_p < 1:
        mass = params.top_p * float(weights.sum(dtype=np.float64))
        kept = np.flatnonzero(nats >= np.float32(threshold(nats, weights, mass)))
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    return ids, weights


def log_normalizer(logits: F32) -> float:
    """log(sum(exp(logits))), so that `logit - log_normalizer` is a log probability."""
    best = logits.max()
    return float(best) + float(np.log(np.exp(logits - best).sum(dtype=np.float64)))


def threshold(nats: F32, weights: F32 | None, mass: float) -> float:
    """The largest value t such that the weights of all values >= t add up to at least `mass`.

    Extends the head of the distribution until it is heavy enough, halves it until few values are
    left, and sorts them. Passes over the whole row only compare and add; sorting the row costs ten
    times more.

    Args:
        nats: float32 [n], relative to the best token: the largest is 0.
        weights: float32 [n]; None gives each value the weight 1.
        mass: above 0. If rounding keeps the total below it, t is the smallest value.
    """
    # The values >= high have the total weight `above`, which is less than `mass`.
    low = -4.0
    high = np.inf
    above = 0.0
    while low >= -_MAX_DEPTH_NATS and (reached := _weigh(nats >= low, weights)) < mass:
        high = low
        low = 2 * low
        above = reached
    if low < -_MAX_DEPTH_NATS:
        low = -np.inf
    while True:
        inside = np.flatnonzero((nats >= low) & (nats < high))
        nats = nats[inside]
        weights = None if weights is None else weights[inside]
        pivot = (low + min(high, 0.0)) / 2
        # Nothing lies between two neighbours of float32, however many values tie there.
        if len(nats) <= _MAX_SORTED or not low < np.float32(pivot) < high:
            break
        reached = above + _weigh(nats >= pivot, weights)
        if reached >= mass:
            low = pivot
        else:
            high = pivot
            above = reached
    order = np.argsort(-nats, kind="stable")
    steps = np.ones(len(order)) if weights is None else weights[order]
    index = int(np.searchsorted(np.cumsum(steps, dtype=np.float64), mass - above))
    return float(nats[order[min(index, len(order) - 1)]])


def _weigh(head: NDArray[np.bool_], weights: F32 | None) -> float:
    return float(np.count_nonzero(head)) if weights is None else float((weights * head).sum())
