"""What the default pace brings a stream, and costs the prompts that are prefilled beside it.

A stream runs, and prompts arrive at once: on servers with each of the `--itl-slo-ms` values, in
turn. The prompts' time is that of all of them, from their arrival to the last first token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from typing import Any

from running import RunningServer
from serving.processes import COMPLETIONS, ask, random_prompt, serving
from twinphase.phases.statistics import percentile
from twinphase_bench.client.client import Reply
from twinphase_bench.client.client import run as run_client
from twinphase_bench.report.report import Column, Section, Table

OPTIONS = {
    "prompts": (3, "requests that arrive beside the stream"),
    "length": (3000, "tokens of each prompt"),
    "values": ("auto,off", "of --itl-slo-ms; the last one is what the others are compared with"),
    "repetitions": (5, "for each value"),
}
STREAM_PROMPT_TOKENS = 64
# Tokens of the stream before the prompts arrive; the usual gap is that of the last half.
TOKENS_BEFORE = 60
Values = dict[str, float]


def token_times(reply: Reply) -> list[float]:
    """When each piece with tokens came."""
    filled = b'"token_ids":['
    return [at for at, data in reply.pieces if filled in data and filled + b"]" not in data]


async def beside(server: RunningServer, prompts: int, length: int) -> Values:
    """Gaps of one stream while prompts are prefilled, and the time of these prompts; seconds."""
    rng = random.Random(time.monotonic_ns())
    enough = asyncio.Event()

    async def request(tokens: int, output: int, **options: Any) -> Reply:
        body = {
            "prompt": random_prompt(rng, tokens),
            "max_tokens": output,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        return await ask(server, COMPLETIONS, body, **options)

    def generated() -> float:
        return server.metric("generation_tokens_total")

    before = await asyncio.to_thread(generated)
    stream = asyncio.create_task(
        request(STREAM_PROMPT_TOKENS, 4000, leave=lambda reply: enough.is_set())
    )
    while await asyncio.to_thread(generated) < before + TOKENS_BEFORE:
        await asyncio.sleep(0.05)
    arrived = time.perf_counter()
    replies = await asyncio.gather(*(request(length, 2) for _ in range(prompts)))
    ended = max(token_times(reply)[0] for reply in replies)
    enough.set()
    times = token_times(await stream)
    earlier = [at for at in times if at <= arrived]
    gaps = [later - at for at, later in pairwise(times) if arrived < later <= ended]
    return {
        "usual": median(b - a for a, b in pairwise(earlier[-TOKENS_BEFORE // 2 :])),
        "median": median(gaps),
        "p95": percentile(gaps, 95),
        "largest": max(gaps),
        "prompts": ended - arrived,
    }


def run(args: argparse.Namespace) -> tuple[Section, Any]:
    """All values in turn, so that other programs slow each alike."""
    values = args.values.split(",")
    found: dict[str, list[Values]] = {value: [] for value in values}
    with ExitStack() as stack:
        servers = {value: stack.enter_context(serving(args, itl_slo_ms=value)) for value in values}
        for repetition in range(args.repetitions + 1):
            for value in values if repetition % 2 else reversed(values):
                one = run_client(beside(servers[value], args.prompts, args.length))
                if repetition:  # The first one warms up.
                    found[value].append(one)
    rows = tuple((value, *cells(found[value], found[values[-1]])) for value in values)
    columns = (
        Column("--itl-slo-ms"),
        Column("usual gap, ms", "of the stream alone"),
        Column("gap beside prompts, ms", "median"),
        Column("95 % of gaps, ms"),
        Column("largest gap, ms"),
        Column("prompts, s"),
        Column(f"prompts / {values[-1]}", "median of the repetitions' ratios (lowest to highest)"),
    )
    title = f"A stream beside {args.prompts} prompts of {args.length:,} tokens"
    notes = (f"Medians of {args.repetitions} repetitions, as a client saw them.",)
    return Section("The pace of a stream", (), notes, (Table(title, columns, rows),)), found


def cells(ours: list[Values], others: list[Values]) -> list[str]:
    """The figures of one value, beside those of the last one."""
    middle = {name: median(one[name] for one in ours) for name in ours[0]}
    ratios = sorted(a["prompts"] / b["prompts"] for a, b in zip(ours, others, strict=True))
    return [
        *(f"{1e3 * middle[name]:.1f}" for name in ("usual", "median", "p95", "largest")),
        f"{middle['prompts']:.2f}",
        f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
    ]
