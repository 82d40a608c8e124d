"""Raise a load until the target is saturated, and stop by itself.

An open-loop load is *saturated* when one of these is true, in this order:
- more than a tenth of its requests fail;
- it is served more slowly than offered: in the last two thirds of sending, fewer requests ended than were sent, by more
  than a tenth of those sent and by more than two standard deviations of what is in flight anyway (n independent users
  vary by sqrt(n) at each end of the time);
- the queue grows while it runs: over the last two thirds, TTFT grows by more than 25 ms per second of sending, with the
  lower end of the interval of its Theil-Sen slope. Where requests come 1 + x times as fast as they are served, each
  second of sending adds about x seconds of queue.
The first third is left out: it begins with an idle server. Sending must take five times as long as a request alone;
a shorter load whose requests do not fail tells nothing of saturation.

A closed-loop load is saturated when its output rate is less than 1.05 of the best before it.

A void load, of which the client was the limit, tells nothing. A load that seems saturated is measured again with other
prompts and gaps, and counts only if it is saturated both times. Each load is warmed up at its own concurrency.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from twinphase.bench.load.arrivals import Arrivals, Closed, Constant, Poisson
from twinphase.bench.load.run import LoadResult
from twinphase.bench.load.workload import Workload
from twinphase.bench.progress import Progress

__all__ = ["LoadPoint", "SaturationSearch", "SearchPlan", "cannot_tell", "find_saturation", "saturation_reason"]

FAILED_SHARE = 0.1
SERVED_SHARE = 0.9
DEVIATIONS = 2.0
GROWTH = 0.025  # seconds of TTFT per second of sending
CONFIDENCE = 0.98  # of the interval of the slope: the lower end is one-sided 0.99
FEWEST_FOR_GROWTH = 8  # requests
WINDOW_OF_E2E = 5
WINDOW_MARGIN = 1.2  # random gaps end a little before or after the time asked for
GAIN = 1.05
ALONE_REQUESTS = 5
MIN_REQUESTS, MAX_REQUESTS = 20, 2000  # of a load, whatever the seconds
MAX_POINTS = 14
REFINEMENTS = 2  # rates tried between the last that was served and the first that was not
MAX_WARM_UP = 64  # requests
WARM_UP_TOKENS = 8
Measure = Callable[..., Awaitable[LoadResult]]  # (workload, arrivals, warm_up_at_once)
MakeWorkload = Callable[[int, int], Workload]  # (number of requests, seed): each seed gives other prompts


@dataclass(frozen=True)
class SearchPlan:
    """How a load is raised."""

    closed: bool = False  # raise the requests in flight, from 1; otherwise the rate
    seconds: float = 30.0  # of sending at each load; more where requests take long
    poisson: bool = True  # random gaps; even ones otherwise
    seed: int = 0  # of gaps and prompts

    @property
    def mode(self) -> str:
        return "concurrency" if self.closed else "rate"


@dataclass(frozen=True)
class LoadPoint:
    """One load of a search."""

    value: float  # its rate or concurrency
    result: LoadResult
    saturated: str = ""  # why it counts as saturated; "" if it does not
    undecided: str = ""  # why that cannot be told; "" if it can

    @property
    def served(self) -> bool:
        return not self.saturated and not self.undecided


@dataclass
class SaturationSearch:
    """What a search found."""

    plan: SearchPlan
    alone: LoadResult  # requests one at a time, before the search
    points: list[LoadPoint] = field(default_factory=list)  # in the order in which they were measured
    stopped: str = ""  # why it ended

    @property
    def ordered(self) -> list[LoadPoint]:
        """By rate or concurrency."""
        return sorted(self.points, key=lambda point: point.value)

    @property
    def saturated_at(self) -> float | None:
        """The lowest saturated value; None if saturation was not reached."""
        return min((point.value for point in self.points if point.saturated), default=None)

    @property
    def capacity(self) -> float | None:
        """The highest value served below every saturated one; None if there is none."""
        limit = math.inf if self.saturated_at is None else self.saturated_at
        return max((point.value for point in self.points if point.served and point.value < limit), default=None)

    @property
    def best_goodput(self) -> LoadPoint | None:
        """The load of the highest goodput; None without service levels, or without a load that can be used."""
        rates = {
            index: point.result.goodput.rate
            for index, point in enumerate(self.points)
            if not point.result.void and point.result.goodput and point.result.goodput.rate is not None
        }
        return self.points[max(rates, key=lambda index: rates[index] or 0.0)] if rates else None


def cannot_tell(result: LoadResult, alone: float) -> str:
    """Why an open-loop load tells nothing of saturation, given the E2E of a request alone; "" if it does."""
    if result.void:
        return "the client was the limit"
    if not result.observations:
        return "nothing was sent"
    window = _window(result)
    if window < WINDOW_OF_E2E * alone and not _failing(result):
        return f"{window:.3g} s of sending are less than {WINDOW_OF_E2E} times the {alone:.3g} s of a request alone"
    return ""


def saturation_reason(result: LoadResult) -> str:
    """Why an open-loop load, of which it can be told, was more than the target can serve; "" if it was not."""
    if failing := _failing(result):
        return failing
    seen, end = result.observations, result.observations[-1].intended
    middle = end - _window(result) * 2 / 3
    sent = sum(middle < one.intended <= end for one in seen)
    ended = sum(middle < one.ended <= end for one in seen)
    in_flight = sum(one.intended <= middle < one.ended for one in seen)
    noise = DEVIATIONS * math.sqrt(2 * max(1, in_flight))
    if sent - ended > max((1 - SERVED_SHARE) * sent, noise):
        return f"of {sent} requests sent in the last two thirds, only {ended} were served in that time"
    slope = _growth([(one.intended, one.ttft) for one in seen if one.intended > middle and one.ttft is not None])
    if slope > GROWTH:
        return f"TTFT grows by {1e3 * slope:.0f} ms or more per second of sending"
    return ""


def _growth(points: list[tuple[float, float]]) -> float:
    """Lower end of the interval of the slope of y over x; 0 of few points."""
    if len(points) < FEWEST_FOR_GROWTH:
        return 0.0
    from scipy.stats import theilslopes

    moments, ttfts = zip(*points, strict=True)
    return float(theilslopes(ttfts, moments, alpha=CONFIDENCE).low_slope)


def _window(result: LoadResult) -> float:
    return result.observations[-1].intended - result.observations[0].intended


def _failing(result: LoadResult) -> str:
    """Which requests failed, if too many; "" otherwise."""
    share = 1 - len(result.succeeded) / len(result.observations)
    kinds = ", ".join(f"{number} x {kind}" for kind, number in result.failures.items())
    return f"{share:.0%} of the requests failed ({kinds})" if share > FAILED_SHARE else ""


async def find_saturation(
    measure: Measure,
    make_workload: MakeWorkload,
    plan: SearchPlan,
    progress: Progress = lambda what, done, total: None,
) -> SaturationSearch:
    """Measure a request alone, then ever higher loads until one is too much; `measure` is `run_load` of a target."""
    alone = await measure(make_workload(ALONE_REQUESTS, plan.seed), Closed(1))
    search = SaturationSearch(plan, alone)
    if not alone.e2e:
        search.stopped = f"no request succeeded alone ({', '.join(alone.failures)})"
        return search
    runner = _Runner(measure, make_workload, search, progress, statistics.median(alone.e2e))
    value = 1.0 if plan.closed else 0.5 / runner.alone_seconds
    while not search.stopped:
        point = await runner.decide(value)
        at = f"at {plan.mode} {value:.4g}"
        if point.undecided:
            search.stopped = f"saturation {at} cannot be told: {point.undecided}"
        elif point.saturated:
            search.stopped = f"saturated {at}, twice: {point.saturated}"
        elif len(search.points) >= MAX_POINTS:
            search.stopped = f"{MAX_POINTS} loads were measured, and none was saturated"
        value *= 2
    if not plan.closed:
        await runner.refine()
    return search


@dataclass
class _Runner:
    """Measures the loads of a search."""

    measure: Measure
    make_workload: MakeWorkload
    search: SaturationSearch
    progress: Progress
    alone_seconds: float  # E2E of a request alone

    async def decide(self, value: float) -> LoadPoint:
        """Measure a load, and if it seems saturated once more; the point that decides."""
        first = await self._measure(value)
        if not first.saturated:
            return first
        second = await self._measure(value)
        if not second.saturated:
            again = f"the second time this could not be told: {second.undecided}"
            again = again if second.undecided else "it was not when measured again"
            why = f"it seemed saturated ({first.saturated}), but {again}"
            self.search.points[-2] = replace(first, saturated="", undecided=why)
        return second

    async def refine(self) -> None:
        """Rates between the last that was served and the first that was not."""
        for _ in range(REFINEMENTS):
            low, high = self.search.capacity, self.search.saturated_at
            if low is None or high is None or len(self.search.points) >= MAX_POINTS:
                return
            await self.decide(math.sqrt(low * high))

    async def _measure(self, value: float) -> LoadPoint:
        plan, points = self.search.plan, self.search.points
        self.progress(f"{plan.mode} {value:.4g}", len(points), MAX_POINTS)
        seed = plan.seed + 2 * (len(points) + 1)
        arrivals: Arrivals
        if plan.closed:
            arrivals, at_once = Closed(round(value)), value
            number = max(4 * round(value), math.ceil(plan.seconds / self.alone_seconds))
        else:
            arrivals = Poisson(value, seed) if plan.poisson else Constant(value)
            at_once = value * self.alone_seconds
            number = math.ceil(value * max(plan.seconds, WINDOW_MARGIN * WINDOW_OF_E2E * self.alone_seconds))
        workload = self._warmed(min(MAX_REQUESTS, max(MIN_REQUESTS, number)), seed, round(at_once))
        result = await self.measure(workload, arrivals, warm_up_at_once=len(workload.warm_up))
        points.append(self._judged(value, result))
        return points[-1]

    def _warmed(self, number: int, seed: int, at_once: int) -> Workload:
        """Requests, and as many short ones before them as will be in flight at once, with prompts of their own."""
        workload = self.make_workload(number, seed)
        at_once = max(1, min(MAX_WARM_UP, at_once))
        warm_up = tuple(
            replace(request, max_tokens=min(request.max_tokens, WARM_UP_TOKENS))
            for request in self.make_workload(at_once, seed + 1).requests
        )
        conditions = {**workload.conditions, "warm-up requests": f"{at_once} at once, before each load"}
        return replace(workload, warm_up=warm_up, conditions=conditions)

    def _judged(self, value: float, result: LoadResult) -> LoadPoint:
        if undecided := cannot_tell(result, 0.0 if self.search.plan.closed else self.alone_seconds):
            return LoadPoint(value, result, undecided=undecided)
        if not self.search.plan.closed:
            return LoadPoint(value, result, saturation_reason(result))
        best = max((_gained(point.result)[0] for point in self.search.points if point.served), default=0.0)
        (rate, unit), reason = _gained(result), _failing(result)
        if not reason and rate < GAIN * best:
            reason = f"{rate:.4g} {unit}, less than {GAIN} of the {best:.4g} before"
        return LoadPoint(value, result, reason)


def _gained(result: LoadResult) -> tuple[float, str]:
    """What a load served: tokens where the target counts them, requests otherwise."""
    if result.output_rate is not None:
        return result.output_rate, "tokens/s"
    return (0.0 if math.isnan(result.request_rate) else result.request_rate), "requests/s"
