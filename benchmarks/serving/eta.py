"""How well a prompt's progress events predict the time until it is computed.

One prompt at a time, on a server that has nothing else to do. Each event's `eta_ms` is compared
with the time that really passed until the first token came, at given parts of the prompt.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

from running import RunningServer
from serving.processes import COMPLETIONS, ask, random_prompt, serving
from twinphase.server.event_stream import read_events
from twinphase_bench.client.client import DONE
from twinphase_bench.client.client import run as run_client
from twinphase_bench.report.report import Column, Section, Table

OPTIONS = {
    "length": (32_000, "tokens of the prompt"),
    "repetitions": (1, "prompts, one after the other"),
}
SHARES = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9)
TIMEOUT_SECONDS = 3600.0
# Seconds since the prompt was sent, share of it that is computed, predicted and real seconds left.
Event = tuple[float, float, float, float]


async def watch(server: RunningServer, rng: random.Random, length: int) -> list[Event]:
    """The events of one prompt that have an estimate."""
    body = {
        "prompt": random_prompt(rng, length),
        "max_tokens": 1,
        "temperature": 0.0,
        "stream": True,
        "return_progress": True,
    }
    reply = await ask(server, COMPLETIONS, body, timeout=TIMEOUT_SECONDS)
    assert reply.status == 200, reply.body
    events = [
        (at - reply.sent, found["processed"] / found["total"], found["eta_ms"])
        for at, data in read_events(reply.pieces)
        if data != DONE and (found := msgspec.json.decode(data).get("prompt_progress"))
    ]
    ended = events[-1][0]
    return [
        (at, share, eta / 1e3, ended - at)
        for at, share, eta in events
        if eta is not None and share < 1
    ]


def run(args: argparse.Namespace) -> tuple[Section, Any]:
    """A new prompt in each repetition."""
    rng = random.Random(args.length)
    with serving(args, max_model_len=args.length + 16) as server:
        run_client(watch(server, rng, min(args.length, 1024)))  # The cost model has seen prompts.
        found = [run_client(watch(server, rng, args.length)) for _ in range(args.repetitions)]
    columns = (
        Column("computed"),
        Column("seconds so far"),
        Column("predicted seconds left"),
        Column("real seconds left"),
        Column("error", "of the prediction, by the real time"),
    )
    rows = tuple(row(share, found) for share in SHARES)
    title = f"Progress of a prompt of {args.length:,} tokens"
    notes = (f"Medians of {args.repetitions} prompts.",)
    return Section("Estimates of prefill", (), notes, (Table(title, columns, rows),)), found


def row(share: float, found: Sequence[Sequence[Event]]) -> tuple[str, ...]:
    """The event of each prompt that is nearest to that share."""
    events = [min(one, key=lambda event: abs(event[1] - share)) for one in found]
    at, computed, predicted, left = (median(values) for values in zip(*events, strict=True))
    error = median(event[2] / event[3] - 1 for event in events)
    return (f"{computed:.0%}", f"{at:.1f}", f"{predicted:.1f}", f"{left:.1f}", f"{error:+.0%}")
