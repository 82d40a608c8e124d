"""What open pages cost: the same requests to a server that ten pages watch and to one without any.

Both run at the same time and take turns, so that other programs slow both alike. Half way the pages
move from one server to the other: each value is the geometric mean of a pair before and one after,
from which any difference between the two servers is gone. Intervals are those of the median, by
ranks (95 %, or as much as the pairs allow).

Tokens per second are noisy on a shared machine, so it also takes the processor time of both
processes of a server. The server's own part computes no model, which shows its added time within
microseconds; the engine's part is as exact with `--model tiny`, whose steps are hardly more than
bookkeeping. `--pages 0` shows what the method finds where there is nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from running import RunningServer
from serving.processes import COMPLETIONS, ask, serving
from tiny_gguf import write_tiny_gguf
from twinphase.phases.statistics import median_interval
from twinphase_bench.report.report import Column, Section, Table

OPTIONS = {
    "pages": (10, "open on one of the two servers"),
    "repetitions": (10, "pairs before the pages move, and after, for each number of requests"),
    "alone": (256, "new tokens of one request alone"),
    "together": (3072, "new tokens of 64 requests at once, of all together"),
}
PROMPT_TOKENS = 32
TOKEN_IDS = (20, 300)  # ordinary tokens of every model, the tiny one included
EVENTS = "/v1/engine/events"
# The engine is watched for 30 s after the last page has closed.
SECONDS_BEFORE_UNWATCHED = 33.0
Values = dict[str, float]
Pair = tuple[Values, Values]  # without pages, and with pages


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


async def run_once(server: RunningServer, count: int, tokens: int, seed: int) -> Values:
    """Tokens per second and processor seconds per token of `count` requests at once."""
    rng = random.Random(seed)
    each = tokens // count
    bodies = [
        {
            "prompt": [rng.randrange(*TOKEN_IDS) for _ in range(PROMPT_TOKENS)],
            "max_tokens": each,
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(count)
    ]
    pids = {"server": server.process.pid, "engine": server.engine_pid()}
    spent = {name: processor_seconds(pid) for name, pid in pids.items()}
    begin = perf_counter()
    replies = await asyncio.gather(*(ask(server, COMPLETIONS, body) for body in bodies))
    seconds = perf_counter() - begin
    assert all(reply.status == 200 for reply in replies), replies
    made = each * count
    used = {name: (processor_seconds(pid) - spent[name]) / made for name, pid in pids.items()}
    return {"rate": made / seconds, "both": sum(used.values()), **used}


def processor_seconds(pid: int) -> float:
    """Of a process's threads, by the scheduler's own clock, in nanoseconds."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9


async def compare(
    args: argparse.Namespace, plain: RunningServer, watched: RunningServer
) -> dict[int, list[Pair]]:
    """Pairs by number of requests."""
    found: dict[int, list[Pair]] = {}
    work = {1: args.alone, 64: args.together}
    async with AsyncExitStack() as stack:
        for _ in range(args.pages):
            await page(watched, stack)
        for count, tokens in work.items():
            for server in (plain, watched):
                await run_once(server, count, tokens, seed=-count)
        for number in range(args.repetitions):
            for count, tokens in work.items():
                order = (plain, watched) if number % 2 else (watched, plain)
                values = {
                    server: await run_once(server, count, tokens, seed=number) for server in order
                }
                found.setdefault(count, []).append((values[plain], values[watched]))
    return found


async def compare_both_ways(
    args: argparse.Namespace, one: RunningServer, other: RunningServer
) -> tuple[dict[int, list[Pair]], dict[int, list[Pair]]]:
    before = await compare(args, one, other)
    await asyncio.sleep(SECONDS_BEFORE_UNWATCHED)
    return before, await compare(args, other, one)


def run(args: argparse.Namespace) -> tuple[Section, dict[str, Any]]:
    if args.model == "tiny":
        args.out.mkdir(parents=True, exist_ok=True)
        args.model = str(write_tiny_gguf(args.out / "tiny.gguf", vocab=320, context=2048))
    with serving(args, max_num_seqs=64) as one, serving(args, max_num_seqs=64) as other:
        halves = asyncio.run(compare_both_ways(args, one, other))
    rows = []
    for count in halves[0]:
        pairs = list(zip(*(half[count] for half in halves), strict=True))
        rate = median(plain["rate"] for both in pairs for plain, _ in both)
        rows.append(
            (
                f"{count}",
                f"{rate:,.1f}",
                *(shown(ratios(pairs, name), "{:.4f}".format) for name in ("rate", "both")),
                *(shown(added(pairs, name), "{:+.1f}".format) for name in ("server", "engine")),
            )
        )
    columns = (
        Column("requests at once"),
        Column("tokens/s", "without pages, median"),
        Column("rate", "tokens/s with pages / without"),
        Column("processor time", "of both processes per token, with pages / without"),
        Column("added by the server", "processor time per token, microseconds"),
        Column("added by the engine", "the same"),
    )
    title = f"What {args.pages} open pages cost"
    note = (
        f"{args.repetitions} pairs each way; {args.alone:,} new tokens of one request, "
        f"{args.together:,} of 64 together. Medians (interval)."
    )
    before, after = halves
    section = Section(title, (), (note,), (Table(title, columns, rows),))
    return section, {"before": before, "after": after}


def ratios(pairs: Sequence[tuple[Pair, Pair]], name: str) -> list[float]:
    """With pages / without: the geometric mean of both ways."""
    return [
        math.sqrt(math.prod(watched[name] / plain[name] for plain, watched in both))
        for both in pairs
    ]


def added(pairs: Sequence[tuple[Pair, Pair]], name: str) -> list[float]:
    """With pages - without, in microseconds: the mean of both ways."""
    return [1e6 * sum(watched[name] - plain[name] for plain, watched in both) / 2 for both in pairs]


def shown(values: Sequence[float], number: Callable[[float], str]) -> str:
    interval = median_interval(values)
    return f"{number(median(values))} ({number(interval.low)} to {number(interval.high)})"
