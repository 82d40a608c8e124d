"""Chooses the next token of a request from one row of logits.

Works on host logits and holds no state: what a request draws depends on its own row, its own
tokens, its constraint, its seed and the position, never on the batch. Not for drafts
(`speculation/verify.py`), stopping (scheduler) nor text.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from twinphase.batch import ScheduledRequest, TokenLogprobs
from twinphase.request import SamplingParams
from twinphase.sampling.logit_filters import candidates, log_normalizer, process, threshold
from twinphase.sampling.rng import uniform

F32 = NDArray[np.float32]

NON_FINITE_LOGITS = (
    "The model's logits were not finite (NaN or infinite), so no token could be chosen."
)
GREEDY_BELOW = 1e-5  # as vLLM: colder than this is greedy, and the division below stays in range
_DRAW_BLOCK = 256


class ConstraintError(RuntimeError):
    """A constraint that cannot go on, such as a grammar that turned out too complex; it fails its own request only."""


class NonFiniteLogitsError(ArithmeticError):
    """A row of logits has no finite maximum; it fails its own request only."""


class Rows:
    """A step's rows of logits, by number: the token that each gives, and log probabilities in it."""

    def __init__(self, logits: F32, eos_token_ids: Collection[int]) -> None:
        self._logits = logits
        self._eos_token_ids = eos_token_ids

    def __len__(self) -> int:
        return len(self._logits)

    def token(self, row: int, share: ScheduledRequest, accepted: Sequence[int]) -> int:
        """See `sample_row`."""
        return sample_row(self._logits[row], share, self._eos_token_ids, accepted)

    def logprobs(self, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        """See `token_logprobs`."""
        return token_logprobs(self._logits[row], token_id, num_top)


def sample_row(
    logits: F32,
    share: ScheduledRequest,
    eos_token_ids: Collection[int],
    accepted: Sequence[int] = (),
) -> int:
    """The next token of one request; ties of the greedy choice go to the lowest id.

    `accepted` are the drafts before this row, known by now to be the output's next tokens.

    Raises:
        NonFiniteLogitsError: the largest logit is NaN or infinite, before or after processing.
        Exception: whatever the request's constraint fails with.
    """
    params = share.sampling_params
    best = _argmax(logits)
    output = [*share.output_token_ids, *accepted] if accepted else share.output_token_ids
    processed = process(logits, params, share.prompt_token_ids, output, eos_token_ids)
    if share.constraint is not None:  # last, so that nothing lifts what it forbids
        processed = share.constraint.restrict(processed, output)
    if processed is not logits:
        best = _argmax(processed)
    if params.temperature < GREEDY_BELOW:
        return best
    return draw(processed, params, position_of(share, len(accepted)))


def position_of(share: ScheduledRequest, num_accepted: int) -> int:
    """The position of the token that a request draws behind so many of its drafts."""
    return share.num_computed_tokens + share.num_scheduled_tokens - share.num_drafts + num_accepted


def draw(logits: F32, params: SamplingParams, position: int) -> int:
    """Draw the token at `position` from processed logits, by inversion of the cumulative distribution in id order.

    `params.seed` must be set: the engine gives requests without a seed one of their own.
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
    """Log probabilities of raw logits: the sampled token's with its rank, and the `num_top` most likely tokens'.

    The rank counts the tokens at least as likely, as vLLM does. Ties among the top are in order of
    id.

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
    best = int(logits.argmax())  # the position of the first NaN, if there is one
    if not math.isfinite(logits[best]):
        raise NonFiniteLogitsError(NON_FINITE_LOGITS)
    return best


def _invert(weights: F32, u: float) -> int:
    """The index i where the cumulative weight first exceeds `u` times the total; never one of zero weight.

    Two levels, since the cumulative sum of a whole vocabulary is the slowest part of a draw.
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
    if index >= min(
        begin + _DRAW_BLOCK, len(weights)
    ):  # rounding put the target on the block's end
        index = int(np.flatnonzero(weights[: begin + _DRAW_BLOCK])[-1])
    return index
