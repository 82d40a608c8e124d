"""Samples the next token of a request from one row of logits on the host.

There is no state: the token depends on the request's row, tokens, constraint, seed and position,
never on the batch. Drafts are verified in `speculation/verify.py`; the scheduler stops requests.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from twinphase.batch import ScheduledRequest, TokenLogprobs
from twinphase.request import SamplingParams
from twinphase.sampling.logit_edits import edited, logit_edits
from twinphase.sampling.logit_filters import candidates, log_normalizer, threshold
from twinphase.sampling.rng import uniform

F32 = NDArray[np.float32]

NON_FINITE_LOGITS = (
    "The model's logits were not finite (NaN or infinite), so no token could be chosen."
)
# As in vLLM, lower temperatures are greedy; dividing by this one does not overflow.
GREEDY_BELOW = 1e-5
_DRAW_BLOCK = 256


class ConstraintError(RuntimeError):
    """A constraint failed, such as a grammar that is too complex; only its request fails."""


class NonFiniteLogitsError(ArithmeticError):
    """A row of logits has no finite maximum; only its request fails."""


class Rows:
    """Rows of a step's logits by number: the sampled token of each, and log probabilities."""

    def __init__(self, logits: F32, eos_token_ids: Collection[int]) -> None:
        self._logits = logits
        self._eos_token_ids = eos_token_ids

    def __len__(self) -> int:
        return len(self._logits)

    def token(self, row: int, share: ScheduledRequest, accepted: Sequence[int]) -> int:
        return sample_row(self._logits[row], share, self._eos_token_ids, accepted)

    def logprobs(self, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        return token_logprobs(self._logits[row], token_id, num_top)


def sample_row(
    logits: F32,
    share: ScheduledRequest,
    eos_token_ids: Collection[int],
    accepted: Sequence[int] = (),
) -> int:
    """The next token of one request; the greedy choice among ties is the lowest id.

    `accepted` are the drafts before this row, which are accepted already.

    Raises:
        NonFiniteLogitsError: the largest logit is NaN or infinite, before or after the edits.
        Exception: as the request's constraint.
    """
    params = share.sampling_params
    best = _argmax(logits)
    output = [*share.output_token_ids, *accepted] if accepted else share.output_token_ids
    edits = logit_edits(params, share.prompt_token_ids, output, eos_token_ids)
    processed = edited(logits, edits)
    if share.constraint is not None:  # Last, so that no edit lifts a restriction.
        processed = share.constraint.restrict(processed, output)
    if processed is not logits:
        best = _argmax(processed)
    if params.temperature < GREEDY_BELOW:
        return best
    return draw(processed, params, position_of(share, len(accepted)))


def position_of(share: ScheduledRequest, num_accepted: int) -> int:
    """The position of the token that a request samples after `num_accepted` of its drafts."""
    return share.num_computed_tokens + share.num_scheduled_tokens - share.num_drafts + num_accepted


def draw(logits: F32, params: SamplingParams, position: int) -> int:
    """Draw the token at `position` from edited logits by inverting the cumulative distribution.

    `params.seed` must be set: the engine derives a seed for requests without one.
    """
    ids, weights = candidates(logits, params)
    index = _invert(weights, random_of(params, position))
    return index if ids is None else int(ids[index])


def random_of(params: SamplingParams, position: int) -> float:
    """The uniform number that decides the token at `position`."""
    if params.seed is None:
        raise ValueError("a random draw needs a seed")
    return uniform(params.seed, position)


def token_logprobs(logits: F32, token_id: int, num_top: int) -> TokenLogprobs:
    """Log probabilities of raw logits: the token's, with its rank, and the `num_top` largest.

    As in vLLM, the rank counts the tokens at least as likely. Ties among the top are ordered by id.

    Raises:
        NonFiniteLogitsError: the largest logit is NaN or infinite.
    """
    _argmax(logits)
    normalizer = log_normalizer(logits)
    value = logits[token_id]
    top: list[tuple[int, float]] = []
    if num_top:
        num_top = min(num_top, len(logits))
        nats = logits - logits.max()
        ids = np.flatnonzero(nats >= np.float32(threshold(nats, None, num_top)))
        ids = ids[np.lexsort((ids, -logits[ids]))][:num_top]
        top = [(int(i), float(logits[i]) - normalizer) for i in ids]
    return TokenLogprobs(
        token_id, float(value) - normalizer, int(np.count_nonzero(logits >= value)), top
    )


def _argmax(logits: F32) -> int:
    best = int(logits.argmax())  # The place of the first NaN, if there is one.
    if not math.isfinite(logits[best]):
        raise NonFiniteLogitsError(NON_FINITE_LOGITS)
    return best


def _invert(weights: F32, u: float) -> int:
    """The first index, of positive weight, whose cumulative weight exceeds `u` times the total.

    In two levels, since the cumulative sum of a whole vocabulary is the slowest part of a draw.
    """
    starts = np.arange(0, len(weights), _DRAW_BLOCK)
    edges = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = u * edges[-1]
    block = min(int(np.searchsorted(edges, target, side="right")), len(edges) - 1)
    begin = block * _DRAW_BLOCK
    within = np.cumsum(weights[begin : begin + _DRAW_BLOCK], dtype=np.float64)
    if block:
        target -= edges[block - 1]
    index = begin + int(np.searchsorted(within, target, side="right"))
    if index >= min(begin + _DRAW_BLOCK, len(weights)):  # By rounding.
        index = int(np.flatnonzero(weights[: begin + _DRAW_BLOCK])[-1])
    return index
