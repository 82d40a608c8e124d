"""Drafts for a step: calls proposers, selects the drafts that pay, and learns from outputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from twinphase.batch import Batch, StepOutput, StepWork
from twinphase.request import Request
from twinphase.scheduler.chunk import StepCost
from twinphase.speculation.draft_lengths import (
    MIN_GAIN_RATIO,
    ROW_OVERHEAD_SECONDS,
    Acceptance,
    choose_lengths,
    drafted_row,
)
from twinphase.speculation.draft_model_policy import DraftModelPolicy
from twinphase.speculation.forced import ForcedProposer
from twinphase.speculation.hidden_states import HiddenStateProposer
from twinphase.speculation.lookup import NgramProposer, PredictionProposer, SuffixProposer
from twinphase.speculation.proposer import Draft, Proposer
from twinphase.speculative import SpeculativeConfig

# Number of useless drafts in a row after which a request is asked for drafts less often: at the
# first interval, and after as many again at twice the interval, up to the maximum.
BACKOFF_AFTER_MISSES = 8
FIRST_RETRY_INTERVAL_STEPS = 4
MAX_RETRY_INTERVAL_STEPS = 16
# After this many useless drafts in a row over all requests, a new request starts as if it had
# missed BACKOFF_AFTER_MISSES times.
BACKOFF_NEW_REQUESTS_AFTER = 128
# Weight of a new measurement in the moving average of drafting time per request.
DRAFT_SECONDS_WEIGHT = 0.1


@dataclass
class SourceCounts:
    """Draft tokens from one source that were verified, and how many of them were accepted."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class _State:
    """State of one request."""

    proposers: list[Proposer]
    sources: dict[str, SourceCounts] = field(default_factory=dict)
    # Number of useless drafts in a row, and the resulting number of steps between drafts.
    num_misses: int = 0
    interval_steps: int = 1


class Speculator:
    """A `Drafter` that chooses among the drafts of several proposers.

    Attributes:
        proposers: proposers in the order of their calls.
        acceptance: learned acceptance rates.
        draft_model: drafts for requests without a draft from a proposer; may be None.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        times: StepCost,
        *,
        most: int,
        slo_seconds: Callable[[], float | None] = lambda: None,
        always: bool = False,
        retry: int = FIRST_RETRY_INTERVAL_STEPS,
    ) -> None:
        """Draft as many tokens as pay.

        Args:
            proposers: proposers in the order of their calls.
            times: predicts the target's step times.
            most: largest number of draft tokens per request and step.
            slo_seconds: the current inter-token SLO; drafts make no step longer.
            always: verify all drafts even if they do not pay, for comparisons.
            retry: steps between drafts of a request whose drafts do not pay.
        """
        self.acceptance = Acceptance()
        self.proposers = tuple(proposers)
        self.draft_model: DraftModelPolicy | None = None
        self._num_failures = 0
        self._times = times
        self._most = most
        self._slo_seconds = slo_seconds
        self._always = always
        self._retry = retry
        self._states: dict[str, _State] = {}
        # Drafts of this step, verified or not.
        self._drafts: dict[str, Draft] = {}
        self._num_steps = 0
        self._num_requests = 0
        self._num_misses = 0
        # Lowest acceptance rate at which a draft pays.
        self._min_rate = 0.0
        # Time per token without drafts, added time per drafted row, and time to draft for one
        # request. The last one is significant only for heads, which compute their drafts.
        self._token_seconds = 0.0
        self._row_seconds = 0.0
        self._draft_seconds = 0.0

    def draft(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        self._num_steps += 1
        if len(requests) != self._num_requests or self._num_steps % MAX_RETRY_INTERVAL_STEPS == 0:
            self._predict_costs(self._decodes(requests))
            self._num_requests = len(requests)
        drafts: dict[str, Draft] = {}
        self._drafts = {}
        limits = {
            request.request_id: request.sampling_params.num_speculative_tokens
            for request in requests
        }
        allowed = [request for request in requests if limits[request.request_id] != 0]
        asked = self._to_ask(allowed)
        start = time.perf_counter()
        for request in asked:
            name = request.request_id
            draft = self._best(request)
            if draft is not None:
                self._drafts[name] = draft
                if self._always or self.acceptance.probability(name, draft, 0) >= self._min_rate:
                    drafts[name] = draft
        if asked:
            seconds = (time.perf_counter() - start) / len(asked)
            self._draft_seconds += DRAFT_SECONDS_WEIGHT * (seconds - self._draft_seconds)
        if self.draft_model is not None:
            others = [request for request in allowed if request.request_id not in drafts]
            from_model = self.draft_model.drafts(others, self.acceptance, self._always)
            drafts |= from_model
            self._drafts |= from_model
        lengths = self._lengths(requests, drafts) if drafts else {}
        self._update_intervals(asked, drafts, lengths)
        return {
            name: drafts[name].token_ids[:length][: limits[name]]
            for name, length in lengths.items()
        }

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """Compare the step's tokens with all drafts, including those that were not verified."""
        if self.draft_model is not None:
            self.draft_model.observe(batch, output)
        drafts = self._drafts
        self._drafts = {}
        for share in batch.decodes if drafts else ():
            name = share.request_id
            draft = drafts.get(name)
            if draft is None:
                continue
            new = output.token_ids.get(name, [])
            if share.num_drafts:
                counts = self._state(name).sources.setdefault(draft.source, SourceCounts())
                counts.drafted += share.num_drafts
                counts.accepted += output.num_accepted(share)
            for position, (token_id, drafted) in enumerate(zip(new, draft.token_ids, strict=False)):
                if position >= draft.certain:
                    self.acceptance.observe(name, draft, position, token_id == drafted)
                if token_id != drafted:
                    break

    def forget(self, request: Request) -> None:
        """Drop the request's state, and store its prediction's counts in the request."""
        state = self._states.pop(request.request_id, None)
        if state is not None and (counts := state.sources.get("prediction")):
            request.counts.num_accepted_prediction_tokens = counts.accepted
            request.counts.num_rejected_prediction_tokens = counts.drafted - counts.accepted
        self.acceptance.forget(request.request_id)
        for proposer in self.proposers:
            proposer.forget(request)
        if self.draft_model is not None:
            self.draft_model.forget(request)

    @property
    def num_failures(self) -> int:
        """Failures of proposers, and failed steps of the draft model."""
        model = self.draft_model
        return self._num_failures + (model.num_failures if model is not None else 0)

    def sources(self, request_id: str) -> dict[str, SourceCounts]:
        """Counts of an unfinished request by source."""
        state = self._states.get(request_id)
        return state.sources if state is not None else {}

    def _state(self, name: str) -> _State:
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = _State(list(self.proposers))
            if self._num_misses >= BACKOFF_NEW_REQUESTS_AFTER:
                state.num_misses = BACKOFF_AFTER_MISSES
        return state

    def _decodes(self, requests: Sequence[Request]) -> StepWork:
        """The work of the step without drafts."""
        context = sum(request.num_tokens for request in requests) / len(requests)
        return StepWork.of_decodes(len(requests), context, self._times.window)

    def _predict_costs(self, decodes: StepWork) -> None:
        """Predict the cost of a token and of a drafted row, and the acceptance rate that pays."""
        row = drafted_row(decodes.decode_contexts // decodes.sequences, self._times.window)
        seconds = self._times.seconds(decodes)
        self._token_seconds = seconds / decodes.sequences
        with_row = self._times.seconds(decodes.plus(row))
        self._row_seconds = with_row - seconds + ROW_OVERHEAD_SECONDS
        self._min_rate = MIN_GAIN_RATIO * self._row_seconds / self._token_seconds

    def _to_ask(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Requests to draft for in this step."""
        if self._always:
            return requests
        if self._min_rate >= 1:
            # No draft can pay; one request in turn keeps the acceptance rates up to date.
            place = self._num_steps % max(MAX_RETRY_INTERVAL_STEPS, len(requests))
            return requests[place : place + 1]
        return [
            request
            for request in requests
            if self._num_steps % self._state(request.request_id).interval_steps == 0
        ]

    def _update_intervals(
        self, asked: Sequence[Request], drafts: Mapping[str, Draft], lengths: Mapping[str, int]
    ) -> None:
        """Ask less often for requests whose drafts do not pay, until one pays."""
        paying = {
            name for name, length in lengths.items() if self._pays(name, drafts[name], length)
        }
        self._num_misses = 0 if paying else self._num_misses + len(asked)
        for name in paying:
            state = self._state(name)
            state.num_misses = 0
            state.interval_steps = 1
        for request in asked if self._min_rate < 1 else ():
            if request.request_id not in paying:
                state = self._state(request.request_id)
                state.num_misses += 1
                if doublings := state.num_misses // BACKOFF_AFTER_MISSES:
                    interval = self._retry << min(doublings, 8) - 1
                    state.interval_steps = min(MAX_RETRY_INTERVAL_STEPS, interval)

    def _pays(self, name: str, draft: Draft, length: int) -> bool:
        """Whether the draft is expected to save more time than drafting and its rows take."""
        saved = self.acceptance.expected(name, draft, length) * self._token_seconds
        return saved > length * self._row_seconds + self._draft_seconds

    def _lengths(self, requests: Sequence[Request], drafts: Mapping[str, Draft]) -> dict[str, int]:
        """Number of draft tokens to verify per request; drafts that do not pay are omitted."""
        if self._always:
            return {name: len(draft.token_ids) for name, draft in drafts.items()}
        slo = self._slo_seconds()
        return choose_lengths(
            drafts,
            {request.request_id: request.num_tokens + 1 for request in requests},
            self._decodes(requests),
            self._times,
            self.acceptance,
            limit=None if slo is None else self._times.step_limit(slo),
        )

    def _best(self, request: Request) -> Draft | None:
        """The admissible draft with the most expected tokens."""
        name = request.request_id
        drafts: list[Draft] = []
        proposers = self._state(name).proposers
        expected = self.acceptance.expected
        for proposer in proposers[:]:
            # A looked-up draft that is as good costs no time, unlike the draft of a head.
            found = drafts and isinstance(proposer, HiddenStateProposer)
            limit = self._most
            if found and max(expected(name, one, len(one.token_ids)) for one in drafts) >= 1:
                limit = 0
            try:
                drafts += proposer.propose(request, limit)
            except Exception:  # The request continues without this proposer.
                proposers.remove(proposer)
                self._num_failures += 1
                logging.getLogger("twinphase").warning(
                    "A proposer failed and is switched off for request %s.", name, exc_info=True
                )
        if not drafts:
            return None
        best = drafts[0]
        if len(drafts) > 1:
            best = max(drafts, key=lambda draft: expected(name, draft, len(draft.token_ids)))
        token_ids = _admitted(request, best)
        return replace(best, token_ids=token_ids) if token_ids else None


def _admitted(request: Request, draft: Draft) -> list[int]:
    """The draft up to a separator between texts, or to a token that the constraint forbids."""
    token_ids = list(takewhile(lambda token_id: token_id >= 0, draft.token_ids))
    if request.constraint is None or draft.certain:
        return token_ids
    try:
        return token_ids[: request.constraint.admits(request.output_token_ids, token_ids)]
    except Exception:  # Sampling fails with the same error, and reports it.
        return []


def make_speculator(
    config: SpeculativeConfig,
    times: StepCost,
    slo_seconds: Callable[[], float | None],
    heads: Proposer | None = None,
) -> Speculator | None:
    """The configured drafter, or None; `heads` are the loaded draft heads, if any.

    Every method drafts predictions and forced tokens; a draft model is added when it is loaded.
    """
    if config.method == "none":
        return None
    proposers: list[Proposer] = [ForcedProposer(), PredictionProposer()]
    retry = FIRST_RETRY_INTERVAL_STEPS
    if config.method == "ngram":
        proposers.append(NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max))
    elif config.method in ("auto", "suffix"):
        proposers.append(
            SuffixProposer(
                config.suffix_decoding_max_cached_requests, config.suffix_decoding_max_spec_factor
            )
        )
    if heads is not None:
        proposers.append(heads)
        retry = MAX_RETRY_INTERVAL_STEPS  # A draft by heads takes as long as several rows.
    return Speculator(
        proposers,
        times,
        most=config.num_speculative_tokens,
        slo_seconds=slo_seconds,
        retry=retry,
    )
