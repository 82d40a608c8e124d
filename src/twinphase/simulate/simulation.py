"""A simulated fleet: real schedulers, KV bookkeeping, routing and ledgers; predicted times.

Each simulated worker takes the steps that its scheduler decides, and a step lasts as long as the
cost model says. No time passes otherwise, so that an hour of 128 workers takes minutes. Not for
what a step computes.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from time import thread_time
from typing import Protocol, cast

from twinphase.batch import Batch, Phase, ScheduledRequest, StepOutput, StepWork
from twinphase.cache.prefix_cache import PrefixCache
from twinphase.cluster.fleet import Fleet, Placement
from twinphase.cluster.routing import FRAMING_SECONDS_PER_BLOCK, Routing
from twinphase.cluster.worker_view import DECODE_WORKER_CHUNK_TOKENS
from twinphase.engine.engine import Engine, StepResult
from twinphase.engine.process.watch import num_new_tokens
from twinphase.engine.recorder import StepRecorder
from twinphase.phases.cost import CostModel
from twinphase.phases.ledger import Ledger
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import Request, SamplingParams
from twinphase.scheduler.pacing import Pacing
from twinphase.scheduler.phase import phase_of
from twinphase.scheduler.scheduler import Scheduler
from twinphase.simulate.spec import FleetSpec, Outcome, TraceRequest, WorkerSpec
from twinphase.speculation.draft_lengths import Acceptance, choose_lengths
from twinphase.speculation.proposer import Draft

ANSWER_TOKEN_ID = 7
NO_TOKEN_ID = -1
# The request that a user sends after an answer, given what was asked and what came of it.
FollowUp = Callable[[TraceRequest, Outcome], TraceRequest | None]


class Observer(Protocol):
    """Sees what a simulation with ledgers does."""

    def arrived(self, request: Request, outcome: Outcome, worker: str, reason: str) -> None:
        """A request was sent to a worker."""

    def moved(self, request: Request, worker: str) -> None:
        """Its KV blocks were sent to a decode worker."""

    def stepped(self, worker: str, engine: Engine, result: StepResult) -> None:
        """A step is complete."""


class _GivenAcceptance(Acceptance):
    """What `choose_lengths` would have learned if every draft were as good as the given rate."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    def probability(self, request_id: str, draft: Draft, position: int) -> float:
        return self._rate


class SimulatedExecutor:
    """Computes nothing: every request that samples gets a token, and those of its right drafts."""

    def __init__(self, acceptance: float = 0.0, seed: int = 0) -> None:
        self._acceptance = acceptance
        self._random = random.Random(f"drafts/{seed}")

    def execute(self, batch: Batch) -> StepOutput:
        return StepOutput(
            {
                share.request_id: [ANSWER_TOKEN_ID] * (1 + self._accepted(share))
                for share in batch.scheduled
                if share.samples
            }
        )

    def _accepted(self, share: ScheduledRequest) -> int:
        accepted = 0
        while accepted < share.num_drafts and self._random.random() < self._acceptance:
            accepted += 1
        return accepted


@dataclass
class _Live:
    """A request that has not ended.

    Attributes:
        checks_first_token: the decode worker computes its first token once more, as a check.
        last_chunk: prompt tokens prefilled in its last step.
    """

    asked: TraceRequest
    placement: Placement
    outcome: Outcome
    checks_first_token: bool = False
    last_chunk: int = 0


@dataclass
class _Worker:
    name: str
    spec: WorkerSpec
    scheduler: Scheduler
    engine: Engine | None  # with the ledgers, where they are kept
    began: float = 0.0
    batch: Batch | None = None  # what it computes now
    usual: Acceptance = field(default_factory=Acceptance)

    @property
    def prefix_cache(self) -> PrefixCache:
        return self.scheduler.kv_cache.prefix_cache

    @property
    def ledger(self) -> Ledger | None:
        return self.engine.ledger if self.engine is not None else None


class Simulation:
    """Runs a trace through a fleet.

    Attributes:
        outcomes: of the requests that have arrived, in that order.
        routing_seconds: of this machine's processor, by decision.
        busy_seconds: of steps, by worker; of these, `decode_seconds` are what the steps would have
            taken without their prefill chunks (with ledgers only).
        num_steps: of all workers.
    """

    def __init__(self, spec: FleetSpec, routing: Routing, observer: Observer | None = None) -> None:
        self.spec = spec
        self.fleet = Fleet(routing)
        self.outcomes: list[Outcome] = []
        self.routing_seconds: list[float] = []
        self.now = 0.0
        self.num_steps = 0
        self._observer = observer
        self._executor = SimulatedExecutor(spec.acceptance, spec.seed)
        self._noise = random.Random(f"noise/{spec.seed}")
        self.workers: dict[str, _Worker] = {}
        for name, one in zip(spec.names(), spec.workers, strict=True):
            self.fleet.join(name, one.role, one.times)
            self.workers[name] = self._worker(name, one)
            self.workers[name].prefix_cache.watch()
        self.busy_seconds = dict.fromkeys(self.workers, 0.0)
        self.decode_seconds = dict.fromkeys(self.workers, 0.0)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._live: dict[str, _Live] = {}

    def run(
        self,
        trace: Iterable[TraceRequest],
        *,
        tick: Callable[[], None] | None = None,
        follow_up: FollowUp = lambda asked, outcome: None,
    ) -> None:
        """Run a trace in order of arrival; `tick` is called when a request has ended."""
        self._tick = tick or (lambda: None)
        self._follow_up = follow_up
        self._arrivals = iter(trace)
        self._expect_arrival()
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()

    def _worker(self, name: str, spec: WorkerSpec) -> _Worker:
        scheduler = Scheduler(spec.config, spec.times)
        scheduler.max_prefill_tokens = DECODE_WORKER_CHUNK_TOKENS if spec.role == "decode" else None
        config = spec.config
        if config.itl_slo_ms == "auto":
            limits = (config.max_num_batched_tokens, scheduler.max_model_len, config.block_size)
            scheduler.pace = Pacing(spec.times, *limits).choose()
        engine = None
        if self.spec.shape is not None:
            recorder = StepRecorder(
                self.spec.shape, cast(CostModel, spec.times), clock=lambda: self.now
            )
            executor = self._executor
            engine = Engine(
                scheduler, executor, recorder, shape=self.spec.shape, vocab_size=1 << 62
            )
        return _Worker(name, spec, scheduler, engine, usual=_GivenAcceptance(self.spec.acceptance))

    def _at(self, moment: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), happen))

    def _expect_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self._at(request.arrival, lambda: self._come(request))

    def _come(self, asked: TraceRequest) -> None:
        self._expect_arrival()
        self._receive(asked)

    def _receive(self, asked: TraceRequest) -> None:
        """A client has sent a request, which its server reads and tokenizes."""
        prompt = asked.prompt()
        front = self.spec.front
        outcome = Outcome(
            asked.arrival, len(prompt), asked.num_outputs, num_reasoning=asked.num_reasoning
        )
        self.outcomes.append(outcome)
        name = str(len(self.outcomes) - 1)
        self._at(
            self.now + front.request + front.per_prompt_token * len(prompt),
            lambda: self._arrive(name, asked, prompt, outcome),
        )

    def _arrive(self, name: str, asked: TraceRequest, prompt: list[int], outcome: Outcome) -> None:
        request = self._request(name, asked, prompt, asked.num_outputs)
        num_blocks = request.num_tokens // self.spec.block_size
        chain = self._chain(request, num_blocks)
        began = thread_time()
        placement = self.fleet.place(request.num_tokens, chain, max_tokens=asked.num_outputs)
        decision = placement.decision
        self.routing_seconds.append(thread_time() - began)
        outcome.read_apart = decision.prefill_worker is not None
        if self.spec.shape is not None:
            outcome.timeline = RequestTimeline(asked.arrival)
            outcome.timeline.mark(IntervalKind.TOKENIZE, self.now)
        self._live[request.request_id] = _Live(asked, placement, outcome)
        if decision.prefill_worker is not None:
            reading = self._request(request.request_id, asked, request.prompt_token_ids, 1)
            reading.block_hashes = chain
            request = reading
        self._add(decision.prefill_worker or decision.worker, request, decision.reason)

    def _request(
        self, name: str, asked: TraceRequest, prompt: list[int], max_tokens: int
    ) -> Request:
        return Request(
            name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), asked.arrival
        )

    def chain_of(self, prompt: list[int]) -> list[bytes]:
        """Hashes of a prompt's full blocks."""
        return self._chain(
            Request("", prompt, SamplingParams()), len(prompt) // self.spec.block_size
        )

    def _chain(self, request: Request, num_blocks: int) -> list[bytes]:
        """Hashes of a request's first blocks: the same on every worker."""
        if num_blocks:
            next(iter(self.workers.values())).prefix_cache.block_hash(request, num_blocks - 1)
        return request.block_hashes

    def _add(self, name: str, request: Request, reason: str = "") -> None:
        worker = self.workers[name]
        worker.scheduler.add(request)
        outcome = self._live[request.request_id].outcome
        outcome.counts = request.counts
        if worker.ledger is not None and outcome.timeline is not None:
            worker.ledger.open(request.request_id, outcome.timeline)
            if self._observer is not None:
                self._observer.arrived(request, outcome, name, reason)
        if worker.batch is None:
            self._begin(worker)

    def _begin(self, worker: _Worker) -> None:
        if not worker.scheduler.has_work:
            return
        spec = worker.spec
        worker.batch = batch = worker.scheduler.schedule(self._drafts(worker))
        seconds = spec.times.seconds(batch.work)
        if noise := spec.prefill_noise if batch.prefills else spec.noise:
            seconds *= self._noise.choice(noise)
        worker.began = self.now
        self.num_steps += 1
        self.busy_seconds[worker.name] += seconds
        self._at(self.now + seconds, lambda: self._end(worker, batch))

    def _drafts(self, worker: _Worker) -> dict[str, list[int]]:
        """As many wrong or right tokens as the speculator would have verified."""
        if not self.spec.drafts:
            return {}
        running = [one for one in worker.scheduler.running if phase_of(one) is Phase.DECODE]
        drafts = {
            one.request_id: Draft("given", [NO_TOKEN_ID] * self.spec.drafts) for one in running
        }
        contexts = {one.request_id: one.num_tokens + 1 for one in running}
        times = worker.spec.times
        decodes = _decodes(running, times.window)
        slo = worker.scheduler.pace.slo_seconds
        limit = times.step_limit(slo) if slo is not None else None
        lengths = choose_lengths(drafts, contexts, decodes, times, worker.usual, limit=limit)
        return {name: drafts[name].token_ids[:length] for name, length in lengths.items()}

    def _end(self, worker: _Worker, batch: Batch) -> None:
        output = self._executor.execute(batch)
        scheduler = worker.scheduler
        finished = scheduler.commit(batch, output)
        if (changes := worker.prefix_cache.changes) is not None:
            self.fleet.index.apply(worker.name, *changes.take())
        for share in batch.prefills:
            live = self._live[share.request_id]
            self.fleet.prefilled(live.placement, share.num_prefilled)
            live.last_chunk = share.num_scheduled_tokens
            outcome = live.outcome
            if share.samples and not outcome.token_times:
                outcome.num_cached = share.num_cached_tokens
        delivered = self.now + self.spec.front.token
        for share in batch.scheduled:
            if share.samples:
                live = self._live[share.request_id]
                new = num_new_tokens(share) - live.checks_first_token
                live.outcome.token_times.extend([delivered] * new)
                live.checks_first_token = False
        if worker.engine is not None:
            self._record(worker, worker.engine, batch, output, finished)
        for request in finished:
            live = self._live[request.request_id]
            if worker.name == live.placement.decision.prefill_worker and live.asked.num_outputs > 1:
                self._hand_over(worker, request, live)
            else:
                self._finish(request)
        spec = worker.spec
        gap = spec.between_steps + spec.between_steps_per_request * len(batch.scheduled)
        self._at(self.now + gap, lambda: self._next(worker))

    def _next(self, worker: _Worker) -> None:
        worker.batch = None
        self._begin(worker)

    def _record(
        self,
        worker: _Worker,
        engine: Engine,
        batch: Batch,
        output: StepOutput,
        finished: list[Request],
    ) -> None:
        ledger = engine.ledger
        work = worker.scheduler.step_work
        record = ledger.add_step(batch, output, worker.began, self.now, work)
        for request in finished:
            ledger.close(request.request_id, self.now)
        ledger.settle(self.now)
        self.decode_seconds[worker.name] += record.decode_seconds
        if self._observer is not None:
            result = StepResult(batch, output, finished, record)
            self._observer.stepped(worker.name, engine, result)

    def _hand_over(self, reader: _Worker, request: Request, live: _Live) -> None:
        """The blocks of the last chunk are still to come; the others came while it was read."""
        worker = self.workers[live.placement.decision.worker]
        asked = live.asked
        decoding = self._request(
            request.request_id, asked, request.prompt_token_ids, asked.num_outputs
        )
        decoding.block_hashes = request.block_hashes
        live.checks_first_token = True
        chain = self._chain(request, len(request.prompt_token_ids) // self.spec.block_size)
        lacking = [
            index for index, block in enumerate(chain) if worker.prefix_cache.find(block) is None
        ]
        blocks = [reader.prefix_cache.block(request, index) for index in lacking]
        if self._observer is not None:
            self._observer.moved(request, worker.name)

        def arrive() -> None:
            worker.scheduler.kv_cache.accept(blocks, lambda block_ids, numbers: None)
            if live.outcome.timeline is not None:
                live.outcome.timeline.mark(IntervalKind.TRANSFER, self.now)
            self._add(worker.name, decoding)

        before = (len(request.prompt_token_ids) - live.last_chunk) // self.spec.block_size
        left = min(len(blocks), len(chain) - before)
        seconds = FRAMING_SECONDS_PER_BLOCK + self.spec.block_bytes / self.spec.bytes_per_second
        self._at(self.now + left * seconds, arrive)

    def _finish(self, request: Request) -> None:
        live = self._live.pop(request.request_id)
        self.fleet.end(live.placement, len(request.output_token_ids))
        self._tick()
        following = self._follow_up(live.asked, live.outcome)
        if following is not None:
            self._at(following.arrival, lambda: self._receive(following))


def _decodes(running: list[Request], window: int | None) -> StepWork:
    """The work of a step where each of them decodes one token."""
    count = len(running)
    return StepWork.of_decodes(
        count, sum(one.num_tokens for one in running) / max(1, count), window
    )
