"""Measures this machine for simulations, with the step log of a real server under a short load.

This takes half a minute, once per model and options; the result is stored. The load is synthetic:
single requests of several lengths, then more and more concurrent ones, so that the log has prefill,
decode and mixed steps of many sizes. The time outside the engine is the client's time minus the
time in the request's ledger.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from twinphase import (
    Calibration,
    Closed,
    Front,
    Lengths,
    Progress,
    TwinphaseError,
    calibration_file,
    calibration_of,
    read_calibration,
)
from twinphase.phases.observation import Observation
from twinphase_bench.client.client import run
from twinphase_bench.load.run import LoadResult, run_load
from twinphase_bench.load.workload import make_workload
from twinphase_bench.targets.openai import OpenAITarget

START_SECONDS = 300.0
STOP_SECONDS = 30.0
# A younger stored calibration counts as measured now.
FRESH_SECONDS = 600.0
QUIET = ("--no-page", "--speculative-config", "none")


class ServerFailedError(TwinphaseError):
    """The server to be measured did not start."""


@dataclass(frozen=True)
class Stage:
    """A part of the load, with a fixed number of concurrent requests."""

    concurrency: int
    requests: int
    lengths: Lengths


STAGES = (
    Stage(1, 5, Lengths((16, 900), (4, 24))),
    Stage(4, 12, Lengths((32, 700), (8, 64))),
    Stage(16, 24, Lengths((16, 500), (16, 64))),
    Stage(2, 4, Lengths((400, 1500), (32, 96))),
)
# The stages are repeated, so that a slow period of the machine does not affect all steps of one
# kind.
ROUNDS = 2


@contextlib.contextmanager
def running_server(model: str, options: Sequence[str]) -> Iterator[str]:
    """Run `twinphase serve` in its own process until the context ends; yields its URL.

    Raises:
        ServerFailedError: the server does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "twinphase_bench.cli", "serve", model, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            end = time.monotonic() + START_SECONDS
            while not _is_up(url):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    last = log.read().decode(errors="replace").strip().splitlines()[-1:]
                    raise ServerFailedError(
                        f"The server of {model} did not start: {' '.join(last)}",
                        f"Try `twinphase serve {model}` by itself.",
                    )
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def calibration_here(
    model: str,
    options: Mapping[str, Any],
    progress: Progress,
    *,
    again: bool = False,
    replicas: int = 1,
) -> Calibration:
    """The stored calibration of a model on this machine, or a new one.

    Args:
        model: name or path as for `serve`.
        options: engine options that change the time of a step, with `EngineConfig`'s names.
        progress: called during the measurement.
        again: whether to measure even if there is a stored calibration.
        replicas: number of busy engines that share this machine.
    """
    path = calibration_file(model, {**options, "replicas": replicas})
    if not again:
        with contextlib.suppress(TwinphaseError, OSError):
            is_fresh = time.time() - path.stat().st_mtime < FRESH_SECONDS
            kept = read_calibration(path)
            return replace(kept, source="steps") if is_fresh else kept
    found = calibrate(model, options, progress, replicas)
    with contextlib.suppress(TwinphaseError):
        found.save(path)
    return found


def calibrate(
    model: str, options: Mapping[str, Any], progress: Progress, replicas: int = 1
) -> Calibration:
    """Measure this machine with a model, for about half a minute.

    With several replicas, the steps of one are measured while the others use the same memory.

    Raises:
        ServerFailedError: the server does not start.
        InvalidRequestError: the server ran too few steps.
    """
    words = [w for name, value in options.items() for w in (f"--{name.replace('_', '-')}", value)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.jsonl"
        arguments = [*map(str, words), *QUIET, "--trace-file", str(log)]
        if replicas > 1:
            arguments += ["--replicas", str(replicas)]
            log = Path(f"{log}.worker-0")
        progress("starting a server to measure", 0, 0)
        with running_server(model, arguments) as url:
            results = run(send_stages(url, progress))
        return calibration_of(log, model=model, front=front_of(results))


async def send_stages(url: str, progress: Progress) -> list[LoadResult]:
    """Send the load for a calibration."""
    target = await OpenAITarget.open(url)
    try:
        sizing = await target.sizing()
        results = []
        for number, stage in enumerate(STAGES * ROUNDS):
            progress("measuring this machine", number, ROUNDS * len(STAGES))
            workload = make_workload(stage.lengths, stage.requests, sizing, seed=7919 * number + 17)
            results.append(await run_load(target, workload, Closed(stage.concurrency)))
        return results
    finally:
        await target.close()


def front_of(results: Sequence[LoadResult]) -> Front:
    """Times outside the engine: TTFT minus queue and prefill, fitted to the prompt length."""
    points = [
        point
        for result in results
        for one in result.succeeded
        if (point := _outside(one)) is not None
    ]
    if len(points) < 2:
        return Front()
    line = linear_regression(*zip(*points, strict=True))
    if line.slope < 0 or line.intercept < 0:
        return Front(request=max(0.0, median(seconds for _, seconds in points)))
    return Front(request=line.intercept, per_prompt_token=line.slope)


def _outside(one: Observation) -> tuple[int, float] | None:
    """(prompt tokens, seconds) of a request whose server reports its ledger."""
    ledger = one.claims.get("timings", {}).get("ledger_ms")
    if not isinstance(ledger, dict) or one.ttft is None or one.num_prompt_tokens is None:
        return None
    inside = sum(ledger.get(kind) or 0.0 for kind in ("queue", "prefill", "prefill_wait")) / 1e3
    return one.num_prompt_tokens, max(0.0, one.ttft - inside)
