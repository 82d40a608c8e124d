"""`kill -9` of the engine's process under load: how soon everybody knows, and how soon the server serves again.

A client is told that it can send its request again by status 503, or by an error event in a stream
that had begun. Served again is the first small request that succeeds; beside it, how long a process
that only loads the model takes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

from running import RunningServer
from serving.processes import COMPLETIONS, ask, events, random_prompt, serving
from twinphase.phases.statistics import percentile
from twinphase_bench.client.client import Reply
from twinphase_bench.client.client import run as run_client
from twinphase_bench.report.report import Column, Section, Table

OPTIONS = {
    "requests": (24, "in flight"),
    "seats": (16, "max_num_seqs"),
    "prompt": (256, "prompt tokens"),
}
PAUSE = 0.01  # seconds between looks whether it serves again
LOAD_ALONE = """
import sys
from twinphase.engine.process.child import WARM_UP_PROMPT, WARM_UP_TOKENS
from twinphase.config import EngineConfig
from twinphase.engine.loading.loading import LoadedEngine
config = EngineConfig(threads=int(sys.argv[2]))
LoadedEngine(sys.argv[1], config).warm_up(WARM_UP_PROMPT, WARM_UP_TOKENS)
"""


async def scenario(server: RunningServer, prompts: list[list[int]], seats: int) -> dict[str, Any]:
    """Load, kill, and what everybody was told when."""
    bodies = [
        {
            "prompt": prompt,
            "max_tokens": 1024,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": index % 3 != 0,
        }
        for index, prompt in enumerate(prompts)
    ]
    tasks = [asyncio.create_task(ask(server, COMPLETIONS, body)) for body in bodies]
    goal = server.metric("generation_tokens_total") + 4 * seats
    while server.metric("generation_tokens_total") < goal:
        await asyncio.sleep(0.02)
    killed = time.perf_counter()
    os.kill(server.engine_pid(), signal.SIGKILL)
    small = {**bodies[0], "prompt": prompts[0][:8], "max_tokens": 1, "stream": False}
    while (await ask(server, COMPLETIONS, small)).status != 200:
        await asyncio.sleep(PAUSE)
    again = time.perf_counter() - killed
    replies = await asyncio.gather(*tasks)
    kinds = [kind_of_error(reply) for reply in replies]
    return {
        "told": [reply.ended - killed for reply in replies],
        "kinds": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "again": again,
    }


def kind_of_error(reply: Reply) -> str:
    """How the client learned of it."""
    if reply.status != 200:
        return f"status {reply.status}"
    found = events(reply)
    error = found[-1].get("error") if found else None
    if error is None:
        return "no error event"
    return f"error event {error['type']}" + ("" if reply.whole else ", cut off")


def load_alone(args: argparse.Namespace) -> float:
    """Seconds of a process that loads the model, warms up and ends."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", LOAD_ALONE, args.model, str(args.threads)], check=True)
    return time.perf_counter() - start


def run(args: argparse.Namespace) -> tuple[Section, Any]:
    """One server, whose engine is killed again and again."""
    rng = random.Random(0)
    found = []
    with serving(args, max_num_seqs=args.seats) as server:
        for _ in range(args.reps):
            prompts = [random_prompt(rng, args.prompt) for _ in range(args.requests)]
            found.append(
                run_client(scenario(server, prompts, args.seats)) | {"alone": load_alone(args)}
            )
    rows = tuple(
        (
            ", ".join(f"{count} x {kind}" for kind, count in one["kinds"].items()),
            *(f"{percentile(one['told'], q) * 1e3:.0f}" for q in (50, 100)),
            f"{one['again']:.2f}",
            f"{one['alone']:.2f}",
        )
        for one in found
    )
    told = "from the kill to the end of a reply"
    columns = (
        Column("what clients got"),
        Column("told, median, ms", told),
        Column("told, last, ms", told),
        Column("served again, s"),
        Column("loading alone, s"),
    )
    note = (
        f"{args.requests} requests on {args.seats} seats, two of three of them streams; "
        f"{args.prompt} prompt tokens."
    )
    return Section(
        "The engine killed under load", (), (note,), (Table("Repetitions", columns, rows),)
    ), found
