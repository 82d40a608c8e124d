"""A server as users run it: `twinphase serve` in a process of its own, on a port that is free."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI

from children import end

PATIENCE = (
    90.0  # seconds after which what a test waits for does not come: a busy machine takes its time
)


class RunningServer:
    """Starts with the object, ends with `stop` or the `with` block.

    Attributes:
        url: without a path.
        log: what it wrote so far goes there.
    """

    def __init__(
        self, model: str | Path, log: Path, *flags: str, wait: bool = True, path: Path | None = None
    ) -> None:
        self.log = log
        self.model = str(model)
        command = [
            sys.executable,
            "-m",
            "twinphase.cli",
            "serve",
            str(model),
            "--port",
            "0",
            *flags,
        ]
        found = [str(path) if path else "", os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, found))}
        with open(log, "w") as file:
            self.process = subprocess.Popen(command, stderr=file, stdout=file, env=environment)
        self.url = ""
        self.headers: dict[str, str] = {}  # of the requests for metrics
        try:
            if wait:
                self.wait_until_ready()
        except BaseException:
            end(self.process)
            raise

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def wait_until_ready(self) -> None:
        """Until the log names the address and requests are taken."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(
                    f"the server ended with {self.process.returncode}:\n{self.log.read_text()}"
                )
            found = re.search(r"listening +(https?://[^/]+)/v1", self.log.read_text())
            if found:
                self.url = found[1]
            if self.url and self.get("/health/ready")[0] == 200:
                return
            time.sleep(0.05)
        raise AssertionError(f"the server is not ready:\n{self.log.read_text()}")

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Status and body, decoded if it is JSON."""
        return self._send(urllib.request.Request(self.url + path, headers=headers))

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """The same for a JSON body, or for bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        return self._send(urllib.request.Request(self.url + path, data, headers))

    def _send(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                status = response.status
                data = response.read()
                kind = response.headers.get("content-type", "")
        except urllib.error.HTTPError as error:
            with error:
                status = error.code
                data = error.read()
                kind = error.headers.get("content-type", "")
        except urllib.error.URLError:
            return 0, None
        return status, json.loads(data) if kind.startswith("application/json") else data.decode()

    def client(self, api_key: str = "none", **options: Any) -> OpenAI:
        """OpenAI's own client, which does not try again by itself."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, **options)

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value, summed over labels that are not given."""
        total = 0.0
        for line in self.get("/metrics", **self.headers)[1].splitlines():
            named = line.startswith((f"twinphase:{name}{{", f"twinphase:{name} "))
            if named and all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rpartition(" ")[2])
        return total

    def engine_pid(self) -> int:
        """Of the engine's process."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for path in children for pid in path.read_text().split()]
        return next(
            pid
            for pid in pids
            if b"twinphase.engine.process.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the engine's process: all requests sent inside come before its next step.

        A request gets no answer, and a stream no head, before the engine goes on.
        """
        engine = self.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(engine, signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """That server and engine have used."""
        ticks = 0
        for pid in (self.process.pid, self.engine_pid()):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # user and system
        return ticks / os.sysconf("SC_CLK_TCK")

    def is_idle(self) -> bool:
        """Whether the engine holds no request and no block."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return (
            all(self.metric(name) == 0 for name in names) and self.get("/health")[1]["running"] == 0
        )

    def wait_until_idle(self, seconds: float = PATIENCE) -> None:
        """Fails if that does not come."""
        deadline = time.monotonic() + seconds
        while not self.is_idle():
            assert time.monotonic() < deadline, f"requests go on: {self.get('/metrics')[1]}"
            time.sleep(0.02)

    def stop(self, sig: int = signal.SIGTERM, seconds: float = PATIENCE) -> int:
        """End it; the exit code."""
        try:
            if self.process.poll() is None:
                os.kill(self.process.pid, sig)
            return self.process.wait(seconds)
        finally:
            end(self.process)
