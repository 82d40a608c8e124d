"""The server's state: engine, limits, requests in flight, health, and a watchdog.

`app.py` and `generation.py` handle HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from time import perf_counter
from typing import Any, Protocol

from msgspec.structs import replace

from twinphase.engine.frontends.async_engine import AsyncEngine
from twinphase.engine.frontends.text import SamplingDefaults
from twinphase.engine.process.host import Host
from twinphase.engine.process.messages import EngineFacts, StepStats
from twinphase.engine.process.status import PhaseTimes, WorkerStatus, limits_of
from twinphase.errors import InvalidRequestError, ModelNotFoundError, TwinphaseError
from twinphase.phases.cost import CostModel
from twinphase.server.access import Access, Admission, Ticket, shutting_down
from twinphase.server.answers import Choice
from twinphase.server.config import ServerConfig
from twinphase.server.live.feed import Feed
from twinphase.server.logs import fields_of
from twinphase.server.metrics import Metrics
from twinphase.server.observe import Timelines
from twinphase.server.tracing import RequestTracer, make_tracer
from twinphase.weights.catalogue import other_names

WATCH_INTERVAL_SECONDS = 0.1
LOG_INTERVAL_SECONDS = 10.0
LOG = logging.getLogger("twinphase.server")
# What a server does by its model's task, what it cannot do, and the remedy.
SERVED = {"generate": "generate text", "embed": "embed texts", "score": "score pairs of texts"}
NOT_DONE = {
    "generate": "writes none",
    "embed": "gives no embeddings here",
    "score": "scores no texts here",
}
FIXES = {
    "embed": "Use /v1/embeddings, or /v1/score.",
    "score": "Use /v1/rerank or /v1/score.",
    "to embed": "Start a server with --task embed, or of an encoder, such as all-minilm.",
    "to score": "Start a server of a reranker, such as ms-marco-minilm or qwen3-reranker, or "
    "of a model that embeds.",
}


class InFlight(Protocol):
    """An HTTP request whose last byte was not sent yet (`generation.py`)."""

    def check(self, now: float) -> None: ...

    def expire(self, error: TwinphaseError) -> None: ...


class StatsLog:
    """Formats a log line about the steps of the last seconds."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._prefill = self._decode = 0
        self._last: StepStats | None = None

    def add(self, stats: StepStats) -> None:
        self._since = self._since if self._since is not None else stats.start
        self._prefill += stats.prefill_tokens
        self._decode += stats.decode_tokens
        self._last = stats

    def line(self, now: float) -> str | None:
        """A line for every `LOG_INTERVAL_SECONDS` with work; otherwise None."""
        if self._since is None or self._last is None or now - self._since < LOG_INTERVAL_SECONDS:
            return None
        seconds = now - self._since
        stats = self._last
        hits = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
        line = (
            f"prefill {self._prefill / seconds:,.0f} tok/s, decode {self._decode / seconds:,.0f} "
            "tok/s; "
            f"{stats.num_running} running, {stats.num_waiting} waiting; KV cache "
            f"{stats.kv_cache_usage:.0%}, "
            f"prefix hits {hits:.0%}"
        )
        self._since = None
        self._prefill = 0
        self._decode = 0
        return line


class Service:
    """The state that all requests share.

    Attributes:
        model: name that the server was started with.
        model_names: names that the server lists; replies have the first one.
        other_names: names that clients may also use.
        engine: engine; None before `start`.
        tracer: tracer for OpenTelemetry, if configured.
        in_flight: requests whose last byte was not sent yet.
        stalled: whether the engine had work but made no step for too long.
        feed: feed of the live page.
    """

    def __init__(self, host: Host, model: str, config: ServerConfig) -> None:
        self.config = config
        self.host = host
        host.text.generation = config
        self.model = model
        self.model_names = list(config.served_model_name) or [model]
        self.other_names = frozenset(() if config.served_model_name else other_names(model))
        self.engine: AsyncEngine | None = None
        self.access = Access(config.keys)
        self.admission = Admission(config)
        weights = {name: tenant.weight for name, tenant in self.admission.tenants.items() if name}
        self.metrics = Metrics(
            self.model_names[0], vllm_aliases=config.vllm_metrics, tenants=weights
        )
        self.tracer: RequestTracer | None = (
            make_tracer(config.otlp_endpoint) if config.otlp_endpoint else None
        )
        self.timelines = Timelines(config.kept_timelines)
        self.in_flight: set[InFlight] = set()
        self.stalled = False
        self.drained = asyncio.Event()
        self.feed = Feed(self)
        self._busy_since: float | None = None
        self._num_restarts = 0
        self._prices: tuple[float, ...] = ()
        self._log = StatsLog()
        self._times = PhaseTimes()
        self._drain_until: float | None = None
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the engine and the watchdog; needs a running event loop."""
        self.engine = AsyncEngine(self.host, on_step=self._on_step)
        loop = asyncio.get_running_loop()
        self._watcher = loop.create_task(self._watch())
        loop.run_in_executor(None, self._warm_up)  # This runs while the engine loads.

    def _warm_up(self) -> None:
        """Build tokenizer and template, so that the first request does not wait for them."""
        try:
            self.host.text.encode(
                "warm-up"
                if self.host.task != "generate"
                else [{"role": "user", "content": "warm-up"}],
                None,
            )
        except TwinphaseError as error:
            LOG.warning("%s Chats will be refused.", error.cause)

    async def ready(self) -> None:
        """Wait until the engine takes requests; raises an error if it refused the model."""
        while self.stage != "ready":
            if self.failure is not None:
                raise self.failure
            await asyncio.sleep(WATCH_INTERVAL_SECONDS)

    async def stop(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if self.engine is not None:
            await asyncio.to_thread(self.engine.close)
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    @property
    def facts(self) -> EngineFacts | None:
        return self.engine.facts if self.engine else None

    @property
    def max_model_len(self) -> int | None:
        return self.engine.max_model_len if self.engine else None

    @property
    def stage(self) -> str:
        """The state "ready", or the reason why the server takes no requests."""
        if self.admission.draining:
            return "draining"
        if self.stalled:
            return "stalled"
        if self.failure is not None:
            return "failed"
        if self.engine is not None and self.engine.is_running:
            return "ready"
        progress = self.engine.progress if self.engine else None
        if progress is None:
            return "starting"
        return (
            f"{progress.stage} ({int(progress.done)} of {progress.total})"
            if progress.total
            else progress.stage
        )

    @property
    def failure(self) -> TwinphaseError | None:
        """The error that prevents the model from ever loading."""
        return self.host.failure.error() if self.host.failure else None

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Default sampling values of requests.

        Raises:
            CheckpointError: --generation-config names no valid file.
        """
        return self.host.text.sampling_defaults

    def require_engine(self) -> AsyncEngine:
        """The engine, or an error with the reason why it takes no requests."""
        assert self.engine is not None, "the server has started"
        if not self.engine.is_running:
            raise self.engine.unavailable()
        return self.engine

    def admit(self, tenant: str, num_requests: int) -> Ticket:
        """Admit a request with `num_requests` requests to the engine, as `Admission.enter`."""
        facts = self.require_engine().facts
        assert facts is not None, "the engine is running"
        self.admission.num_seats = facts.config.max_num_seqs
        return self.admission.enter(tenant, num_requests)

    def cost_model(self) -> CostModel | None:
        """The step times that the engine has learned so far; None if they are unknown."""
        facts = self.facts
        prices = self._prices or (facts.prices if facts else ())
        if facts is None or facts.shape is None or not prices:
            return None
        return CostModel(prices, facts.shape.windowed_share, facts.shape.window)

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served; a request without a model is accepted."""
        if name is not None and name not in self.model_names and name not in self.other_names:
            names = ", ".join(self.model_names)
            raise ModelNotFoundError(
                f"The model {name[:80]!r} is not served here.", f"Use one of: {names}."
            )

    def check_task(self, task: str, model: str | None) -> None:
        """Refuse another model, or a task that the model was not loaded for.

        A model that embeds can also score pairs, by the cosine of their vectors.
        """
        own = self.host.task
        if task != own and (task, own) != ("score", "embed"):
            raise InvalidRequestError(
                f"{self.model_names[0]} is served to {SERVED[own]}; it {NOT_DONE[task]}.",
                FIXES.get(own) or FIXES[f"to {task}"],
            )
        self.check_model(model)

    def check_n(self, n: int | None, name: str = "n") -> None:
        if n is not None and n > self.config.max_n:
            raise InvalidRequestError(
                f"{name} is {n}; {self.config.max_n} answers are allowed.", "Ask for fewer."
            )

    def drain(self, seconds: float) -> None:
        """Stop admitting; set `drained` when all requests have finished, or after `seconds`."""
        self.admission.draining = True
        self._drain_until = perf_counter() + seconds

    def observe_begin(self, choice: Choice) -> None:
        self.timelines.begin(choice)
        if self.config.log_requests:
            LOG.info(
                "Request accepted: %s", choice.record, extra={"fields": fields_of(choice.record)}
            )

    def observe_end(self, choice: Choice, headers: Mapping[bytes, bytes]) -> None:
        self.feed.finished(choice)
        self.timelines.end(choice)
        record = choice.record
        self._prices = record.prices or self._prices
        if self.config.log_requests:
            # Without an end, the client left or the engine died.
            how = "ended" if record.has_ended else "cut off"
            LOG.info("Request %s: %s", how, record, extra={"fields": fields_of(record)})
        self.metrics.ended(record, choice.num_reasoning_tokens)
        if self.tracer is not None and record.has_ended:
            self.tracer.trace(
                record,
                choice.job.operation,
                choice.job.model,
                choice.num_reasoning_tokens,
                wall_clock_offset=time.time() - perf_counter(),
                headers=headers,
            )

    def _on_step(self, stats: StepStats) -> None:
        # The engine learns the cost of a long prompt's context long before the request ends.
        self._prices = stats.prices or self._prices
        self.admission.step(stats.end, stats.work)
        self.metrics.step(stats)
        self._times.add(stats)
        if self.config.log_stats:
            self._log.add(stats)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_SECONDS)
            try:
                self._look_after(perf_counter())
            except Exception:
                LOG.exception("The watch over requests failed")

    def _look_after(self, now: float) -> None:
        for generation in list(self.in_flight):
            generation.check(now)
        if self._drain_until is not None and (not self.in_flight or now > self._drain_until):
            for generation in list(self.in_flight):
                generation.expire(shutting_down())
            self.drained.set()
            self.feed.close()
        self.feed.check(now)
        engine = self.engine
        if engine is None:
            return
        self._watch_engine(engine, now)

    def _watch_engine(self, engine: AsyncEngine, now: float) -> None:
        busy = engine.is_running and engine.num_unfinished > 0
        self._busy_since = (self._busy_since or now) if busy else None
        last_step = max(engine.stats.end if engine.stats else 0.0, engine.last_embedded)
        was_stalled = self.stalled
        limit = self.config.stall_timeout
        self.stalled = (
            self._busy_since is not None and now - max(self._busy_since, last_step) > limit
        )
        if self.stalled and not was_stalled:
            LOG.error("The engine made no step for %.0f s; it is restarted.", limit)
            engine.host.kill()
        if engine.host.num_restarts > self._num_restarts:
            self._num_restarts = engine.host.num_restarts
            LOG.error("%s", engine.host.last_death)
            self.metrics.engine_restarted(totals_last=engine.host.totals_last)
        self.metrics.engine_up(engine.is_running and not self.stalled)
        if not busy:
            self.metrics.idle()
        if (line := self._log.line(now)) is not None:
            LOG.info(line)

    def workers(self) -> list[WorkerStatus]:
        """The engines of this server; a lone engine is called `engine`."""
        if found := self.host.workers():
            return found
        last = self.engine.stats if self.engine else None
        stats = last if self.engine and self.engine.num_unfinished else None
        state = self.stage
        status = WorkerStatus(
            "engine",
            "both",
            "localhost",
            getattr(self.host, "pid", None),
            state,
            running=stats.num_running if stats else 0,
            waiting=stats.num_waiting if stats else 0,
            kv_cache_usage=stats.kv_cache_usage if stats else 0.0,
            restarts=self.host.num_restarts,
            ranks=self.facts.ranks if self.facts else [],
        )
        limits = limits_of(self.facts, last, "localhost")
        return [replace(status, **self._times.fields(perf_counter()), **limits)]

    def state(self) -> dict[str, Any]:
        return {"status": self.stage, "running": self.admission.num_requests}
