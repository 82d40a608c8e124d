"""A simulated fleet: the real schedulers, KV bookkeeping, router and ledgers on predicted times.

Each simulated worker makes the steps that its scheduler decides, and a step lasts as long as the
cost model predicts. No model is computed, so that simulating an hour of 128 workers takes minutes.
"""

from __future__ import annotations

import heapq
import random
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from time import thread_time
from typing import Protocol, cast

from twinphase.batch import Batch, Phase, StepOutput, StepWork
from twinphase.cluster.fleet import Fleet, Placement
from twinphase.cluster.routing import FRAMING_SECONDS_PER_BLOCK, Routing
from twinphase.cluster.worker_view import DECODE_WORKER_CHUNK_TOKENS
from twinphase.engine.engine import Engine, StepResult
from twinphase.engine.process.watch import num_new_tokens
from twinphase.engine.recorder import StepRecorder
from twinphase.phases.cost import CostModel
from twinphase.phases.ledger import Ledger, predicted_parts, step_parts
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import Request, SamplingParams
from twinphase.scheduler.pacing import Pacing
from twinphase.scheduler.phase import phase_of
from twinphase.scheduler.scheduler import Scheduler
from twinphase.scheduler.steady import steady_steps
from twinphase.simulate.estimated import decode_works
from twinphase.simulate.spec import FleetSpec, Outcome, TraceRequest, WorkerSpec
from twinphase.simulate.worker import (
    ANSWER_TOKEN_ID,
    GivenAcceptance,
    Jump,
    SimulatedExecutor,
    SimulatedWorker,
)
from twinphase.speculation.draft_lengths import choose_lengths
from twinphase.speculation.proposer import Draft

NO_TOKEN_ID = -1
# The order of events at the same moment.
ENDS, ARRIVES, BEGINS = range(3)
# Returns a user's next request, given the last one and its outcome.
FollowUp = Callable[[TraceRequest, Outcome], TraceRequest | None]


class Observer(Protocol):
    """Receives the events of a simulation with ledgers."""

    def arrived(self, request: Request, outcome: Outcome, worker: str, reason: str) -> None:
        """A request was sent to a worker."""

    def moved(self, request: Request, worker: str) -> None:
        """The KV blocks of a request were sent to a decode worker."""

    def stepped(self, worker: str, engine: Engine, result: StepResult) -> None:
        """A step is complete."""


@dataclass
class _Live:
    """An unfinished request.

    Attributes:
        checks_first_token: whether the decode worker computes the first token again as a check.
        last_chunk: number of prompt tokens prefilled in its last step.
    """

    asked: TraceRequest
    placement: Placement
    outcome: Outcome
    checks_first_token: bool = False
    last_chunk: int = 0


class Simulation:
    """Runs a trace through a fleet.

    Attributes:
        outcomes: one outcome per request, in order of arrival, if they are kept.
        routing_seconds: processor time of each routing decision on this machine.
        busy_seconds: seconds in steps, by worker; `decode_seconds` is what the steps would have
            taken without their prefill chunks.
        num_steps: number of steps of all workers.
    """

    def __init__(
        self,
        spec: FleetSpec,
        routing: Routing,
        observer: Observer | None = None,
        *,
        step_by_step: bool = False,
        keep_outcomes: bool = True,
    ) -> None:
        """Start an idle fleet.

        Args:
            spec: the fleet.
            routing: chooses workers.
            observer: notified of arrivals and steps.
            step_by_step: schedule every step instead of jumping over those that only decode; the
                result is the same.
            keep_outcomes: whether to keep all outcomes; `follow_up` gets each outcome in any case.
        """
        self.spec = spec
        self.fleet = Fleet(routing)
        self.outcomes: list[Outcome] = []
        self.routing_seconds = array("d")
        self.now = 0.0
        self.num_steps = 0
        self._observer = observer
        self._keep_outcomes = keep_outcomes
        self._num_requests = 0
        self._executor = SimulatedExecutor(spec.acceptance, spec.seed)
        self._jumps = not (step_by_step or observer or spec.drafts)
        self.workers: dict[str, SimulatedWorker] = {}
        for name, one in zip(spec.names(), spec.workers, strict=True):
            self.fleet.join(name, one.role, one.times)
            self.workers[name] = self._worker(name, one)
            self.workers[name].prefix_cache.watch()
        self.busy_seconds = dict.fromkeys(self.workers, 0.0)
        self.decode_seconds = dict.fromkeys(self.workers, 0.0)
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._order = count()
        self._live: dict[str, _Live] = {}
        # Workers that may complete the first block of a request during a jump.
        self._hiding: dict[str, SimulatedWorker] = {}

    def run(
        self,
        trace: Iterable[TraceRequest],
        *,
        tick: Callable[[], None] | None = None,
        follow_up: FollowUp = lambda asked, outcome: None,
    ) -> None:
        """Run a trace in order of arrival; `tick` is called after each request."""
        self._tick = tick or (lambda: None)
        self._follow_up = follow_up
        self._arrivals = iter(trace)
        self._expect_arrival()
        while self._events:
            self.now, _, _, happen = heapq.heappop(self._events)
            happen()

    def _worker(self, name: str, spec: WorkerSpec) -> SimulatedWorker:
        # Only reports from ledgers show why a prefix was missed.
        explains = self.spec.shape is not None
        scheduler = Scheduler(spec.config, spec.times, explains_misses=explains)
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
        draw = random.Random(f"noise/{name}/{self.spec.seed}")
        places = [draw.randrange(max(1, len(noise))) for noise in (spec.noise, spec.prefill_noise)]
        usual = GivenAcceptance(self.spec.acceptance)
        return SimulatedWorker(name, spec, scheduler, engine, places, usual=usual)

    def _at(self, moment: float, happen: Callable[[], None], kind: int = ARRIVES) -> None:
        heapq.heappush(self._events, (moment, kind, next(self._order), happen))

    def _expect_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self._at(request.arrival, lambda: self._come(request))

    def _come(self, asked: TraceRequest) -> None:
        self._expect_arrival()
        self._receive(asked)

    def _receive(self, asked: TraceRequest) -> None:
        """A client has sent a request, which the server parses and tokenizes."""
        prompt = asked.prompt()
        front = self.spec.front
        outcome = Outcome(
            asked.arrival, len(prompt), asked.num_outputs, num_reasoning=asked.num_reasoning
        )
        if self._keep_outcomes:
            self.outcomes.append(outcome)
        name = str(self._num_requests)
        self._num_requests += 1
        self._at(
            self.now + front.request + front.per_prompt_token * len(prompt),
            lambda: self._arrive(name, asked, prompt, outcome),
        )

    def _arrive(self, name: str, asked: TraceRequest, prompt: list[int], outcome: Outcome) -> None:
        request = self._request(name, asked, prompt, asked.num_outputs)
        num_blocks = request.num_tokens // self.spec.block_size
        chain = self._chain(request, num_blocks)
        self._show_blocks(chain)
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
        return Request(name, prompt, _params(max_tokens), asked.arrival)

    def chain_of(self, prompt: list[int]) -> list[bytes]:
        """Hashes of a prompt's full blocks."""
        return self._chain(
            Request("", prompt, SamplingParams()), len(prompt) // self.spec.block_size
        )

    def _chain(self, request: Request, num_blocks: int) -> list[bytes]:
        """Hashes of a request's first blocks, which are the same on every worker."""
        if num_blocks:
            next(iter(self.workers.values())).prefix_cache.block_hash(request, num_blocks - 1)
        return request.block_hashes

    def _add(self, name: str, request: Request, reason: str = "") -> None:
        worker = self.workers[name]
        self._interrupt(worker)
        worker.scheduler.add(request)
        outcome = self._live[request.request_id].outcome
        outcome.counts = request.counts
        if worker.ledger is not None and outcome.timeline is not None:
            worker.ledger.open(request.request_id, outcome.timeline)
            if self._observer is not None:
                self._observer.arrived(request, outcome, name, reason)
        if worker.batch is None:
            self._begin(worker)

    def _begin(self, worker: SimulatedWorker) -> None:
        if not worker.scheduler.has_work:
            return
        times = worker.spec.times
        worker.batch = batch = worker.scheduler.schedule(self._drafts(worker))
        worker.num_scheduled += 1
        if self._jumps:
            number = steady_steps(worker.scheduler, batch, ANSWER_TOKEN_ID)
            if number > 1:
                self._jump(worker, batch, number)
                return
        predicted = times.seconds(batch.work)
        seconds = predicted * worker.draw(bool(batch.prefills))
        self.num_steps += 1
        self.busy_seconds[worker.name] += seconds
        parts = predicted_parts(cast(CostModel, times), batch)
        self.decode_seconds[worker.name] += step_parts(parts, predicted, seconds, 0.0)[0]
        self._run_until(worker, batch, self.now, self.now + seconds)

    def _run_until(self, worker: SimulatedWorker, batch: Batch, began: float, end: float) -> None:
        worker.batch = batch
        worker.began = began
        self._at(end, lambda: self._end(worker, batch), ENDS)

    def _jump(self, worker: SimulatedWorker, batch: Batch, number: int) -> None:
        """Begin a jump of several steps, each with the tokens of the previous step."""
        worker.jump = jump = worker.new_jump(batch, number, self.now)
        if jump.hides_beginnings:
            self._hiding[worker.name] = worker
        self._at(jump.ends[-1], lambda: self._land(worker, jump), ENDS)

    def _show_blocks(self, chain: list[bytes]) -> None:
        """Report to the router how jumps have changed the workers' blocks of a prompt so far.

        A worker stores a block of an answer only after the blocks before it, which this search
        uses.
        """
        for name in self.fleet.index.holders(chain):
            self._catch_up(self.workers[name])
        for name, worker in list(self._hiding.items()):
            self._catch_up(worker)
            if worker.jump is None:
                del self._hiding[name]

    def _catch_up(self, worker: SimulatedWorker) -> None:
        """Report the blocks changed so far during a jump, as of its last completed step."""
        jump = worker.jump
        if jump is not None and jump.due <= self.now:
            jump.reach(self.now)
            self._report_blocks(worker)

    def _interrupt(self, worker: SimulatedWorker) -> None:
        """End a jump after its present step, because another event occurred."""
        jump = worker.jump
        if jump is None:
            return
        self._catch_up(worker)
        ended = bisect_right(jump.ends, self.now)
        begun = max(1, bisect_left(jump.begins, self.now))
        begin = jump.begins[ended]
        self._commit(worker, jump, begun, ended)
        worker.places[False] -= jump.shorten(begun)
        if begun == ended:
            worker.jump = None
            self._at(begin, lambda: self._next(worker), BEGINS)
        elif worker.ledger is None:
            self._at(jump.ends[-1], lambda: self._land(worker, jump), ENDS)
        else:
            worker.jump = None
            self._run_until(worker, worker.scheduler.schedule(), begin, jump.ends[-1])

    def _land(self, worker: SimulatedWorker, jump: Jump) -> None:
        """Handle the end of a jump's last step."""
        if worker.jump is jump:
            number = len(jump.ends)
            self._commit(worker, jump, number, number)
            worker.jump = None
            self._report_blocks(worker)
            gap = worker.gap(len(jump.steps.requests))
            self._at(self.now + gap, lambda: self._next(worker), BEGINS)

    def _commit(self, worker: SimulatedWorker, jump: Jump, begun: int, ended: int) -> None:
        """Record the begun steps of a jump, and the tokens of the completed ones."""
        if worker.ledger is not None and worker.batch is not None and ended:
            self._write(worker, worker.ledger, worker.batch, jump, ended)
        self.num_steps += begun - jump.num_begun
        times = zip(jump.predicted, jump.draws, strict=True)
        for seconds, draw in islice(times, jump.num_begun, begun):
            self.busy_seconds[worker.name] += seconds * draw
            self.decode_seconds[worker.name] += seconds * draw
        new = slice(jump.num_committed, ended)
        jump.steps.commit(begun, jump.predicted[new])
        delivered = array("d", [end + self.spec.front.token for end in jump.ends[new]])
        for request in jump.steps.requests:
            self._live[request.request_id].outcome.token_times.extend(delivered)
        jump.num_begun = begun
        jump.num_committed = ended

    def _write(
        self, worker: SimulatedWorker, ledger: Ledger, batch: Batch, jump: Jump, ended: int
    ) -> None:
        """Write the steps of a jump to the ledger; the first may have admitted a request."""
        gap = worker.gap(len(batch.decodes))
        begins = jump.begins[:ended]
        ends = jump.ends[:ended]
        tenant = batch.decodes[0].tenant
        ledger.add_step(batch, StepOutput(), begins[0], ends[0], {tenant: jump.predicted[0]})
        ledger.settle(ends[0] + gap)
        if ended > 1:
            ledger.add_decodes(batch, decode_works(batch, ended)[1:], begins[1:], ends[1:], gap)

    def _report_blocks(self, worker: SimulatedWorker) -> None:
        if (changes := worker.prefix_cache.changes) is not None:
            self.fleet.index.apply(worker.name, *changes.take())

    def _drafts(self, worker: SimulatedWorker) -> dict[str, list[int]]:
        """Drafts, accepted or not, of the lengths that a server's speculator would verify."""
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

    def _end(self, worker: SimulatedWorker, batch: Batch) -> None:
        output = self._executor.execute(batch)
        scheduler = worker.scheduler
        finished = scheduler.commit(batch, output)
        self._report_blocks(worker)
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
        gap = worker.gap(len(batch.scheduled))
        self._at(self.now + gap, lambda: self._next(worker), BEGINS)

    def _next(self, worker: SimulatedWorker) -> None:
        worker.batch = None
        self._begin(worker)

    def _record(
        self,
        worker: SimulatedWorker,
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
        # As in a real engine, the time until the next step belongs to this step.
        ledger.settle(self.now + worker.gap(len(batch.scheduled)))
        if self._observer is not None:
            result = StepResult(batch, output, finished, record)
            self._observer.stepped(worker.name, engine, result)

    def _hand_over(self, reader: SimulatedWorker, request: Request, live: _Live) -> None:
        """Send the last chunk's blocks; the others were sent while it was computed."""
        worker = self.workers[live.placement.decision.worker]
        asked = live.asked
        decoding = self._request(
            request.request_id, asked, request.prompt_token_ids, asked.num_outputs
        )
        decoding.block_hashes = request.block_hashes
        live.checks_first_token = True
        chain = self._chain(request, len(request.prompt_token_ids) // self.spec.block_size)
        self._catch_up(worker)
        lacking = [
            index for index, block in enumerate(chain) if worker.prefix_cache.find(block) is None
        ]
        blocks = [reader.prefix_cache.block(request, index) for index in lacking]
        if self._observer is not None:
            self._observer.moved(request, worker.name)

        def arrive() -> None:
            self._interrupt(worker)
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


@cache
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def _decodes(running: list[Request], window: int | None) -> StepWork:
    """The work of a step that decodes one token per request."""
    count = len(running)
    return StepWork.of_decodes(
        count, sum(one.num_tokens for one in running) / max(1, count), window
    )
