"""Measured errors of simulations relative to real servers, which every report states."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import ClassVar

import msgspec

# Sources of step times, the most accurate first.
ERROR_SOURCES = {
    "steps": "the steps of the same server, measured minutes before",
    "kept": "steps that were measured earlier, or on another server",
    "bench": "the points of a `bench` result",
    "roofline": "the points of a `roofline` result",
    "datasheet": "a datasheet",
}
KEPT = "kept"
FILE = Path(__file__).with_name("errors.json")
# Probability that a real figure lies inside its band.
COVERAGE = 0.8
FIGURES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "goodput")
NAMES = {
    "ttft_p50": "TTFT p50",
    "ttft_p99": "TTFT p99",
    "itl_p50": "ITL p50",
    "itl_p99": "ITL p99",
    "goodput": "goodput",
}


@dataclass(frozen=True)
class Trial:
    """One configuration under one trace, run on a real server and simulated.

    Attributes:
        machine, model, date: subject and date of the real run.
        configuration, trace: configuration and load of the run.
        requests: number of requests in the trace.
        utilisation: busy share of the workers in the simulation.
        real, simulated: figures by name, in seconds or requests per second; published tables may
            lack some.
        spread: (highest - lowest) / median of repeated real runs; empty with one run.
        source: source of the simulation's step times, one of `ERROR_SOURCES`.
        hindsight: figures simulated with the step times of the real run itself, so that they
            exclude changes of the machine since its calibration; empty if these were not logged.
    """

    machine: str
    model: str
    date: str
    configuration: str
    trace: str
    requests: int
    utilisation: float
    real: dict[str, float]
    simulated: dict[str, float]
    spread: dict[str, float] = field(default_factory=dict)
    source: str = "steps"
    hindsight: dict[str, float] = field(default_factory=dict)

    def error(self, figure: str) -> float:
        """(simulated - real) / real; if the real figure is 0, the result is 0 or 1."""
        return self._error(self.simulated, figure)

    def ratio(self, figure: str) -> float | None:
        """real / simulated; None if one of them is missing or 0."""
        real = self.real.get(figure)
        simulated = self.simulated.get(figure)
        return real / simulated if real and simulated else None

    def hindsight_error(self, figure: str) -> float:
        """Error of a simulation with the real run's own step times."""
        return self._error(self.hindsight, figure)

    def _error(self, simulated: Mapping[str, float], figure: str) -> float:
        real = self.real[figure]
        return (simulated[figure] - real) / real if real else float(simulated[figure] > 0)


def read_trials(path: Path = FILE) -> list[Trial]:
    """The stored trials; empty if there is no file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Trial])
    except (OSError, ValueError):
        return []


def write_trials(trials: Sequence[Trial], path: Path = FILE) -> None:
    path.write_text(
        json.dumps(msgspec.to_builtins(list(trials)), indent=1) + "\n", encoding="utf-8"
    )


@dataclass(frozen=True)
class Band:
    """The range of a real server's figure around the simulated one.

    Attributes:
        name: name of the figure, such as "TTFT p50".
        factor: the range is from simulated / factor to simulated * factor.
        pairs: number of pairs of a real and a simulated run behind the band.
        is_least: whether the source has too few pairs, so that the band is a better source's, and
            the true range is at least this wide.
    """

    coverage: ClassVar[float] = COVERAGE
    name: str
    factor: float
    pairs: int
    is_least: bool = False

    def around(self, value: float) -> tuple[float, float]:
        """The band's lower and upper end around a simulated value."""
        return value / self.factor, value * self.factor

    def as_json(self, value: float) -> dict[str, float | bool]:
        """The band of a simulated value, in its unit."""
        low, high = self.around(value)
        return {"low": low, "high": high, "pairs": self.pairs, "at_least": self.is_least}

    def contains(self, bound: float, value: float) -> bool:
        """Whether a bound lies inside the band of a simulated value, which is too close to call."""
        low, high = self.around(value)
        return low <= bound <= high


def bands(trials: Sequence[Trial], source: str) -> dict[str, Band]:
    """The band of each figure that has trials.

    It is a split conformal interval (Lei et al., 2018, arXiv:1604.04173): the absolute logarithmic
    error with rank ceil((n + 1) * COVERAGE) among n pairs sets the width. A new pair of the same
    kind lies inside with probability COVERAGE. A source never gets a narrower band than a better
    one, and a source with too few pairs gets the band of the next worse one.

    Args:
        trials: the stored trials.
        source: source of a simulation's step times, one of `ERROR_SOURCES`.
    """
    found = {figure: _band(trials, figure, source) for figure in FIGURES}
    return {figure: band for figure, band in found.items() if band is not None}


def _band(trials: Sequence[Trial], figure: str, source: str) -> Band | None:
    order = [*ERROR_SOURCES]
    place = order.index(source)
    known = {
        number: band
        for number, name in enumerate(order)
        if (band := _own_band(trials, figure, name)) is not None
    }
    worse = next((number for number in sorted(known) if number >= place), None)
    used = [number for number in known if number <= (place if worse is None else worse)]
    if not used:
        return None
    widest = known[max(used, key=lambda number: known[number].factor)]
    return replace(widest, is_least=worse is None)


def _own_band(trials: Sequence[Trial], figure: str, source: str) -> Band | None:
    """The band from the trials of one source; None if there are too few."""
    ratios = [trial.ratio(figure) for trial in trials if trial.source == source]
    sizes = sorted(abs(math.log(ratio)) for ratio in ratios if ratio is not None)
    rank = math.ceil((len(sizes) + 1) * COVERAGE)
    if rank > len(sizes):
        return None
    return Band(NAMES[figure], math.exp(sizes[rank - 1]), len(sizes))


def level_figure(name: str, percentile: float) -> str:
    """The figure whose band applies to a latency at a percentile: "ttft", "itl" or "tpot"."""
    end = "p99" if percentile > 75 else "p50"
    return f"{'ttft' if name == 'ttft' else 'itl'}_{end}"


def coarsest(sources: Iterable[str]) -> str:
    """The source with the widest bands among several."""
    return max(sources, key=[*ERROR_SOURCES].index)


def error_sentence(trials: Sequence[Trial], source: str) -> str:
    """A sentence about the bands of a simulation.

    Args:
        trials: the stored trials.
        source: source of its step times, one of `ERROR_SOURCES`.
    """
    own = [trial for trial in trials if trial.source == source]
    if not trials:
        return "Bands: unknown, no simulation was compared with a real server yet."
    text = (
        f"Bands: a real server's figure is expected inside {COVERAGE:.0%} of the time, by pairs "
        f"of a real and a simulated run. Step times here come from {ERROR_SOURCES[source]}"
    )
    if not own:
        return (
            f"{text}; no real run was compared with these yet, so that a band is that of the next "
            "worse source, or at least that of a better one."
        )
    models = ", ".join(dict.fromkeys(f"{trial.model} on {trial.machine}" for trial in own))
    errors = ", ".join(
        f"{NAMES[figure]} {median(sizes):.0%} (worst {max(sizes):.0%})"
        for figure in FIGURES
        if (sizes := [abs(one.error(figure)) for one in own if one.ratio(figure) is not None])
    )
    dates = max(trial.date for trial in own)
    return f"{text}; {len(own)} pairs with such ({models}, {dates}), median error: {errors}."
