"""Runs a load: sends each request when it is due, watches the client, and keeps all raw data.

A run is void if the client was the limit (`twinphase_bench/client/health.py`).
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from twinphase import Arrivals, Closed, Progress, TwinphaseError
from twinphase.phases.observation import Observation
from twinphase.phases.slo import Goodput, Slos, goodput
from twinphase.phases.statistics import percentile
from twinphase_bench.client.client import CLIENT_LIMIT, SEND_NOW, allow_connections
from twinphase_bench.client.health import (
    HEARTBEAT_SECONDS,
    Beat,
    ClientHealth,
    lags_of_stamps,
    watch_loop,
)
from twinphase_bench.client.sse import failure_kind
from twinphase_bench.load.workload import LoadRequest, Workload
from twinphase_bench.targets.target import LoadTarget, TargetFacts

# An open loop does not send requests above this limit, and the run is then void.
MAX_IN_FLIGHT = 4096
# The first request of an open loop is due this much after the start, so that its task is ready.
START_DELAY_SECONDS = 0.05


class LoadFailedError(TwinphaseError):
    """The target fails before anything is measured."""


@dataclass
class LoadResult:
    """The parameters of a load, and every request as the client saw it.

    Times and latencies are seconds.

    Attributes:
        facts: facts of the target.
        workload, arrivals: descriptions of one line each.
        rate: requests per second; None for a closed loop, or if all were due at once.
        concurrency: requests in flight of a closed loop.
        observations: observations of the measured requests, in the order of their scheduled times.
        num_requests: number of requests in the workload; there are fewer observations if a limit
            ended the load.
        client: how well the client kept up.
        slos: service levels for goodput.
        conditions: conditions of the workload, for the report.
        notes: facts that a reader needs to judge the load.
    """

    facts: TargetFacts
    workload: str
    arrivals: str
    rate: float | None
    concurrency: int | None
    observations: list[Observation]
    num_requests: int
    client: ClientHealth
    slos: Slos = field(default_factory=Slos)
    conditions: dict[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def succeeded(self) -> list[Observation]:
        return [seen for seen in self.observations if seen.succeeded]

    @property
    def failures(self) -> dict[str, int]:
        """Failed requests by kind, the most frequent first."""
        kinds = (
            failure_kind(seen.error) or "no output"
            for seen in self.observations
            if not seen.succeeded
        )
        return dict(Counter(kinds).most_common())

    @property
    def seconds(self) -> float:
        """Seconds from the first scheduled send time to the last end."""
        seen = self.observations
        return max(one.ended for one in seen) - min(one.intended for one in seen) if seen else 0.0

    @property
    def offered(self) -> float | None:
        """Due requests per second (of the actual random gaps); None for a closed loop."""
        if self.concurrency is not None or len(self.observations) < 2:
            return None
        window = self.observations[-1].intended - self.observations[0].intended
        return (len(self.observations) - 1) / window if window > 0 else None

    def _known(self, latency: str) -> list[float]:
        return [value for seen in self.succeeded if (value := getattr(seen, latency)) is not None]

    @property
    def ttft(self) -> list[float]:
        return self._known("ttft")

    @property
    def tpot(self) -> list[float]:
        return self._known("tpot")

    @property
    def ttfo(self) -> list[float]:
        return self._known("ttfo")

    @property
    def e2e(self) -> list[float]:
        return self._known("e2e")

    @property
    def itl(self) -> list[float]:
        """The gaps of all requests, pooled."""
        return [gap for seen in self.succeeded for gap in seen.itl]

    def _tokens(self, *kinds: str) -> int | None:
        """Tokens of successful requests by the target's count; None if a count is missing."""
        counts = [getattr(seen, f"num_{kind}_tokens") for seen in self.succeeded for kind in kinds]
        return sum(counts) if counts and None not in counts else None

    @property
    def num_output_tokens(self) -> int | None:
        return self._tokens("output")

    @property
    def request_rate(self) -> float:
        """Successful requests per second."""
        return len(self.succeeded) / self.seconds if self.seconds > 0 else math.nan

    @property
    def output_rate(self) -> float | None:
        """Output tokens of successful requests per second."""
        return self._per_second(self._tokens("output"))

    @property
    def total_rate(self) -> float | None:
        """Prompt tokens (including cached) and output tokens of successful requests per second."""
        return self._per_second(self._tokens("prompt", "output"))

    def _per_second(self, count: int | None) -> float | None:
        return None if count is None or self.seconds <= 0 else count / self.seconds

    @property
    def goodput(self) -> Goodput | None:
        """The requests that met all service levels; None without service levels."""
        return goodput(self.observations, self.slos, self.seconds) if self.slos.bounds else None

    @property
    def void(self) -> tuple[str, ...]:
        """The reasons why the figures are void; empty if they are valid."""
        return self.client.faults(percentile(self.ttft, 50), percentile(self.itl, 50))


async def run_load(
    target: LoadTarget,
    workload: Workload,
    arrivals: Arrivals,
    *,
    slos: Slos | None = None,
    send_seconds: float = math.inf,
    progress: Progress = lambda what, done, total: None,
) -> LoadResult:
    """Warm up, then send a workload.

    Args:
        target: receives each request `lead` seconds before it is due; in a closed loop, a target
            with a lead gets `SEND_NOW` as the time. Replies are parsed after the load.
        workload: requests to send.
        arrivals: send times.
        slos: service levels for goodput.
        send_seconds: send nothing after this time.
        progress: called with the number of requests that have ended.

    Raises:
        InvalidRequestError: the workload does not fit the target, or lacks the times that
            `arrivals` needs.
        LoadFailedError: a warm-up request failed.
    """
    workload.require_fit(target.facts.context_length)
    offsets = arrivals.offsets([request.timestamp for request in workload.requests])
    allow_connections(min(MAX_IN_FLIGHT, len(workload.requests)))
    await _warm_up(target, workload, progress)
    client = ClientHealth()
    sender = _Sender(target, workload.requests, client, progress)
    if isinstance(arrivals, Closed):
        beats = await _watched(client, sender.closed(arrivals.concurrency, send_seconds))
    else:
        beats = await _watched(client, sender.open(offsets, send_seconds))
    observations = sender.read()
    _judge(client, observations, beats)
    return LoadResult(
        facts=target.facts,
        workload=workload.description,
        arrivals=str(arrivals),
        rate=_rate(arrivals, offsets),
        concurrency=arrivals.concurrency if isinstance(arrivals, Closed) else None,
        observations=observations,
        num_requests=len(workload.requests),
        client=client,
        slos=slos or Slos(),
        conditions={**workload.conditions, "arrivals": str(arrivals)},
        notes=(*workload.notes, *target.notes),
    )


async def _warm_up(target: LoadTarget, workload: Workload, progress: Progress) -> None:
    """Send unmeasured requests first, so that the server is warm."""
    for number, request in enumerate(workload.warm_up):
        progress("warm-up", number, len(workload.warm_up))
        seen = await target.send(request.prompt, request.max_tokens, time.perf_counter())
        if seen.error:
            raise LoadFailedError(
                f"{target.facts.name} failed on a warm-up request: {seen.error}.", "See its log."
            )


async def _watched(client: ClientHealth, sending: Coroutine[Any, Any, None]) -> list[Beat]:
    """Send without garbage collection, and record the client's CPU time and heartbeats."""
    beats: list[Beat] = []
    with _without_garbage_collection():
        began = time.perf_counter()
        cpu = time.thread_time()
        heart = asyncio.ensure_future(watch_loop(beats))
        try:
            await sending
            # The last timestamps need a later heartbeat.
            await asyncio.sleep(2 * HEARTBEAT_SECONDS)
        finally:
            client.cpu = (time.thread_time() - cpu) / (time.perf_counter() - began)
            heart.cancel()
    return beats


def _judge(
    client: ClientHealth, observations: Sequence[Observation], beats: Sequence[Beat]
) -> None:
    """Record send lags, delays of timestamps, and connections that this machine refused."""
    client.send_lags = [seen.lag for seen in observations if not seen.connected_late]
    client.connected_late = sum(seen.connected_late for seen in observations)
    client.loop_lags = lags_of_stamps(
        beats, [moment for seen in observations for moment in seen.token_times]
    )
    refused = [
        seen.error.partition(": ")[2]
        for seen in observations
        if failure_kind(seen.error) == CLIENT_LIMIT
    ]
    client.refused = dict(Counter(refused))


@dataclass
class _Sender:
    """Sends a workload and collects the replies, which the target parses afterwards.

    `replies` are by the request's index in the workload.
    """

    target: LoadTarget
    requests: Sequence[LoadRequest]
    client: ClientHealth
    progress: Progress
    replies: dict[int, Any] = field(default_factory=dict)
    in_flight: int = 0

    async def open(self, offsets: Sequence[float], send_seconds: float) -> None:
        """Send each request at its time, independently of the others."""
        began = time.perf_counter() + START_DELAY_SECONDS + self.target.lead
        tasks = []
        for number, offset in enumerate(offsets):
            if offset > send_seconds:
                break
            await asyncio.sleep(began + offset - self.target.lead - time.perf_counter())
            if self.in_flight >= MAX_IN_FLIGHT:
                self.client.not_sent += 1
                continue
            tasks.append(asyncio.ensure_future(self._one(number, began + offset)))
        await asyncio.gather(*tasks)

    async def closed(self, concurrency: int, send_seconds: float) -> None:
        """Send each request when another one has ended."""
        waiting = iter(range(len(self.requests)))
        end = time.perf_counter() + send_seconds

        async def user() -> None:
            for number in waiting:
                if time.perf_counter() > end:
                    return
                await self._one(number, SEND_NOW if self.target.lead else time.perf_counter())

        await asyncio.gather(*(user() for _ in range(min(concurrency, len(self.requests)))))

    async def _one(self, number: int, intended: float) -> None:
        request = self.requests[number]
        self.in_flight += 1
        try:
            self.replies[number] = await self.target.start(
                request.prompt, request.max_tokens, intended
            )
        # Targets must not raise; if one does, only this request is lost.
        except Exception as error:
            self.replies[number] = _broken(error, intended)
        finally:
            self.in_flight -= 1
        self.progress("load", len(self.replies), len(self.requests))

    def read(self) -> list[Observation]:
        """The observations by their scheduled times; ties are in the workload's order."""
        replies = [self.replies[number] for number in sorted(self.replies)]
        return sorted((self._observed(reply) for reply in replies), key=lambda one: one.intended)

    def _observed(self, reply: Any) -> Observation:
        try:
            return reply if isinstance(reply, Observation) else self.target.read(reply)
        except Exception as error:
            return _broken(error, reply.intended)


def _broken(error: Exception, intended: float) -> Observation:
    now = time.perf_counter()
    moment = now if math.isnan(intended) else intended
    return Observation(
        "", moment, moment, ended=now, error=f"exception: {type(error).__name__}: {error}"
    )


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, because a full collection takes longer than a token."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _rate(arrivals: Arrivals, offsets: Sequence[float] | None) -> float | None:
    """The requested rate, or the trace's own."""
    rate: float | None = getattr(arrivals, "rate", None)
    if rate is None and offsets and offsets[-1] > 0:
        return (len(offsets) - 1) / offsets[-1]
    return None if rate is None or math.isinf(rate) else rate
