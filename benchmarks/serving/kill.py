"""`kill -9` of the engine's process under load: when clients know, and when it serves again.

A client learns that it can send its request again by status 503, or by an error event in a stream
that had begun. The server serves again when the first small request succeeds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
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
RETRY_SECONDS = 0.01


async def scenario(server: RunningServer, prompts: list[list[int]], seats: int) -> dict[str, Any]:
    """Load, kill, and which error each client got when."""
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
        await asyncio.sleep(RETRY_SECONDS)
    again = time.perf_counter() - killed
    replies = await asyncio.gather(*tasks)
    kinds = [kind_of_error(reply) for reply in replies]
    return {
        "heard": [reply.ended - killed for reply in replies],
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


def run(args: argparse.Namespace) -> tuple[Section, Any]:
    """One server, whose engine is killed again and again."""
    rng = random.Random(0)
    found = []
    with serving(args, max_num_seqs=args.seats) as server:
        for _ in range(args.reps):
            prompts = [random_prompt(rng, args.prompt) for _ in range(args.requests)]
            found.append(run_client(scenario(server, prompts, args.seats)))
    rows = tuple(
        (
            ", ".join(f"{count} x {kind}" for kind, count in one["kinds"].items()),
            *(f"{percentile(one['heard'], q) * 1e3:.0f}" for q in (50, 100)),
            f"{one['again']:.2f}",
        )
        for one in found
    )
    note_of_column = "from the kill to the end of a reply"
    columns = (
        Column("what clients got"),
        Column("error, median, ms", note_of_column),
        Column("error, last, ms", note_of_column),
        Column("served again, s"),
    )
    note = (
        f"{args.requests} requests on {args.seats} seats, two of three of them streams; "
        f"{args.prompt} prompt tokens."
    )
    return Section(
        "The engine killed under load", (), (note,), (Table("Repetitions", columns, rows),)
    ), found
