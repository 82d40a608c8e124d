"""Random mixes of requests: each gets the tokens that it gets alone, bit for bit.

A state machine submits, aborts, preempts, evicts, fails and changes chunk sizes and the SLO between
steps, on the real cpu backend, while somebody guesses what comes next and is right or wrong. In the
same runs no block leaks, every timeline partitions its request's life, and what nothing names stays
below 1 %.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from inspect import signature
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from mix_engines import (
    GUESSERS,
    MOST_BLOCKS,
    MOST_SEQS,
    TAGS,
    Alone,
    Clock,
    constraint_of,
    make_drafter,
    make_engine,
    make_writer,
)

from twinphase.batch import TokenLogprobs
from twinphase.constraint import StructuredOutputsParams
from twinphase.engine.engine import StepResult
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.outcome import FinishReason
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import Request, SamplingParams
from twinphase.scheduler.pace import Pace
from twinphase.scheduler.pacing import Pacing

PREFIX = [(7 * i + i * i) % 250 + 10 for i in range(96)]
# The same blocks stand behind others in the second, and behind themselves in the third: that is not
# the same KV.
PREFIXES = [PREFIX, PREFIX[80:] + PREFIX[16:], 6 * PREFIX[:16]]
CUTS = [0, 15, 16, 33, 64, 90, 96]
COMPARED = {"compared": 101}


class Tally(Counter[str]):
    """What all mixes of a test did; of finished requests also the share of time without a name."""

    def __init__(self) -> None:
        super().__init__()
        self.unattributed: list[float] = []

    def assert_reaches(self, least: Mapping[str, int]) -> None:
        """The proof is not empty."""
        assert all(self[name] >= number for name, number in least.items()), self


FORMS = (
    {"regex": "(cat|dog|cart){3,9}!"},
    {"choice": ["somewhat longer", "some other", "no"]},
    {
        "json": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["name", "n"],
            "additionalProperties": False,
        }
    },
)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    form = draw(st.sampled_from([None, None, None, *FORMS]))
    free = {"ignore_eos": draw(st.booleans()), "min_tokens": draw(st.sampled_from([0, 0, 1, 5]))}
    max_tokens = draw(st.sampled_from([1, 7, 24, 60]))
    free["min_tokens"] = min(max_tokens, free["min_tokens"])
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.5])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.8])),
        top_k=draw(st.sampled_from([0, 0, 20])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3])),
        logit_bias=draw(st.sampled_from([None, None, {12: 3.0, 40: -2.0}])),
        bad_words=draw(st.sampled_from([None, None, ["e", "the", "0"]])),
        allowed_token_ids=draw(st.sampled_from([None, None, range(2, 310, 2)]))
        if form is None
        else None,
        seed=draw(st.sampled_from([None, 0, 1, 2])),
        logprobs=draw(st.sampled_from([None, 0, 3])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, None, 2])),
        max_tokens=max_tokens,
        stop_token_ids=draw(st.sampled_from([None, None, [30, 31, 32, 33]])),
        thinking_token_budget=draw(st.sampled_from([None, None, None, 0, 6])),
        **(free if form is None else {"structured_outputs": StructuredOutputsParams(**form)}),
    )


@st.composite
def new_requests(draw: st.DrawFn) -> dict[str, Any]:
    """Prompts share beginnings with others; what differs comes early or late."""
    prefix = draw(st.sampled_from(PREFIXES))
    cut = draw(st.sampled_from(CUTS))
    params = draw(sampling_params())
    thinking = (
        [] if params.thinking_token_budget is None else TAGS.start
    )  # is what the prompt ends with
    return {
        "prompt_token_ids": [
            *prefix[:cut],
            *draw(st.lists(st.integers(10, 14), min_size=1, max_size=12)),
            *thinking,
        ],
        "sampling_params": params,
        "priority": draw(st.integers(-1, 2)),
        "cache_salt": draw(st.sampled_from([None, None, None, "a", "b"])),
        "tenant": draw(st.sampled_from(["", "a", "b"])),
        "weight": draw(st.sampled_from([1.0, 1.0, 0.1, 5.0])),
    }


# No rule's draws depend on the engine's state: with an SLO that depends on the machine's speed.
class Mixes(RuleBasedStateMachine):
    """One mix."""

    least_blocks = 0  # of the KV cache

    def __init__(
        self,
        mixed: LoadedEngine,
        alone: Alone,
        tally: Tally,
        kind: str | None = None,
        writer: LoadedEngine | None = None,
    ) -> None:
        super().__init__()
        self.written_by = writer
        self.writer = None
        self.mixed = mixed
        self.alone = alone
        self.tally = tally
        self.kind = kind
        self.clock = Clock()
        self.requests: dict[str, Request] = {}
        self.timelines: dict[str, RequestTimeline] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.ends: dict[str, float] = {}

    @initialize(
        num_blocks=st.sampled_from([12, 16, MOST_BLOCKS]),
        policy=st.sampled_from(["fcfs", "priority"]),
        kind=st.sampled_from(["none", *GUESSERS]),
    )
    def start(self, num_blocks: int, policy: str, kind: str) -> None:
        num_blocks = max(num_blocks, self.least_blocks)
        options = {"scheduling_policy": policy, "max_num_batched_tokens": 64}
        self.engine = make_engine(self.mixed, num_blocks, self.clock, **options)
        self.engine.drafter = make_drafter(self.kind or kind, self.engine, self.right)
        if self.written_by is not None:
            self.engine.drafter = self.writer = make_writer(self.written_by, num_blocks)
        self.scheduler = self.engine.scheduler
        if num_blocks == 12:
            # Room for all at first, and for two at their ends: whatever a step takes, somebody has
            # to go.
            params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
            for number in range(4):
                self.add([10 + number] * 10, params)

    @rule(burst=st.lists(new_requests(), min_size=1, max_size=6))
    def submit(self, burst: list[dict[str, Any]]) -> None:
        for wanted in burst:
            wanted["priority"] *= self.scheduler.config.scheduling_policy == "priority"
            self.add(**wanted)

    def right(self, request: Request) -> list[int]:
        """The whole output of a request."""
        return self.alone(request.prompt_token_ids, request.sampling_params)[0]

    def add(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams, **wanted: Any
    ) -> None:
        name = str(len(self.requests))
        request = Request(
            name, prompt_token_ids, sampling_params, arrival_time=self.clock(), **wanted
        )
        request.constraint = constraint_of(self.mixed, sampling_params, prompt_token_ids)
        self.timelines[name] = self.engine.add_request(request)
        self.requests[name] = request
        self.logprobs[name] = []
        right = self.right(request)  # now, so that it is not in the middle of a step
        if len(self.requests) % 3 == 0:
            request.prediction_token_ids = [
                *right[:5],
                7,
                *right[6:20],
                *prompt_token_ids,
                *right[25:],
            ]

    @rule(count=st.sampled_from([1, 2, 20]))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    def one_step(self) -> None:
        if not self.engine.has_work:
            return
        with self.clock.running():
            result: StepResult = self.engine.step()
        self.scheduler.check_integrity()
        assert 0 < result.batch.num_tokens <= self.scheduler.config.max_num_batched_tokens
        for name, (first, entries) in result.output.prompt_logprobs.items():
            assert first == len(self.logprobs[name]) + 1
            self.logprobs[name] += entries
        for name, entries in result.output.logprobs.items():
            self.logprobs[name] += entries
        self.ends |= {request.request_id: result.record.end for request in result.finished}
        self.tally["failures"] += len(result.output.errors)
        self.tally["natural preemptions"] += len(result.batch.preempted)
        self.tally["states held back"] += result.batch.held_back == "states"
        self.tally["mixed steps"] += bool(result.batch.decodes and result.batch.prefills)
        self.tally["steps"] += 1

    def unfinished(self) -> list[str]:
        return [name for name, request in self.requests.items() if request.finish_reason is None]

    @rule(which=st.integers(0, 999))
    def abort(self, which: int) -> None:
        unfinished = self.unfinished()
        if unfinished:
            self.engine.abort(unfinished[which % len(unfinished)])

    @rule(which=st.integers(0, 999))
    def preempt(self, which: int) -> None:
        if not self.scheduler.running:
            self.one_step()
        running = self.scheduler.running
        if running:
            request = running[which % len(running)]
            self.scheduler._preempt(request)
            self.engine.ledger._running.pop(request.request_id)  # as where a batch says so
            self.tally["forced preemptions"] += 1

    @rule()
    def evict(self) -> None:
        """Others need all free blocks for a moment."""
        pool = self.scheduler.kv_cache.pool
        self.tally["evicted blocks"] += pool.num_cached
        pool.release(pool.allocate(pool.num_available))

    @precondition(lambda self: self.scheduler.kv_cache.states is not None)
    @rule(which=st.integers(0, 999))
    def lose_a_snapshot(self, which: int) -> None:
        """Its block stays."""
        states = self.scheduler.kv_cache.states
        if names := sorted(states._slot_of):
            states.drop(names[which % len(names)])
            self.tally["snapshots lost alone"] += 1

    @rule(num_tokens=st.sampled_from([MOST_SEQS, 16, 17, 33, 64, 256]))
    def change_chunks(self, num_tokens: int) -> None:
        config = replace(self.scheduler.config, max_num_batched_tokens=num_tokens)
        self.scheduler.config = config

    @rule(milliseconds=st.sampled_from([None, 1e-6, 0.2, 0.5, 1000.0, "auto"]))
    def change_slo(self, milliseconds: float | str | None) -> None:
        """To a number, to none, or as a server does by default."""
        if isinstance(milliseconds, str):
            limits = self.scheduler.config.max_num_batched_tokens, self.scheduler.max_model_len, 16
            self.engine.keep_pace(Pacing(self.engine.cost_model, *limits).choose())
            self.tally["default SLOs"] += 1
        else:
            self.engine.keep_pace(Pace(milliseconds and milliseconds / 1e3))

    @rule(which=st.integers(0, 999))
    def strike(self, which: int) -> None:
        """One request's computation fails, and every batch with it."""
        unfinished = self.unfinished()
        if unfinished:
            self.engine.executor.doomed = {unfinished[which % len(unfinished)]}
            self.one_step()
            self.engine.executor.doomed = set()

    def teardown(self) -> None:
        while self.engine.has_work:
            self.one_step()
        assert self.scheduler.kv_cache.pool.num_held == 0
        states = self.scheduler.kv_cache.states
        assert states is None or states.usage == 0
        assert not self.engine.timelines
        assert self.writer is None or self.writer.kv_cache.pool.num_held == 0
        for request in self.requests.values():
            self.tally["accepted drafts"] += request.counts.num_accepted_draft_tokens
            self.tally["rejected drafts"] += (
                request.counts.num_draft_tokens - request.counts.num_accepted_draft_tokens
            )
        self.tally["recomputed tokens"] += self.scheduler.num_recomputed_tokens
        for name, request in self.requests.items():
            self.check_time(name)
            self.check_bits(name, request)

    def check_time(self, name: str) -> None:
        timeline = self.timelines[name]
        at = timeline.arrival
        total = Fraction(0)
        for interval in timeline.intervals:
            assert interval.start == at < interval.end, f"{name}: {interval} does not begin at {at}"
            at = interval.end
            total += Fraction(interval.end) - Fraction(interval.start)
        assert at == timeline.end == self.ends.get(name, timeline.end)
        assert total == Fraction(timeline.end) - Fraction(timeline.arrival)
        if name in self.ends:
            self.tally.unattributed.append(
                timeline.seconds(IntervalKind.UNATTRIBUTED) / (at - timeline.arrival)
            )

    def check_bits(self, name: str, request: Request) -> None:
        tokens, logprobs, reason = self.alone(request.prompt_token_ids, request.sampling_params)
        if request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert request.output_token_ids == tokens[: len(request.output_token_ids)]
            return
        assert (request.output_token_ids, request.finish_reason) == (tokens, reason)
        assert repr(self.logprobs[name]) == logprobs
        assert "nan" not in logprobs  # which would be equal to anything that went wrong alike
        self.tally["compared"] += 1
        self.tally["compared with the prompt's"] += (
            request.sampling_params.prompt_logprobs is not None
        )
        self.tally["compared with a grammar"] += (
            request.sampling_params.structured_outputs is not None
        )
        thoughts = request.sampling_params.thinking_token_budget is not None
        self.tally["compared with an end of thinking"] += thoughts and list(TAGS.end) in (
            tokens[:3],
            tokens[6:9],
        )
        self.tally["compared after a hit"] += request.counts.num_cached_tokens > 0
        self.tally["compared after preemption"] += request.counts.num_preemptions > 0


def run_mixes(num_mixes: int, mixed: LoadedEngine, alone: Alone, *drafting: Any) -> Tally:
    """Runs mixes, and counts what they did; `drafting` are the last arguments of `Mixes`."""
    tally = Tally()
    machine = partial(Mixes, mixed, alone, tally, *drafting)
    # What hypothesis draws depends on the signature: an argument kept by name would be in it, with
    # its address.
    assert " at 0x" not in str(signature(machine))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_mixes,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            print_blob=True,
            database=None,
            phases=[Phase.generate],  # add Phase.shrink to look into a failure: it takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(drafting[:1], dict(tally), flush=True)
    return tally
