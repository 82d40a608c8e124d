"""The phase sweep: prefill time against prompt length, decode time against position and batch, each point repeated.

Rounds of all points in an order drawn anew each time, so that a machine that gets slower or faster meanwhile does not
look like a law. Some points are held out of the fits, which must predict them. Not for what it means
(`bench_report.py`), nor for load (`load.py`).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from twinphase.bench.conditions import Bystanders
from twinphase.bench.sweep.fit import DECODE_LAWS, PREFILL_LAW, Fit, Point, Prediction, best_fit, fit
from twinphase.bench.sweep.plan import ENOUGH_SECONDS, UNKNOWN_CONTEXT, Pace, Place, Plan
from twinphase.bench.targets.target import DecodeSample, PrefillSample, Target, TargetFacts
from twinphase.errors import TwinphaseError

__all__ = ["HeldOut", "Measurement", "SweepError", "SweepResult", "calibrate", "sweep"]

QUIET_CORES = 0.1  # others may use this much of the machine before a measurement counts as disturbed
FEWEST_TICKS = 2  # of the kernel's clock: one alone may have been anything
CLOCK_TICK = 0.01  # seconds
FEWEST_QUIET = 3  # repetitions: fewer tell nothing of their noise
RETRIES = 2  # of a disturbed measurement
HOPE_AFTER, HOPE_SHARE = 10, 0.5  # measurements, and the share that stayed disturbed above which retries are no use
MOST_IN_A_ROW = 8
ROOM = 16  # tokens behind a warm-up's prompt
WARM_UP = ((40, 1), (200, 2), (200, 1))

Progress = Callable[[str, int, int], None]


class SweepError(TwinphaseError):
    """Nothing could be measured; the message carries the target's first failure."""


@dataclass(frozen=True)
class Measurement:
    """One visit to one place.

    Attributes:
        place: where.
        round: which, from 0; a place may be measured several times in one.
        began: seconds since the sweep began.
        samples: what the target gave: several for a short prefill.
        foreign_cores: cores' worth of CPU time that others used meanwhile; None where it cannot be told.
        disturbed: others used so much that it was measured again, or would have been.
        kept: False for one that a less disturbed repetition replaced.
    """

    place: Place
    round: int
    began: float
    samples: tuple[PrefillSample | DecodeSample, ...]
    foreign_cores: float | None
    disturbed: bool
    kept: bool

    @property
    def x(self) -> tuple[float, float]:
        """(prompt tokens, 1) by the target's count, or (mean position, batch)."""
        first = self.samples[0]
        if isinstance(first, PrefillSample):
            return float(first.num_tokens), 1.0
        return first.position, float(first.batch)

    @property
    def seconds(self) -> float:
        """Of a prefill: the median of the samples. Of a decode step: the mean of the steps, as TPOT has it."""
        first = self.samples[0]
        if isinstance(first, DecodeSample):
            return sum(first.gaps) / len(first.gaps)
        return statistics.median(sample.seconds for sample in self.samples if isinstance(sample, PrefillSample))


@dataclass(frozen=True)
class HeldOut:
    """A point that the fit has not seen, and what it said of it."""

    place: Place
    x: tuple[float, float]
    predicted: Prediction
    measured: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return (self.predicted.value - self.measured) / self.measured

    @property
    def inside(self) -> bool:
        """Whether it lies within the claimed interval."""
        return self.predicted.holds(self.measured)


@dataclass
class SweepResult:
    """Everything measured, and the fits.

    Attributes:
        facts: of the target.
        plan: what was to be measured.
        measurements: all, replaced ones too, in the order in which they were made.
        failures: why a place could not be measured.
        seconds: the sweep took.
        stopped: why it ended before all rounds were done; "" if it did not.
    """

    facts: TargetFacts
    plan: Plan
    measurements: list[Measurement] = field(default_factory=list)
    failures: dict[Place, str] = field(default_factory=dict)
    seconds: float = 0.0
    stopped: str = ""
    _fits: dict[tuple[str, int], Fit | None] = field(default_factory=dict, repr=False)  # of so many measurements

    def disturbed_share(self, fewest: int = HOPE_AFTER) -> float:
        """Share of the measurements that others disturbed in spite of retries; 0 below so many."""
        kept = [one for one in self.measurements if one.kept]
        return sum(one.disturbed for one in kept) / len(kept) if len(kept) >= fewest else 0.0

    def used(self, place: Place) -> list[Measurement]:
        """The repetitions that count: the undisturbed ones if they are three, and half of them at least, otherwise all.

        What is left out is chosen by what others did meanwhile, never by how long it took.
        """
        kept = [one for one in self.measurements if one.place == place and one.kept]
        quiet = [one for one in kept if not one.disturbed]
        return quiet if 2 * len(quiet) >= max(2 * FEWEST_QUIET, len(kept)) else kept

    def points(self, phase: str, held_out: bool | None = None) -> list[tuple[Place, Point]]:
        """Places with their repetitions' seconds, in the plan's order; held-out ones, the others, or (None) all."""
        found = []
        for place in self.plan.places:
            if place.phase != phase or held_out not in (None, place.held_out):
                continue
            kept = self.used(place)
            if kept:
                x = tuple(float(sum(one.x[axis] for one in kept)) / len(kept) for axis in (0, 1))
                found.append((place, Point((x[0], x[1]), tuple(one.seconds for one in kept))))
        return found

    def fit(self, phase: str) -> Fit | None:
        """The law of a phase through all points but the held-out ones; None: too few of them."""
        key = phase, len(self.measurements)
        if key not in self._fits:
            points = [point for _, point in self.points(phase, held_out=False)]
            self._fits[key] = fit(PREFILL_LAW, points) if phase == "prefill" else best_fit(DECODE_LAWS, points)
        return self._fits[key]

    def held_out(self, phase: str, found: Fit) -> list[HeldOut]:
        """What the fit predicts for the held-out points, beside what was measured."""
        return [
            HeldOut(place, point.x, found.predict(point.x, len(point.values)), point.median)
            for place, point in self.points(phase, held_out=True)
        ]


def calibrate(target: Target, progress: Progress = lambda what, done, total: None) -> Pace:
    """Warm a target up with requests that are not measured, and see about how fast it is.

    Raises:
        TwinphaseError: the target failed.
    """
    longest = max(2, (target.facts.context_length or UNKNOWN_CONTEXT) - ROOM)
    token = step = 0.0
    for number, (length, batch) in enumerate(WARM_UP):
        progress("warm-up", number, len(WARM_UP))
        sample = target.prefill(min(length, longest))
        token = sample.seconds / sample.num_tokens
        try:
            gaps = target.decode(min(length, longest), batch, 4).gaps
        except TwinphaseError:
            if batch == 1:
                raise
            continue  # it does not take two at once: the sweep will say so
        step = sum(gaps) / len(gaps)
    return Pace(token, step)


def sweep(
    target: Target,
    plan: Plan,
    progress: Progress = lambda what, done, total: None,
    *,
    watch_others: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> SweepResult:
    """Measure every place of a plan, round after round; Ctrl-C ends it with what is complete.

    Args:
        target: idle and warm (`calibrate`).
        plan: what to measure.
        progress: told before each measurement.
        watch_others: repeat what others' use of the CPU disturbed. Not for a server, whose own work would count.
        clock: monotonic seconds.

    Raises:
        SweepError: not one place could be measured.
    """
    run = _Sweep(target, plan, progress, watch_others, clock)
    try:
        run.rounds()
    except KeyboardInterrupt:
        run.result.stopped = "interrupted"
    run.result.seconds = clock() - run.start
    if not run.result.measurements:
        raise SweepError(
            f"Nothing could be measured: {next(iter(run.result.failures.values()), run.result.stopped)}",
            "See that the target answers a short prompt.",
        )
    return run.result


class _Sweep:
    """A sweep that is running."""

    def __init__(
        self, target: Target, plan: Plan, progress: Progress, watch_others: bool, clock: Callable[[], float]
    ) -> None:
        self.target, self.plan, self.progress, self.clock = target, plan, progress, clock
        self.watch_others = watch_others
        self.result = SweepResult(target.facts, plan)
        self.start = clock()
        self.random = random.Random(plan.seed)

    def rounds(self) -> None:
        """All places, as often as the plan says or the time allows; in a round each in an order drawn anew."""
        visits = [place for place in self.plan.places for _ in range(place.visits)]
        done, total = 0, len(visits) * self.plan.repetitions
        for number in range(self.plan.repetitions):
            places = list(visits)
            self.random.shuffle(places)
            for place in places:
                if self.plan.max_seconds is not None and self.clock() - self.start > self.plan.max_seconds:
                    self.result.stopped = f"the limit of {self.plan.max_seconds:g} s was reached"
                    return
                self.progress(f"{place}, round {number + 1} of {self.plan.repetitions}", done, total)
                done += 1
                if place not in self.result.failures:
                    self.measure(place, number)
        self.progress("done", total, total)

    def measure(self, place: Place, number: int) -> None:
        """One repetition; again with fresh prompts where it was disturbed. Keeps the least disturbed one."""
        found: list[Measurement] = []
        for _ in range(1 + (RETRIES if self.result.disturbed_share() < HOPE_SHARE else 0)):
            began = self.clock()
            watch = Bystanders()
            try:
                if self.watch_others:
                    with watch:
                        samples = tuple(self.samples(place))
                else:
                    samples = tuple(self.samples(place))
            except TwinphaseError as error:
                self.result.failures[place] = str(error)
                break
            seconds, cores = self.clock() - began, watch.cores
            ticks = (cores or 0.0) * seconds / CLOCK_TICK
            disturbed = cores is not None and cores > QUIET_CORES and ticks >= FEWEST_TICKS
            found.append(Measurement(place, number, began - self.start, samples, cores, disturbed, kept=False))
            if not disturbed:
                break
        best = min(found, key=lambda one: (one.disturbed, one.foreign_cores or 0.0), default=None)
        for one in found:
            values: dict[str, Any] = {**vars(one), "kept": one is best}
            self.result.measurements.append(Measurement(**values))

    def samples(self, place: Place) -> Iterator[PrefillSample | DecodeSample]:
        """Ask the target: a decode once, a prefill as often as a short one needs."""
        if place.phase == "decode":
            yield self.target.decode(place.length, place.batch, self.plan.decode_tokens)
            return
        total = 0.0
        for _ in range(MOST_IN_A_ROW):
            sample = self.target.prefill(place.length)
            total += sample.seconds
            yield sample
            if total >= ENOUGH_SECONDS:
                return
