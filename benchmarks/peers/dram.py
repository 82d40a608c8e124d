"""How fast this machine reads DRAM right now: the bandwidth of a shared machine drifts, and decode drifts with it.

Not for a roofline; twinphase measures its own.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

MEBIBYTES = 256
PASSES = 9
METHOD = f"C, all threads reading {MEBIBYTES} MiB, best of {PASSES} passes"
SOURCE = Path(__file__).resolve().parent / "dram_read.c"


class DramProbe:
    """A compiled reader; measures nothing where there is no C compiler."""

    def __init__(self, threads: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dram_read")
        program = Path(self._folder.name) / "dram_read"
        compiler = shutil.which("cc")
        if compiler:
            command = [
                compiler,
                "-O3",
                "-march=native",
                "-pthread",
                str(SOURCE),
                "-o",
                str(program),
            ]
            subprocess.run(command, check=True)
        self._command = (
            [str(program), str(threads), str(MEBIBYTES), str(PASSES)] if compiler else None
        )

    def gigabytes_per_second(self) -> list[float]:
        """One measurement, or none."""
        if self._command is None:
            return []
        output = subprocess.run(self._command, capture_output=True, text=True, check=True).stdout
        return [max(map(float, output.split()))]
