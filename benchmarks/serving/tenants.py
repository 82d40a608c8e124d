"""What tenants and streams notice of each other: a flood and a short request, shares, gaps, throughput.

Four questions. `flood`: key t0 sends many prompts at once, and a short request follows, of another key or of t0 itself
(first come, first served). `shares`: 1 to 8 tenants of different weights and lengths always have more to do; each one's
part of the work, beside what is due. `pace`: long prompts arrive beside streams, with the default SLO and with
`--itl-slo-ms off`, in turn. `burst`: requests that all come at once, in the same two ways.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from itertools import pairwise
from typing import Any

from running import RunningServer
from serving.processes import COMPLETIONS, ask, random_prompt, serving, spread
from twinphase.bench.client.client import Reply
from twinphase.bench.client.client import run as run_client
from twinphase.bench.report.report import Column, Section, Table
from twinphase.bench.statistics import percentile

OPTIONS = {
    "questions": ("flood,shares,pace,burst", "which of them"),
    "flooding": (40, "requests of key a, of 800 prompt and 16 new tokens"),
    "prompts": (3, "of 3,000 tokens, that arrive beside streams"),
    "seconds": (15.0, "that shares are watched"),
}
TENANTS = [f"t{number}" for number in range(8)]
WEIGHTS = [1, 2, 1, 3, 1, 2, 1, 1]
LENGTHS = [(800, 16), (64, 64), (2000, 4), (200, 100), (16, 32), (800, 64), (400, 1), (100, 16)]  # prompt, output
CLIENTS = 6  # of each tenant, one request at a time each
SETTLE = 5.0  # seconds
MODES: dict[str, dict[str, str]] = {"default": {}, "off": {"itl_slo_ms": "off"}}


class Asker:
    """Sends streaming completions of random prompts to one server, none of them twice."""

    def __init__(self, server: RunningServer) -> None:
        self.server, self.rng = server, random.Random(time.monotonic_ns())

    async def ask(self, prompt: int, output: int, tenant: str = "", **options: Any) -> Reply:
        body = {
            "prompt": random_prompt(self.rng, prompt), "max_tokens": output, "temperature": 0.0, "ignore_eos": True,
            "return_token_ids": True, "stream": True,
        }  # fmt: skip
        headers = {"Authorization": f"Bearer {tenant}"} if tenant else {}
        return await ask(self.server, COMPLETIONS, body, headers=headers, **options)


def token_times(reply: Reply) -> list[float]:
    """When each piece with tokens was read."""
    return [at for at, data in reply.pieces if b'"token_ids":[' in data and b'"token_ids":[]' not in data]


def ttft(reply: Reply) -> float:
    return token_times(reply)[0] - reply.sent


async def flood(asker: Asker, count: int, tenant: str) -> dict[str, float]:
    """TTFT of a tenant's short request, alone and after the flood of key t0 has begun, and the flood's throughput."""
    alone = [ttft(await asker.ask(12, 4, tenant)) for _ in range(3)][-1]
    start = time.perf_counter()
    tasks = [asyncio.create_task(asker.ask(800, 16, "t0")) for _ in range(count)]
    await asyncio.sleep(1.0)
    short = [ttft(await asker.ask(12, 4, tenant)) for _ in range(5 if tenant != "t0" else 1)]
    replies = await asyncio.gather(*tasks)
    whole = max(reply.ended for reply in replies) - start
    return {"alone": alone, "first": short[0], "worst": max(short), "tokens per second": count * 816 / whole}


async def shares(asker: Asker, number: int, seconds: float) -> list[tuple[str, float, float, float]]:
    """(tenant, share had, share due, median TTFT) of each of so many tenants."""
    end = time.perf_counter() + SETTLE + seconds
    times: dict[str, list[float]] = {tenant: [] for tenant in TENANTS[:number]}

    async def client(index: int) -> None:
        while time.perf_counter() < end:
            reply = await asker.ask(*LENGTHS[index], TENANTS[index], leave_after=max(0.1, end - time.perf_counter()))
            if token_times(reply):
                times[TENANTS[index]].append(ttft(reply))

    clients = [asyncio.create_task(client(index)) for index in range(number) for _ in range(CLIENTS)]
    metric = asker.server.metric
    await asyncio.sleep(SETTLE)
    before = {tenant: metric("tenant_work_seconds_total", tenant=tenant) for tenant in times}
    await asyncio.sleep(seconds - 0.5)
    had = {tenant: metric("tenant_work_seconds_total", tenant=tenant) - before[tenant] for tenant in times}
    await asyncio.gather(*clients)
    due = sum(WEIGHTS[:number])
    return [
        (tenant, had[tenant] / sum(had.values()), WEIGHTS[index] / due, percentile(times[tenant], 50))
        for index, tenant in enumerate(times)
    ]


async def pace(asker: Asker, streams: int, prompts: int) -> dict[str, float]:
    """Gaps of so many streams while long prompts are read, and when those have their first tokens."""
    enough = asyncio.Event()
    leave = {"leave": lambda reply: enough.is_set()}
    made = asker.server.metric("generation_tokens_total")
    running = [asyncio.create_task(asker.ask(64, 4000, **leave)) for _ in range(streams)]
    while asker.server.metric("generation_tokens_total") < made + 40 * streams:
        await asyncio.sleep(0.05)
    arrived = time.perf_counter()
    replies = await asyncio.gather(*(asker.ask(3000, 4) for _ in range(prompts)))
    read = max(token_times(reply)[0] for reply in replies)
    enough.set()
    gaps = [
        later - earlier
        for times in map(token_times, await asyncio.gather(*running))
        for earlier, later in pairwise(times)
        if arrived < later <= read
    ]
    first = min(token_times(reply)[0] for reply in replies)
    times = {"first": first - arrived, "last": read - arrived}
    return {"p50": percentile(gaps, 50), "p99": percentile(gaps, 99), "max": max(gaps), **times}


async def burst(asker: Asker, count: int) -> dict[str, float]:
    """New tokens per second of requests of 256 prompt and 128 new tokens that come at once."""
    start = time.perf_counter()
    replies = await asyncio.gather(*(asker.ask(256, 128) for _ in range(count)))
    whole = max(reply.ended for reply in replies) - start
    return {"rate": count * 128 / whole, "ttft": percentile([ttft(reply) for reply in replies], 50)}


def run(args: argparse.Namespace) -> tuple[Section, Any]:
    """Every question that was asked for; both ways of it in turn."""
    wanted, found, tables = args.questions.split(","), dict[str, Any](), []
    if {"flood", "shares"} & set(wanted):
        flags = [f"--tenant={name}={name}" for name in TENANTS]
        weights = [f"--tenant-weight={name}={weight}" for name, weight in zip(TENANTS, WEIGHTS, strict=True)]
        with serving(args, *flags, *weights) as server:
            if "flood" in wanted:
                asked = {"another key's": "t1", "its own": "t0"}
                found["flood"] = {
                    name: [run_client(flood(Asker(server), args.flooding, tenant)) for _ in range(args.reps)]
                    for name, tenant in asked.items()
                }
                tables.append(table("A short request behind a flood", "of", found["flood"], 1e3, 1))
            if "shares" in wanted:
                found["shares"] = [run_client(shares(Asker(server), n, args.seconds)) for n in (1, 2, 4, 8)]
                tables.append(shares_table(found["shares"]))
    if {"pace", "burst"} & set(wanted):
        with serving(args, **MODES["default"]) as default, serving(args, **MODES["off"]) as off:
            servers = {"default": default, "--itl-slo-ms off": off}
            asks: dict[str, Any] = {}
            if "pace" in wanted:
                asks |= {f"{n} streams": lambda asker, n=n: pace(asker, n, args.prompts) for n in (1, 12)}
            if "burst" in wanted:
                asks |= {f"{n} at once": lambda asker, n=n: burst(asker, n) for n in (16, 64)}
            for name, question in asks.items():
                found[name] = {mode: [] for mode in servers}
                for _ in range(args.reps):
                    for mode, server in servers.items():  # in turn: what else runs on the machine meets both
                        found[name][mode].append(run_client(question(Asker(server))))
                scale = 1e3 if "streams" in name else 1.0
                tables.append(table(name, "server", found[name], scale, 2 if scale == 1 else 0))
            lines = [line for line in default.log.read_text().splitlines() if line.startswith("pace")]
            found["pace line"] = lines
    notes = (
        f"The default's start line: {' '.join(found['pace line'])}." if found.get("pace line") else "",
        "Times are milliseconds, as the client saw them; rates are tokens per second.",
    )
    return Section("Tenants and streams beside each other", (), tuple(filter(None, notes)), tuple(tables)), found


def table(title: str, what: str, found: dict[str, list[dict[str, float]]], scale: float, digits: int) -> Table:
    """A row for each way, a column for each figure: the median of the repetitions (lowest .. highest)."""
    names = list(next(iter(found.values()))[0])
    rates = {"tokens per second", "rate"}

    def cell(ones: list[dict[str, float]], name: str) -> str:
        return spread([one[name] * (1.0 if name in rates else scale) for one in ones], 0 if name in rates else digits)

    rows = tuple((way, *(cell(ones, name) for name in names)) for way, ones in found.items())
    return Table(title, (Column(what), *map(Column, names)), rows)


def shares_table(found: list[list[tuple[str, float, float, float]]]) -> Table:
    """A row for each tenant of each number of them."""
    rows = [
        (str(len(tenants)), name, f"{had:.3f}", f"{due:.3f}", f"{had / due:.2f}", f"{1e3 * first:,.0f}")
        for tenants in found
        for name, had, due, first in tenants
    ]
    columns = ("tenants", "tenant", "share had", "share due", "had / due", "TTFT p50, ms")
    return Table("Shares of the engine's work", tuple(map(Column, columns)), tuple(rows))
