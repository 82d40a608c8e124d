"""How far simulations were from real servers: measured, stored, and shown beside each answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec

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
    """One configuration under one trace, run for real and simulated.

    Attributes:
        machine, model, date: what ran, and when.
        configuration, trace: what was run.
        requests: in the trace.
        utilisation: busy share of the workers in the simulation.
        real, simulated: figures by name; seconds, and requests per second.
        spread: of the real runs of it, (highest - lowest) / median; empty with one run.
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

    def error(self, figure: str) -> float:
        """(simulated - real) / real; where nothing was real, 0 or 1."""
        real = self.real[figure]
        simulated = self.simulated[figure]
        return (simulated - real) / real if real else float(simulated > 0)


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


def error_sentence(trials: Sequence[Trial], measured_here: bool, hardware: str) -> str:
    """What is known of the error of an answer, in words.

    Args:
        trials: the stored ones.
        measured_here: the step times come from a calibration.
        hardware: the machine's name.
    """
    if not trials:
        return "Error: unknown, no simulation was compared with a real server yet."
    bands = []
    for figure in FIGURES:
        errors = [abs(trial.error(figure)) for trial in trials]
        bands.append(f"{NAMES[figure]} {median(errors):.0%} (worst {max(errors):.0%})")
    one = trials[0]
    shown = (
        f"{len(trials)} real runs of {min(t.requests for t in trials):,} requests or more "
        f"({one.model}, {one.machine}, {max(t.date for t in trials)})"
    )
    text = f"Error of simulations against {shown}, median: {', '.join(bands)}."
    if measured_here:
        return text
    return (
        f"Error: {hardware} was not measured, so expect a factor of 1.5 or more in every time, "
        f"beside the simulator's own. {text}"
    )
