"""Raise a load until the target is saturated, and stop by itself.

A load is *saturated*, in this order, when
- more than a tenth of its requests fail, or
- it is served more slowly than offered: in the last two thirds of sending fewer requests ended than were sent, by more
  than a tenth of these and by more than two standard deviations of what is in flight anyway (of n, as of independent
  users, sqrt(n) at each end of the time), or
- the queue grows while it runs: the median TTFT of the last third is more than 1.4 times that of the middle one, both
  differ by the rank-sum test at 0.01 (Mann and Whitney 1947), and TTFT grew by more than 25 ms in a second of sending.
  (Where requests come 1 + x times as fast as they are served, each second of sending adds x seconds of queue. Less
  growth than that of x = 0.025 is what a machine does that is busy elsewhere for a moment.)
The first third is left out: it begins with an idle server, and nothing ends in it but what was sent in it. It must last
longer than a request does, so that the time of sending must be five times the E2E of a request alone; a load of shorter
time whose requests do not fail tells nothing of saturation.

For a fixed concurrency, when the output rate is less than 1.05 of the best before it.

A void load, of which the client was the limit, tells nothing either. A load that seems saturated is measured again with
other prompts and gaps, and is only if it is so both times. Each load has a warm-up at its own concurrency before it.

Not for one load (`load.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from twinphase.bench.load.arrivals import Closed, Constant, Poisson
from twinphase.bench.load.run import LoadResult, Progress, run_load
from twinphase.bench.load.slo import Slos
from twinphase.bench.load.workload import Workload
from twinphase.bench.targets.target import LoadTarget
from twinphase.errors import InvalidRequestError

__all__ = ["Point", "SweepPlan", "SweepResult", "cannot_tell", "find_saturation", "rank_sum_p", "saturation_reason"]

FAILED_SHARE = 0.1
SERVED_SHARE = 0.9
DEVIATIONS = 2.0
WINDOW_OF_E2E = 5
WINDOW_MARGIN = 1.2  # random gaps end a little before or after the time asked for
GROWTH = 1.4
GROWTH_PER_SECOND = 0.025
SIGNIFICANCE = 0.01
GAIN = 1.05
ALONE_REQUESTS = 5
MOST_WARM_UP = 64  # requests
WARM_UP_TOKENS = 8
MakeWorkload = Callable[[int, int], Workload]  # (number of requests, seed): each call gives other prompts


@dataclass(frozen=True)
class SweepPlan:
    """How a load is raised.

    Attributes:
        mode: "rate" (open loop) or "concurrency" (closed loop).
        values: these, in this order, instead of searching; the sweep still ends at saturation.
        seconds: of sending at each rate; more where requests take long.
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
    """One load of a sweep.

    Attributes:
        value: its rate or concurrency.
        result: what came of it.
        saturated: why it counts as saturated; "" if it does not.
        untold: why that cannot be told; "" if it can.
    """

    value: float
    result: LoadResult
    saturated: str
    untold: str = ""

    @property
    def bad(self) -> bool:
        """Whether it was too much for the target, and not for the client."""
        return bool(self.saturated) and not self.untold and not self.result.void

    @property
    def good(self) -> bool:
        """Whether the target is known to have served it."""
        return not self.saturated and not self.untold and not self.result.void


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
        bad = [point.value for point in self.points if point.bad]
        good = [point.value for point in self.points if point.good]
        return max((value for value in good if not bad or value < min(bad)), default=None)

    @property
    def saturated_at(self) -> float | None:
        """The lowest saturated value; None if saturation was not reached."""
        return min((point.value for point in self.points if point.bad), default=None)

    @property
    def runs(self) -> dict[float, list[LoadResult]]:
        """All loads of each rate or concurrency, ascending."""
        found: dict[float, list[LoadResult]] = {}
        for point in self.ordered:
            found.setdefault(point.value, []).append(point.result)
        return found

    @property
    def best_goodput(self) -> Point | None:
        """The point of the highest goodput; None without service levels, or without a point that can be used."""
        rated = [p for p in self.points if not p.result.void and (g := p.result.goodput) and g.rate is not None]
        return max(rated, key=lambda p: (p.result.goodput and p.result.goodput.rate) or 0.0, default=None)


def cannot_tell(result: LoadResult, alone: float | None = None) -> str:
    """Why an open-loop load tells nothing of saturation; "" if it does.

    Args:
        result: of the load.
        alone: E2E of a request alone, seconds; the shortest of the load if None.
    """
    if result.void:
        return "the client was the limit"
    if not result.observations:
        return "nothing was sent"
    unhurried = min(result.e2e, default=0.0) if alone is None else alone
    window = _window(result)
    if window < WINDOW_OF_E2E * unhurried and _failed_share(result) <= FAILED_SHARE:
        return f"{window:.3g} s of sending are less than {WINDOW_OF_E2E} times the {unhurried:.3g} s of a request alone"
    return ""


def saturation_reason(result: LoadResult, alone: float | None = None) -> str:
    """Why an open-loop load was more than the target can serve; "" if it was not, or `cannot_tell`."""
    if cannot_tell(result, alone):
        return ""
    seen = result.observations
    if _failed_share(result) > FAILED_SHARE:
        kinds = ", ".join(f"{number} x {kind}" for kind, number in result.failures.items())
        return f"{_failed_share(result):.0%} of the requests failed ({kinds})"
    window = _window(result)
    end = seen[-1].intended
    middle = end - window * 2 / 3
    sent = sum(middle < one.intended <= end for one in seen)
    ended = sum(middle < one.ended <= end for one in seen)
    in_flight = sum(one.intended <= middle < one.ended for one in seen)
    noise = DEVIATIONS * math.sqrt(2 * max(1, in_flight))
    if sent - ended > max((1 - SERVED_SHARE) * sent, noise):
        return f"of {sent} requests sent in the last two thirds only {ended} were served in that time"
    parts = [one for one in seen if one.succeeded and one.intended > middle]
    first = [one.ttft for one in parts if one.intended <= end - window / 3 and one.ttft is not None]
    last = [one.ttft for one in parts if one.intended > end - window / 3 and one.ttft is not None]
    if min(len(first), len(last)) >= 4:
        before, after = statistics.median(first), statistics.median(last)
        steep = after - before > GROWTH_PER_SECOND * window / 3  # from the middle of a third to that of the next
        if steep and after > GROWTH * before and rank_sum_p(first, last) < SIGNIFICANCE:
            return f"TTFT grows: median {1e3 * before:.0f} ms in the middle third, {1e3 * after:.0f} ms in the last"
    return ""


def _window(result: LoadResult) -> float:
    return result.observations[-1].intended - result.observations[0].intended


def _failed_share(result: LoadResult) -> float:
    return 1 - len(result.succeeded) / len(result.observations)


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
    start = 1.0 if plan.mode == "concurrency" else 0.5 / statistics.median(alone.e2e)
    value = next(values) if values else start
    search = _Search(target, make_workload, sweep, slos, progress)
    while len(sweep.points) < plan.max_points:
        point = await search.decide(value)
        if point.result.void:
            sweep.stopped = f"the client was the limit at {plan.mode} {value:.4g}"
            return sweep
        if point.untold:
            sweep.stopped = f"saturation at {plan.mode} {value:.4g} cannot be told: {point.untold}"
            return sweep
        if point.saturated:
            sweep.stopped = f"saturated at {plan.mode} {value:.4g}, twice: {point.saturated}"
            break
        following = next(values, None) if values else 2 * value
        if following is None:
            sweep.stopped = "all values given were measured; none was saturated"
            return sweep
        value = following
    else:
        sweep.stopped = f"{plan.max_points} points were measured; none was saturated"
    if plan.mode == "rate" and not plan.values:
        await search.refine()
    return sweep


class _Search:
    """Measures the points of a sweep."""

    def __init__(
        self,
        target: LoadTarget,
        make_workload: MakeWorkload,
        sweep: SweepResult,
        slos: Slos | None,
        progress: Progress,
    ) -> None:
        self._target, self._make, self._sweep, self._slos, self._progress = target, make_workload, sweep, slos, progress
        self._alone = statistics.median(sweep.alone.e2e)
        self._best = 0.0  # output rate, of a fixed concurrency
        self._runs = 0

    async def decide(self, value: float) -> Point:
        """Measure a load, and if it seems saturated once more; the point that decides."""
        first = await self._measure(value)
        if not first.saturated:
            if first.good:
                self._best = max(self._best, _gained(first.result)[0])
            return first
        second = await self._measure(value)
        if not second.saturated:
            again = f"could not be told again: {second.untold}" if second.untold else "was not when measured again"
            untold = f"it seemed saturated ({first.saturated}), and {again}"
            self._sweep.points[-2] = replace(first, saturated="", untold=untold)
        if second.good:
            self._best = max(self._best, _gained(second.result)[0])
        return second

    async def refine(self) -> None:
        """Rates between the last that was served and the first that was not."""
        for _ in range(self._sweep.plan.refine):
            low, high = self._sweep.capacity, self._sweep.saturated_at
            if low is None or high is None or len(self._sweep.points) >= self._sweep.plan.max_points:
                return
            await self.decide(math.sqrt(low * high))

    async def _measure(self, value: float) -> Point:
        plan = self._sweep.plan
        self._progress(f"{plan.mode} {value:.4g}", len(self._sweep.points), plan.max_points)
        self._runs += 1
        seed = plan.seed + 2 * self._runs
        seconds = max(plan.seconds, WINDOW_MARGIN * WINDOW_OF_E2E * self._alone)
        if plan.mode == "rate":
            number, at_once = math.ceil(value * seconds), value * self._alone
            arrivals: Poisson | Constant | Closed = Poisson(value, seed) if plan.poisson else Constant(value)
        else:  # at least: more at once take longer
            number, at_once = max(4 * round(value), math.ceil(plan.seconds / self._alone)), value
            arrivals = Closed(max(1, round(value)))
        number = min(plan.max_requests, max(plan.min_requests, number))
        workload = self._warmed(number, seed, max(1, min(MOST_WARM_UP, round(at_once))))
        warm = len(workload.warm_up)
        result = await run_load(
            self._target, workload, arrivals, None, self._slos, self._progress, warm_up_at_once=warm
        )
        point = self._judge(value, result)
        self._sweep.points.append(point)
        return point

    def _warmed(self, number: int, seed: int, at_once: int) -> Workload:
        """Requests, and as many short ones before them as will be in flight at once, with prompts of their own."""
        workload = self._make(number, seed)
        warm_up = tuple(
            replace(request, max_tokens=min(request.max_tokens, WARM_UP_TOKENS))
            for request in self._make(at_once, seed + 1).requests
        )
        conditions = {**workload.conditions, "warm-up requests": f"{at_once} at once, before each load"}
        return Workload(workload.requests, warm_up, workload.description, conditions, workload.notes)

    def _judge(self, value: float, result: LoadResult) -> Point:
        if self._sweep.plan.mode == "rate":
            untold = cannot_tell(result, self._alone)
            return Point(value, result, saturation_reason(result, self._alone), untold)
        if result.void or not result.observations:
            return Point(value, result, "", "the client was the limit" if result.void else "nothing was sent")
        if _failed_share(result) > FAILED_SHARE:
            kinds = ", ".join(f"{number} x {kind}" for kind, number in result.failures.items())
            return Point(value, result, f"{_failed_share(result):.0%} of the requests failed ({kinds})")
        rate, unit = _gained(result)
        if rate < GAIN * self._best:
            return Point(value, result, f"{rate:.4g} {unit}, no more than {GAIN} of {self._best:.4g} before")
        return Point(value, result, "")


def _gained(result: LoadResult) -> tuple[float, str]:
    """What a load served: tokens where the target counts them, requests otherwise."""
    if result.output_rate is not None:
        return result.output_rate, "tokens/s"
    return (0.0 if math.isnan(result.request_rate) else result.request_rate), "requests/s"
