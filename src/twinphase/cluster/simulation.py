"""A simulated fleet: real schedulers, KV bookkeeping and routing; predicted times.

Each simulated worker takes the steps that its scheduler decides, and a step lasts as long as the
cost model says. No time passes otherwise, so that an hour of 128 workers takes minutes. Not for
what a step computes.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import thread_time

from twinphase.batch import Batch, StepOutput
from twinphase.cache.prefix_cache import PrefixCache
from twinphase.cluster.fleet import Fleet, Placement
from twinphase.cluster.routing import FRAMING_SECONDS_PER_BLOCK, Role, Routing
from twinphase.cluster.worker_view import DECODE_WORKER_CHUNK_TOKENS
from twinphase.config import EngineConfig
from twinphase.engine.executor import Executor
from twinphase.request import Request, SamplingParams
from twinphase.scheduler.chunk import StepCost
from twinphase.scheduler.scheduler import Scheduler

ANSWER_TOKEN_ID = 7


@dataclass(frozen=True)
class FleetSpec:
    """The workers, all alike but for their roles.

    Attributes:
        roles: one per worker.
        times: predicted step times, used by the router and to advance the clock.
        config: of each worker's engine, resolved.
        between_steps: seconds of Python between two steps.
        block_bytes, bytes_per_second: size and rate of KV transfers, from copying out to storing.
    """

    roles: Sequence[Role]
    times: StepCost
    config: EngineConfig
    block_bytes: int = 0
    bytes_per_second: float = 4e8
    between_steps: float = 0.0

    def names(self) -> list[str]:
        """A name for each worker, by its role: `prefill-0`, `decode-0`, `worker-0`."""
        numbers: dict[Role, count[int]] = {"both": count(), "prefill": count(), "decode": count()}
        return [
            f"{'worker' if role == 'both' else role}-{next(numbers[role])}" for role in self.roles
        ]


@dataclass(frozen=True)
class TraceRequest:
    """A request of a trace; `prompt` makes its token ids on arrival, since traces are long."""

    arrival: float
    num_outputs: int
    prompt: Callable[[], list[int]]


@dataclass(slots=True)
class Outcome:
    """One request as its user would have seen it; times in seconds of the simulation."""

    arrival: float
    num_prompt: int = 0
    num_cached: int = 0
    read_apart: bool = False  # by a worker of the prefill pool
    token_times: array[float] = field(default_factory=lambda: array("d"))

    @property
    def num_outputs(self) -> int:
        return len(self.token_times)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def tpot(self) -> float:
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


class SimulatedExecutor:
    """Computes nothing: every request that samples gets a token."""

    def execute(self, batch: Batch) -> StepOutput:
        return StepOutput(
            {share.request_id: [ANSWER_TOKEN_ID] for share in batch.scheduled if share.samples}
        )


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
    scheduler: Scheduler
    times: StepCost
    executor: Executor = field(default_factory=SimulatedExecutor)
    batch: Batch | None = None  # what it computes now

    @property
    def prefix_cache(self) -> PrefixCache:
        return self.scheduler.kv_cache.prefix_cache


class Simulation:
    """Runs a trace through a fleet.

    Attributes:
        outcomes: of the requests that have arrived, in that order.
        routing_seconds: of this machine's processor, by decision.
        busy_seconds: of steps, by worker.
    """

    def __init__(self, spec: FleetSpec, routing: Routing) -> None:
        self.spec = spec
        self.fleet = Fleet(routing)
        self.outcomes: list[Outcome] = []
        self.routing_seconds: list[float] = []
        self.now = 0.0
        self._workers: dict[str, _Worker] = {}
        for name, role in zip(spec.names(), spec.roles, strict=True):
            self.fleet.join(name, role, spec.times)
            self._workers[name] = _Worker(name, self._scheduler(role), spec.times)
            self._workers[name].prefix_cache.watch()
        self.busy_seconds = dict.fromkeys(self._workers, 0.0)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._live: dict[str, _Live] = {}

    def run(self, trace: Iterable[TraceRequest], *, tick: Callable[[], None] | None = None) -> None:
        """Run a trace in order of arrival; `tick` is called when a request has ended."""
        self._tick = tick or (lambda: None)
        self._arrivals = iter(trace)
        self._expect_arrival()
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()

    def _scheduler(self, role: Role) -> Scheduler:
        scheduler = Scheduler(self.spec.config, self.spec.times)
        scheduler.max_prefill_tokens = DECODE_WORKER_CHUNK_TOKENS if role == "decode" else None
        return scheduler

    def _at(self, moment: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), happen))

    def _expect_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self._at(request.arrival, lambda: self._arrive(request))

    def _arrive(self, asked: TraceRequest) -> None:
        self._expect_arrival()
        request = self._request(str(len(self.outcomes)), asked, asked.prompt(), asked.num_outputs)
        num_blocks = request.num_tokens // self.spec.config.block_size
        chain = self._chain(request, num_blocks)
        began = thread_time()
        placement = self.fleet.place(request.num_tokens, chain, max_tokens=asked.num_outputs)
        decision = placement.decision
        self.routing_seconds.append(thread_time() - began)
        outcome = Outcome(
            asked.arrival, request.num_tokens, read_apart=decision.prefill_worker is not None
        )
        self.outcomes.append(outcome)
        self._live[request.request_id] = _Live(asked, placement, outcome)
        if decision.prefill_worker is None:
            self._add(decision.worker, request)
        else:
            reading = self._request(request.request_id, asked, request.prompt_token_ids, 1)
            reading.block_hashes = chain
            self._add(decision.prefill_worker, reading)

    def _request(
        self, name: str, asked: TraceRequest, prompt: list[int], max_tokens: int
    ) -> Request:
        return Request(
            name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), asked.arrival
        )

    def chain_of(self, prompt: list[int]) -> list[bytes]:
        """Hashes of a prompt's full blocks."""
        return self._chain(
            Request("", prompt, SamplingParams()), len(prompt) // self.spec.config.block_size
        )

    def _chain(self, request: Request, num_blocks: int) -> list[bytes]:
        """Hashes of a request's first blocks: the same on every worker."""
        if num_blocks:
            next(iter(self._workers.values())).prefix_cache.block_hash(request, num_blocks - 1)
        return request.block_hashes

    def _add(self, name: str, request: Request) -> None:
        worker = self._workers[name]
        worker.scheduler.add(request)
        if worker.batch is None:
            self._begin(worker)

    def _begin(self, worker: _Worker) -> None:
        if not worker.scheduler.has_work:
            return
        worker.batch = batch = worker.scheduler.schedule()
        seconds = worker.times.seconds(batch.work) + self.spec.between_steps
        self.busy_seconds[worker.name] += seconds
        self._at(self.now + seconds, lambda: self._end(worker, batch))

    def _end(self, worker: _Worker, batch: Batch) -> None:
        finished = worker.scheduler.commit(batch, worker.executor.execute(batch))
        worker.batch = None
        if (changes := worker.prefix_cache.changes) is not None:
            self.fleet.index.apply(worker.name, *changes.take())
        for share in batch.prefills:
            live = self._live[share.request_id]
            self.fleet.prefilled(live.placement, share.num_prefilled)
            live.last_chunk = share.num_scheduled_tokens
            outcome = live.outcome
            if share.samples and not outcome.token_times:
                outcome.num_cached = share.num_cached_tokens
        for share in batch.scheduled:
            if share.samples:
                live = self._live[share.request_id]
                if not live.checks_first_token:
                    live.outcome.token_times.append(self.now)
                live.checks_first_token = False
        for request in finished:
            live = self._live[request.request_id]
            if worker.name == live.placement.decision.prefill_worker and live.asked.num_outputs > 1:
                self._hand_over(worker, request, live)
            else:
                self._finish(request)
        self._begin(worker)

    def _hand_over(self, reader: _Worker, request: Request, live: _Live) -> None:
        """The blocks of the last chunk are still to come; the others came while it was read."""
        worker = self._workers[live.placement.decision.worker]
        asked = live.asked
        decoding = self._request(
            request.request_id, asked, request.prompt_token_ids, asked.num_outputs
        )
        decoding.block_hashes = request.block_hashes
        live.checks_first_token = True
        chain = self._chain(request, len(request.prompt_token_ids) // self.spec.config.block_size)
        lacking = [
            index for index, block in enumerate(chain) if worker.prefix_cache.find(block) is None
        ]
        blocks = [reader.prefix_cache.block(request, index) for index in lacking]

        def arrive() -> None:
            worker.scheduler.kv_cache.accept(blocks, lambda block_ids, numbers: None)
            self._add(worker.name, decoding)

        before = (len(request.prompt_token_ids) - live.last_chunk) // self.spec.config.block_size
        left = min(len(blocks), len(chain) - before)
        self._at(
            self.now
            + left
            * (FRAMING_SECONDS_PER_BLOCK + self.spec.block_bytes / self.spec.bytes_per_second),
            arrive,
        )

    def _finish(self, request: Request) -> None:
        live = self._live.pop(request.request_id)
        self.fleet.end(live.placement, len(request.output_token_ids))
        self._tick()
