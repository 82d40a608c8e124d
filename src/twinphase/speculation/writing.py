"""When a draft model writes, and how far: as long as its next token brings more than its step and the row cost.

Unlike text that is looked up, a draft that is written costs time before anybody knows whether it is
right. So its length is decided beforehand, for all requests of a step alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from twinphase.batch import Batch, StepOutput, StepWork
from twinphase.request import Request
from twinphase.speculation.choose import Acceptance, drafted_row
from twinphase.speculation.draft_model import DraftModel
from twinphase.speculation.proposer import Draft

SOURCE = "draft_model"
TRIED = 16  # steps in which as much as may be is written, to learn how often it is right
TRYING = (
    0.01  # of the time in which nothing seems worth writing, that may go to trying all the same
)


class Writing:
    """A draft model within a `Speculator`.

    Attributes:
        num_failures: steps in which the model failed; it does not write for their requests again.
    """

    def __init__(
        self,
        model: DraftModel,
        seconds: Callable[[StepWork], float],
        window: int | None = None,
        most: int | None = None,
    ) -> None:
        """`seconds` predicts steps of the target, `window` is that of its layers; `most` tokens are written at once."""
        self.model = model
        self._most = model.num_speculative_tokens if most is None else most
        self.num_failures = 0
        self._seconds = seconds
        self._window = window
        self._given_up: set[str] = set()
        self._num_steps = self._num_tries = 0
        self._to_spend = 0.0  # seconds, on trying

    def drafts(
        self, requests: Sequence[Request], acceptance: Acceptance, always: bool = False
    ) -> dict[str, Draft]:
        """What the model writes for `requests`; always as much as it may, or as much as is worth it."""
        requests = [request for request in requests if request.request_id not in self._given_up]
        if not requests:
            return {}
        self._num_steps += 1
        most = self._most
        if not always and self._num_steps > TRIED:
            most = self._worthwhile(requests, acceptance)
        limits = dict.fromkeys((request.request_id for request in requests), most)
        if not most:
            limits |= self._tried(requests)
        try:
            written = self.model.draft(requests, limits)
        except Exception:  # a guess is a favour: the answers go on without
            self.num_failures += 1
            for request in requests:
                self._given_up.add(request.request_id)
                self.model.forget(request)
            logging.getLogger("twinphase").warning(
                "The draft model failed and is switched off for %d requests.",
                len(requests),
                exc_info=True,
            )
            return {}
        return {name: Draft(SOURCE, list(token_ids)) for name, token_ids in written.items()}

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """See `Drafter`."""
        self.model.observe(batch, output)

    def forget(self, request: Request) -> None:
        """See `Drafter`."""
        self._given_up.discard(request.request_id)
        self.model.forget(request)

    def _tried(self, requests: Sequence[Request]) -> dict[str, int]:
        """One draft, now and then, where what it costs is little of the time that passed; requests take turns."""
        context = sum(request.num_tokens for request in requests) // len(requests)
        self._to_spend += TRYING * self._seconds(
            StepWork.of_decodes(len(requests), context, self._window)
        )
        turn = self._num_tries % len(requests)
        for request in [*requests[turn:], *requests[:turn]]:
            missing = min(self.model.behind(request), request.num_tokens)
            cost = self.model.times.seconds(
                StepWork.of_chunk(request.num_tokens - missing, missing, True)
            )
            if cost <= self._to_spend:
                self._num_tries = self._num_tries + 1
                self._to_spend = 0.0
                return {request.request_id: 1}
        return {}

    def _worthwhile(self, requests: Sequence[Request], acceptance: Acceptance) -> int:
        count = len(requests)
        context = sum(request.num_tokens for request in requests) // len(requests)
        unknown = Draft(SOURCE, [])

        def chances(position: int) -> list[float]:
            return [
                acceptance.probability(request.request_id, unknown, position)
                for request in requests
            ]

        writing = self.model.times.seconds(StepWork.of_decodes(count, context))
        decodes = StepWork.of_decodes(count, context, self._window)
        row = drafted_row(context, self._window)
        return tokens_to_write(chances, writing, decodes, row, self._seconds, self._most)


def tokens_to_write(
    chances: Callable[[int], Sequence[float]],
    writing: float,
    decodes: StepWork,
    row: StepWork,
    seconds: Callable[[StepWork], float],
    most: int,
) -> int:
    """How many tokens a draft model should write for each of some requests.

    Args:
        chances: of each request, that the token at a position is right where all before it are.
        writing: seconds of a step of the draft model.
        decodes: the target's step without drafts.
        row: what one drafted row adds to it.
        seconds: predicts the target's steps.
        most: tokens, never more.
    """
    work = decodes
    now = seconds(decodes)
    tokens = float(decodes.sequences)
    survive = [1.0] * decodes.sequences
    for position in range(most):
        survive = [alive * chance for alive, chance in zip(survive, chances(position), strict=True)]
        grown = work
        for _ in survive:
            grown = grown.plus(row)
        cost = writing + seconds(grown) - seconds(work)
        if sum(survive) * now <= cost * tokens:
            return position
        work = grown
        now = now + cost
        tokens = tokens + sum(survive)
    return most
