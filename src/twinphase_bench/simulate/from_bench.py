"""Reads step times of a machine from a result of `bench` or `roofline`, for `--calibrate`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from twinphase import (
    Deployment,
    InvalidRequestError,
    LoadShape,
    Machine,
    MeasuredPoint,
    calibration_of_points,
    capacity_of,
)
from twinphase_bench.report.result import FORMAT, read_result

# Names of metrics: those of `bench` are in seconds, those of `roofline` in tokens per second.
PREFILL = re.compile(r"prefill(_seconds)?\[n=(\d+)\](?: tok/s)?$")
DECODE_STEP = re.compile(r"decode_step_seconds\[position=(\d+),batch=(\d+)\]$")
DECODE_RATE = re.compile(r"decode\[batch=(\d+),context=(\d+)\] tok/s$")
# A smaller MFU or MBU means that the result belongs to another machine or model.
LEAST = 0.01


def is_result(path: Path) -> bool:
    """Whether a file, or a folder's `result.json`, is a result of `bench` or `roofline`."""
    path = path / "result.json" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            return FORMAT.encode() in file.read(200)
    except OSError:
        return False


def points_of(path: Path) -> tuple[str, list[MeasuredPoint]]:
    """The command of a result, and the measured points of both phases.

    Raises:
        InvalidRequestError: the result has no prefill, or no decode step of one sequence.
        ResultError: the result is damaged.
    """
    result = read_result(path)
    points = []
    for metric in result.metrics:
        value = median(metric.values) if metric.values else 0.0
        if value <= 0:
            continue
        if m := PREFILL.match(metric.name):
            tokens = int(m[2])
            seconds = value if m[1] else tokens / value
            points.append(MeasuredPoint("prefill", tokens, seconds))
        elif m := DECODE_STEP.match(metric.name):
            points.append(MeasuredPoint("decode", int(m[1]), value, int(m[2])))
        elif m := DECODE_RATE.match(metric.name):
            points.append(MeasuredPoint("decode", int(m[2]), int(m[1]) / value, int(m[1])))
    has_decode = any(one.phase == "decode" and one.batch == 1 for one in points)
    if not has_decode or all(one.phase == "decode" for one in points):
        raise InvalidRequestError(
            f"{path} has no prefill and no decode step of one sequence.",
            "Give the result of `twinphase bench MODEL` without a load, or of `twinphase roofline "
            "MODEL`.",
        )
    return result.kind, points


def measured_machine(path: Path, deployment: Deployment) -> Machine:
    """The deployment's machine with the step times of a result.

    For this machine, prices are fitted to all points. For a datasheet, MFU comes from the longest
    prefill and MBU from a decode step of one sequence, as the time at its peaks divided by the
    measured time.

    Raises:
        InvalidRequestError: the result lacks phases, or cannot belong to this machine.
        ResultError: the result is damaged.
    """
    source, points = points_of(path)
    machine = deployment.machine
    if machine.name == "this":
        return Machine("this", calibration_of_points(points, deployment, source))
    prefill = max((one for one in points if one.phase == "prefill"), key=lambda one: one.tokens)
    decodes = (one for one in points if one.phase == "decode" and one.batch == 1)
    step = min(decodes, key=lambda one: one.tokens)
    found = {
        "MFU": _best(machine, deployment, prefill.tokens, prefill.tokens)[0] / prefill.seconds,
        "MBU": _best(machine, deployment, step.tokens, 1)[1] / step.seconds,
    }
    _check(found, path, machine)
    return Machine(machine.name, None, found["MFU"], found["MBU"], machine.devices, source)


def _best(
    machine: Machine, deployment: Deployment, tokens: int, budget: int
) -> tuple[float, float]:
    """Seconds of a prompt's prefill and of the next decode step, at the datasheet's peaks."""
    peak = Machine(machine.name, None, 1.0, 1.0, machine.devices)
    engine = {"max_num_seqs": 1, "max_num_batched_tokens": max(1, budget)}
    one = Deployment(deployment.model, peak, ("both",), engine, dtype=deployment.dtype)
    found = capacity_of(one.worker("both"), LoadShape(1.0, float(tokens), 1.0))
    return found.prefill_seconds, found.step_seconds


def _check(found: Mapping[str, float], path: Path, machine: Machine) -> None:
    for name, value in found.items():
        if not LEAST <= value <= 1:
            raise InvalidRequestError(
                f"By {path}, {name} of {machine.name} would be {value:.3g}.",
                "Is it a result of this model on this hardware?",
            )
