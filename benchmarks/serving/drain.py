"""SIGTERM under load: every request that was accepted is answered to its last token, and new ones are refused.

Half of the requests stream. The signal comes when half of the seats have their first token. From
then on a new request is sent every few milliseconds until the server is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import time
from typing import Any

from running import RunningServer
from serving.processes import COMPLETIONS, ask, events, random_prompt, serving
from twinphase_bench.client.client import Reply
from twinphase_bench.client.client import run as run_client
from twinphase_bench.report.report import Column, Section, Table

OPTIONS = {
    "requests": (32, "in flight"),
    "seats": (16, "max_num_seqs"),
    "prompt": (256, "prompt tokens"),
    "output": (128, "new tokens"),
}
PAUSE = 0.025  # seconds between requests that come too late


async def scenario(
    server: RunningServer, bodies: list[dict[str, Any]], seats: int
) -> dict[str, Any]:
    """Load, signal, and what became of all of it."""
    late_body = {**bodies[0], "prompt": bodies[0]["prompt"][:8], "max_tokens": 1, "stream": False}
    tasks = [asyncio.create_task(ask(server, COMPLETIONS, body)) for body in bodies]
    while server.metric("generation_tokens_total") < seats / 2:
        await asyncio.sleep(0.01)
    signalled = time.perf_counter()
    server.process.send_signal(signal.SIGTERM)
    late: list[Reply] = []
    while server.process.poll() is None:
        late.append(await ask(server, COMPLETIONS, late_body))
        await asyncio.sleep(PAUSE)
    gone = time.perf_counter()
    replies = await asyncio.gather(*tasks)
    kinds = [str(reply.status or "no connection") for reply in late]
    return {
        "complete": sum(
            is_complete(reply, body) for reply, body in zip(replies, bodies, strict=True)
        ),
        "before": sum(reply.ended < signalled for reply in replies),
        "late": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "exit code": server.process.returncode,
        "last byte": max(reply.ended for reply in replies) - signalled,
        "gone": gone - signalled,
    }


def is_complete(reply: Reply, body: dict[str, Any]) -> bool:
    """Whether all tokens came, the end was said, and the HTTP message ended."""
    if reply.status != 200 or not reply.whole:
        return False
    messages = events(reply) if body["stream"] else [reply.json()]
    choices = [choice for message in messages for choice in message["choices"]]
    tokens = sum(len(choice["token_ids"]) for choice in choices)
    return bool(tokens == body["max_tokens"] and choices[-1]["finish_reason"] == "length")


def run(args: argparse.Namespace) -> tuple[Section, Any]:
    """The scenario on a server of its own, repeated."""
    rng = random.Random(0)
    found = []
    for _ in range(args.reps):
        bodies = [
            {
                "prompt": random_prompt(rng, args.prompt),
                "max_tokens": args.output,
                "temperature": 0.0,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": index % 2 == 0,
            }
            for index in range(args.requests)
        ]
        with serving(args, max_num_seqs=args.seats) as server:
            found.append(run_client(scenario(server, bodies, args.seats)))
    rows = tuple(
        (
            f"{one['complete']} of {args.requests}",
            f"{one['before']}",
            ", ".join(f"{count} x {kind}" for kind, count in one["late"].items()),
            f"{one['exit code']}",
            f"{one['last byte']:.2f}",
            f"{one['gone']:.2f}",
        )
        for one in found
    )
    columns = (
        Column(
            "complete",
            "status 200, every token by its id, finish_reason length, and the HTTP message's end",
        ),
        Column("before the signal", "requests that had ended when it came"),
        Column("sent after it", "requests by their status"),
        Column("exit code"),
        Column("last byte, s", "of an answer, after the signal"),
        Column("gone, s", "end of the process, after the signal"),
    )
    note = (
        f"{args.requests} requests on {args.seats} seats, {args.prompt} prompt and "
        f"{args.output} new tokens each."
    )
    return Section("SIGTERM under load", (), (note,), (Table("Repetitions", columns, rows),)), found
