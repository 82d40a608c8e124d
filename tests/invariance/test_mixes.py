"""Random mixes of requests: each gets the tokens that it gets alone, bit for bit.

A state machine submits, aborts, preempts, evicts, fails and changes chunk sizes and the SLO between
steps, on the real cpu backend, while somebody guesses what comes next and is right or wrong. In the
same runs no block leaks, every timeline partitions its request's life, and what nothing names stays
below 1 %.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from inspect import signature
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from steps import own_cache
from tiny_gguf import write_tiny_gguf
from twinphase.batch import Batch, ScheduledRequest, StepOutput, TokenLogprobs
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.config import EngineConfig
from twinphase.constraint import Constraint, StructuredOutputsParams
from twinphase.engine.engine import Engine, StepResult
from twinphase.engine.executor import Executor
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.recorder import StepRecorder
from twinphase.outcome import FinishReason
from twinphase.phases.cost import CostModel, starting_prices
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import Request, SamplingParams
from twinphase.sampling import sampler
from twinphase.sampling.thinking import ThinkingTags, make_constraint
from twinphase.sampling.token_filter import filtered
from twinphase.scheduler.pace import Pace
from twinphase.scheduler.pacing import Pacing
from twinphase.scheduler.scheduler import Scheduler
from twinphase.speculation.draft_model import DraftModel
from twinphase.speculation.drafter import Drafter
from twinphase.speculation.forced import ForcedProposer
from twinphase.speculation.lookup import NgramProposer, PredictionProposer, SuffixProposer
from twinphase.speculation.speculator import Speculator

VOCAB = 320
MOST_BLOCKS = 40
MOST_SEQS = 8
PREFIX = [(7 * i + i * i) % 250 + 10 for i in range(96)]
# The same blocks stand behind others in the second, and behind themselves in the third: that is not
# the same KV.
PREFIXES = [PREFIX, PREFIX[80:] + PREFIX[16:], 6 * PREFIX[:16]]


TAGS = ThinkingTags((50,), (51, 52, 53))


class Clock:
    """Runs only while the engine is at work, so that a test's own time is nobody's."""

    def __init__(self) -> None:
        self._passed = 0.0
        self._since = None

    def __call__(self) -> float:
        return self._passed + (
            time.perf_counter() - self._since if self._since is not None else 0.0
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let time pass."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._passed = self()
            self._since = None


class Faulty:
    """An executor that computes nothing of a batch in which a doomed request is."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.doomed = set()

    def execute(self, batch: Batch) -> StepOutput:
        if any(share.request_id in self.doomed for share in batch.scheduled):
            raise RuntimeError("struck by the test")
        return self.executor.execute(batch)


class Guesser:
    """Drafts of any length: right ones, wrong ones, and right ones that go wrong."""

    def __init__(self, right: Callable[[Request], Sequence[int]], right_share: float = 0.5) -> None:
        """`right` tells a request's whole output; `right_share` of the guesses are."""
        self.right = right
        self.right_share = right_share
        self.random = random.Random(0)

    def draft(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        return {request.request_id: self.guess(request) for request in requests}

    def guess(self, request: Request) -> list[int]:
        known = len(request.output_token_ids)
        choose = self.random
        draft = list(self.right(request)[known : known + choose.choice([0, 1, 2, 7, 20])])
        if choose.random() >= self.right_share:
            draft[choose.randint(0, len(draft)) :] = [
                choose.randrange(VOCAB + 5) for _ in range(choose.randint(0, 5))
            ]
        return draft

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """Nothing is learned."""

    def forget(self, request: Request) -> None:
        """Nothing is kept."""


GUESSERS = ("adversary", "oracle", "mixed", "ngram", "suffix", "auto")


class Checked(DraftModel):
    """A draft model whose blocks are counted before each step."""

    def draft(
        self, requests: Sequence[Request], limits: Mapping[str, int] = MappingProxyType({})
    ) -> dict[str, Any]:
        self.check_integrity()
        return dict(super().draft(requests, limits))


def make_writer(loaded: LoadedEngine, num_blocks: int) -> Checked:
    """A draft model on a fresh cache; the blocks are as few as the engine's."""
    whole = loaded.engine
    return Checked(
        whole.executor.execute,
        KVCacheManager(num_blocks, 16),
        CostModel(starting_prices(whole.shape, None)),
        num_speculative_tokens=4,
        vocab_size=whole.vocab_size,
        max_model_len=512,
        max_num_batched_tokens=64,
        eos_token_ids=loaded.text.tokenizer.eos_token_ids,
    )


def make_drafter(
    kind: str, engine: Engine, right: Callable[[Request], Sequence[int]]
) -> Drafter | None:
    """A proposer by name; "ngram" and "suffix" verify every draft, "auto" those that pay."""
    shares = {"adversary": 0.0, "oracle": 1.0, "mixed": 0.5}
    if kind in shares:
        return Guesser(right, shares[kind])
    if kind == "none":
        return None
    text = NgramProposer() if kind == "ngram" else SuffixProposer()
    proposers = [ForcedProposer(), PredictionProposer(), text]
    always = kind != "auto"
    slo_seconds = lambda: engine.scheduler.pace.slo_seconds  # noqa: E731
    return Speculator(proposers, engine.cost_model, most=8, slo_seconds=slo_seconds, always=always)


def make_engine(
    loaded: LoadedEngine,
    num_blocks: int,
    clock: Callable[[], float],
    drafter: Drafter | None = None,
    **options: object,
) -> Engine:
    """A new engine on a loaded model, whose blocks still hold the KV of earlier engines."""
    whole = loaded.engine
    cost_model = CostModel(starting_prices(whole.shape, None))
    config = EngineConfig(
        num_kv_blocks=num_blocks,
        max_model_len=512,
        max_num_seqs=MOST_SEQS,
        itl_slo_ms=None,
        **options,
    )
    eos = loaded.text.tokenizer.eos_token_ids
    scheduler = Scheduler(config, cost_model, eos_token_ids=eos)
    scheduler.usual_output = 0.0  # so that blocks run out
    recorder = StepRecorder(whole.shape, cost_model, clock)
    executor = Faulty(whole.executor)
    sizes = {"shape": whole.shape, "vocab_size": whole.vocab_size}
    return Engine(scheduler, executor, recorder, **sizes, drafter=drafter)


def constraint_of(
    loaded: LoadedEngine, params: SamplingParams, prompt: Sequence[int]
) -> Constraint | None:
    """As `ModelText.constraint`, for a model that thinks."""
    form = (
        make_constraint(params, prompt, loaded.text.grammar_compiler, TAGS)
        if params.has_form
        else None
    )
    return filtered(form, params, partial(loaded.text.tokenizer.encode, add_special_tokens=False))


class Alone:
    """Each request alone, on a second copy of the model with another number of threads."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self._loaded = loaded
        self._known = {}

    def __call__(
        self, prompt: Sequence[int], params: SamplingParams
    ) -> tuple[list[int], str, FinishReason]:
        """Tokens, log probabilities in every digit, and how it ended."""
        key = (tuple(prompt), repr(params))
        if key not in self._known:
            engine = make_engine(self._loaded, MOST_BLOCKS, time.perf_counter)
            request = Request("alone", list(prompt), params)
            logprobs = []
            request.constraint = constraint_of(self._loaded, params, prompt)
            engine.add_request(request)
            scored: list[TokenLogprobs] = []
            while engine.has_work:
                output = engine.step().output
                logprobs += output.logprobs.get("alone", [])
                scored += output.prompt_logprobs.get("alone", (0, []))[1]
            assert params.prompt_logprobs is None or len(scored) == len(prompt) - 1
            self._known[key] = (
                request.output_token_ids,
                repr(scored + logprobs),
                request.finish_reason,
            )
        return self._known[key]


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
    cut = draw(st.sampled_from([0, 15, 16, 33, 64, 90, 96]))
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

    def __init__(
        self,
        mixed: LoadedEngine,
        alone: Alone,
        tally: Counter[str],
        unattributed: list[float],
        kind: str | None = None,
        writer: LoadedEngine | None = None,
    ) -> None:
        super().__init__()
        self.written_by = writer
        self.writer = None
        self.mixed = mixed
        self.alone = alone
        self.tally = tally
        self.unattributed = unattributed
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
            self.unattributed.append(
                timeline.seconds(IntervalKind.UNATTRIBUTED) / (at - timeline.arrival)
            )

    def check_bits(self, name: str, request: Request) -> None:
        tokens, logprobs, reason = self.alone(request.prompt_token_ids, request.sampling_params)
        if request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert request.output_token_ids == tokens[: len(request.output_token_ids)]
            return
        assert (request.output_token_ids, request.finish_reason) == (tokens, reason)
        assert repr(self.logprobs[name]) == logprobs
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


MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "windowed": {"window": 40},
    "mixture": {"experts": (6, 2)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("models")
    with own_cache(path / "cache"):
        yield path


COMPARED = {"compared": 101}
QUICK = {"compared": 50, "compared after a hit": 5, "mixed steps": 50, "forced preemptions": 1}
QUICK |= {
    "accepted drafts": 500,
    "rejected drafts": 100,
}  # how many are worth it depends on how fast steps are
QUICK |= {"compared with a grammar": 10, "compared with an end of thinking": 10}
# Most natural preemptions are of the four requests that each mix of 12 blocks begins with.
LONG = {
    "compared": 1000,
    "compared after a hit": 300,
    "compared after preemption": 40,
    "mixed steps": 1000,
}
LONG |= {"natural preemptions": 20, "forced preemptions": 5, "evicted blocks": 5, "failures": 5}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_mixes", "model", "kv_cache_dtype", "least"),
    (
        (32, "dense", "auto", QUICK),
        pytest.param(100, "dense", "auto", LONG, marks=pytest.mark.slow),
        pytest.param(40, "dense", "int8", COMPARED, marks=pytest.mark.slow),
        pytest.param(100, "windowed", "auto", LONG, marks=pytest.mark.slow),
        pytest.param(100, "mixture", "auto", LONG, marks=pytest.mark.slow),
    ),
)
def test_mixes(folder, num_mixes, model, kv_cache_dtype, least):
    """`least` are counts that all mixes together must reach, so that the proof is not empty."""
    path = write_tiny_gguf(folder / f"{model}.gguf", vocab=VOCAB, **MODELS[model])
    config = {
        "num_kv_blocks": MOST_BLOCKS,
        "max_num_batched_tokens": 512,
        "kv_cache_dtype": kv_cache_dtype,
    }
    tally = Counter()
    unattributed = []
    alone = Alone(LoadedEngine(path, EngineConfig(threads=1, **config)))
    run(
        partial(
            Mixes, LoadedEngine(path, EngineConfig(threads=2, **config)), alone, tally, unattributed
        ),
        num_mixes,
    )
    print(dict(tally), f"unattributed: median {median(unattributed):.3%} of {len(unattributed)}")
    assert all(tally[name] >= number for name, number in least.items()), tally
    if least is LONG:
        assert median(unattributed) < 0.01


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("fault", "kind"), [("blind", "adversary"), ("forgetful", "oracle")])
def test_a_wrong_verification_is_found(folder, fault, kind, monkeypatch):
    """One that accepts the first draft unverified, and one that ignores earlier drafts."""
    real = sampler.sample_row

    def blind(
        logits: Any,
        share: ScheduledRequest,
        eos_token_ids: Collection[int],
        accepted: Sequence[int],
    ) -> int:
        if share.num_drafts and not accepted:
            return share.token_ids[-share.num_drafts]
        return real(logits, share, eos_token_ids, accepted)

    def forgetful(
        logits: Any,
        share: ScheduledRequest,
        eos_token_ids: Collection[int],
        accepted: Sequence[int],
    ) -> int:
        return real(logits, share, eos_token_ids)

    path = write_tiny_gguf(folder / "dense.gguf", vocab=VOCAB)
    config = {"num_kv_blocks": MOST_BLOCKS, "max_num_batched_tokens": 512}
    alone = Alone(LoadedEngine(path, EngineConfig(threads=1, **config)))
    machine = partial(
        Mixes, LoadedEngine(path, EngineConfig(threads=2, **config)), alone, Counter(), [], kind
    )
    run(machine, 3)
    monkeypatch.setattr(sampler, "sample_row", {"blind": blind, "forgetful": forgetful}[fault])
    with pytest.raises(
        AssertionError
    ):  # in one of the first mixes; some have no request in which it would show
        run(machine, 20)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", GUESSERS)
def test_every_guesser(folder, kind):
    """25 mixes with each alone, half of them with values in int8."""
    path = write_tiny_gguf(folder / "dense.gguf", vocab=VOCAB)
    tally = Counter()
    unattributed = []
    for kv_cache_dtype in ("auto", "int8"):
        config = {
            "num_kv_blocks": MOST_BLOCKS,
            "max_num_batched_tokens": 512,
            "kv_cache_dtype": kv_cache_dtype,
        }
        alone = Alone(LoadedEngine(path, EngineConfig(threads=1, **config)))
        run(
            partial(
                Mixes,
                LoadedEngine(path, EngineConfig(threads=2, **config)),
                alone,
                tally,
                unattributed,
                kind,
            ),
            13,
        )
    print(kind, dict(tally))
    assert tally["compared"] > 50
    assert kind == "oracle" or tally["rejected drafts"] > 50
    assert kind == "adversary" or tally["accepted drafts"] > 50


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_mixes", (32, pytest.param(160, marks=pytest.mark.slow)))
def test_a_draft_model(folder, num_mixes):
    """It has the same weights in 32 bits, so that it is often right, and not always."""
    path = write_tiny_gguf(folder / "eight.gguf", vocab=VOCAB, tensor_type="Q8_0")
    writer = write_tiny_gguf(folder / "writer.gguf", vocab=VOCAB, tensor_type="F32")
    config = {"num_kv_blocks": MOST_BLOCKS, "max_num_batched_tokens": 512}
    tally = Counter()
    unattributed = []
    alone = Alone(LoadedEngine(path, EngineConfig(threads=1, **config)))
    mixed = LoadedEngine(path, EngineConfig(threads=2, **config))
    writer = LoadedEngine(writer, EngineConfig(threads=2, **config))
    run(partial(Mixes, mixed, alone, tally, unattributed, None, writer), num_mixes)
    print(dict(tally))
    least = (
        {"compared": 8, "accepted drafts": 100, "rejected drafts": 100} if num_mixes < 160 else LONG
    )
    assert all(tally[name] >= number for name, number in least.items()), tally


def run(machine: Callable[[], Mixes], num_mixes: int) -> None:
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
