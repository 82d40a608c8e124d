"""The engine's loop: takes messages from a front end, runs steps, and sends their results.

One thread runs the loop and owns all state of the engine. A host decides where that thread lives
(`host.py`, `child.py`).
"""

from __future__ import annotations

import gc
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from twinphase.engine.engine import Engine, StepResult
from twinphase.engine.loading.ceilings import device_of, measured_ceilings
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.process.messages import (
    Accepted,
    Add,
    BlocksChanged,
    End,
    EngineFacts,
    FromEngine,
    HandOver,
    Inspect,
    Inspected,
    LimitPrefill,
    PushTo,
    Refused,
    StepStats,
    StepUpdates,
    Stop,
    ToEngine,
    WatchBlocks,
    WatchSteps,
)
from twinphase.engine.process.requests import EngineRequests
from twinphase.engine.process.watch import StepWatch
from twinphase.errors import InvalidRequestError, TwinphaseError, one_line
from twinphase.phases.record import RequestRecord
from twinphase.request import Request
from twinphase.scheduler.pace import Pace

if TYPE_CHECKING:
    from twinphase.constraint import Constraint

GRAMMAR_THREADS = 2
PACE_INTERVAL_STEPS = 16


@dataclass(frozen=True)
class _Compiled:
    """An `Add` with its compiled grammar, or with the error of compiling it."""

    add: Add
    constraint: Constraint | None
    error: TwinphaseError | None = None


@dataclass(frozen=True)
class _Call:
    function: Callable[[Engine], None]


class Pushes(Protocol):
    """Sends KV blocks to other engines, on the loop's thread."""

    def begin(self, request: Request, to: PushTo) -> None:
        """Send the blocks of a request's prompt as they are computed."""

    def hand_over(self, to: PushTo) -> None:
        """Send all blocks of the prefix cache."""

    def progress(self) -> None:
        """Continue; called between two steps."""


class EngineLoop:
    """Runs an engine on messages; `send` gets the replies, on the loop's thread.

    Attributes:
        pushes: sends KV blocks to other engines, where this engine is a cluster's worker.
        block_counts: KV blocks that other engines sent, by outcome.
        idle: entered while the engine waits for a message.
    """

    def __init__(self, loaded: LoadedEngine, send: Callable[[FromEngine], None]) -> None:
        self.loaded = loaded
        self.pushes: Pushes | None = None
        self.block_counts: Mapping[str, int] = {}
        self.idle: AbstractContextManager[object] = nullcontext()
        self.pace: Pace | None = None
        self._chunk_tokens: int | None = None
        self._send = send
        self._inbox: queue.SimpleQueue[ToEngine | _Compiled | _Call] = queue.SimpleQueue()
        self._compilers: ThreadPoolExecutor | None = None
        self._compiling: set[str] = set()  # Requests that ended meanwhile are removed.
        # By tenant; the first one's turn is next.
        self._to_compile: dict[str, deque[Add]] = {}
        self._lock = threading.Lock()
        self._requests = EngineRequests(loaded.engine)
        # One inspection runs between two steps, so that inspecting does not slow the requests.
        self._inspections: deque[Inspect] = deque()
        self._calls: deque[Callable[[Engine], None]] = deque()
        self._stopped = False
        self._watch: StepWatch | None = None

    def put(self, message: ToEngine) -> None:
        """Hand a message to the loop, from any thread.

        Other threads compile the grammars first, so that steps continue meanwhile.
        """
        if isinstance(message, Add) and message.sampling_params.constrained:
            with self._lock:
                self._compiling.add(message.request_id)
                self._to_compile.setdefault(message.record.tenant, deque()).append(message)
                self._compilers = self._compilers or ThreadPoolExecutor(
                    GRAMMAR_THREADS, "twinphase-grammar"
                )
            self._compilers.submit(self._compile_next)
            return
        if isinstance(message, End):
            with self._lock:
                self._compiling.discard(message.request_id)
        self._inbox.put(message)

    def between_steps(self, function: Callable[[Engine], None]) -> None:
        """Have the loop's thread call a short `function` between two steps; from any thread."""
        self._inbox.put(_Call(function))

    def run(self) -> None:
        """Serve until `Stop`; an error of the engine ends the loop."""
        engine = self.loaded.engine
        gc.collect()
        # Otherwise the collector would scan all objects of the model in the middle of a step.
        gc.freeze()
        try:
            while not self._stopped:
                self._drain(engine)
                if self._inspections:
                    self._inspect(engine, self._inspections.popleft())
                for _ in range(len(self._calls)):
                    self._calls.popleft()(engine)
                if engine.has_work and not self._stopped:
                    self._step(engine)
                if self.pushes is not None:
                    self.pushes.progress()
                self._send_block_changes(engine)
                if self._watch is not None and (held := self._watch.blocks()) is not None:
                    self._send(held)
        finally:
            if self._compilers is not None:
                self._compilers.shutdown(wait=False, cancel_futures=True)

    def _step(self, engine: Engine) -> None:
        result = engine.step()
        # Before the results, so that a client's next request is routed with these blocks.
        self._send_block_changes(engine)
        view = self._watch.step(result) if self._watch is not None else None
        updates = self._requests.updates(result)
        for update in updates:
            self._finalize(update.ended)
        if self._chunk_tokens is None or engine.ledger.num_steps % PACE_INTERVAL_STEPS == 0:
            self._chunk_tokens = engine.scheduler.chunk_tokens
        stats = step_stats(engine, result, self.block_counts, self._chunk_tokens)
        self._send(StepUpdates(updates, stats, view))
        engine.ledger.end_text(engine.clock(), len(result.batch.scheduled) == 1)
        if self.pace is None:
            self.pace = self.loaded.settle_pace()
        elif self.pace.chosen and engine.ledger.num_steps % PACE_INTERVAL_STEPS == 0:
            self.loaded.choose_pace()

    def _drain(self, engine: Engine) -> None:
        """Take all waiting messages; without work, wait for one."""
        while not self._stopped:
            try:
                message = self._inbox.get(block=False)
            except queue.Empty:
                if engine.has_work or self._inspections or self._calls:
                    return
                with self.idle:
                    message = self._inbox.get()
            self._take(engine, message)

    def _take(self, engine: Engine, message: ToEngine | _Compiled | _Call) -> None:
        if isinstance(message, Add):
            self._add(_Compiled(message, None))
        elif isinstance(message, _Compiled):
            with self._lock:
                wanted = message.add.request_id in self._compiling
                self._compiling.discard(message.add.request_id)
            if wanted:
                self._add(message)
        elif isinstance(message, End):
            update = self._requests.end(message.request_id, message.reason)
            if update is not None:
                self._finalize(update.ended)
                self._send(StepUpdates([update]))
        elif isinstance(message, Inspect):
            self._inspections.append(message)
        elif isinstance(message, _Call):
            self._calls.append(message.function)
        elif isinstance(message, WatchBlocks):
            number, hashes = engine.scheduler.kv_cache.prefix_cache.watch()
            self._send(BlocksChanged(number, hashes, whole=True))
        elif isinstance(message, WatchSteps):
            self._watch_steps(engine, on=message.on)
        elif isinstance(message, HandOver) and self.pushes is not None:
            self.pushes.hand_over(message.to)
        elif isinstance(message, LimitPrefill):
            engine.limit_prefill(message.num_tokens)
            self._chunk_tokens = None
        elif isinstance(message, Stop):
            self._stopped = True

    def _compile_next(self) -> None:
        """Compile a grammar of the tenant that has waited longest since its last one."""
        with self._lock:
            tenant = next(iter(self._to_compile))
            line = self._to_compile.pop(tenant)
            add = line.popleft()
            if line:
                self._to_compile[tenant] = line
        self._compile(add)

    def _compile(self, add: Add) -> None:
        with self._lock:
            if add.request_id not in self._compiling:  # The client left while the request waited.
                return
        try:
            constraint = self.loaded.text.constraint(add.sampling_params, add.prompt_token_ids)
            self._inbox.put(_Compiled(add, constraint))
        except TwinphaseError as error:
            self._inbox.put(_Compiled(add, None, error))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # A compiler's bug, even a panic, fails one request only.
            cause = f"The structured output could not be compiled: {one_line(error)}."
            self._inbox.put(_Compiled(add, None, TwinphaseError(cause)))

    def _add(self, compiled: _Compiled) -> None:
        add = compiled.add
        try:
            if compiled.error is not None:
                raise compiled.error
            if add.push_to is not None and self.pushes is None:
                raise InvalidRequestError(
                    "This engine cannot send KV blocks to others.",
                    "Start it as a worker of a cluster.",
                )
            request = self._requests.add(add, compiled.constraint)
            if add.push_to is not None and self.pushes is not None:
                self.pushes.begin(request, add.push_to)
        except TwinphaseError as error:
            self._send(refusal(add.request_id, error))
            return
        self._send(Accepted(add.request_id))

    def _finalize(self, record: RequestRecord | None) -> None:
        if record is not None:
            record.timeline.compact()
            record.counts.sampling_params = None  # The front end knows them.
            self.loaded.doubt_ceilings(record.timeline)

    def _inspect(self, engine: Engine, message: Inspect) -> None:
        try:
            self._send(self._inspected(engine, message))
        except Exception as error:  # An explanation that fails must not end the engine.
            cause = f"It could not be explained: {error}."
            self._send(Refused(message.number, "TwinphaseError", cause, ""))

    def _inspected(self, engine: Engine, message: Inspect) -> Inspected:
        record = message.record
        if record is None and engine.scheduler.get(message.request_id) is not None:
            record = self._requests.copy(message.request_id)
            record.timeline.compact()
        if record is None:
            return Inspected(message.number, None, None)
        explanation = self.loaded.explain(record.counts, record.timeline)
        return Inspected(message.number, record, explanation)

    def _watch_steps(self, engine: Engine, *, on: bool) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = StepWatch(engine) if on else None
        if self._watch is not None:
            self._send(self._watch.all_blocks())

    def _send_block_changes(self, engine: Engine) -> None:
        changes = engine.scheduler.kv_cache.prefix_cache.changes
        if changes is not None:
            number, stored, evicted = changes.take()
            if stored or evicted:
                self._send(BlocksChanged(number, stored, evicted))


def refusal(about: str | int | None, error: TwinphaseError) -> Refused:
    """The refusal of a request (by id), a question (by number) or the model (None)."""
    return Refused(about, type(error).__name__, error.cause, error.fix)


def engine_facts(loaded: LoadedEngine, pace: Pace | None) -> EngineFacts:
    config = loaded.config
    warm = loaded.warm_timeline
    device = device_of(config)
    prompt, ttft, tpot = (warm.prefill.tokens, warm.ttft, warm.tpot) if warm else (0, None, None)
    return EngineFacts(
        config,
        loaded.engine.shape,
        measured_ceilings(config),
        prompt,
        ttft,
        tpot,
        pace=pace,
        chunk_tokens=loaded.engine.scheduler.chunk_tokens,
        prices=loaded.engine.cost_model.prices,
        model=loaded.checkpoint.fingerprint,
        kv_fingerprint=loaded.backend.kv_fingerprint,
        ranks=loaded.ranks,
        threads=device.threads,
        isa=device.isa,
    )


def step_stats(
    engine: Engine, result: StepResult, block_counts: Mapping[str, int], chunk_tokens: int
) -> StepStats:
    """The report of a step, which is sent whether the engine is watched or not."""
    record = result.record
    scheduler = engine.scheduler
    kv_cache = engine.scheduler.kv_cache
    states = kv_cache.states
    drafted = [share for share in result.batch.decodes if share.num_drafts]
    accepted = [result.output.num_accepted(share) for share in drafted]
    return StepStats(
        start=record.start,
        end=record.end,
        prefill_seconds=record.seconds - record.decode_seconds,
        decode_seconds=record.decode_seconds,
        prefill_tokens=record.prefill_tokens,
        decode_tokens=record.decode_tokens,
        prefill_flops=record.prefill.flops,
        decode_flops=record.decode.flops,
        prefill_bytes=record.prefill.bytes,
        decode_bytes=record.decode.bytes,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.fair),
        kv_cache_usage=kv_cache.pool.num_held / kv_cache.pool.num_blocks,
        prefix_queries=kv_cache.num_queried_tokens,
        prefix_hits=kv_cache.num_hit_tokens,
        num_preemptions=scheduler.num_preemptions,
        work=scheduler.step_work,
        num_drafts=len(drafted),
        num_draft_tokens=sum(share.num_drafts for share in drafted),
        accepted=[
            sum(count > position for count in accepted)
            for position in range(max(accepted, default=0))
        ],
        num_draft_failures=engine.drafter.num_failures if engine.drafter else 0,
        blocks_received=dict(block_counts),
        times=record.times,
        itl_slo_seconds=scheduler.pace.slo_seconds,
        chunk_tokens=chunk_tokens,
        state_usage=states.usage if states else 0.0,
        num_snapshots=states.num_snapshots if states else 0,
        prices=engine.cost_model.prices if record.prefill_tokens else (),
    )
