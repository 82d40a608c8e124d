"""Raise a load until the target is saturated, and stop by itself.

A load is *saturated*, in this order, when
- more than a tenth of its requests fail, or
- it is served at less than 0.9 of the rate offered: requests that succeeded / (last end - first send - E2E of the first
  third, the time that even an unhurried last request takes) against requests / time of sending, or
- the queue grows while it runs: the median TTFT of the last third is more than twice that of the first third, the two
  differ by the rank-sum test at 0.01 (Mann and Whitney 1947), and TTFT grew by more than 25 ms in a second of sending.
  (Where requests come 1 + x times as fast as they are served, each second of sending adds x seconds of queue. Less
  growth than that of x = 0.025 is what a machine does that is busy elsewhere for a moment.)
For a fixed concurrency, when the output rate is less than 1.05 of the best before it.

Not for one load (`load.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twinphase.bench.arrivals import Closed, Constant, Poisson
from twinphase.bench.load import LoadResult, Progress, run_load
from twinphase.bench.slo import Slos
from twinphase.bench.target import LoadTarget
from twinphase.bench.workload import Workload
from twinphase.errors import InvalidRequestError

__all__ = ["Point", "SweepPlan", "SweepResult", "find_saturation", "rank_sum_p", "saturation_reason"]

FAILED_SHARE = 0.1
SERVED_SHARE = 0.9
GROWTH = 2.0
GROWTH_PER_SECOND = 0.025
SIGNIFICANCE = 0.01
GAIN = 1.05
ALONE_REQUESTS = 5
MakeWorkload = Callable[[int, int], Workload]  # (number of requests, seed): each call gives other prompts


@dataclass(frozen=True)
class SweepPlan:
    """How a load is raised.

    Attributes:
        mode: "rate" (open loop) or "concurrency" (closed loop).
        values: these, in this order, instead of searching; the sweep still ends at saturation.
        seconds: of sending at each rate.
        min_requests, max_requests: at each point, whatever the seconds.
        poisson: random gaps; even ones otherwise.
        refine: rates tried between the last that was served and the first that was not.
        max_points: in all.
        seed: of gaps and prompts.
    """

    mode: str = "rate"
    values: tuple[float, ...] = ()
    seconds: float = 30.0
    min_requests: int = 20
    max_requests: int = 2000
    poisson: bool = True
    refine: int = 2
    max_points: int = 14
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in ("rate", "concurrency"):
            raise InvalidRequestError(f"A sweep of {self.mode!r} is none.", "Use rate or concurrency.")
        if any(not 0 < value < math.inf for value in self.values) or self.seconds <= 0:
            raise InvalidRequestError("Rates, concurrencies and seconds must be above 0.")


@dataclass(frozen=True)
class Point:
    """One load of a sweep: its rate or concurrency, what came of it, and why it counts as saturated ("" if not)."""

    value: float
    result: LoadResult
    saturated: str


@dataclass
class SweepResult:
    """What a sweep found.

    Attributes:
        plan: as asked.
        alone: requests one at a time, before the sweep.
        points: in the order in which they were measured.
        stopped: why it ended.
    """

    plan: SweepPlan
    alone: LoadResult
    points: list[Point] = field(default_factory=list)
    stopped: str = ""

    @property
    def ordered(self) -> list[Point]:
        """By rate or concurrency."""
        return sorted(self.points, key=lambda point: point.value)

    @property
    def capacity(self) -> float | None:
        """The highest value below every saturated one; None if there is none."""
        bad = [point.value for point in self.points if point.saturated]
        good = [point.value for point in self.points if not point.saturated and not point.result.void]
        return max((value for value in good if not bad or value < min(bad)), default=None)

    @property
    def saturated_at(self) -> float | None:
        """The lowest saturated value; None if saturation was not reached."""
        return min((point.value for point in self.points if point.saturated), default=None)

    @property
    def best_goodput(self) -> Point | None:
        """The point of the highest goodput; None without service levels, or without a point that can be used."""
        rated = [p for p in self.points if not p.result.void and (g := p.result.goodput) and g.rate is not None]
        return max(rated, key=lambda p: (p.result.goodput and p.result.goodput.rate) or 0.0, default=None)


def saturation_reason(result: LoadResult) -> str:
    """Why an open-loop load was more than the target can serve; "" if it was not, or cannot be told."""
    seen = result.observations
    if not seen:
        return ""
    failed = 1 - len(result.succeeded) / len(seen)
    if failed > FAILED_SHARE:
        kinds = ", ".join(f"{number} x {kind}" for kind, number in result.failures.items())
        return f"{failed:.0%} of the requests failed ({kinds})"
    third = len(seen) // 3
    early = [one.e2e for one in seen[: max(1, third)] if one.e2e is not None]
    window = seen[-1].intended - seen[0].intended
    if early and window > 0:
        rest = result.seconds - statistics.median(early)
        served = (1 - failed) * window / rest if rest > 0 else math.inf
        if served < SERVED_SHARE:
            return f"served at {served:.2f} of the rate offered"
    first = [one.ttft for one in seen[:third] if one.succeeded and one.ttft is not None]
    last = [one.ttft for one in seen[-third:] if one.succeeded and one.ttft is not None] if third else []
    if min(len(first), len(last)) >= 4:
        before, after = statistics.median(first), statistics.median(last)
        steep = after - before > GROWTH_PER_SECOND * window * 2 / 3  # from the middle of a third to that of the other
        if steep and after > GROWTH * before and rank_sum_p(first, last) < SIGNIFICANCE:
            return f"TTFT grows: median {1e3 * before:.0f} ms in the first third, {1e3 * after:.0f} ms in the last"
    return ""


def rank_sum_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Chance that b's values lie this much higher than a's if both are of one kind: one-sided, normal approximation."""
    wins = sum((y > x) + 0.5 * (y == x) for x in a for y in b)
    n, m = len(a), len(b)
    deviation = math.sqrt(n * m * (n + m + 1) / 12)
    return 0.5 * math.erfc((wins - n * m / 2) / deviation / math.sqrt(2)) if deviation else 1.0


async def find_saturation(
    target: LoadTarget,
    make_workload: MakeWorkload,
    plan: SweepPlan | None = None,
    slos: Slos | None = None,
    progress: Progress = lambda what, done, total: None,
) -> SweepResult:
    """Measure a request alone, then ever higher loads until one is too much.

    Args:
        target: as for `run_load`, with its errors.
        make_workload: gives so many requests for a seed; prompts of different seeds must differ.
        plan: how.
        slos: for goodput.
        progress: told of points, and of requests within them.
    """
    plan = plan or SweepPlan()
    alone = await run_load(target, make_workload(ALONE_REQUESTS, plan.seed), Closed(1), None, slos, progress)
    sweep = SweepResult(plan, alone)
    if not alone.e2e:
        sweep.stopped = f"no request succeeded alone ({', '.join(alone.failures)})"
        return sweep
    values = iter(plan.values) if plan.values else None
    if plan.mode == "concurrency":
        start, best = 1.0, 0.0
    else:
        start, best = 0.5 / statistics.median(alone.e2e), 0.0
    value = next(values) if values else start
    while len(sweep.points) < plan.max_points:
        progress(f"{plan.mode} {value:.4g}", len(sweep.points), plan.max_points)
        point, best = await _measure(target, make_workload, sweep, value, best, slos, progress)
        if point.result.void:
            sweep.stopped = f"the client was the limit at {plan.mode} {value:.4g}"
            return sweep
        if point.saturated:
            sweep.stopped = f"saturated at {plan.mode} {value:.4g}: {point.saturated}"
            break
        following = next(values, None) if values else 2 * value
        if following is None:
            sweep.stopped = "all values given were measured; none was saturated"
            return sweep
        value = following
    else:
        sweep.stopped = f"{plan.max_points} points were measured; none was saturated"
    if plan.mode == "rate" and not plan.values:
        await _refine(target, make_workload, sweep, slos, progress)
    return sweep


async def _measure(
    target: LoadTarget,
    make_workload: MakeWorkload,
    sweep: SweepResult,
    value: float,
    best: float,
    slos: Slos | None,
    progress: Progress,
) -> tuple[Point, float]:
    """One point, and the best output rate so far."""
    plan, seed = sweep.plan, sweep.plan.seed + 1 + len(sweep.points)
    if plan.mode == "rate":
        number = min(plan.max_requests, max(plan.min_requests, math.ceil(value * plan.seconds)))
        arrivals: Poisson | Constant | Closed = Poisson(value, seed) if plan.poisson else Constant(value)
    else:
        alone = statistics.median(sweep.alone.e2e)  # at least: more at once take longer
        number = min(plan.max_requests, max(plan.min_requests, 4 * round(value), math.ceil(plan.seconds / alone)))
        arrivals = Closed(max(1, round(value)))
    workload = make_workload(number, seed)
    workload = Workload(workload.requests, (), workload.description, workload.conditions, workload.notes)
    result = await run_load(target, workload, arrivals, None, slos, progress)
    saturated = saturation_reason(result) if plan.mode == "rate" else ""
    rate = result.output_rate if result.output_rate is not None else result.request_rate
    if plan.mode == "concurrency" and not result.void:
        if len(result.succeeded) < (1 - FAILED_SHARE) * len(result.observations):
            saturated = saturation_reason(result)
        elif rate < GAIN * best:
            saturated = f"{rate:.4g} tokens/s, no more than {GAIN} of {best:.4g} before"
    point = Point(value, result, saturated)
    sweep.points.append(point)
    return point, max(best, rate if rate == rate else 0.0)


async def _refine(
    target: LoadTarget, make_workload: MakeWorkload, sweep: SweepResult, slos: Slos | None, progress: Progress
) -> None:
    """Rates between the last that was served and the first that was not."""
    for _ in range(sweep.plan.refine):
        low, high = sweep.capacity, sweep.saturated_at
        if low is None or high is None or len(sweep.points) >= sweep.plan.max_points:
            return
        middle = math.sqrt(low * high)
        progress(f"rate {middle:.4g}", len(sweep.points), sweep.plan.max_points)
        await _measure(target, make_workload, sweep, middle, 0.0, slos, progress)
