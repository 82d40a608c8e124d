"""A `twinphase serve` of its own for the benchmarks of the server, and what the system tells of its two processes.

Not for what it answers (`sse_client.py`).
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessState", "Server", "cpu_seconds", "process_state"]

READY_SECONDS, STOP_SECONDS = 180, 90
TICK = os.sysconf("SC_CLK_TCK")
MIB = 1024.0  # of /proc's kB


class Server:
    """Started with the object; ended by `stop` or the `with` block.

    Attributes:
        process: the front end's.
        port: that it listens on.
        started: when the process was started, and `ready` when it took requests, seconds.
    """

    def __init__(self, model: str, *flags: str, program: Sequence[str] = ("-m", "twinphase.cli")) -> None:
        """Start it, and wait until it takes requests.

        Args:
            model: as for `twinphase serve`.
            flags: of `twinphase serve`.
            program: what Python runs.
        """
        self.started = time.perf_counter()
        self._log = tempfile.NamedTemporaryFile("w+", prefix="twinphase-serve-", suffix=".log")  # noqa: SIM115
        command = [sys.executable, *program, "serve", model, "--port", "0", *flags]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self.port = 0
        while not self.port or self.get("/health")[0] != 200:
            if self.process.poll() is not None or time.perf_counter() > self.started + READY_SECONDS:
                self.process.kill()
                raise SystemExit(f"the server did not start:\n{self.log()}")
            found = re.search(r"listening +http://[^/]+:(\d+)/v1", self.log())
            self.port = int(found[1]) if found else 0
            time.sleep(0.01)
        self.ready = time.perf_counter()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def log(self) -> str:
        """What it wrote so far."""
        return Path(self._log.name).read_text()

    def get(self, path: str) -> tuple[int, str]:
        """Status and body; status 0 when there is no connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()

    def metrics(self, *names: str) -> dict[str, float]:
        """Values by name, summed over labels."""
        found = dict.fromkeys(names, 0.0)
        for line in self.get("/metrics")[1].splitlines():
            name = re.match(r"twinphase:(\w+)", line)
            if name and name[1] in found:
                found[name[1]] += float(line.rpartition(" ")[2])
        return found

    def is_idle(self) -> bool:
        """Whether it holds no request and no block of the KV cache."""
        state = self.metrics("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(state.values()) and json.loads(self.get("/health")[1] or '{"running": 1}')["running"] == 0

    @property
    def engine_pid(self) -> int:
        """Of the engine's process; 0 while there is none."""
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for pid in path.read_text().split():
                try:
                    if b"twinphase.engine.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        return int(pid)
                except OSError:
                    continue
        return 0

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """End it; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@dataclass(frozen=True)
class ProcessState:
    """What a process holds: resident memory without mapped files, MiB; all resident memory; threads; descriptors."""

    anonymous: float
    resident: float
    threads: int
    descriptors: int


def process_state(pid: int) -> ProcessState:
    """By /proc."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    sizes = [int(fields[name].split()[0]) / MIB for name in ("RssAnon", "VmRSS")]
    return ProcessState(*sizes, int(fields["Threads"]), len(os.listdir(f"/proc/{pid}/fd")))


def cpu_seconds(pid: int) -> float:
    """Used so far by a process and by those of its children that have ended."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])) / TICK
