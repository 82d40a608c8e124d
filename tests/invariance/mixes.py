"""Random mixes of requests: each gets the tokens that it gets alone, bit for bit.

Each mix submits, aborts, preempts, evicts, fails and changes chunk sizes and the SLO between steps,
at random, on the real cpu backend, with drafts that are right or wrong. In the same runs no block
leaks, every timeline partitions its request's life, and unattributed time stays below 1 %.

Mix number n draws from a generator with seed n, so that more mixes are the same ones and others.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

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
    """The events of all mixes in a test, and the share of unattributed time."""

    def __init__(self) -> None:
        super().__init__()
        self.unattributed: list[float] = []

    def assert_reaches(self, least: Mapping[str, int]) -> None:
        """Assert that the mixes covered enough events."""
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


def sampling_params(rng: random.Random) -> SamplingParams:
    choose = rng.choice
    form = choose([None, None, None, *FORMS])
    max_tokens = choose([1, 7, 24, 60])
    return SamplingParams(
        temperature=choose([0.0, 0.0, 0.7, 1.5]),
        top_p=choose([1.0, 1.0, 0.8]),
        top_k=choose([0, 0, 20]),
        repetition_penalty=choose([1.0, 1.0, 1.3]),
        presence_penalty=choose([0.0, 0.0, 0.5]),
        frequency_penalty=choose([0.0, 0.0, 0.3]),
        logit_bias=choose([None, None, {12: 3.0, 40: -2.0}]),
        bad_words=choose([None, None, ["e", "the", "0"]]),
        allowed_token_ids=choose([None, None, range(2, 310, 2)]) if form is None else None,
        seed=choose([None, 0, 1, 2]),
        logprobs=choose([None, 0, 3]),
        prompt_logprobs=choose([None, None, None, None, 2]),
        max_tokens=max_tokens,
        ignore_eos=form is None and choose([False, True]),
        min_tokens=min(max_tokens, choose([0, 0, 1, 5])) if form is None else 0,
        stop_token_ids=choose([None, None, [30, 31, 32, 33]]),
        thinking_token_budget=choose([None, None, None, 0, 6]),
        structured_outputs=form and StructuredOutputsParams(**form),
    )


def new_request(rng: random.Random) -> dict[str, Any]:
    """A request whose prompt shares a prefix with others, and differs early or late."""
    params = sampling_params(rng)
    thinking = (
        [] if params.thinking_token_budget is None else TAGS.start
    )  # is what the prompt ends with
    return {
        "prompt_token_ids": [
            *rng.choice(PREFIXES)[: rng.choice(CUTS)],
            *rng.choices(range(10, 15), k=rng.randint(1, 12)),
            *thinking,
        ],
        "sampling_params": params,
        "priority": rng.randint(-1, 2),
        "cache_salt": rng.choice([None, None, None, "a", "b"]),
        "tenant": rng.choice(["", "a", "b"]),
        "weight": rng.choice([1.0, 1.0, 0.1, 5.0]),
    }


class Mix:
    """One mix."""

    least_blocks = 0  # of the KV cache

    def __init__(
        self,
        number: int,
        mixed: LoadedEngine,
        alone: Alone,
        tally: Tally,
        kind: str | None = None,
        writer: LoadedEngine | None = None,
    ) -> None:
        self.random = random.Random(number)
        self.writer = None
        self.mixed = mixed
        self.alone = alone
        self.tally = tally
        self.clock = Clock()
        self.requests: dict[str, Request] = {}
        self.timelines: dict[str, RequestTimeline] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.ends: dict[str, float] = {}
        num_blocks = max((12, 16, 12, MOST_BLOCKS)[number % 4], self.least_blocks)
        policy = self.random.choice(["fcfs", "priority"])
        guesser = self.random.choice(["none", *GUESSERS])
        options = {"scheduling_policy": policy, "max_num_batched_tokens": 64}
        self.engine = make_engine(self.mixed, num_blocks, self.clock, **options)
        self.engine.drafter = make_drafter(kind or guesser, self.engine, self.right)
        if writer is not None:
            self.engine.drafter = self.writer = make_writer(writer, num_blocks)
        self.scheduler = self.engine.scheduler
        if num_blocks == 12:
            # Room for all at first, and for two at their ends: whatever a step takes, somebody has
            # to go.
            params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
            for number in range(4):
                self.add([10 + number] * 10, params)

    def run(self) -> None:
        """Actions at random, which do not depend on the machine's speed; then all requests end."""
        actions = [self.submit, *2 * [self.submit_next_turn], *2 * [self.step], self.abort]
        actions += [self.preempt, self.evict, self.strike, self.change_chunks, self.change_slo]
        if self.scheduler.kv_cache.states is not None:
            actions.append(self.lose_a_snapshot)
        for action in self.random.choices(actions, k=30):
            action()
        self.finish()

    def submit(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            self.add(**new_request(self.random))

    def submit_next_turn(self) -> None:
        """A finished request's text with new text after it, so that most of it is cached."""
        wanted = new_request(self.random)
        finished = [one for one in self.requests.values() if one.finish_reason is not None]
        if finished:
            before = self.random.choice(finished)
            text = [*before.prompt_token_ids, *before.output_token_ids][:96]
            wanted["prompt_token_ids"] = [*text, *wanted["prompt_token_ids"][-8:]]
            wanted["cache_salt"] = before.cache_salt
        self.add(**wanted)

    def right(self, request: Request) -> list[int]:
        """The reference output of a request."""
        return self.alone(request.prompt_token_ids, request.sampling_params)[0]

    def add(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams, **wanted: Any
    ) -> None:
        name = str(len(self.requests))
        if self.scheduler.config.scheduling_policy != "priority":
            wanted["priority"] = 0
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

    def step(self) -> None:
        for _ in range(self.random.choice([1, 2, 20])):
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

    def abort(self) -> None:
        if unfinished := self.unfinished():
            self.engine.abort(self.random.choice(unfinished))

    def preempt(self) -> None:
        if not self.scheduler.running:
            self.one_step()
        if running := self.scheduler.running:
            request = self.random.choice(running)
            self.scheduler._preempt(request)
            self.engine.ledger._running.pop(request.request_id)  # as where a batch says so
            self.tally["forced preemptions"] += 1

    def evict(self) -> None:
        """Take all free blocks for a moment."""
        pool = self.scheduler.kv_cache.pool
        self.tally["evicted blocks"] += pool.num_cached
        pool.release(pool.allocate(pool.num_available))

    def lose_a_snapshot(self) -> None:
        """Drop a snapshot but keep its block."""
        states = self.scheduler.kv_cache.states
        if names := sorted(states._slot_of):
            states.drop(self.random.choice(names))
            self.tally["snapshots lost alone"] += 1

    def change_chunks(self) -> None:
        num_tokens = self.random.choice([MOST_SEQS, 16, 17, 33, 64, 256])
        config = replace(self.scheduler.config, max_num_batched_tokens=num_tokens)
        self.scheduler.config = config

    def change_slo(self) -> None:
        """Set the SLO to a number, to none, or to a server's default."""
        milliseconds = self.random.choice([None, 1e-6, 0.2, 0.5, 1000.0, "auto"])
        if isinstance(milliseconds, str):
            limits = self.scheduler.config.max_num_batched_tokens, self.scheduler.max_model_len, 16
            self.engine.keep_pace(Pacing(self.engine.cost_model, *limits).choose())
            self.tally["default SLOs"] += 1
        else:
            self.engine.keep_pace(Pace(milliseconds and milliseconds / 1e3))

    def strike(self) -> None:
        """Make the computation of one request fail, and with it every batch that contains it."""
        if unfinished := self.unfinished():
            self.engine.executor.doomed = {self.random.choice(unfinished)}
            self.one_step()
            self.engine.executor.doomed = set()

    def finish(self) -> None:
        """Let every request end, and check all of them."""
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
    """Runs mixes, and counts what they did; `drafting` are the last arguments of `Mix`."""
    tally = Tally()
    for number in range(num_mixes):
        try:
            Mix(number, mixed, alone, tally, *drafting).run()
        except BaseException as error:
            error.add_note(f"in mix {number}")
            raise
    print(drafting[:1], dict(tally), flush=True)
    return tally
