"""Learns the step times of a machine with a model from a step log, for simulations.

The step log of a server (`serve --trace-file`) has each step's work and time, and the time between
steps. The cost model learns from it as the server's own cost model did.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import msgspec

from twinphase.batch import StepWork
from twinphase.config import EngineConfig
from twinphase.engine.recorder import MAX_GAP_SECONDS
from twinphase.engine.trace import Replaying, replay
from twinphase.errors import InvalidRequestError, StorageError
from twinphase.phases.cost import CostModel
from twinphase.phases.hardware import processor_name
from twinphase.simulate.errors import KEPT
from twinphase.simulate.spec import Front, WorkerSpec
from twinphase.weights.storage import cache_root, write_atomically

FORMAT = "twinphase-calibration-3"
# Number of first steps of a log, whose kernels and caches are cold.
WARM_UP_STEPS = 32
MIN_STEPS = 200
MAX_NOISE = 4096


@dataclass(frozen=True)
class Calibration:
    """Measured step times of a machine with a model.

    Attributes:
        model, processor, threads, date: subject and date of the measurement.
        costs: arguments of `CostModel`.
        config: the engine's resolved configuration.
        between_steps, between_steps_per_request, noise, prefill_noise: as in `WorkerSpec`.
        front: times outside the engine.
        steps: number of measured steps.
        source: source of the step times, one of `ERROR_SOURCES`.
        median_error: median relative error of the cost model's last predictions.
    """

    model: str
    processor: str
    threads: int
    date: str
    costs: Mapping[str, Any]
    config: Mapping[str, Any]
    between_steps: float
    between_steps_per_request: float
    noise: Sequence[float]
    prefill_noise: Sequence[float] = ()
    front: Front = field(default_factory=Front)
    steps: int = 0
    median_error: float = 0.0
    source: str = "steps"

    @property
    def times(self) -> CostModel:
        return CostModel(**self.costs)

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(**self.config)

    def worker(self, role: Any, config: EngineConfig) -> WorkerSpec:
        return WorkerSpec(
            role,
            self.times,
            config,
            between_steps=self.between_steps,
            between_steps_per_request=self.between_steps_per_request,
            noise=self.noise,
            prefill_noise=self.prefill_noise,
        )

    def save(self, path: Path) -> None:
        """Write the calibration as JSON.

        Raises:
            StorageError: the file cannot be written.
        """
        try:
            write_atomically(path, json.dumps({"format": FORMAT, **asdict(self)}).encode())
        except OSError as error:
            raise StorageError(
                f"The calibration cannot be written to {path}: {error.strerror}."
            ) from None


def read_calibration(path: Path) -> Calibration:
    """Read a saved calibration, or learn one from a step log.

    Raises:
        InvalidRequestError: the file is neither of these.
    """
    try:
        with path.open("rb") as file:
            start = file.read(64)
        if b'"event"' in start:
            return replace(calibration_of(path), source=KEPT)
        found = msgspec.json.decode(path.read_bytes())
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise ValueError("it has another format")
        calibration = msgspec.convert(found, Calibration)
        is_measured = calibration.source == "steps"
        return replace(calibration, source=KEPT) if is_measured else calibration
    except (OSError, ValueError) as error:
        raise InvalidRequestError(
            f"{path} cannot be read as a calibration: {error}.",
            "Give a step log of `twinphase serve --trace-file`, or a file of `twinphase simulate "
            "--save-calibration`.",
        ) from None


def calibration_of(
    log: Path,
    *,
    model: str = "",
    front: Front | None = None,
    first: int = WARM_UP_STEPS,
    least: int = MIN_STEPS,
) -> Calibration:
    """Learn from the steps of a log.

    Args:
        log: step log of a server on the machine in question.
        model: name of the model, for reports.
        front: measured times of requests outside the engine, if any.
        first: number of first steps to ignore in the noise.
        least: minimum number of steps after those.

    Raises:
        InvalidRequestError: the file is not a step log, or has too few steps.
    """
    steps: list[tuple[StepWork, float]] = []
    gaps: list[tuple[int, float]] = []
    header: dict[str, Any] = {}
    last: Replaying | None = None

    def watch(event: dict[str, Any], state: Replaying) -> None:
        nonlocal last
        last = state
        if event["event"] == "header":
            header.update(event)
        elif event["event"] == "observe" and state.num_steps > first:
            steps.append((state.batch.work, event["seconds"]))
            if 0 < event["gap"] < MAX_GAP_SECONDS:
                gaps.append((len(state.batch.scheduled), event["gap"]))

    replay(log, watch)
    if last is None or len(steps) < least:
        raise InvalidRequestError(
            f"{log} has {len(steps)} steps after its warm-up; at least {least} are needed.",
            "Run a load against the server for half a minute.",
        )
    fixed, per_request = _gap_line(gaps)
    # The cost model's pace at the end of the log reflects the last steps only. The prices must
    # reflect all steps, so that the total time is kept.
    costs = last.cost_model
    predicted = [costs.seconds(work) for work, _ in steps]
    pace = sum(seconds for _, seconds in steps) / sum(predicted)
    by_phase: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for (work, seconds), expected in zip(steps, predicted, strict=True):
        by_phase[work.prefill_contexts > 0].append((seconds, expected * pace))
    noise, prefill_noise = map(_noise, by_phase)
    error = costs.error()
    config = {**header["config"], "trace_file": None}
    return Calibration(
        model=model,
        processor=processor_name(),
        threads=config.get("threads") or 0,
        date=time.strftime("%Y-%m-%d"),
        costs={**costs.learned, "prices": tuple(price * pace for price in costs.prices)},
        config=config,
        between_steps=fixed,
        between_steps_per_request=per_request,
        noise=noise,
        prefill_noise=prefill_noise,
        front=front or Front(),
        steps=len(steps),
        median_error=error.median or 0.0,
    )


def _noise(steps: Sequence[tuple[float, float]]) -> list[float]:
    """Ratios measured / predicted of the last steps, scaled so that the total time is kept.

    Short steps vary more than long ones. A simulation also draws their ratios for long steps, which
    would lengthen all steps by several percent without the scaling.
    """
    last = steps[-MAX_NOISE:]
    if not last:
        return []
    ratios = [seconds / expected for seconds, expected in last]
    total = sum(seconds for seconds, _ in last) / sum(expected for _, expected in last)
    correction = total * len(ratios) / sum(ratios)
    return [ratio * correction for ratio in ratios]


def _gap_line(gaps: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """A line through the seconds between steps: a fixed part and a part per request, both >= 0.

    The line is fitted to the median of each batch size, so that single pauses do not tilt it, and
    then raised to keep the total time of all gaps.
    """
    if not gaps:
        return 0.0, 0.0
    by_size: dict[int, list[float]] = {}
    for size, gap in gaps:
        by_size.setdefault(size, []).append(gap)
    points = [(size, median(values)) for size, values in by_size.items() if len(values) >= 5]
    whole = sum(gap for _, gap in gaps)
    if len(points) >= 2:
        line = linear_regression(*zip(*points, strict=True))
        if line.slope > 0 and line.intercept >= 0:
            fitted = sum(line.intercept + line.slope * size for size, _ in gaps)
            return line.intercept * whole / fitted, line.slope * whole / fitted
    return whole / len(gaps), 0.0


def calibration_file(model: str, options: Mapping[str, Any]) -> Path:
    """Path of the calibration of a model on this machine with these options."""
    key = json.dumps([FORMAT, processor_name(), model, sorted(options.items())])
    return cache_root() / "calibrations" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
