"""What open pages cost: the same requests to a server that ten pages watch and to one without any.

Both run at the same time and take turns, so that other programs slow both alike. Beside
tokens per second, which a busy machine makes noisy, it takes the processor seconds of server and
engine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

from running import RunningServer
from serving.processes import COMPLETIONS, ask, random_prompt, serving
from twinphase_bench.report.report import Column, Section, Table

OPTIONS = {
    "pages": (10, "open on one of the two servers"),
    "repetitions": (12, "of each number of requests, on each server"),
    "tokens": (3072, "new tokens of each repetition, of all its requests"),
}
CONCURRENT = (1, 64)
PROMPT_TOKENS = 32
EVENTS = "/v1/engine/events"


async def page(server: RunningServer, stack: AsyncExitStack) -> None:
    """A reader that throws away what it reads."""
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    stack.callback(writer.close)
    writer.write(f"GET {EVENTS} HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
    status = await reader.readline()
    assert b" 200 " in status, status

    async def read() -> None:
        while await reader.read(1 << 16):
            pass

    stack.callback(asyncio.create_task(read()).cancel)


async def run_once(server: RunningServer, count: int, tokens: int, seed: int) -> dict[str, float]:
    """Tokens per second and processor seconds per token of `count` requests at once."""
    rng = random.Random(seed)
    each = tokens // count
    bodies = [
        {
            "prompt": random_prompt(rng, PROMPT_TOKENS),
            "max_tokens": each,
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(count)
    ]
    spent = server.cpu_seconds()
    begin = time.perf_counter()
    replies = await asyncio.gather(*(ask(server, COMPLETIONS, body) for body in bodies))
    seconds = time.perf_counter() - begin
    assert all(reply.status == 200 for reply in replies), replies
    made = each * count
    return {"rate": made / seconds, "cpu": (server.cpu_seconds() - spent) / made}


async def compare(args: argparse.Namespace, plain: RunningServer, watched: RunningServer) -> Any:
    """All values by number of requests: pairs of (without pages, with pages)."""
    found: dict[int, list[tuple[dict[str, float], dict[str, float]]]] = {}
    async with AsyncExitStack() as stack:
        for _ in range(args.pages):
            await page(watched, stack)
        for count in CONCURRENT:
            for server in (plain, watched):
                await run_once(server, count, args.tokens // 4, seed=-count)
            for number in range(args.repetitions):
                values: dict[str, dict[str, float]] = {}
                order = [("plain", plain), ("watched", watched)]
                for name, server in order if number % 2 else order[::-1]:
                    values[name] = await run_once(server, count, args.tokens, seed=number)
                found.setdefault(count, []).append((values["plain"], values["watched"]))
    return found


def run(args: argparse.Namespace) -> tuple[Section, dict[str, Any]]:
    with serving(args, max_num_seqs=64) as plain, serving(args, max_num_seqs=64) as watched:
        found = asyncio.run(compare(args, plain, watched))
    rows = []
    values: dict[str, Any] = {}
    for count, pairs in found.items():
        ratios = {
            name: sorted(after[name] / before[name] for before, after in pairs)
            for name in ("rate", "cpu")
        }
        low, middle, high = (quantile(ratios["rate"], share) for share in (0.25, 0.5, 0.75))
        rows.append(
            (
                f"{count}",
                f"{statistics.median(before['rate'] for before, _ in pairs):,.1f}",
                f"{middle:.4f} ({low:.4f} .. {high:.4f})",
                f"{quantile(ratios['cpu'], 0.5):.4f}",
            )
        )
        values[f"{count}"] = {"pairs": pairs, **ratios}
    columns = (
        Column("requests at once"),
        Column("tokens/s", "without pages, median"),
        Column("rate", "with pages / without, median of pairs (half of the pairs)"),
        Column("processor time", "of server and engine per token, with pages / without, median"),
    )
    title = f"What {args.pages} open pages cost"
    note = f"{args.repetitions} pairs; {args.tokens:,} new tokens each, of all requests together."
    return Section(title, (), (note,), (Table(title, columns, tuple(rows)),)), values


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]
