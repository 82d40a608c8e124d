"""What this machine can do at best: memory read by working set, and peak rates of the units that kernels use.

Not for judging kernels (phases/hardware.py does), and not for the way to the first token: callers measure after the
answer, once a machine. The loops are in peaks.py, which alone needs the compiler.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from twinphase.backends.cpu.isa import baseline_cpu, choose_isa
from twinphase.config import module_command
from twinphase.errors import TwinphaseError

__all__ = ["CeilingsError", "Measurement", "measure"]


class CeilingsError(TwinphaseError):
    """The ceilings could not be measured; the message carries the last line of what went wrong."""


@dataclass(frozen=True)
class Measurement:
    """Best rates seen, operations and bytes a second; None where the processor has no such unit.

    A multiplication and an addition are two operations. `bandwidth` is ((working set in bytes, bytes/s), ...).
    """

    bandwidth: tuple[tuple[int, float], ...]
    int8_ops: float
    float32_flops: float
    bfloat16_flops: float | None


def measure(threads: int, isa: str | None = None) -> Measurement:
    """All ceilings of `threads` threads on one instruction-set path, measured in a process of its own.

    A process of its own keeps the compiler and 256 MiB of memory out of the caller's, and compiles for the path's
    processor. It takes about two seconds, half a second of which is measuring.

    Raises:
        InvalidRequestError: this processor cannot run `isa`.
        CeilingsError: the measuring process failed.
    """
    path = choose_isa(isa)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if path.cpu or path.name == "generic":
        environment |= {"NUMBA_CPU_NAME": baseline_cpu(path), "NUMBA_CPU_FEATURES": ""}
    command = [*module_command("twinphase.backends.cpu.peaks"), str(threads), path.name]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise CeilingsError(f"Measuring this machine's ceilings failed: {reason}")
    found = json.loads(done.stdout)
    found["bandwidth"] = tuple((int(size), float(rate)) for size, rate in found["bandwidth"])
    return Measurement(**found)
