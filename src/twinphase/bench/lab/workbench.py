"""What experiments work with: a loaded model, the machine's ceilings and speed, and their share of the time.

Every experiment repeats its variants in turn, so that a slow minute hits all of them alike, until its share of the
time is used. Sizes shrink before repetitions do. Not for verdicts (`experiment.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import numpy as np

from twinphase.bench.conditions import Bystanders
from twinphase.bench.progress import Progress
from twinphase.bench.targets.stepped import Stepped, Workshop
from twinphase.phases.hardware import Ceilings
from twinphase.phases.timeline import StepRecord

__all__ = ["MOST_ROUNDS", "QUIET_CORES", "ROUNDS", "Speed", "Workbench", "calibrate", "fits", "fitted", "median_step"]

ROUNDS = 5  # the fewest repetitions that give a median an interval of 90 % and more
USUAL_ROUNDS = 8  # from here on one disturbed repetition on either side does not count
MOST_ROUNDS = 24
QUIET_CORES = 0.25  # used by others: a round with more is left out where enough others remain
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@dataclass(frozen=True)
class Speed:
    """Roughly how fast this machine is with this model, seconds: for planning only, never for a verdict.

    Prefill of n tokens takes fixed + per_token n + per_pair n^2; a decode step of B sequences step + per_sequence B.
    """

    fixed: float
    per_token: float
    per_pair: float
    step: float
    per_sequence: float

    def prefill(self, num_tokens: int) -> float:
        """Seconds to compute a prompt."""
        return self.fixed + self.per_token * num_tokens + self.per_pair * num_tokens**2

    def decode(self, num_tokens: int, batch: int = 1) -> float:
        """Seconds to decode that many tokens of each of `batch` sequences."""
        return num_tokens * (self.step + self.per_sequence * batch)


def fitted(x: Sequence[float], y: Sequence[float], degree: int) -> list[float]:
    """Coefficients, lowest power first, of the polynomial with the least squares of the relative error.

    Args:
        x: where it was measured; more points than the degree.
        y: seconds, positive.
        degree: of the polynomial.
    """
    points, values = np.asarray(x, np.float64), np.asarray(y, np.float64)
    powers = np.vander(points / points.max(), degree + 1, increasing=True)
    solution = np.linalg.lstsq(powers / values[:, None], np.ones(len(values)), rcond=None)[0]
    return [float(c) / float(points.max()) ** power for power, c in enumerate(solution)]


def fits(repetitions: Mapping[int, Sequence[float]], degree: int) -> list[list[float]]:
    """A polynomial of each repetition, whose seconds are given by x."""
    rounds = zip(*repetitions.values(), strict=True)
    return [fitted(list(repetitions), seconds, degree) for seconds in rounds]


def median_step(records: Sequence[StepRecord]) -> float:
    """Seconds of the usual step: one that was held up does not count."""
    return median(record.seconds for record in records)


def calibrate(workshop: Workshop) -> Speed:
    """Warm the engine up and see how fast it is: a few seconds, less where the context is short."""
    engine = workshop.engine()
    room = workshop.max_model_len - 24
    lengths = [n for n in (64, 256, 1024) if n <= room] or [max(1, room // 4), max(2, room)]
    for n in lengths:
        engine.prefill(workshop.prompt(n))
    seconds = [min(engine.prefill(workshop.prompt(n)) for _ in range(3)) for n in lengths]
    engine.clear()
    coefficients = [max(0.0, c) for c in fitted(lengths, seconds, min(2, len(lengths) - 1))] + [0.0]
    batches = [b for b in (1, 8) if b <= workshop.config.max_num_seqs] or [1]
    steps = []
    for batch in batches:
        records = engine.decode([workshop.prompt(min(16, room)) for _ in range(batch)], 8)
        steps.append(min(record.seconds for record in records))
    growth = max(0.0, (steps[-1] - steps[0]) / (batches[-1] - batches[0])) if len(batches) > 1 else 0.0
    return Speed(coefficients[0], coefficients[1], coefficients[2], max(0.0, steps[0] - growth), growth)


@dataclass
class Workbench:
    """One experiment's place in a run.

    Attributes:
        workshop: the model, and engines on it.
        ceilings: of this machine; None if they could not be measured.
        speed: for planning.
        seconds: this experiment's share of the time.
        open: loads the same model with other settings; its result is closed after the experiment.
        progress: told of every measurement.
        title: for progress.
        reduced: what had to be smaller than planned, or was left out, and why.
        others: cores that other programs used in the rounds that count, median; None is unknown.
    """

    workshop: Workshop
    ceilings: Ceilings | None
    speed: Speed
    seconds: float
    open: Callable[..., Workshop]
    progress: Progress = lambda what, done, total: None
    title: str = ""
    reduced: list[str] = field(default_factory=list)
    others: float | None = None
    started: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        """Seconds of the share that are left."""
        return self.seconds - (time.perf_counter() - self.started)

    def size(
        self, what: str, candidates: Sequence[int], round_seconds: Callable[[int], float], room: int | None = None
    ) -> int:
        """The first candidate, largest first, that leaves time for the usual repetitions, or else for the fewest.

        Args:
            what: for the report: "longest prompt, tokens".
            candidates: falling.
            round_seconds: of one repetition of all variants at a size, by `speed`.
            room: the largest size that the context or the cache allows; the context less 64 tokens if None.
        """
        limit = self.workshop.max_model_len - 64 if room is None else room
        fitting = [size for size in candidates if size <= limit] or [max(1, min(limit, candidates[-1]))]
        chosen = fitting[-1]
        for rounds in (USUAL_ROUNDS, ROUNDS):
            affordable = [size for size in fitting if rounds * round_seconds(size) <= self.left]
            if affordable:
                chosen = affordable[0]
                break
        if chosen != candidates[0]:
            cause = "the model's context" if chosen == fitting[0] else "the time"
            self.reduced.append(f"{what}: {chosen:,} instead of {candidates[0]:,}, for want of {cause}")
        return chosen

    def interleave(self, variants: Mapping[Key, Callable[[], Value]]) -> dict[Key, list[Value]]:
        """Measure every variant in turn, each round in another order, until the share of the time is used.

        Five rounds at least, unless three times the share would be used; every variant has as many values as rounds.
        Rounds in which other programs computed are left out, whatever they measured, if five quiet ones remain.
        """
        found: dict[Key, list[Value]] = {key: [] for key in variants}
        keys, rounds, begin = list(variants), 0, time.perf_counter()
        others: list[float | None] = []
        while rounds < MOST_ROUNDS:
            spent = time.perf_counter() - begin
            usual = spent / rounds if rounds else 0.0
            if rounds >= ROUNDS and self.left < usual:
                break
            if 0 < rounds < ROUNDS and self.left + 2 * self.seconds < usual:
                self.reduced.append(f"{rounds} repetitions instead of {ROUNDS}, for want of time")
                break
            turn = rounds % len(keys)
            with Bystanders() as bystanders:
                for key in keys[turn:] + keys[:turn]:
                    # By time, because rounds are as many as fit.
                    used = 1 - max(0.0, self.left) / self.seconds if self.seconds > 0 else 1.0
                    self.progress(self.title, min(99, round(100 * used)), 100)
                    found[key].append(variants[key]())
            others.append(bystanders.cores)
            rounds += 1
        kept = self._quiet(others)
        return {key: [values[i] for i in kept] for key, values in found.items()}

    def _quiet(self, others: Sequence[float | None]) -> list[int]:
        """Which rounds count, by the cores that others used in each."""
        quiet = [i for i, cores in enumerate(others) if cores is None or cores < QUIET_CORES]
        kept = quiet if len(quiet) >= ROUNDS else list(range(len(others)))
        if len(kept) < len(others):
            self.reduced.append(
                f"{len(others) - len(kept)} of {len(others)} repetitions left out, because other programs computed"
            )
        known = [cores for i in kept if (cores := others[i]) is not None]
        self.others = median(known) if known else None
        return kept

    def engine(self, **settings: int | bool) -> Stepped:
        """A new engine on the loaded model; see `Workshop.engine`."""
        return self.workshop.engine(**settings)  # type: ignore[arg-type]
