"""Measured errors of simulations against real servers, which every report states."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec

# Where step times come from, the best first, and what is known of those that no trial has.
ERROR_SOURCES = {
    "steps": "",
    "bench": "its own steps under load were not measured, only the points of a `bench` result, so "
    "expect more than the errors below",
    "roofline": "its own steps under load were not measured, only the points of a `roofline` "
    "result, so expect more than the errors below, and more than with `bench`",
    "datasheet": "it was not measured, so expect a factor of 1.5 or more in every time, beside the "
    "simulator's own errors",
}
FILE = Path(__file__).with_name("errors.json")
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
        machine, model, date: what ran, and when.
        configuration, trace: what was run.
        requests: number of requests in the trace.
        utilisation: busy share of the workers in the simulation.
        real, simulated: figures by name; seconds, and requests per second.
        spread: (highest - lowest) / median of repeated real runs; empty with one run.
        source: where the simulation's step times come from, one of `ERROR_SOURCES`.
        hindsight: figures simulated with the step times of the trace's own run, which has no error
            of a machine that changed since its calibration; empty where they were not logged.
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

    def hindsight_error(self, figure: str) -> float:
        """The same of `hindsight`."""
        return self._error(self.hindsight, figure)

    def _error(self, simulated: Mapping[str, float], figure: str) -> float:
        real = self.real[figure]
        return (simulated[figure] - real) / real if real else float(simulated[figure] > 0)


def read_trials(path: Path = FILE) -> list[Trial]:
    """The stored trials; empty where there are none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Trial])
    except (OSError, ValueError):
        return []


def write_trials(trials: Sequence[Trial], path: Path = FILE) -> None:
    path.write_text(
        json.dumps(msgspec.to_builtins(list(trials)), indent=1) + "\n", encoding="utf-8"
    )


def error_sentence(trials: Sequence[Trial], source: str, hardware: str) -> str:
    """A sentence about the expected error of a simulation.

    Args:
        trials: the stored trials.
        source: where its step times come from, one of `ERROR_SOURCES`.
        hardware: the machine's name.
    """
    own = [trial for trial in trials if trial.source == source]
    used = own or [trial for trial in trials if trial.source == "steps"]
    if not used:
        return "Error: unknown, no simulation was compared with a real server yet."
    one = used[0]
    shown = (
        f"{len(used)} real runs of {min(t.requests for t in used):,} requests or more "
        f"({one.model}, {one.machine}, {max(t.date for t in used)})"
    )
    text = f"Error of simulations against {shown}, median: {_bands(used, Trial.error)}."
    with_hindsight = [trial for trial in used if trial.hindsight]
    if with_hindsight:
        bands = _bands(with_hindsight, Trial.hindsight_error)
        text += f" With the step times of the same minutes: {bands}."
    return text if own else f"Error: {hardware}: {ERROR_SOURCES[source]}. {text}"


def _bands(trials: Sequence[Trial], error: Callable[[Trial, str], float]) -> str:
    bands = []
    for figure in FIGURES:
        errors = [abs(error(trial, figure)) for trial in trials]
        bands.append(f"{NAMES[figure]} {median(errors):.0%} (worst {max(errors):.0%})")
    return ", ".join(bands)
