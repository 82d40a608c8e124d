"""This machine's ceilings: memory bandwidth by working set, and the peak rates of its units.

Not for judging kernels (phases/hardware.py does), and not where somebody waits: callers measure in
idle moments. The measuring is in peaks.py, which alone needs the compiler.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable

from twinphase import lifeline
from twinphase.backends.base import MeasuredRates
from twinphase.backends.cpu.isa import choose_isa, compiler_environment
from twinphase.config import module_command
from twinphase.errors import TwinphaseError


class CeilingsError(TwinphaseError):
    """The ceilings could not be measured; the message carries the last line of what went wrong."""


def measure(threads: int, isa: str | None = None) -> MeasuredRates:
    """All ceilings of `threads` threads on one instruction-set path, in a process of its own.

    It takes about four seconds, half of them compiling; on a busy machine up to ten.

    Raises:
        InvalidRequestError: this processor cannot run `isa`.
        CeilingsError: the measuring process failed.
    """
    return measure_repeatedly(threads, isa, 1)[0]


def measure_repeatedly(
    threads: int,
    isa: str | None,
    repetitions: int,
    progress: Callable[[float, int], None] = lambda done, total: None,
    started: Callable[[Callable[[], None]], None] = lambda end: None,
) -> list[MeasuredRates]:
    """All ceilings, `repetitions` times in one process of its own.

    A process of its own keeps the compiler and 256 MiB of memory out of the caller's, and compiles
    for the path's processor. `progress` gets the repetitions that are done. `started` is
    called with a function that ends it at once.

    Raises:
        InvalidRequestError: this processor cannot run `isa`.
        CeilingsError: the measuring process failed, or was ended.
    """
    path = choose_isa(isa)
    command = [
        *module_command("twinphase.backends.cpu.peaks"),
        path.name,
        str(threads),
        str(repetitions),
    ]
    found: list[MeasuredRates] = []
    with (
        tempfile.TemporaryFile() as log,
        lifeline.start(
            command,
            env=compiler_environment(path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as run,
    ):
        try:
            started(run.kill)
            assert run.stdout is not None
            for line in run.stdout:
                values = json.loads(line)
                if "share" in values:
                    progress(len(found) + values["share"], repetitions)
                    continue
                values["bandwidth"] = tuple(
                    (int(size), float(rate)) for size, rate in values["bandwidth"]
                )
                found.append(MeasuredRates(**values))
                progress(len(found), repetitions)
        except BaseException:
            run.kill()
            raise
        if run.wait() or len(found) < repetitions:
            log.seek(0)
            reason = (log.read().decode(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise CeilingsError(f"Measuring this machine's ceilings failed: {reason}")
    return found
