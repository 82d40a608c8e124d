"""Drafts for a step: asks the proposers, chooses what is worth its time, learns from what came of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from twinphase.batch import Batch, StepOutput, StepWork
from twinphase.request import Request
from twinphase.scheduler.chunk import StepCost
from twinphase.speculation.choose import PAYS, ROW_SECONDS, Acceptance, choose_lengths, drafted_row
from twinphase.speculation.forced import ForcedProposer
from twinphase.speculation.lookup import NgramProposer, PredictionProposer, SuffixProposer
from twinphase.speculation.proposer import Draft, Proposer
from twinphase.speculation.writing import Writing
from twinphase.speculative import SpeculativeConfig

# steps after which a guess is looked for again where none could pay, or where making one takes long
SELDOM = 16
# times in a row that a request was asked for nothing; steps between times from then on, which
PATIENCE = 8
RETRY = 4
# double after as many times again, up to SELDOM
HOPELESS = 128  # times in a row that anybody was: who comes is asked as seldom from the beginning


@dataclass
class SourceCounts:
    """Tokens drafted from one source, verified or not, and those of the verified that were right."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class _State:
    """What is known of one request."""

    proposers: list[Proposer]
    sources: dict[str, SourceCounts] = field(default_factory=dict)
    num_unwanted: int = 0  # times in a row that it was asked, and nothing was drafted


class Speculator:
    """A `Drafter` made of proposers and a choice among their guesses.

    Attributes:
        proposers: asked in this order.
        acceptance: how often guesses were right.
        writing: a draft model, asked about requests for which no proposer has a guess; None without
            one.
    """

    writing: Writing | None = None

    def __init__(
        self,
        proposers: Sequence[Proposer],
        times: StepCost,
        *,
        most: int,
        slo_seconds: Callable[[], float | None] = lambda: None,
        window: int | None = None,
        always: bool = False,
        retry: int = RETRY,
    ) -> None:
        """Draft as many tokens as are worth it.

        Args:
            proposers: in the order in which they are asked.
            times: predicts the target's steps.
            most: tokens drafted for a request at a time.
            slo_seconds: the gap between tokens that holds now; drafts make no step longer than
                that.
            window: of the model's layers that have one.
            always: drafts as many as there are, worth it or not, for comparison.
            retry: steps between guesses for a request where they are not wanted.
        """
        self.acceptance = Acceptance()
        self._num_failures = 0
        self.proposers = tuple(proposers)
        self._times = times
        self._most = most
        self._slo_seconds = slo_seconds
        self._window = window
        self._always = always
        self._retry = retry
        self._states: dict[str, _State] = {}
        self._guesses: dict[str, Draft] = {}  # of this step
        self._resting: dict[
            str, int
        ] = {}  # steps between times for who was asked for nothing too often
        self._num_steps = self._num_requests = self._num_unwanted = 0
        self._least = 0.0  # chance of being right from which a guess pays
        self._token_seconds = self._row_seconds = (
            0.0  # what a token costs without drafts; what a drafted row adds
        )
        self._asking_seconds = (
            0.0  # what asking about one request takes; most for heads, which compute their guess
        )

    def draft(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        """See `Drafter`."""
        self._num_steps += 1
        if len(requests) != self._num_requests or not self._num_steps % SELDOM:
            self._least = self._least_chance(self._decodes(requests))
            self._num_requests = len(requests)
        drafts: dict[str, Draft] = {}
        self._guesses = guesses = {}
        asked = self._asked(requests)
        start = time.perf_counter()
        for request in asked:
            name = request.request_id
            draft = self._best(request, self._state(name))
            if draft is not None:
                guesses[name] = draft
                if self._always or self.acceptance.probability(name, draft, 0) >= self._least:
                    drafts[name] = draft
        if asked:
            self._asking_seconds += 0.1 * (
                (time.perf_counter() - start) / len(asked) - self._asking_seconds
            )
        if self.writing is not None:
            others = [request for request in requests if request.request_id not in drafts]
            written = self.writing.drafts(others, self.acceptance, self._always)
            drafts |= written
            guesses |= written
        lengths = self._lengths(requests, drafts) if drafts else {}
        self._learn_who_to_ask(asked, drafts, lengths)
        return {name: drafts[name].token_ids[:length] for name, length in lengths.items()}

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """See `Drafter`: what was said shows which guesses were right, those that were not verified too."""
        if self.writing is not None:
            self.writing.observe(batch, output)
        guesses = self._guesses
        self._guesses = {}
        for share in batch.decodes if guesses else ():
            draft = guesses.get(share.request_id)
            if draft is None:
                continue
            new = output.token_ids.get(share.request_id, [])
            if share.num_drafts:
                counts = self._state(share.request_id).sources.setdefault(
                    draft.source, SourceCounts()
                )
                counts.drafted += share.num_drafts
                counts.accepted += output.num_accepted(share)
            for position, (token_id, guessed) in enumerate(zip(new, draft.token_ids, strict=False)):
                if position >= draft.certain:
                    self.acceptance.observe(share.request_id, draft, position, token_id == guessed)
                if token_id != guessed:
                    break

    def forget(self, request: Request) -> None:
        """See `Drafter`; the request learns what its prediction was worth."""
        self._resting.pop(request.request_id, None)
        state = self._states.pop(request.request_id, None)
        if state is not None and (counts := state.sources.get("prediction")):
            request.counts.num_accepted_prediction_tokens = counts.accepted
            request.counts.num_rejected_prediction_tokens = counts.drafted - counts.accepted
        self.acceptance.forget(request.request_id)
        for proposer in self.proposers:
            proposer.forget(request)
        if self.writing is not None:
            self.writing.forget(request)

    @property
    def num_failures(self) -> int:
        """Times that a proposer raised, or the draft model failed in a step; those requests ask it no more."""
        return self._num_failures + (self.writing.num_failures if self.writing is not None else 0)

    def sources(self, request_id: str) -> dict[str, SourceCounts]:
        """What each source brought to an unfinished request."""
        state = self._states.get(request_id)
        return state.sources if state is not None else {}

    def _state(self, name: str) -> _State:
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = _State(list(self.proposers))
            if self._num_unwanted >= HOPELESS:
                state.num_unwanted = PATIENCE
        return state

    def _decodes(self, requests: Sequence[Request]) -> StepWork:
        """The step without drafts."""
        context = sum(request.num_tokens for request in requests) / len(requests)
        return StepWork.of_decodes(len(requests), context, self._window)

    def _least_chance(self, decodes: StepWork) -> float:
        """How likely the first drafted row has to be right to be worth its time; 1 or more where none is."""
        row = drafted_row(decodes.decode_contexts // decodes.sequences, self._window)
        now = self._times.seconds(decodes)
        then = self._times.seconds(decodes.plus(row))
        self._token_seconds = now / decodes.sequences
        self._row_seconds = then - now + ROW_SECONDS
        return PAYS * self._row_seconds / self._token_seconds

    def _asked(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Who is asked in this step."""
        if self._always:
            return requests
        if (
            self._least >= 1
        ):  # no guess could pay; one request in turn, so that what is known stays true
            place = self._num_steps % max(SELDOM, len(requests))
            return requests[place : place + 1]
        resting = self._resting
        step = self._num_steps
        return (
            [one for one in requests if not step % resting.get(one.request_id, 1)]
            if resting
            else requests
        )

    def _learn_who_to_ask(
        self, asked: Sequence[Request], drafts: Mapping[str, Draft], lengths: Mapping[str, int]
    ) -> None:
        """Requests whose drafts were not worth asking for rest, ever longer, until one is."""
        worth = {
            name for name, length in lengths.items() if self._saves(name, drafts[name], length)
        }
        self._num_unwanted = 0 if worth else self._num_unwanted + len(asked)
        for name in worth:
            self._state(name).num_unwanted = 0
            self._resting.pop(name, None)
        for request in asked if self._least < 1 else ():
            name = request.request_id
            if name not in worth:
                state = self._state(name)
                state.num_unwanted += 1
                if times := state.num_unwanted // PATIENCE:
                    self._resting[name] = min(SELDOM, self._retry << min(times, 8) - 1)

    def _saves(self, name: str, draft: Draft, length: int) -> bool:
        """Whether the draft is expected to save more time than its rows and asking for it take."""
        saved = self.acceptance.expected(name, draft, length) * self._token_seconds
        return saved > length * self._row_seconds + self._asking_seconds

    def _lengths(self, requests: Sequence[Request], drafts: Mapping[str, Draft]) -> dict[str, int]:
        """Tokens to draft of each draft; those of which none is worth it are left out."""
        if self._always:
            return {name: len(draft.token_ids) for name, draft in drafts.items()}
        contexts = {request.request_id: request.num_tokens + 1 for request in requests}
        slo = self._slo_seconds()
        decodes = self._decodes(requests)
        limit = None if slo is None else self._times.step_limit(slo)
        return choose_lengths(
            drafts,
            contexts,
            decodes,
            self._times.seconds,
            self.acceptance,
            window=self._window,
            limit=limit,
        )

    def _best(self, request: Request, state: _State) -> Draft | None:
        """The guess that is expected to bring most."""
        found: list[Draft] = []
        for proposer in state.proposers[:]:
            try:
                found += proposer.propose(request, self._most)
            # a guess is a favour: whoever fails at it is not asked again, and the answer goes on
            except Exception:
                state.proposers.remove(proposer)
                self._num_failures += 1
                logging.getLogger("twinphase").warning(
                    "A proposer failed and is switched off for request %s.",
                    request.request_id,
                    exc_info=True,
                )
        if not found:
            return None
        name = request.request_id
        best = (
            found[0]
            if len(found) == 1
            else max(
                found, key=lambda draft: self.acceptance.expected(name, draft, len(draft.token_ids))
            )
        )
        best = self._admitted(request, best)
        return best if best.token_ids else None

    def _admitted(self, request: Request, draft: Draft) -> Draft:
        """The draft up to what is no token, or what the request's constraint forbids."""
        token_ids = draft.token_ids
        if min(token_ids, default=0) < 0:
            token_ids = list(takewhile(lambda token_id: token_id >= 0, token_ids))
        if request.constraint is not None and not draft.certain:
            try:
                token_ids = token_ids[
                    : request.constraint.admits(request.output_token_ids, token_ids)
                ]
            except Exception:  # it will fail again where it is asked about the answer, and say why
                token_ids = []
        return draft if token_ids is draft.token_ids else replace(draft, token_ids=token_ids)


def make_speculator(
    config: SpeculativeConfig,
    times: StepCost,
    slo_seconds: Callable[[], float | None],
    window: int | None,
    heads: Proposer | None = None,
) -> Speculator | None:
    """What a configuration asks for; None for no speculation. `heads` are those that it names.

    What a user predicts and what a grammar forces is drafted by every method; a draft model is
    added when it is loaded.
    """
    if config.method == "none":
        return None
    proposers: list[Proposer] = [ForcedProposer(), PredictionProposer()]
    if config.method == "ngram":
        proposers.append(NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max))
    elif heads is not None:
        proposers.append(heads)
    elif config.method != "draft_model":
        proposers.append(
            SuffixProposer(
                config.suffix_decoding_max_cached_requests, config.suffix_decoding_max_spec_factor
            )
        )
    return Speculator(
        proposers,
        times,
        most=config.num_speculative_tokens,
        slo_seconds=slo_seconds,
        window=window,
        retry=RETRY if heads is None else SELDOM,  # a guess of theirs takes as long as some rows
    )
