"""Drafts for a step: asks the proposers, chooses what is worth its time, learns from what came of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Protocol

from twinphase.batch import Batch, StepOutput, StepWork
from twinphase.request import Request
from twinphase.speculation.choose import PAYS, ROW_SECONDS, Acceptance, choose_lengths, drafted_row
from twinphase.speculation.forced import ForcedProposer
from twinphase.speculation.lookup import NgramProposer, PredictionProposer, SuffixProposer
from twinphase.speculation.proposer import Draft, Proposer
from twinphase.speculation.writing import Writing
from twinphase.speculative import SpeculativeConfig

__all__ = ["Speculator", "StepTimes", "make_speculator"]

SELDOM = 16  # steps after which a guess is looked for again where none could pay
PATIENCE, RETRY = 8, 4  # guesses in a row that were not wanted; steps between guesses from then on


class StepTimes(Protocol):
    """Predicts how long a step takes; the measured cost model does."""

    def step_limit(self, slo_seconds: float) -> float:
        """Predicted time, seconds, at which a step still meets the SLO."""

    def seconds(self, work: StepWork) -> float:
        """Predicted time of a step, seconds."""


@dataclass
class SourceCounts:
    """Tokens drafted from one source, verified or not, and those of the verified that were right."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class _State:
    """What is known of one request."""

    proposers: list[Proposer]
    guess: Draft | None = None  # until it is known what came
    sources: dict[str, SourceCounts] = field(default_factory=dict)
    num_unwanted: int = 0  # times in a row that it was asked, and nothing was drafted


class Speculator:
    """A `Drafter` made of proposers and a choice among their guesses.

    Attributes:
        proposers: asked in this order.
        acceptance: how often guesses were right.
        num_failures: requests whose proposer raised, which it was not asked about again; see `writing` for its own.
        writing: a draft model, asked about requests for which no proposer has a guess; None without one.
    """

    writing: Writing | None = None

    def __init__(
        self,
        proposers: Sequence[Proposer],
        times: StepTimes,
        *,
        most: int,
        slo_seconds: float | None = None,
        window: int | None = None,
        always: bool = False,
    ) -> None:
        """`most` tokens are drafted at a time; `always` drafts as many, worth it or not, for comparison."""
        self.acceptance = Acceptance()
        self.num_failures = 0
        self.proposers, self._times, self._most = tuple(proposers), times, most
        self._slo_seconds, self._window, self._always = slo_seconds, window, always
        self._states: dict[str, _State] = {}
        self._num_steps = 0

    def draft(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        """See `Drafter`."""
        self._num_steps += 1
        context = sum(request.num_tokens for request in requests) / len(requests)
        decodes = StepWork.of_decodes(len(requests), context, self._window)
        worthwhile = self._always or self._could_pay(decodes)
        drafts: dict[str, Draft] = {}
        asked: list[_State] = []
        for index, request in enumerate(requests):
            state = self._states.get(request.request_id)
            if state is None:
                state = self._states[request.request_id] = _State(list(self.proposers))
            state.guess = None
            # Where no guess could pay, one request in turn is asked all the same, so that what is known stays true.
            every = max(SELDOM, len(requests)) if not worthwhile else RETRY if state.num_unwanted >= PATIENCE else 1
            if (self._num_steps + index) % every and not self._always:
                continue
            asked.append(state)
            draft = self._best(request, state)
            if draft is not None:
                drafts[request.request_id] = draft
        if self.writing is not None:
            drafts |= self._written([request for request in requests if request.request_id not in drafts])
        if self._always:
            lengths = {name: len(draft.token_ids) for name, draft in drafts.items()}
        elif drafts:
            contexts = {request.request_id: request.num_tokens + 1 for request in requests}
            limit = None if self._slo_seconds is None else self._times.step_limit(self._slo_seconds)
            lengths = choose_lengths(
                drafts, contexts, decodes, self._times.seconds, self.acceptance, window=self._window, limit=limit
            )
        else:
            lengths = {}
        for state in asked if worthwhile else ():
            state.num_unwanted += 1
        for name in lengths:
            self._states[name].num_unwanted = 0
        return {name: drafts[name].token_ids[:length] for name, length in lengths.items()}

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """See `Drafter`: what was said shows which guesses were right, those that were not verified too."""
        if self.writing is not None:
            self.writing.observe(batch, output)
        for share in batch.decodes:
            state = self._states.get(share.request_id)
            if state is None or state.guess is None:
                continue
            new, draft = output.token_ids.get(share.request_id, []), state.guess
            if share.num_drafts:
                counts = state.sources.setdefault(draft.source, SourceCounts())
                counts.drafted += share.num_drafts
                counts.accepted += max(0, len(new) - 1)
            for position, (token_id, guessed) in enumerate(zip(new, draft.token_ids, strict=False)):
                if position >= draft.certain:
                    self.acceptance.observe(share.request_id, draft, position, token_id == guessed)
                if token_id != guessed:
                    break
            state.guess = None

    def forget(self, request: Request) -> None:
        """See `Drafter`; the request learns what its prediction was worth."""
        state = self._states.pop(request.request_id, None)
        if state is not None and (counts := state.sources.get("prediction")):
            request.num_accepted_prediction_tokens = counts.accepted
            request.num_rejected_prediction_tokens = counts.drafted - counts.accepted
        self.acceptance.forget(request.request_id)
        for proposer in self.proposers:
            proposer.forget(request)
        if self.writing is not None:
            self.writing.forget(request)

    def sources(self, request_id: str) -> dict[str, SourceCounts]:
        """What each source brought to an unfinished request."""
        state = self._states.get(request_id)
        return state.sources if state is not None else {}

    def _could_pay(self, decodes: StepWork) -> bool:
        """Whether a guess that is sure to be right would be worth a row."""
        row = drafted_row(decodes.decode_contexts // decodes.sequences, self._window)
        now, then = self._times.seconds(decodes), self._times.seconds(decodes.plus(row))
        return PAYS * (then - now + ROW_SECONDS) * decodes.sequences < now

    def _best(self, request: Request, state: _State) -> Draft | None:
        """The guess that is expected to bring most; remembered until it is known what came."""
        found: list[Draft] = []
        for proposer in state.proposers[:]:
            try:
                found += proposer.propose(request, self._most)
            except Exception:  # a guess is a favour: whoever fails at it is not asked again, and the answer goes on
                state.proposers.remove(proposer)
                self.num_failures += 1
                logging.getLogger("twinphase").warning(
                    "A proposer failed and is switched off for request %s.", request.request_id, exc_info=True
                )
        if not found:
            return None
        name = request.request_id
        best = found[0] if len(found) == 1 else max(found, key=lambda draft: self.acceptance.expected(name, draft))
        best = self._admitted(request, best)
        state.guess = best if best.token_ids else None
        return best if best.token_ids else None

    def _written(self, requests: Sequence[Request]) -> dict[str, Draft]:
        """What the draft model writes, which obeys the requests' constraints."""
        assert self.writing is not None
        drafts = self.writing.drafts(requests, self.acceptance, self._always)
        for name, draft in drafts.items():
            self._states[name].guess = draft
        return drafts

    def _admitted(self, request: Request, draft: Draft) -> Draft:
        """The draft up to what is no token, or what the request's constraint forbids."""
        token_ids = list(takewhile(lambda token_id: token_id >= 0, draft.token_ids))
        if request.constraint is not None and not draft.certain:
            try:
                token_ids = token_ids[: request.constraint.admits(request.output_token_ids, token_ids)]
            except Exception:  # it will fail again where it is asked about the answer, and say why
                token_ids = []
        return replace(draft, token_ids=token_ids)


def make_speculator(
    config: SpeculativeConfig,
    times: StepTimes,
    slo_seconds: float | None,
    window: int | None,
    heads: Proposer | None = None,
) -> Speculator | None:
    """What a configuration asks for; None for no speculation. `heads` are those that it names.

    What a user predicts and what a grammar forces is drafted by every method; a draft model is added when it is loaded.
    """
    if config.method == "none":
        return None
    proposers: list[Proposer] = [ForcedProposer(), PredictionProposer()]
    if config.method == "ngram":
        proposers.append(NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max))
    elif heads is not None:
        proposers.append(heads)
    elif config.method != "draft_model":
        proposers.append(SuffixProposer())
    return Speculator(proposers, times, most=config.num_speculative_tokens, slo_seconds=slo_seconds, window=window)
