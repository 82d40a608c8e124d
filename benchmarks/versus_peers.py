"""twinphase beside the engines a user would pick on the same CPU: one table, one run, the same prompts.

    PEERS_DIR=/some/folder python benchmarks/peers/setup.py        # once: installs the peers, makes the models
    PEERS_DIR=/some/folder python benchmarks/versus_peers.py                # one request at a time
    PEERS_DIR=/some/folder python benchmarks/versus_peers.py --concurrent   # 1, 4, 16 and 64 requests at once

Points: `prefill_N` is N prompt tokens in to the first token out; `decode_at_N` is 127 further greedy tokens after that
prompt (0: an 8-token prompt), end-of-text ignored; `batchN` is N requests of 256 prompt and 128 new tokens, submitted
at once, of which the new tokens are counted (a second table counts the prompts too).

How it stays fair: within a repetition every engine measures a point before the next point comes, in an order that
rotates; all get the same prompts, and no slice of text is used twice; all get the same threads on the same cores; an
engine that is not measured is stopped by signal; a measurement during which other processes used more than a tenth of a
core is taken again, and left out of the median where an undisturbed one exists; DRAM bandwidth is read in the same run.
Medians and half ranges are printed, all raw values saved.

Not for: quality. The precisions differ and are listed; a 4-bit file made from another has been rounded twice.
Needs only the standard library and this checkout; with rich installed the progress is nicer.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers import report
from peers.dram import DramProbe
from peers.engines import (
    CONCURRENT_ENGINES,
    DEFAULT_ENGINES,
    ENGINES,
    REPO,
    EngineError,
    EngineProcess,
    EngineSpec,
    Places,
    select,
)
from peers.points import CONCURRENT_POINTS, DEFAULT_POINTS, SHORT_PROMPT, Point, Prompts

sys.path.insert(0, str(REPO / "src"))  # nothing of it that is imported here needs more than Python
from twinphase.bench.conditions import Bystanders  # noqa: E402
from twinphase.phases.hardware import processor_name  # noqa: E402

LOAD_SECONDS, OPERATION_SECONDS = 600.0, 600.0
WARM_TOKENS = 8
QUIET_CORES = 0.1  # others may use this much of the machine before a measurement counts as disturbed
QUIET_WAIT_SECONDS = 10.0


class Progress:
    """Lines of progress on stderr, dressed up where rich is installed."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        try:
            from rich.console import Console

            self._console: Any = Console(stderr=True, highlight=False)
        except ImportError:
            self._console = None

    def say(self, text: str) -> None:
        """One line."""
        if self._console:
            self._console.print(text, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def step(self, text: str) -> None:
        """One line with the count of measurements so far."""
        self._done += 1
        self.say(f"[{self._done}/{self._total}] {text}")


@dataclasses.dataclass
class Run:
    """One run of the benchmark: the engines that live, and everything measured so far."""

    points: Sequence[Point]
    threads: int
    reps: int
    retries: int
    prompts: Prompts
    progress: Progress
    warm_requests: list[tuple[str, dict[str, Any]]] = dataclasses.field(default_factory=list)
    processes: dict[str, EngineProcess] = dataclasses.field(default_factory=dict)
    engines: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    absent: dict[str, str] = dataclasses.field(default_factory=dict)
    measurements: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    bandwidth: list[float] = dataclasses.field(default_factory=list)

    @property
    def max_len(self) -> int:
        """Context every engine is opened with: the longest point and its new tokens."""
        longest = max(point.kv_tokens // point.requests for point in self.points)
        return -(-max(longest, 1024) // 256) * 256

    def fail(self, name: str, error: Exception) -> None:
        """Leave an engine out from here on, and say why."""
        self.absent[name] = str(error)
        self.progress.say(f"{name}: {error}")
        if process := self.processes.pop(name, None):
            process.close()

    def load(self, spec: EngineSpec, places: Places, logs: Path) -> None:
        """Start an engine, load its model and warm it up; then stop it until its turn comes."""
        if reason := places.absence(spec):
            self.absent[spec.name] = reason
            self.progress.say(f"{spec.name}: absent, {reason}")
            return
        self.progress.say(f"{spec.name}: loading")
        process = EngineProcess(spec, places, self.threads, logs / f"{spec.name}.log")
        self.processes[spec.name] = process
        settings = {
            "threads": self.threads,
            "max_len": self.max_len,
            "max_seqs": max(point.requests for point in self.points),
            "kv_tokens": max(point.kv_tokens for point in self.points),
            "options": spec.options,
        }
        try:
            reply = process.call("load", LOAD_SECONDS, model=places.model(spec), **settings)
            self.engines[spec.name] = reply["conditions"]
            self._warm_up(process)
            process.pause()
        except EngineError as error:
            self.fail(spec.name, error)

    def _warm_up(self, process: EngineProcess) -> None:
        """One unmeasured pass over every shape: engines compile, pack and cache on first sight of one."""
        for operation, request in self._warm_requests():
            process.call(operation, OPERATION_SECONDS, **request)

    def _warm_requests(self) -> list[tuple[str, dict[str, Any]]]:
        """The warm-up, the same for every engine: each length once, and the batch, with a few new tokens."""
        if not self.warm_requests:
            shapes = {(p.requests, p.length, p.operation == "batch"): p for p in self.points}
            for (_, _, is_batch), point in sorted(shapes.items()):
                request = {**self.prompts.request(point), "n": WARM_TOKENS}
                self.warm_requests.append(("batch" if is_batch else "decode", request))
        return self.warm_requests

    def measure(self, name: str, point: Point, rep: int, request: dict[str, Any]) -> None:
        """One engine, one point, one repetition; once more, with fresh text, when others were in the way."""
        for attempt in range(self.retries + 1):
            if attempt:
                self.progress.say(f"{name} {point.name}: others were busy, measuring again")
                wait_for_quiet()
                request = self.prompts.request(point)
            try:
                entry = {"point": point.name, "repetition": rep, **self._once(self.processes[name], point, request)}
            except EngineError as error:
                self.fail(name, error)
                return
            self.measurements.append(entry)
            if not entry["disturbed"]:
                break
        self.progress.step(f"{name} {point.name}: {entry['tokens_per_second']:,.1f} tokens/s")

    def _once(self, process: EngineProcess, point: Point, request: dict[str, Any]) -> dict[str, Any]:
        """Let the engine run, wake it up, and measure."""
        wake = self.prompts.take(SHORT_PROMPT)
        # Begun and ended while every engine is stopped: counters of processes and of the machine are read in turn.
        with Bystanders() as others, process.turn():
            # Unmeasured: brings the threads and pages of a stopped process back.
            process.call("decode", OPERATION_SECONDS, tokens=wake, n=4)
            reply = process.call(point.operation, OPERATION_SECONDS, **request)
        return {
            "engine": process.spec.name,
            "seconds": reply["seconds"],
            "new_tokens": reply["new_tokens"],
            "widest": reply["widest"],
            "narrow": reply["widest"] < point.requests,
            "tokens_per_second": point.rate(reply),
            "total_tokens_per_second": point.total_rate(reply),
            "foreign_cores": others.cores,
            "disturbed": others.cores is not None and others.cores > QUIET_CORES,
            "first_tokens": reply["tokens"][:16],
        }

    def repetition(self, rep: int, probe: DramProbe) -> None:
        """All points, each on all engines in turn, and the bandwidth before and after."""
        self.read_bandwidth(probe)
        for index, point in enumerate(self.points):
            request = self.prompts.request(point)
            names = list(self.processes)
            # Rotated, so that no engine always follows the same one, or always comes first.
            shift = (rep + index) % max(1, len(names))
            for name in names[shift:] + names[:shift]:
                self.measure(name, point, rep, request)
        self.read_bandwidth(probe)

    def read_bandwidth(self, probe: DramProbe) -> None:
        """Note the bandwidth while every engine is stopped."""
        value = probe.gigabytes_per_second()
        if value is not None:
            self.bandwidth.append(value)


def wait_for_quiet() -> None:
    """Wait, for a while at most, until others leave the processor alone; every engine is stopped meanwhile."""
    deadline = time.monotonic() + QUIET_WAIT_SECONDS
    while time.monotonic() < deadline:
        with Bystanders() as others:
            time.sleep(0.5)
        if (others.cores or 0.0) <= QUIET_CORES:
            return


def conditions(run: Run) -> dict[str, str]:
    """What a reader must know to judge or repeat the figures."""
    return {
        "machine": f"{processor_name()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "method": f"{run.threads} threads, {run.reps} repetitions, median ± half range, engines interleaved, "
        "idle engines stopped, prefix caches off",
        "prompts": run.prompts.source,
        "load average at the start": f"{os.getloadavg()[0]:.2f}",
    }


def default_python() -> Path:
    """The checkout's own environment where there is one, else the Python running this."""
    own = REPO / ".venv" / "bin" / "python"
    return own if own.exists() else Path(sys.executable)


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(spec.name for spec in ENGINES)
    parser.add_argument("--engines", help=f"names, families or `peers` (default: one of each): {names}")
    parser.add_argument("--points", help=f"columns (default: {DEFAULT_POINTS})")
    parser.add_argument(
        "--concurrent",
        action="store_true",
        help=f"points {CONCURRENT_POINTS} on {','.join(CONCURRENT_ENGINES)}, where not named otherwise",
    )
    parser.add_argument("--reps", type=int, default=5, help="repetitions (default: %(default)s)")
    parser.add_argument(
        "--retries", type=int, default=2, help="further tries at a disturbed measurement (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads for every engine (default: %(default)s)")
    parser.add_argument("--peers-dir", type=Path, default=os.environ.get("PEERS_DIR"), help="default: $PEERS_DIR")
    parser.add_argument("--python", type=Path, default=default_python(), help="interpreter that has twinphase")
    parser.add_argument("--json", type=Path, help="file for the raw values (default: benchmarks/results/, dated)")
    args = parser.parse_args()
    try:
        engines = CONCURRENT_ENGINES if args.concurrent else DEFAULT_ENGINES
        args.specs = select(split(args.engines) if args.engines else list(engines))
        points = args.points or (CONCURRENT_POINTS if args.concurrent else DEFAULT_POINTS)
        args.point_list = [Point.parse(name) for name in split(points)]
    except ValueError as error:
        parser.error(str(error))
    return args


def split(text: str) -> list[str]:
    """Comma-separated words."""
    return [word.strip() for word in text.split(",") if word.strip()]


def use_cores(threads: int) -> None:
    """Keep this process, and so every engine it starts, on as many cores as there are threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def result_path(given: Path | None) -> Path:
    """Where the raw values go; the default folder ignores itself in git."""
    if given:
        return given
    folder = REPO / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    return folder / f"versus_peers-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"


def execute(run: Run, specs: Sequence[EngineSpec], places: Places, logs: Path) -> str:
    """Load, repeat, and always leave no process behind; returns how the bandwidth was measured."""
    probe = DramProbe(run.threads)
    # A stopped engine would not notice that its driver is gone, so a polite kill must pass through `finally` too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for spec in specs:
            run.load(spec, places, logs)
        for rep in range(run.reps):
            run.repetition(rep, probe)
    except KeyboardInterrupt:
        run.progress.say("interrupted: reporting what was measured so far")
    finally:
        for process in run.processes.values():
            process.close()
    return probe.method


def main() -> int:
    """Measure, print the report, save the raw values."""
    args = parse_arguments()
    use_cores(args.threads)
    peers_dir = Path(args.peers_dir).resolve() if args.peers_dir else None
    prompts = Prompts(peers_dir / "models" / "prompt_tokens.json" if peers_dir else None)
    progress = Progress(len(args.specs) * len(args.point_list) * args.reps)
    run = Run(args.point_list, args.threads, args.reps, args.retries, prompts, progress)
    facts = conditions(run)
    logs = Path(tempfile.mkdtemp(prefix="versus_peers-"))
    progress.say(f"logs of the engines: {logs}")
    method = execute(run, args.specs, Places(peers_dir, args.python), logs)
    result = {
        "conditions": facts,
        "engines": run.engines,
        "absent": run.absent,
        "dram_method": method,
        "dram_gigabytes_per_second": run.bandwidth,
        "measurements": run.measurements,
    }
    path = result_path(args.json)
    path.write_text(json.dumps(result, indent=1) + "\n")
    own = [spec.name for spec in args.specs if not spec.is_peer]
    print(report.markdown(result, [s.name for s in args.specs], own, [p.name for p in args.point_list]))
    progress.say(f"raw values: {path}")
    return 0 if run.measurements else 1


if __name__ == "__main__":
    sys.exit(main())
