"""The phase sweep: prefill time by prompt length, decode time by position and batch.

Rounds go over all points, each in another random order, so that a machine that slows down does not
look like an effect of length. `verdicts.py` interprets the results.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from twinphase import Progress, TwinphaseError
from twinphase_bench.conditions import Bystanders
from twinphase_bench.sweep.plan import (
    DEFAULT_CONTEXT_TOKENS,
    MIN_PREFILL_SECONDS,
    Pace,
    Place,
    Plan,
)
from twinphase_bench.targets.target import PhaseSample, Target, TargetFacts

# A measurement counts as disturbed if other programs use more cores than this.
QUIET_CORES = 0.1
# A single tick of the kernel's clock does not prove a disturbance.
MIN_DISTURBED_TICKS = 2
TICK_SECONDS = 0.01
MAX_RETRIES = 2
# Retrying stops if this share of that number of measurements was disturbed.
BUSY_AFTER_MEASUREMENTS = 10
BUSY_SHARE = 0.5
MAX_PREFILLS_IN_A_ROW = 8
WARM_UP_OUTPUT_TOKENS = 16
WARM_UP = ((40, 1), (200, 2), (200, 1))  # (prompt tokens, batch)


class SweepError(TwinphaseError):
    """Nothing could be measured; the message has the target's first failure."""


@dataclass(frozen=True)
class Visit:
    """One measurement of one place.

    Attributes:
        place: the place.
        round: number of the round, from 0.
        began: seconds from the start of the sweep.
        samples: samples from the target; several for a short prefill.
        foreign_cores: cores that other programs used during the measurement; None is unknown.
        disturbed: whether other programs used too many cores, so that a repetition was due.
        kept: False if a less disturbed repetition replaced it.
    """

    place: Place
    round: int
    began: float
    samples: Sequence[PhaseSample]
    foreign_cores: float | None
    disturbed: bool
    kept: bool

    @property
    def seconds(self) -> float:
        return statistics.median(sample.seconds for sample in self.samples)


@dataclass(frozen=True)
class SweepPoint:
    """A place with the seconds of each repetition.

    `tokens` is the target's count: of the prompt, or the mean before the decoded ones.
    """

    place: Place
    tokens: float
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass
class PhaseSweep:
    """Everything that a sweep measured."""

    facts: TargetFacts
    plan: Plan
    # In the order of measurement, including replaced ones.
    visits: list[Visit] = field(default_factory=list)
    # The reason why a place could not be measured.
    failures: dict[Place, str] = field(default_factory=dict)
    # The duration of the sweep.
    seconds: float = 0.0
    # The reason why it ended before all rounds were done.
    stopped: str = ""

    def kept(self, place: Place | None = None) -> list[Visit]:
        """The valid measurements of one place, or of all places."""
        return [one for one in self.visits if one.kept and place in (None, one.place)]

    @property
    def disturbed_share(self) -> float:
        """Share of the measurements that other programs disturbed in spite of retries."""
        kept = self.kept()
        return sum(one.disturbed for one in kept) / len(kept) if kept else 0.0

    def points(self, phase: str) -> list[SweepPoint]:
        """The measured points of a phase, in the plan's order."""
        found = []
        for place in self.plan.places:
            kept = self.kept(place)
            if place.phase == phase and kept:
                tokens = statistics.fmean(one.samples[0].tokens for one in kept)
                found.append(SweepPoint(place, tokens, tuple(one.seconds for one in kept)))
        return found


def calibrate(target: Target, progress: Progress = lambda what, done, total: None) -> Pace:
    """Warm up a target with unmeasured requests, and estimate its speed.

    Raises:
        TwinphaseError: the target failed.
    """
    longest = max(
        2, (target.facts.context_length or DEFAULT_CONTEXT_TOKENS) - WARM_UP_OUTPUT_TOKENS
    )
    token = step = 0.0
    for number, (length, batch) in enumerate(WARM_UP):
        progress("warm-up", number, len(WARM_UP))
        sample = target.prefill(min(length, longest))
        token = sample.seconds / sample.tokens
        try:
            step = target.decode(min(length, longest), batch, 4).seconds
        except TwinphaseError:
            if batch == 1:  # Two sequences at once may be too many, which the sweep will report.
                raise
    return Pace(token, step)


def sweep(
    target: Target,
    plan: Plan,
    progress: Progress = lambda what, done, total: None,
    *,
    watch_others: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> PhaseSweep:
    """Measure every place of a plan in rounds; after Ctrl-C, return the complete rounds.

    Args:
        target: idle, warm target (`calibrate`).
        plan: places to measure.
        progress: called before each measurement.
        watch_others: repeat measurements that other programs disturbed. Must be False for a server,
            whose own work would count.
        clock: returns monotonic seconds.

    Raises:
        SweepError: no place could be measured.
    """
    run = _Sweep(target, plan, progress, watch_others, clock)
    try:
        run.rounds()
    except KeyboardInterrupt:
        run.result.stopped = "interrupted"
    run.result.seconds = clock() - run.start
    if not run.result.visits:
        raise SweepError(
            "Nothing could be measured: "
            f"{next(iter(run.result.failures.values()), run.result.stopped)}",
            "Check that the target answers a short prompt.",
        )
    return run.result


@dataclass
class _Sweep:
    """A running sweep."""

    target: Target
    plan: Plan
    progress: Progress
    watch_others: bool
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.result = PhaseSweep(self.target.facts, self.plan)
        self.start = self.clock()
        self.random = random.Random(self.plan.seed)

    def rounds(self) -> None:
        """Measure all places in rounds of random order, until the plan or the time ends."""
        done = 0
        total = len(self.plan.places) * self.plan.repetitions
        for number in range(self.plan.repetitions):
            places = list(self.plan.places)
            self.random.shuffle(places)
            for place in places:
                if (
                    self.plan.max_seconds is not None
                    and self.clock() - self.start > self.plan.max_seconds
                ):
                    self.result.stopped = f"the limit of {self.plan.max_seconds:g} s was reached"
                    return
                self.progress(
                    f"{place}, round {number + 1} of {self.plan.repetitions}", done, total
                )
                done += 1
                if place not in self.result.failures:
                    self.measure(place, number)
        self.progress("done", total, total)

    def measure(self, place: Place, number: int) -> None:
        """Measure a place once; repeat with fresh prompts if it was disturbed.

        Only the least disturbed measurement is kept.
        """
        always_busy = (
            len(self.result.kept()) >= BUSY_AFTER_MEASUREMENTS
            and self.result.disturbed_share >= BUSY_SHARE
        )
        found: list[Visit] = []
        for _ in range(1 if always_busy else 1 + MAX_RETRIES):
            began = self.clock()
            watch = Bystanders() if self.watch_others else None
            try:
                with watch or nullcontext():
                    samples = list(self.samples(place))
            except TwinphaseError as error:
                self.result.failures[place] = str(error)
                break
            cores = watch.cores if watch else None
            ticks = (cores or 0.0) * (self.clock() - began) / TICK_SECONDS
            disturbed = cores is not None and cores > QUIET_CORES and ticks >= MIN_DISTURBED_TICKS
            found.append(
                Visit(place, number, began - self.start, samples, cores, disturbed, kept=False)
            )
            if not disturbed:
                break
        best = min(found, key=lambda one: (one.disturbed, one.foreign_cores or 0.0), default=None)
        self.result.visits += [replace(one, kept=one is best) for one in found]

    def samples(self, place: Place) -> Iterator[PhaseSample]:
        """Samples from the target: one decode, or as many prefills as a short one needs."""
        if place.phase == "decode":
            yield self.target.decode(place.length, place.batch, self.plan.decode_tokens)
            return
        total = 0.0
        for _ in range(MAX_PREFILLS_IN_A_ROW):
            sample = self.target.prefill(place.length)
            total += sample.seconds
            yield sample
            if total >= MIN_PREFILL_SECONDS:
                return
