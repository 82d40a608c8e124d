"""From raw logits to the tokens that may be drawn, in the order and with the semantics of vLLM.

min_tokens, logit_bias, then the penalties; temperature; min-p, top-k, top-p. Every function takes
one row, float32 [vocab_size], and leaves what it was given as it was. A full sort of the vocabulary
never happens: thresholds are found by bisection (`threshold`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from twinphase.request import SamplingParams

F32 = NDArray[np.float32]
Ids = NDArray[np.intp]

_SORTED_AT_ONCE = 512  # values worth sorting rather than bisecting further
# nats below the best to look for a threshold; a weight of exp(-64) is nothing to a float32 sum
_DEEPEST = 64.0


def process(
    logits: F32,
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    eos_token_ids: Collection[int],
) -> F32:
    """Logits with everything applied that can change the most likely token; `logits` itself when nothing applies."""
    if len(output_token_ids) < params.min_tokens:
        logits = logits.copy()
        logits[[*eos_token_ids, *(params.stop_token_ids or ())]] = -np.inf
    if params.logit_bias:
        logits = logits.copy()
        logits[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
    return penalize(logits, params, prompt_token_ids, output_token_ids)


def penalize(
    logits: F32,
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
) -> F32:
    """Repetition penalty over prompt and output, frequency and presence penalty over the output.

    Repetition divides positive logits and multiplies negative ones (Keskar et al., 2019); frequency
    subtracts `penalty * count`, presence `penalty` once (OpenAI).
    """
    repetition = params.repetition_penalty
    if repetition == 1.0 and params.frequency_penalty == params.presence_penalty == 0.0:
        return logits
    logits = logits.copy()
    if repetition != 1.0:
        seen = np.unique(np.array([*prompt_token_ids, *output_token_ids], np.intp))
        values = logits[seen]
        logits[seen] = np.where(
            values > 0, values / np.float32(repetition), values * np.float32(repetition)
        )
    ids, penalty = subtracted(params, output_token_ids)
    logits[ids] -= penalty
    return logits


def subtracted(params: SamplingParams, output_token_ids: Sequence[int]) -> tuple[Ids, F32]:
    """Tokens of an output, each once, and what frequency and presence penalty take from their logits."""
    ids, counts = np.unique(np.array(output_token_ids, np.intp), return_counts=True)
    return ids, (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)


def candidates(logits: F32, params: SamplingParams) -> tuple[Ids | None, F32]:
    """The tokens left by min-p, top-k and top-p, and their weights (probabilities up to a common factor).

    Tokens that tie with the last one kept are kept too, so that the result does not depend on any
    sort's order.

    Args:
        logits: processed logits, float32 [vocab_size]; the largest is finite.
        params: temperature above zero.

    Returns:
        Token ids in ascending order (None: the whole vocabulary) and float32 weights, as many.
    """
    # Relative to the best token, in nats: 0 is the best, weights are exp.
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

    Looks ever deeper below the best until the head is heavy enough, then halves that head until few
    values are left, and sorts those. The passes over the whole row only compare and add; a sort of
    the row costs ten times more.

    Args:
        nats: float32 [n], relative to the best token: the largest is 0.
        weights: float32 [n]; None gives each value the weight 1.
        mass: above 0. If rounding keeps the total below it, t is the smallest value.
    """
    # the values >= high weigh `above`, which is less than `mass`
    low = -4.0
    high = np.inf
    above = 0.0
    while low >= -_DEEPEST and (reached := _weigh(nats >= low, weights)) < mass:
        high = low
        low = 2 * low
        above = reached
    if low < -_DEEPEST:
        low = -np.inf
    while True:
        inside = np.flatnonzero((nats >= low) & (nats < high))
        nats = nats[inside]
        weights = None if weights is None else weights[inside]
        pivot = (low + min(high, 0.0)) / 2
        # Nothing lies between two neighbours of float32, however many values tie there.
        if len(nats) <= _SORTED_AT_ONCE or not low < np.float32(pivot) < high:
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
