"""How fast this machine reads DRAM right now, with as many threads as the engines have.

For: `versus_peers.py`, because the bandwidth of a shared machine drifts from run to run and decode drifts with it.
Not for: a roofline; twinphase measures its own.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

MEBIBYTES = 256
PASSES = 9
SOURCE = Path(__file__).resolve().parent / "dram_read.c"


class DramProbe:
    """A compiled reader where there is a C compiler, NumPy threads where there is none."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._folder = tempfile.TemporaryDirectory(prefix="dram_read")
        self._program = self._compile()

    @property
    def method(self) -> str:
        """What is measured, and with what."""
        tool = "C" if self._program else "NumPy"
        return f"{tool}, {self._threads} threads reading {MEBIBYTES} MiB, best of {PASSES} passes"

    def _compile(self) -> Path | None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            return None
        program = Path(self._folder.name) / "dram_read"
        command = [compiler, "-O3", "-march=native", "-pthread", str(SOURCE), "-o", str(program)]
        return program if subprocess.run(command, capture_output=True).returncode == 0 else None

    def gigabytes_per_second(self) -> float | None:
        """One measurement; None when neither the compiler nor NumPy is there."""
        if self._program is None:
            return self._with_numpy()
        command = [str(self._program), str(self._threads), str(MEBIBYTES), str(PASSES)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return max(map(float, output.split()))

    def _with_numpy(self) -> float | None:
        try:
            import numpy as np
        except ImportError:
            return None
        data = np.ones(MEBIBYTES * 1024 * 1024 // 8, dtype=np.uint64)
        parts = np.array_split(data, self._threads)
        best = 0.0
        for _ in range(PASSES):
            workers = [threading.Thread(target=part.sum) for part in parts]
            start = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            best = max(best, data.nbytes / (time.perf_counter() - start) / 1e9)
        return best
