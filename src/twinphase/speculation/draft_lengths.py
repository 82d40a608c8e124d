"""Chooses the number of draft tokens to verify: one more while tokens per second increase.

A step of n decodes that takes T seconds makes n / T tokens per second. One more drafted row costs
dT, by the cost model for the step's actual mix, and yields a token with the probability that it and
all drafts before it are accepted. Rows are added in order of that probability, over all requests;
if the most probable row does not pay, no other row does.

Acceptance rates are learned from every draft, by its source and by the length of the match plus the
drafted tokens. A draft that was not verified counts too, because the output shows whether it was
right.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from twinphase.batch import StepWork
from twinphase.scheduler.chunk import StepCost
from twinphase.speculation.proposer import Draft

# Gains and costs are estimates, so a draft must exceed its cost by this factor.
MIN_GAIN_RATIO = 1.2
# Time per drafted row that the cost model does not contain: drafting and sampling.
ROW_OVERHEAD_SECONDS = 3e-5
# Decay per observation of the shared counts.
DECAY_ALL_REQUESTS = 0.99
DECAY_PER_REQUEST = 0.9
# Weight of the shared rate, in observations of the request itself.
SHARED_RATE_WEIGHT = 3.0
# Pseudo-counts of accepted and rejected drafts before the first observation.
PRIOR = (0.5, 1.0)
# The caller expects this text, so its prior is higher.
PRIORS = {"prediction": (4.0, 1.0)}
CERTAIN_RATE = 0.999
LONG_MATCH_TOKENS = 8
# Summation of expected tokens stops when fewer than this share of drafts reach a position.
MIN_SURVIVAL = 0.05


def _bucket(match: int) -> int:
    """Similar lengths share a bucket: 0, 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, 12 to 15 and so on."""
    if match < 4:
        return match
    bits = match.bit_length()
    return 2 * bits + (match >> bits - 2 & 1) - 2


class Acceptance:
    """Learned acceptance rates: counts with a Beta prior, shared and per request."""

    def __init__(self) -> None:
        # Each count is [accepted, observed].
        self._all: dict[tuple[str, int], list[float]] = {}
        self._own: dict[str, dict[tuple[str, bool], list[float]]] = {}

    def observe(self, request_id: str, draft: Draft, position: int, right: bool) -> None:
        """Count the draft's token at `position`, before which all tokens were accepted."""
        match = draft.match + position
        own = self._own.setdefault(request_id, {})
        for counts, decay in (
            (self._all.setdefault((draft.source, _bucket(match)), [0.0, 0.0]), DECAY_ALL_REQUESTS),
            (
                own.setdefault((draft.source, match >= LONG_MATCH_TOKENS), [0.0, 0.0]),
                DECAY_PER_REQUEST,
            ),
        ):
            counts[0] = decay * counts[0] + right
            counts[1] = decay * counts[1] + 1.0

    def probability(self, request_id: str, draft: Draft, position: int) -> float:
        """Probability that the draft's token at `position` is accepted if all before it are."""
        if position < draft.certain:
            return CERTAIN_RATE
        match = draft.match + position
        right, seen = self._all.get((draft.source, _bucket(match)), (0.0, 0.0))
        prior = PRIORS.get(draft.source, PRIOR)
        shared = (right + prior[0]) / (seen + sum(prior))
        own_right, own_seen = self._own.get(request_id, {}).get(
            (draft.source, match >= LONG_MATCH_TOKENS), (0.0, 0.0)
        )
        return (own_right + SHARED_RATE_WEIGHT * shared) / (own_seen + SHARED_RATE_WEIGHT)

    def expected(self, request_id: str, draft: Draft, length: int) -> float:
        """Expected number of accepted tokens among the first `length` of the draft."""
        total = 0.0
        survival = 1.0
        for position in range(length):
            survival *= self.probability(request_id, draft, position)
            total += survival
            if survival < MIN_SURVIVAL:
                break
        return total

    def forget(self, request_id: str) -> None:
        """Drop the counts of a request that has ended; the shared counts stay."""
        self._own.pop(request_id, None)


def drafted_row(context: int, window: int | None) -> StepWork:
    """Work that a drafted row adds to a step if it attends to `context` tokens."""
    return StepWork.of_decodes(1, context, window)._replace(sequences=0, draft_contexts=context)


def choose_lengths(
    drafts: Mapping[str, Draft],
    contexts: Mapping[str, int],
    decodes: StepWork,
    times: StepCost,
    acceptance: Acceptance,
    *,
    limit: float | None = None,
) -> dict[str, int]:
    """Number of draft tokens to verify per request; drafts that do not pay are omitted.

    Args:
        drafts: drafts by request.
        contexts: number of tokens that each request's first drafted row attends to.
        decodes: work of the step without drafts.
        times: predicts a step's time.
        acceptance: learned acceptance rates.
        limit: maximum predicted seconds of the step; None is no limit.
    """
    work = decodes
    predicted = times.seconds(decodes)
    step_seconds = predicted
    tokens = float(decodes.sequences)
    lengths = dict[str, int]()
    # A heap of (-probability, request) with the next row of each request.
    rows = [
        (-acceptance.probability(name, draft, 0), name)
        for name, draft in drafts.items()
        if draft.token_ids
    ]
    heapq.heapify(rows)
    while rows:
        chance, name = heapq.heappop(rows)
        chance = -chance
        length = lengths.get(name, 0)
        grown = work.plus(drafted_row(contexts[name] + length, times.window))
        grown_predicted = times.seconds(grown)
        grown_seconds = step_seconds + grown_predicted - predicted + ROW_OVERHEAD_SECONDS
        cost = grown_seconds - step_seconds
        if chance * step_seconds <= MIN_GAIN_RATIO * cost * tokens or (
            limit is not None and grown_seconds > limit
        ):
            break
        work = grown
        predicted = grown_predicted
        step_seconds = grown_seconds
        tokens += chance
        lengths[name] = length = length + 1
        if length < len(drafts[name].token_ids):
            next_chance = chance * acceptance.probability(name, drafts[name], length)
            heapq.heappush(rows, (-next_chance, name))
    return lengths
