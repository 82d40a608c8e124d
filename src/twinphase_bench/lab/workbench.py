"""The environment of an experiment: a loaded model, engines, ceilings, a size and a time.

Variants are measured in turn until the experiment's time is used, so that a slow period affects all
of them equally.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import numpy as np

from twinphase import Progress, Recorder, Stepped, Workshop
from twinphase.phases.hardware import Ceilings
from twinphase.phases.roofline import ideal_seconds_of_chunk
from twinphase_bench.load.workload import PromptMaker, Sizing

# With fewer repetitions, a median has no interval of 90 % confidence.
MIN_ROUNDS = 5
MAX_ROUNDS = 24

# Names of quantities: the measured value, then its unit.
TTFT = "TTFT, ms"
TPOT = "TPOT, ms"
E2E = "E2E, ms"
STEPS = "steps"
PREFILL = "prefill, ms"
DECODE = "decode step, ms"
LEDGER = tuple(
    f"{kind}, ms" for kind in ("queue", "prefill", "prefill_wait", "decode", "batching", "stall")
)

Variant = TypeVar("Variant", bound=Hashable)
Runs = Mapping[Any, Mapping[str, Sequence[float]]]
"""Values of all repetitions, by variant and by quantity."""


@dataclass
class Workbench:
    """The environment of one experiment in a run of the lab.

    Attributes:
        workshop: model, and engines on it.
        ceilings: ceilings of this machine; None if they could not be measured.
        seconds: this experiment's share of the time.
        open: loads the same model with other settings.
        progress: called before every measurement.
        size: size of the measurement, in tokens or requests.
        max_rounds: maximum number of repetitions.
        rounds: number of completed repetitions; `round_seconds` has their durations.
        recordings: folder for recordings; None makes none.
    """

    workshop: Workshop
    ceilings: Ceilings | None
    seconds: float
    open: Callable[..., Workshop]
    progress: Progress = lambda what, done, total: None
    title: str = ""
    size: int = 0
    max_rounds: int = MAX_ROUNDS
    rounds: int = 0
    round_seconds: float = 0.0
    recordings: Path | None = None
    clock: Callable[[], float] = time.perf_counter
    started: float = field(init=False)
    _engines: list[Stepped] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def left(self) -> float:
        """Seconds left of the experiment's time."""
        return self.seconds - (self.clock() - self.started)

    def interleave(
        self, variants: Mapping[Variant, Callable[[], Mapping[str, float]]]
    ) -> dict[Variant, dict[str, list[float]]]:
        """Measure the variants in turn, each round in another order, until the time is used.

        A variant returns the values of its quantities. There are at least five rounds, unless they
        would take more than three times the experiment's time.
        """
        found: dict[Variant, dict[str, list[float]]] = {key: {} for key in variants}
        keys = list(variants)
        begin = self.clock()
        self.rounds = 0
        while self.rounds < self.max_rounds:
            left = self.left if self.rounds >= MIN_ROUNDS else self.left + 2 * self.seconds
            if self.rounds and left < self.round_seconds:
                break
            turn = self.rounds % len(keys)
            for key in keys[turn:] + keys[:turn]:
                used = 1 - max(0.0, self.left) / self.seconds if self.seconds > 0 else 1.0
                self.progress(self.title, min(99, round(100 * used)), 100)
                for quantity, value in variants[key]().items():
                    found[key].setdefault(quantity, []).append(value)
            self.rounds += 1
            self.round_seconds = (self.clock() - begin) / self.rounds
        if self.recordings is not None:
            for key in keys:
                words = re.sub(r"[^a-z0-9]+", "-", f"{self.title} {key}".lower())
                self._record(variants[key], self.recordings / f"{words}.jsonl.gz")
        return found

    def _record(self, measure: Callable[[], object], path: Path) -> None:
        """Run a variant once more for a recording, so that recording does not slow measurements."""
        recorder = Recorder(self.workshop)
        for engine in self._engines:
            engine.observer = recorder
        measure()
        for engine in self._engines:
            engine.observer = None
        if recorder.num_steps:
            recorder.write(path)

    def engine(self, **settings: int | bool) -> Stepped:
        """A new engine on the loaded model; see `Workshop.engine`."""
        engine = self.workshop.engine(**settings)  # type: ignore[arg-type]
        self._engines.append(engine)
        return engine

    def ideal_milliseconds(self, start: int, num_tokens: int) -> tuple[float, float]:
        """Milliseconds for only the FLOP and only the bytes of tokens after `start`.

        A value is NaN if its ceiling is unknown.
        """
        shop = self.workshop
        ideal = ideal_seconds_of_chunk(shop.shape, shop.units, self.ceilings, start, num_tokens)
        compute, memory = (1e3 * seconds if seconds else math.nan for seconds in ideal)
        return compute, memory

    def prompts(self, count: int, num_tokens: int) -> list[list[int]]:
        return [self.prompt(num_tokens) for _ in range(count)]

    def prompt(self, num_tokens: int) -> list[int]:
        """Random token ids that share no prefix with any other prompt of the lab."""
        return list(self._prompts.take(num_tokens).token_ids)

    @cached_property
    def _prompts(self) -> PromptMaker:
        return PromptMaker(Sizing(vocab_size=self.workshop.blueprint.vocab_size))


def serve(engine: Stepped, prompts: Sequence[list[int]], output: int = 1) -> dict[str, float]:
    """Send prompts together and wait for all answers; return median latencies and mean ledgers.

    `DECODE` is the median of the steps that decode all requests, so that a delayed step does not
    count.
    """
    tickets = [engine.submit(prompt, output) for prompt in prompts]
    records = engine.run()
    engine.clear()
    totals = [ticket.timeline.totals() for ticket in tickets]
    found = {
        TTFT: median(ticket.ttft for ticket in tickets) * 1e3,
        E2E: median(ticket.e2e for ticket in tickets) * 1e3,
        STEPS: len(records),
        **{quantity: fmean(one[quantity[:-4]] for one in totals) * 1e3 for quantity in LEDGER},
        PREFILL: sum(record.seconds for record in records if record.prefill_tokens) * 1e3,
    }
    decodes = [r.seconds for r in records if r.num_decodes == len(prompts) and not r.prefill_tokens]
    if output > 1:
        found[TPOT] = median(ticket.tpot for ticket in tickets) * 1e3
    if decodes:
        found[DECODE] = median(decodes) * 1e3
    return found


def fits(repetitions: Mapping[int, Sequence[float]], degree: int) -> list[list[float]]:
    """The value of each coefficient in every repetition, lowest power first.

    One polynomial is fitted per repetition, by least squares of the relative error.
    """
    rounds = zip(*repetitions.values(), strict=True)
    polynomials = [
        np.polynomial.polynomial.polyfit(list(repetitions), y, degree, w=1 / np.array(y))
        for y in rounds
    ]
    return [
        [float(value) for value in coefficient] for coefficient in zip(*polynomials, strict=True)
    ]


def growth(repetitions: Mapping[int, Sequence[float]]) -> list[float]:
    """The exponent of growth in every repetition: 0 is constant, 1 linear, 2 quadratic."""
    logs = {x: [float(np.log(value)) for value in values] for x, values in repetitions.items()}
    x = np.log(list(logs))
    return [
        float(np.polynomial.polynomial.polyfit(x, y, 1)[1])
        for y in zip(*logs.values(), strict=True)
    ]
