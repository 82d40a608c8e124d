"""How many tokens to draft: as long as the next one brings more tokens per second than the step has without it.

A step of n decodes that takes T seconds makes n / T tokens per second. One more drafted row costs
dT, by the cost model for the step's real mix, and brings a token with the probability that it and
all before it are right. The surest row of any request comes first; when that one does not pay, none
does.

How often guesses were right is learned from every guess, also from those that were not computed:
what the request said shows it. Learned is by source and by how many tokens spoke for the guess,
those drafted before it included.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from twinphase.batch import StepWork
from twinphase.speculation.proposer import Draft

# of what a row costs: it has to bring more than that, since both are estimates; in doubt, no draft
PAYS = 1.2
ROW_SECONDS = 3e-5  # beside the model: what drafting, and drawing a token, take for a row
# of a count, by one more observation
FADE = 0.99
OWN_FADE = 0.9
OWN_WEIGHT = 3.0  # observations of the request itself that outweigh half of what all taught
PRIOR = (0.5, 1.0)  # guesses right and wrong, before anything was seen
PRIORS = {"prediction": (4.0, 1.0)}  # a user who predicts an answer knows something
CERTAIN = 0.999
LONG_MATCH = 8


def _bucket(match: int) -> int:
    """Matches that are about as long: 0, 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, 12 to 15 and so on."""
    return (
        match if match < 4 else 2 * match.bit_length() + (match >> match.bit_length() - 2 & 1) - 2
    )


class Acceptance:
    """How likely a guess is right: counts with a Beta prior, of all requests and of each."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, int], list[float]] = {}  # [right, seen]
        self._own: dict[str, dict[tuple[str, bool], list[float]]] = {}

    def observe(self, request_id: str, draft: Draft, position: int, right: bool) -> None:
        """The draft's token at `position` was right, or not; all before it were right."""
        match = draft.match + position
        own = self._own.setdefault(request_id, {})
        for counts, fade in (
            (self._all.setdefault((draft.source, _bucket(match)), [0.0, 0.0]), FADE),
            (own.setdefault((draft.source, match >= LONG_MATCH), [0.0, 0.0]), OWN_FADE),
        ):
            counts[0] = fade * counts[0] + right
            counts[1] = fade * counts[1] + 1.0

    def probability(self, request_id: str, draft: Draft, position: int) -> float:
        """That the draft's token at `position` is right where all before it are."""
        if position < draft.certain:
            return CERTAIN
        match = draft.match + position
        right, seen = self._all.get((draft.source, _bucket(match)), (0.0, 0.0))
        prior = PRIORS.get(draft.source, PRIOR)
        usual = (right + prior[0]) / (seen + sum(prior))
        own_right, own_seen = self._own.get(request_id, {}).get(
            (draft.source, match >= LONG_MATCH), (0.0, 0.0)
        )
        return (own_right + OWN_WEIGHT * usual) / (own_seen + OWN_WEIGHT)

    def expected(self, request_id: str, draft: Draft, length: int) -> float:
        """Tokens that the first `length` of the draft are expected to bring."""
        total = 0.0
        survives = 1.0
        for position in range(length):
            survives *= self.probability(request_id, draft, position)
            total += survives
            if survives < 0.05:
                break
        return total

    def forget(self, request_id: str) -> None:
        """The request has ended; what it taught stays."""
        self._own.pop(request_id, None)


def drafted_row(context: int, window: int | None) -> StepWork:
    """What a drafted row that attends to `context` tokens adds to a step."""
    return StepWork.of_decodes(1, context, window)._replace(sequences=0, draft_contexts=context)


def choose_lengths(
    drafts: Mapping[str, Draft],
    contexts: Mapping[str, int],
    decodes: StepWork,
    seconds: Callable[[StepWork], float],
    acceptance: Acceptance,
    *,
    window: int | None = None,
    limit: float | None = None,
) -> dict[str, int]:
    """Tokens to draft, by request; requests that draft none are left out.

    Args:
        drafts: guesses by request.
        contexts: tokens that each request's first drafted row attends to.
        decodes: the step without drafts.
        seconds: predicts a step's time.
        acceptance: how likely guesses are right.
        window: of the model's layers that have one.
        limit: predicted seconds that no step may exceed for drafts; None is no limit.
    """
    work = decodes
    predicted = seconds(decodes)
    now = predicted
    tokens = float(decodes.sequences)
    lengths = dict[str, int]()
    # The surest row of each request, as a heap: (-chance that it brings a token, request).
    surest = [
        (-acceptance.probability(name, draft, 0), name)
        for name, draft in drafts.items()
        if draft.token_ids
    ]
    heapq.heapify(surest)
    while surest:
        chance, name = heapq.heappop(surest)
        chance = -chance
        length = lengths.get(name, 0)
        grown = work.plus(drafted_row(contexts[name] + length, window))
        longer = seconds(grown)
        then = now + longer - predicted + ROW_SECONDS
        if chance * now <= PAYS * (then - now) * tokens or (limit is not None and then > limit):
            break
        work = grown
        predicted = longer
        now = then
        tokens = tokens + chance
        lengths[name] = length = length + 1
        if length < len(drafts[name].token_ids):
            heapq.heappush(
                surest, (-chance * acceptance.probability(name, drafts[name], length), name)
            )
    return lengths
