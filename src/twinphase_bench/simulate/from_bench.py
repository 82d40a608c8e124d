"""MFU and MBU of a machine from a `bench` result that was measured there: `--calibrate`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from twinphase import Deployment, InvalidRequestError, LoadShape, Machine, capacity_of
from twinphase_bench.report.result import FORMAT, read_result

PREFILL = re.compile(r"prefill_seconds\[n=(\d+)\]")
DECODE = re.compile(r"decode_step_seconds\[position=(\d+),batch=(\d+)\]")
# Below, a result is of another machine or model than the datasheet's.
LEAST = 0.01


def is_result(path: Path) -> bool:
    """Whether a file, or the one in a folder, is a result of `bench`."""
    path = path / "result.json" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            return FORMAT.encode() in file.read(200)
    except OSError:
        return False


def measured_machine(path: Path, deployment: Deployment) -> Machine:
    """The deployment's machine with the MFU and MBU that a result of its phases shows.

    The longest prefill gives the MFU, a decode step of one sequence the MBU: what the datasheet's
    peaks would take, over what was measured.

    Raises:
        InvalidRequestError: the result has no phases, or they cannot be those of this machine.
        ResultError: it is damaged.
    """
    metrics = {one.name: median(one.values) for one in read_result(path).metrics if one.values}
    prefills = {int(m[1]): value for name, value in metrics.items() if (m := PREFILL.match(name))}
    steps = {
        int(m[1]): value
        for name, value in metrics.items()
        if (m := DECODE.match(name)) and m[2] == "1"
    }
    if not prefills or not steps:
        raise InvalidRequestError(
            f"{path} has no prefill and no decode step of one sequence.",
            "Give the result of `twinphase bench MODEL` without a load.",
        )
    machine = deployment.machine
    length = max(prefills)
    position = min(steps)
    found = {
        "MFU": _best(machine, deployment, length, length)[0] / prefills[length],
        "MBU": _best(machine, deployment, position, 1)[1] / steps[position],
    }
    _check(found, path, machine)
    devices = machine.devices
    return Machine(machine.name, None, found["MFU"], found["MBU"], devices)


def _best(
    machine: Machine, deployment: Deployment, tokens: int, budget: int
) -> tuple[float, float]:
    """Seconds of a prompt's prefill, and of a decode step after it, at the datasheet's peaks."""
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
