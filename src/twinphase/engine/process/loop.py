"""The engine's side of a conversation: takes messages, makes steps, sends what they brought.

One thread runs it and owns all state of the engine. Where that thread lives, here or in a process
of its own, is the host's business (`async_engine.py`, `child.py`).
"""

from __future__ import annotations

import gc
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from twinphase.engine.engine import Engine, StepResult
from twinphase.engine.loading.ceilings import measured_ceilings
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.process.messages import (
    Accepted,
    Add,
    BlocksChanged,
    End,
    EngineFacts,
    Finished,
    FromEngine,
    HandOver,
    LookAt,
    News,
    PushTo,
    ReadAtMost,
    Refused,
    Seen,
    StepNews,
    StepStats,
    Stop,
    ToEngine,
    WatchBlocks,
)
from twinphase.errors import InvalidRequestError, TwinphaseError
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import Request
from twinphase.scheduler.pace import Pace

if TYPE_CHECKING:
    from twinphase.constraint import Constraint

GRAMMAR_THREADS = 2
PACE_STEPS = (
    64  # after which a pace that was chosen is chosen again, by what is known of steps then
)


@dataclass(frozen=True)
class _Queue:
    """An `Add` whose grammar is compiled, or could not be."""

    add: Add
    constraint: Constraint | None
    error: TwinphaseError | None = None


@dataclass(frozen=True)
class _Call:
    function: Callable[[Engine], None]


class Pushes(Protocol):
    """Sends a request's KV blocks on to another engine, on the loop's thread."""

    def begin(self, request: Request, to: PushTo) -> None:
        """From now on, send what is computed of the request's prompt."""

    def hand_over(self, to: PushTo) -> None:
        """Send what the prefix cache holds."""

    def progress(self) -> None:
        """Called between two steps."""


class EngineLoop:
    """Runs an engine on messages; `send` takes its own, on the loop's thread."""

    def __init__(self, loaded: LoadedEngine, send: Callable[[FromEngine], None]) -> None:
        self.loaded = loaded
        self._send = send
        self._inbox: queue.SimpleQueue[ToEngine | _Queue | _Call] = queue.SimpleQueue()
        self._compilers: ThreadPoolExecutor | None = None
        self._compiling: set[str] = set()  # ids; one that ended meanwhile is taken out
        self._lock = threading.Lock()
        self._timelines: dict[
            str, RequestTimeline
        ] = {}  # of unfinished requests that came by message
        self._looks: deque[LookAt] = (
            deque()
        )  # one is answered between two steps: looking must not slow others
        self._calls: deque[Callable[[Engine], None]] = deque()
        self.pushes: Pushes | None = None  # where this engine's blocks can be sent on
        self.block_counts: Mapping[
            str, int
        ] = {}  # of those that others send, by what becomes of them
        self._stopped = False
        self.pace: Pace | None = None

    def put(self, message: ToEngine) -> None:
        """Hand a message to the loop, from any thread.

        Grammars are compiled by others first, so that steps go on.
        """
        if isinstance(message, Add) and message.sampling_params.constrained:
            with self._lock:
                self._compiling.add(message.request_id)
                self._compilers = self._compilers or ThreadPoolExecutor(
                    GRAMMAR_THREADS, "twinphase-grammar"
                )
            self._compilers.submit(self._compile, message)
            return
        if isinstance(message, End):
            with self._lock:
                self._compiling.discard(message.request_id)
        self._inbox.put(message)

    def between_steps(self, function: Callable[[Engine], None]) -> None:
        """Have the loop's thread call `function` between two steps, from any thread; it is to be short."""
        self._inbox.put(_Call(function))

    def run(self) -> None:
        """Serve until `Stop`; what the engine raises ends it."""
        engine = self.loaded.engine
        gc.collect()
        # or the collector goes through the whole model's objects in the middle of a step
        gc.freeze()
        try:
            while not self._stopped:
                self._drain(engine)
                if self._looks:
                    self._look(engine, self._looks.popleft())
                for _ in range(len(self._calls)):
                    self._calls.popleft()(engine)
                if engine.has_work and not self._stopped:
                    self._step(engine)
                if self.pushes is not None:
                    self.pushes.progress()
                self._tell_blocks(engine)
        finally:
            if self._compilers is not None:
                self._compilers.shutdown(wait=False, cancel_futures=True)

    def _step(self, engine: Engine) -> None:
        result = engine.step()
        self._tell_blocks(
            engine
        )  # before who waits for an end hears of it, and sends the next one after it
        self._send(StepNews(self._news(engine, result), _stats(engine, result, self.block_counts)))
        engine.ledger.end_text(engine.clock(), len(result.batch.scheduled) == 1)
        if self.pace is None:
            self.pace = self.loaded.settle_pace()
        elif self.pace.chosen and engine.ledger.num_steps % PACE_STEPS == 0:
            self.loaded.choose_pace()

    def _drain(self, engine: Engine) -> None:
        """Take all waiting messages; without work, wait for one."""
        while not self._stopped:
            try:
                message = self._inbox.get(block=not (engine.has_work or self._looks or self._calls))
            except queue.Empty:
                return
            self._take(engine, message)

    def _take(self, engine: Engine, message: ToEngine | _Queue | _Call) -> None:
        if isinstance(message, Add):
            self._add(engine, _Queue(message, None))
        elif isinstance(message, _Queue):
            with self._lock:
                wanted = message.add.request_id in self._compiling
                self._compiling.discard(message.add.request_id)
            if wanted:
                self._add(engine, message)
        elif isinstance(message, End):
            self._end(engine, message)
        elif isinstance(message, LookAt):
            self._looks.append(message)
        elif isinstance(message, _Call):
            self._calls.append(message.function)
        elif isinstance(message, WatchBlocks):
            number, hashes = engine.scheduler.kv_cache.prefix_cache.watch()
            self._send(BlocksChanged(number, hashes, whole=True))
        elif isinstance(message, HandOver) and self.pushes is not None:
            self.pushes.hand_over(message.to)
        elif isinstance(message, ReadAtMost):
            engine.read_at_most(message.num_tokens)
        elif isinstance(message, Stop):
            self._stopped = True

    def _compile(self, add: Add) -> None:
        with self._lock:
            if add.request_id not in self._compiling:  # its client left while it waited
                return
        try:
            constraint = self.loaded.text.constraint(add.sampling_params, add.prompt_token_ids)
            self._inbox.put(_Queue(add, constraint))
        except TwinphaseError as error:
            self._inbox.put(_Queue(add, None, error))
        except (KeyboardInterrupt, SystemExit):
            raise
        except (
            BaseException
        ) as error:  # a compiler's bug, a panic included, is one request's misfortune
            cause = f"The structured output could not be compiled: {type(error).__name__}: {error}."
            self._inbox.put(_Queue(add, None, TwinphaseError(" ".join(cause.split())[:300])))

    def _add(self, engine: Engine, queued: _Queue) -> None:
        add = queued.add
        timeline = RequestTimeline(add.arrival)
        timeline.mark(IntervalKind.TOKENIZE, max(add.arrival, add.tokenized))
        try:
            if queued.error is not None:
                raise queued.error
            if add.push_to is not None and self.pushes is None:
                raise InvalidRequestError(
                    "This engine cannot send KV blocks on.", "Start it as a worker of a cluster."
                )
            request = Request(
                add.request_id,
                add.prompt_token_ids,
                add.sampling_params,
                add.arrival,
                add.priority,
                add.cache_salt,
                add.tenant,
                add.weight,
            )
            request.constraint = queued.constraint
            request.prediction_token_ids = add.prediction_token_ids
            request.output_token_ids = list(add.output_token_ids)
            request.fresh = add.fresh
            if queued.constraint is not None:
                timeline.mark(
                    IntervalKind.QUEUE, max(timeline.end, engine.clock()), reason="grammar"
                )
            engine.add_request(request, timeline=timeline)
            if add.push_to is not None and self.pushes is not None:
                self.pushes.begin(request, add.push_to)
        except TwinphaseError as error:
            self._send(refusal(add.request_id, error))
            return
        self._timelines[add.request_id] = timeline
        self._send(Accepted(add.request_id))

    def _end(self, engine: Engine, message: End) -> None:
        request = engine.scheduler.get(message.request_id)
        timeline = self._timelines.pop(message.request_id, None)
        if request is None or timeline is None:
            return
        engine.finish(message.request_id, message.reason)
        num_prefilled = min(request.most_computed_tokens, len(request.prompt_token_ids))
        end = self._finished(engine, request, timeline)
        self._send(
            StepNews(
                [News(request.request_id, [], num_prefilled, request.num_cached_tokens, [], end)]
            )
        )

    def _look(self, engine: Engine, message: LookAt) -> None:
        try:
            self._send(self._seen(engine, message))
        except Exception as error:  # an explanation that fails must not cost anybody an answer
            self._send(
                Refused(
                    message.number, "TwinphaseError", f"It could not be explained: {error}.", ""
                )
            )

    def _seen(self, engine: Engine, message: LookAt) -> Seen:
        if message.timeline is not None and message.counts is not None:
            return Seen(
                message.number,
                message.timeline,
                self.loaded.explain(message.counts, message.timeline),
            )
        known = engine.scheduler.get(message.request_id)
        if known is None:
            return Seen(message.number, None, None)
        timeline = engine.timelines[message.request_id].copy()
        timeline.compact()
        return Seen(message.number, timeline, self.loaded.explain(known.counts(), timeline))

    def _tell_blocks(self, engine: Engine) -> None:
        changes = engine.scheduler.kv_cache.prefix_cache.changes
        if changes is not None:
            number, stored, evicted = changes.take()
            if stored or evicted:
                self._send(BlocksChanged(number, stored, evicted))

    def _news(self, engine: Engine, result: StepResult) -> list[News]:
        finished = {request.request_id: request for request in result.finished}
        news = []
        for share in result.batch.scheduled:
            name = share.request_id
            if name not in self._timelines:
                continue
            request = finished.get(name)
            end = self._finished(engine, request, self._timelines.pop(name)) if request else None
            tokens = result.output.token_ids.get(name, [])
            logprobs = result.output.logprobs.get(name, [])
            scored = result.output.prompt_logprobs.get(name)
            news.append(
                News(
                    name,
                    tokens,
                    share.num_prefilled,
                    share.num_cached_tokens,
                    logprobs,
                    end,
                    scored,
                )
            )
        return news

    def _finished(self, engine: Engine, request: Request, timeline: RequestTimeline) -> Finished:
        timeline.compact()
        self.loaded.doubt_ceilings(timeline)
        assert request.finish_reason is not None, "it has finished"
        counts = replace(
            request.counts(), sampling_params=None
        )  # what it asked for, the front end knows
        return Finished(request.finish_reason, counts, timeline, engine.cost_model.prices)


def refusal(about: str | int | None, error: TwinphaseError) -> Refused:
    """The message that a request (by id), a question (by number) or the model (None) was refused."""
    return Refused(about, type(error).__name__, error.cause, error.fix)


def engine_facts(loaded: LoadedEngine, pace: Pace | None) -> EngineFacts:
    """What to tell about a loaded engine."""
    config = loaded.config
    warm = loaded.warm_timeline
    prompt, ttft, tpot = (warm.prefill.tokens, warm.ttft, warm.tpot) if warm else (0, None, None)
    return EngineFacts(
        config,
        loaded.engine.shape,
        measured_ceilings(config),
        prompt,
        ttft,
        tpot,
        0,
        pace,
        loaded.engine.cost_model.prices,
        loaded.checkpoint.fingerprint,
        loaded.backend.kv_fingerprint,
        ranks=loaded.ranks,
    )


def _stats(engine: Engine, result: StepResult, block_counts: Mapping[str, int]) -> StepStats:
    record = result.record
    scheduler = engine.scheduler
    kv_cache = engine.scheduler.kv_cache
    decode_seconds = record.seconds if record.num_decodes else 0.0
    if record.num_decodes and record.prefill_ids and record.predicted > 0:
        alone = engine.cost_model.seconds(result.batch.decode_work)
        decode_seconds *= min(1.0, alone / record.predicted)
    drafted = [share for share in result.batch.decodes if share.num_drafts]
    accepted = [result.output.num_accepted(share) for share in drafted]
    return StepStats(
        start=record.start,
        end=record.end,
        prefill_seconds=record.seconds - decode_seconds,
        decode_seconds=decode_seconds,
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
    )
