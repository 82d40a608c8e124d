"""twinphase beside the engines that a user would pick on the same CPU: one table, the same prompts.

PEERS_DIR=/some/folder python benchmarks/peers/setup.py       # once: installs peers, makes models
PEERS_DIR=/some/folder python benchmarks/versus_peers.py      # one request at a time
PEERS_DIR=... python benchmarks/versus_peers.py --concurrent  # 1, 4, 16 and 64 requests at once
PEERS_DIR=... python benchmarks/versus_peers.py --model FILE.gguf     # with llama.cpp on any file
python benchmarks/versus_peers.py --engines NAME=URL,NAME=URL         # running servers

Points: `prefill_N` is N prompt tokens in to the first token out; `decode_at_N` is 127 further
greedy tokens after that prompt (0: an 8-token prompt), end of text ignored, with the rate of these
prompts in a second table; `batchN` is N requests
of 256 prompt and 128 output tokens, submitted at once. The rate of a batch counts its output
tokens; a second table counts the prompts too.

How it stays fair: within a repetition every engine measures a point before the next point comes, in
an order that rotates. All engines get the same prompts (servers: random words), and no slice of
text is used twice. All use the same number of threads on the same cores. An engine whose turn it is
not is stopped by a signal (a server is not: one that spins while idle slows the others). A
measurement during which other processes used more than a tenth of a core is repeated, and left out
of the median where an undisturbed one exists (except for a server, which is such a process).
Medians and half ranges are printed, all raw values saved.

Not for: quality. The precisions differ and are listed; a 4-bit file made from another has been
rounded twice.
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
from peers.engines import (
    CONCURRENT_ENGINES,
    DEFAULT_ENGINES,
    ENGINES,
    REPO,
    SAME_FILE_ENGINES,
    EngineError,
    EngineProcess,
    EngineSpec,
    Places,
    select,
)
from peers.points import CONCURRENT_POINTS, DEFAULT_POINTS, SHORT_PROMPT, Point, Prompts

sys.path.insert(0, str(REPO / "src"))  # nothing of it that is imported here needs more than Python
from twinphase.phases.hardware import processor_name  # noqa: E402
from twinphase_bench.conditions import Bystanders  # noqa: E402

CALL_SECONDS = 600.0
# A call may take as long as a prompt does at this rate.
SLOWEST_TOKENS_PER_SECOND = 10
WARM_TOKENS = 8
# Prompts for warming up are no longer than this.
WARM_PROMPT_TOKENS = 4096
# Other processes may use this much of the machine before a measurement counts as disturbed.
QUIET_CORES = 0.1
QUIET_WAIT_SECONDS = 5.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclasses.dataclass
class Run:
    """One run of the benchmark: the engines that live, and everything measured so far."""

    points: Sequence[Point]
    threads: int
    retries: int
    prompts: Prompts
    processes: dict[str, EngineProcess] = dataclasses.field(default_factory=dict)
    engines: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    absent: dict[str, str] = dataclasses.field(default_factory=dict)
    measurements: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def call_seconds(self) -> float:
        longest = max(point.length for point in self.points)
        return max(CALL_SECONDS, longest / SLOWEST_TOKENS_PER_SECOND)

    def fail(self, name: str, error: Exception) -> None:
        """Leave an engine out from here on, and say why."""
        self.absent[name] = str(error)
        say(f"{name}: {error}")
        if process := self.processes.pop(name, None):
            process.close()

    def load(self, spec: EngineSpec, places: Places, logs: Path) -> None:
        """Start an engine, load its model and warm it up; then stop it until its turn comes."""
        if reason := places.absence(spec):
            self.absent[spec.name] = reason
            say(f"{spec.name}: absent, {reason}")
            return
        say(f"{spec.name}: loading")
        process = self.processes[spec.name] = EngineProcess(
            spec, places, self.threads, logs / f"{spec.name}.log"
        )
        longest = max(point.length + point.new_tokens for point in self.points)
        settings = {
            "threads": self.threads,
            "max_len": -(-max(longest, 1024) // 256) * 256,
            "max_seqs": max(point.requests for point in self.points),
            "kv_tokens": max(
                point.requests * (point.length + point.new_tokens) for point in self.points
            ),
            "options": spec.options,
        }
        try:
            with process.turn():
                reply = process.call(self.call_seconds, model=places.model(spec), **settings)
                self.engines[spec.name] = reply["conditions"]
                # One unmeasured pass over every shape: engines compile, pack and cache on first
                # sight of one.
                for count, length in {
                    (point.requests, min(point.length, WARM_PROMPT_TOKENS)) for point in self.points
                }:
                    warm = [self.prompts.take(length) for _ in range(count)]
                    process.call(self.call_seconds, prompts=warm, n=WARM_TOKENS)
        except EngineError as error:
            self.fail(spec.name, error)

    def measure(self, name: str, point: Point, rep: int, request: dict[str, Any]) -> None:
        """One engine, point and repetition; again, with fresh text, when others disturbed it."""
        for attempt in range(self.retries + 1):
            if attempt:
                say(f"{name} {point.name}: others were busy, measuring again")
                time.sleep(QUIET_WAIT_SECONDS)
                request = self.prompts.request(point)
            try:
                entry = {
                    "point": point.name,
                    "repetition": rep,
                    **self._once(self.processes[name], point, request),
                }
            except EngineError as error:
                self.fail(name, error)
                return
            self.measurements.append(entry)
            if not entry["disturbed"]:
                break
        say(
            f"repetition {rep + 1}, {name} {point.name}: {entry['tokens_per_second']:,.1f} tokens/s"
        )

    def _once(
        self, process: EngineProcess, point: Point, request: dict[str, Any]
    ) -> dict[str, Any]:
        """Let the engine run, wake it up, and measure."""
        # Begun and ended while every engine is stopped: counters of processes and of the machine
        # are read in turn.
        with Bystanders() as others, process.turn():
            # Unmeasured: brings the threads and pages of a stopped process back.
            process.call(CALL_SECONDS, prompts=[self.prompts.take(SHORT_PROMPT)], n=4)
            reply = process.call(self.call_seconds, **request)
        cores = None if process.spec.is_server else others.cores
        return {
            "engine": process.spec.name,
            **{
                key: reply[key]
                for key in ("first", "seconds", "prompt_tokens", "new_tokens", "widest")
            },
            "narrow": reply["widest"] < point.requests,
            **point.rates(reply),
            "peak_mib": None if process.spec.is_server else process.peak_mib(),
            "foreign_cores": cores,
            "disturbed": cores is not None and cores > QUIET_CORES,
            "first_tokens": reply["tokens"][:16],
        }

    def repetition(self, rep: int) -> None:
        """All points, each on all engines in turn."""
        for index, point in enumerate(self.points):
            request = self.prompts.request(point)
            names = list(self.processes)
            # Rotated, so that no engine always follows the same one, or always comes first.
            shift = (rep + index) % max(1, len(names))
            for name in names[shift:] + names[:shift]:
                self.measure(name, point, rep, request)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(spec.name for spec in ENGINES)
    parser.add_argument(
        "--engines", help=f"NAME=URL, families, `peers` or names (default: one of each): {names}"
    )
    parser.add_argument("--points", help=f"columns (default: {DEFAULT_POINTS})")
    parser.add_argument(
        "--concurrent",
        action="store_true",
        help=f"points {CONCURRENT_POINTS} on {','.join(CONCURRENT_ENGINES)}, where not named "
        "otherwise",
    )
    parser.add_argument(
        "--model", type=Path, help="GGUF file for twinphase and llama.cpp in place of SmolLM2's"
    )
    parser.add_argument("--reps", type=int, default=5, help="repetitions (default: %(default)s)")
    parser.add_argument(
        "--retries",
        type=int,
        default=2,
        help="further tries at a disturbed measurement (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="threads for every engine (default: %(default)s)"
    )
    parser.add_argument(
        "--peers-dir", type=Path, default=os.environ.get("PEERS_DIR"), help="default: $PEERS_DIR"
    )
    args = parser.parse_args()
    default = (
        CONCURRENT_ENGINES
        if args.concurrent
        else SAME_FILE_ENGINES
        if args.model
        else DEFAULT_ENGINES
    )
    engines = args.engines or ",".join(default)
    points = args.points or (CONCURRENT_POINTS if args.concurrent else DEFAULT_POINTS)
    try:
        args.specs = select(engines.split(","))
        if args.model:
            args.specs = [
                dataclasses.replace(spec, model=str(args.model.resolve())) for spec in args.specs
            ]
        args.point_list = [Point.parse(name) for name in points.split(",")]
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> int:
    """Measure, print the report, save the raw values; leave no process behind."""
    args = parse_arguments()
    if hasattr(os, "sched_setaffinity"):  # keeps every engine on as many cores as there are threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    peers_dir = Path(args.peers_dir).resolve() if args.peers_dir else None
    prompts = Prompts(peers_dir / "models" / "prompt_tokens.json" if peers_dir else None)
    run = Run(args.point_list, args.threads, args.retries, prompts)
    conditions = {
        "machine": f"{processor_name()}, {os.cpu_count()} cores, {platform.system()} "
        f"{platform.release()}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "method": f"{run.threads} threads, {args.reps} repetitions, median ± half range, engines "
        "interleaved, "
        "idle engines stopped, prefix caches off",
        "prompts": prompts.source,
    }
    logs = Path(tempfile.mkdtemp(prefix="versus_peers-"))
    say(f"logs of the engines: {logs}")
    # A stopped engine would not notice that its driver is gone, so a polite kill must pass through
    # `finally` too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for spec in args.specs:
            run.load(spec, Places(peers_dir, Path(sys.executable)), logs)
        for rep in range(args.reps):
            run.repetition(rep)
    except KeyboardInterrupt:
        say("interrupted: reporting what was measured so far")
    finally:
        for process in run.processes.values():
            process.close()
    result = {
        "conditions": conditions,
        "engines": run.engines,
        "absent": run.absent,
        "measurements": run.measurements,
    }
    path = logs / "result.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    own = [spec.name for spec in args.specs if not spec.is_peer]
    print(
        report.markdown(
            result, [s.name for s in args.specs], own, [p.name for p in args.point_list]
        )
    )
    say(f"raw values: {path}")
    return 0 if run.measurements else 1


if __name__ == "__main__":
    sys.exit(main())
