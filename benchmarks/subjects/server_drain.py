"""SIGTERM under load: every request that was accepted is answered to its last token, and new ones are refused.

Half of the requests stream. The signal comes when half of the seats have their first token, so that some decode, some
are read and some wait. From then on a new request is sent every few milliseconds until the server is gone.
Not for: answers that take longer than `--drain-timeout`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from typing import Any

from loads import Report, spread
from sse_client import ask, events

from subjects.server_process import Server
from twinphase.bench.client.client import Reply
from twinphase.bench.client.client import run as run_client

SUBJECT = "drain"
METHOD = "each on a server of its own; prompts are random token ids"
PAUSE = 0.025  # seconds between requests that come too late


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--requests", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--seats", type=int, default=16, help="max_num_seqs (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--output", type=int, default=128, help="new tokens (default: %(default)s)")


async def scenario(server: Server, bodies: list[dict[str, Any]], seats: int) -> dict[str, Any]:
    """Load, signal, and what became of all of it."""
    late_body = {**bodies[0], "prompt": bodies[0]["prompt"][:8], "max_tokens": 1, "stream": False}
    tasks = [asyncio.create_task(ask(server.port, "/v1/completions", body)) for body in bodies]
    while server.metrics("generation_tokens_total")["generation_tokens_total"] < seats / 2:
        await asyncio.sleep(0.01)
    signalled = time.perf_counter()
    server.process.send_signal(signal.SIGTERM)
    late: list[Reply] = []
    while server.process.poll() is None:
        late.append(await ask(server.port, "/v1/completions", late_body))
        await asyncio.sleep(PAUSE)
    gone = time.perf_counter()
    replies = await asyncio.gather(*tasks)
    complete = sum(is_complete(reply, body) for reply, body in zip(replies, bodies, strict=True))
    kinds = [reply.status or "refused" for reply in late]
    return {
        "complete": complete,
        "ended_before": sum(reply.ended < signalled for reply in replies),
        "late": {str(kind): kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "exit_code": server.process.returncode,
        "last_byte": max(reply.ended for reply in replies) - signalled,
        "gone": gone - signalled,
        "log": server.log().splitlines()[-3:],
    }


def is_complete(reply: Reply, body: dict[str, Any]) -> bool:
    """Whether all tokens came, the end was said, and the HTTP message ended."""
    if reply.status != 200 or not reply.whole:
        return False
    if not body["stream"]:
        found = reply.json()
        return bool(
            found["usage"]["completion_tokens"] == len(found["choices"][0]["token_ids"]) == body["max_tokens"]
            and found["choices"][0]["finish_reason"] == "length"
        )
    choices = [choice for _, data in events(reply) for choice in data["choices"]]
    tokens = sum(len(choice["token_ids"]) for choice in choices)
    return bool(tokens == body["max_tokens"] and choices[-1]["finish_reason"] == "length")


def run(bench: Any) -> Report:
    """The scenario, repeated."""
    args = bench.args
    found: list[dict[str, Any]] = []

    def once() -> dict[str, Any]:
        bodies = [
            {
                "prompt": bench.prompts.take(args.prompt), "max_tokens": args.output, "temperature": 0.0,
                "ignore_eos": True, "return_token_ids": True, "stream": index % 2 == 0,
            }
            for index in range(args.requests)
        ]  # fmt: skip
        with bench.serve(f"--max-num-seqs={args.seats}") as server:
            return run_client(scenario(server, bodies, args.seats))

    with bench.steps(args.reps):
        for rep in range(args.reps):
            found.append(bench.measure(f"repetition {rep + 1}", once))
    return make_report(bench, bench.complete(found))


def make_report(bench: Any, found: list[dict[str, Any]]) -> Report:
    """One line a repetition."""
    rows = []
    for index, one in enumerate(found):
        late = ", ".join(f"{count} x {kind}" for kind, count in one["late"].items())
        cells = [f"{index + 1}", f"{one['complete']} of {bench.args.requests}", f"{one['ended_before']}", late]
        rows.append([*cells, f"{one['exit_code']}", f"{one['last_byte']:.2f}", f"{one['gone']:.2f}"])
    after = spread([(one["gone"] - one["last_byte"]) * 1e3 for one in found], digits=0)
    args = bench.args
    notes = [
        f"{args.requests} requests on {args.seats} seats, half of them streams; {args.prompt} prompt and {args.output} "
        "new tokens each; SIGTERM when half of the seats had their first token",
        "complete: status 200, finish_reason length, every one of the tokens by its id, and the HTTP message's end",
        "seconds from the signal to the last byte of an answer, and to the end of the process; "
        f"between them {after} ms",
        "refused: no connection",
    ]
    header = ["repetition", "complete", "before the signal", "sent after it", "exit code", "last byte, s", "gone, s"]
    return Report("SIGTERM under load", header, rows, notes, found)
