"""`kill -9` of the engine's process under load: how soon everybody knows, and how soon the server serves again.

A client is told that it can send its request again by status 503, or by an error event in a stream that had begun.
Served again is the first small request that succeeds, tried every few milliseconds; beside it, how long a process of
its own takes to load the model and warm up.
Not for: an engine that hangs (`stall_timeout`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

from loads import Report
from sse_client import ask, events

from subjects.server_process import Server
from twinphase.bench.client.client import Reply
from twinphase.bench.client.client import run as run_client
from twinphase.bench.statistics import percentile

SUBJECT = "kill"
PATH = "/v1/completions"
METHOD = "one server, whose engine is killed again and again; prompts are random token ids"
PAUSE = 0.01  # seconds between looks whether it serves again
LOAD_ALONE = """
import sys
from twinphase.engine.child import WARM_UP_PROMPT, WARM_UP_TOKENS
from twinphase.engine.load import LoadedEngine
LoadedEngine(sys.argv[1], threads=int(sys.argv[2])).warm_up(WARM_UP_PROMPT, WARM_UP_TOKENS)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--requests", type=int, default=24, help="in flight (default: %(default)s)")
    parser.add_argument("--seats", type=int, default=16, help="max_num_seqs (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens (default: %(default)s)")


async def scenario(server: Server, prompts: list[list[int]], seats: int) -> dict[str, Any]:
    """Load, kill, and what everybody was told when."""
    bodies = [
        {"prompt": prompt, "max_tokens": 1024, "temperature": 0.0, "ignore_eos": True, "stream": index % 3 != 0}
        for index, prompt in enumerate(prompts)
    ]
    tasks = [asyncio.create_task(ask(server.port, PATH, body)) for body in bodies]
    goal = server.metrics("generation_tokens_total")["generation_tokens_total"] + 4 * seats
    while server.metrics("generation_tokens_total")["generation_tokens_total"] < goal:
        await asyncio.sleep(0.02)
    killed = time.perf_counter()
    os.kill(server.engine_pid, signal.SIGKILL)
    small = {**bodies[0], "prompt": prompts[0][:8], "max_tokens": 1, "stream": False}
    while (await ask(server.port, PATH, small)).status != 200:
        await asyncio.sleep(PAUSE)
    again = time.perf_counter() - killed
    replies = await asyncio.gather(*tasks)
    told = [reply.ended - killed for reply in replies]
    kinds = [kind_of_error(reply) for reply in replies]
    return {
        "told": told,
        "kinds": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "again": again,
    }


def kind_of_error(reply: Reply) -> str:
    """How the client learned of it."""
    if reply.status != 200:
        return f"status {reply.status}"
    found = events(reply)
    error = found[-1][1].get("error") if found else None
    if error is None:
        return "no error event"
    return f"error event {error['type']}" + ("" if reply.whole else ", cut off")


def run(bench: Any) -> Report:
    """The scenario, repeated."""
    args = bench.args
    found: list[dict[str, Any]] = []
    alone: list[float] = []
    with bench.serve(f"--max-num-seqs={args.seats}") as server, bench.steps(2 * args.reps):

        def once() -> dict[str, Any]:
            prompts = [bench.prompts.take(args.prompt) for _ in range(args.requests)]
            return run_client(scenario(server, prompts, args.seats))

        for rep in range(args.reps):
            found.append(bench.measure(f"repetition {rep + 1}", once))
            alone.append(bench.measure("loading alone", lambda: load_alone(bench)))
    bench.complete({"found": found, "alone": alone})
    return make_report(bench, found, alone)


def load_alone(bench: Any) -> float:
    """Seconds of a process that loads the model, warms up and ends."""
    start = time.perf_counter()
    command = [sys.executable, "-c", LOAD_ALONE, bench.args.model, str(bench.args.threads)]
    subprocess.run(command, check=True)
    return time.perf_counter() - start


def make_report(bench: Any, found: list[dict[str, Any]], alone: list[float]) -> Report:
    """One line a repetition."""
    rows = []
    for index, (one, load) in enumerate(zip(found, alone, strict=True)):
        kinds = ", ".join(f"{count} x {kind}" for kind, count in one["kinds"].items())
        told = [f"{percentile(one['told'], q) * 1e3:.0f}" for q in (50, 100)]
        rows.append([f"{index + 1}", kinds, *told, f"{one['again']:.2f}", f"{load:.2f}"])
    args = bench.args
    ratio = statistics.median(one["again"] for one in found) / statistics.median(alone)
    longest = max(seconds for one in found for seconds in one["told"])
    notes = [
        f"{args.requests} requests on {args.seats} seats, two of three of them streams; {args.prompt} prompt tokens",
        f"told: from the kill to the end of a reply; the longest of all {longest:.3f} s",
        f"served again / loading alone: {ratio:.2f} (medians)",
    ]
    header = ["repetition", "what clients got", "told, median, ms", "told, last, ms"]
    header += ["served again, s", "loading alone, s"]
    return Report("The engine killed under load", header, rows, notes, {"kills": found, "alone": alone})
