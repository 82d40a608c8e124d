"""Chooses the number of tokens that a draft model drafts: one more while it pays.

Unlike looked-up text, a model's draft costs time before its acceptance is known. So its length is
chosen beforehand, and is the same for all requests of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from twinphase.batch import Batch, StepOutput, StepWork
from twinphase.request import Request
from twinphase.scheduler.chunk import StepCost
from twinphase.speculation.draft_lengths import Acceptance, drafted_row
from twinphase.speculation.draft_model import DraftModel
from twinphase.speculation.proposer import Draft

SOURCE = "draft_model"
# The first steps draft as many tokens as allowed, to learn the acceptance rate.
LEARNING_STEPS = 16
# If drafts do not pay, trial drafts take this share of the time.
TRIAL_TIME_SHARE = 0.01


class DraftModelPolicy:
    """Drives a draft model for a `Speculator`.

    Attributes:
        num_failures: number of failed steps; the model is not used again for the requests of a
            failed step.
    """

    def __init__(self, model: DraftModel, times: StepCost) -> None:
        """Decide for `model`; `times` predicts steps of the target."""
        self.model = model
        self.num_failures = 0
        self._times = times
        self._failed: set[str] = set()
        self._num_steps = 0
        self._num_trials = 0
        self._trial_seconds = 0.0

    def drafts(
        self, requests: Sequence[Request], acceptance: Acceptance, always: bool = False
    ) -> dict[str, Draft]:
        """Drafts of the allowed length if `always`, else of the length that pays."""
        requests = [request for request in requests if request.request_id not in self._failed]
        if not requests:
            return {}
        self._num_steps += 1
        most = self.model.num_speculative_tokens
        if not always and self._num_steps > LEARNING_STEPS:
            most = self._worthwhile(requests, acceptance)
        limits = dict.fromkeys((request.request_id for request in requests), most)
        if not most:
            limits |= self._trial(requests)
        try:
            drafts = self.model.draft(requests, limits)
        except Exception:  # The requests continue without drafts.
            self.num_failures += 1
            for request in requests:
                self._failed.add(request.request_id)
                self.model.forget(request)
            logging.getLogger("twinphase").warning(
                "The draft model failed and is switched off for %d requests.",
                len(requests),
                exc_info=True,
            )
            return {}
        return {name: Draft(SOURCE, list(token_ids)) for name, token_ids in drafts.items()}

    def observe(self, batch: Batch, output: StepOutput) -> None:
        self.model.observe(batch, output)

    def forget(self, request: Request) -> None:
        self._failed.discard(request.request_id)
        self.model.forget(request)

    def _decodes(self, requests: Sequence[Request]) -> StepWork:
        """The work of the target's step without drafts."""
        context = sum(request.num_tokens for request in requests) // len(requests)
        return StepWork.of_decodes(len(requests), context, self._times.window)

    def _trial(self, requests: Sequence[Request]) -> dict[str, int]:
        """One draft token for one request in turn, once enough trial time has accumulated."""
        self._trial_seconds += TRIAL_TIME_SHARE * self._times.seconds(self._decodes(requests))
        turn = self._num_trials % len(requests)
        for request in [*requests[turn:], *requests[:turn]]:
            missing = min(self.model.num_missing(request), request.num_tokens)
            work = StepWork.of_chunk(request.num_tokens - missing, missing, True)
            if self.model.times.seconds(work) <= self._trial_seconds:
                self._num_trials += 1
                self._trial_seconds = 0.0
                return {request.request_id: 1}
        return {}

    def _worthwhile(self, requests: Sequence[Request], acceptance: Acceptance) -> int:
        unknown = Draft(SOURCE, [])

        def chances(position: int) -> list[float]:
            return [
                acceptance.probability(request.request_id, unknown, position)
                for request in requests
            ]

        context = sum(request.num_tokens for request in requests) // len(requests)
        return tokens_to_draft(
            chances,
            self.model.times.seconds(StepWork.of_decodes(len(requests), context)),
            self._decodes(requests),
            drafted_row(context, self._times.window),
            self._times.seconds,
            self.model.num_speculative_tokens,
        )


def tokens_to_draft(
    chances: Callable[[int], Sequence[float]],
    draft_seconds: float,
    decodes: StepWork,
    row: StepWork,
    seconds: Callable[[StepWork], float],
    most: int,
) -> int:
    """Number of tokens to draft for each of some requests.

    Args:
        chances: returns, for a position, each request's probability that its token is accepted if
            all tokens before it are.
        draft_seconds: time of a step of the draft model.
        decodes: work of the target's step without drafts.
        row: work that one drafted row adds to the target's step.
        seconds: predicts the target's steps.
        most: the largest result.
    """
    work = decodes
    step_seconds = seconds(decodes)
    tokens = float(decodes.sequences)
    survival = [1.0] * decodes.sequences
    for position in range(most):
        survival = [
            alive * chance for alive, chance in zip(survival, chances(position), strict=True)
        ]
        grown = work
        for _ in survival:
            grown = grown.plus(row)
        cost = draft_seconds + seconds(grown) - seconds(work)
        gain = sum(survival)
        if gain * step_seconds <= cost * tokens:
            return position
        work = grown
        step_seconds += cost
        tokens += gain
    return most
