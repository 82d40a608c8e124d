"""Mixed load in which a fifth of the clients leave, in either phase: leaks, and wrong answers.

Chats and completions, streams and whole replies, short and long prompts, shared prefixes, greedy
and seeded, n = 2, stop strings, schemas, in OpenAI's, Anthropic's and Ollama's APIs, of several
tenants; on a KV cache so small that requests lose their blocks to others. Every answer that came to
its end must have the tokens, the text and the reason that the engine alone gave before. In rounds:
after each the server must hold nothing. What the server keeps of the past is bounded; it is filled
first, so that what grows later is a leak.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scipy.stats import theilslopes

from running import RunningServer
from serving.mixed_requests import (
    NAME,
    Sample,
    answer_alone,
    answers_of,
    make_other_samples,
    make_samples,
    parts_of,
)
from serving.processes import COMPLETIONS, ProcessState, ask, process_state, serving
from twinphase import LLM
from twinphase.phases.ledger import KEPT_RECORDS
from twinphase.server.config import ServerConfig
from twinphase_bench.client.client import LEFT_BY_CLIENT, Reply
from twinphase_bench.client.client import run as run_client
from twinphase_bench.client.sse import failure_kind
from twinphase_bench.report.report import Column, Section, Table

OPTIONS = {
    "minutes": (10.0, "of load"),
    "rounds": (5, "after each the server must hold nothing"),
    "clients": (20, "at once"),
    "tenants": (3, "keys that the clients share"),
    "seats": (16, "max_num_seqs"),
    "blocks": (160, "num_kv_blocks"),
    "leavers": (0.2, "share of the requests whose client leaves"),
}
IDLE_SECONDS = 30.0
# Of each of the requests that fill the record of steps.
FILL_TOKENS = 1024
MAX_QUEUED_REQUESTS = 8
SAMPLING_INTERVAL_SECONDS = 2.0
METRICS = (
    "num_preemptions_total",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "engine_restarts_total",
)
OUTCOMES = ("completed", "left before the first token", "left in decode", "429", "failed", "wrong")
Look = tuple[float, ProcessState, ProcessState]  # seconds, the server's process, the engine's


@dataclass
class Tally:
    """What became of the requests, and what the two processes held meanwhile."""

    counts: Counter[str] = field(default_factory=Counter)  # by outcome
    kinds: Counter[str] = field(
        default_factory=Counter
    )  # answers that were compared, by kind of request
    unexpected: list[Any] = field(default_factory=list)  # failed and wrong ones
    looks: list[Look] = field(default_factory=list)
    idle: list[Look] = field(default_factory=list)  # when a round had ended and the server was idle


def departure(rng: random.Random, sample: Sample) -> tuple[bool, dict[str, Any], dict[str, Any]]:
    """How a client leaves: whether it streams, fields of its request, options of its exchange."""
    if rng.random() < 0.5:  # in decode
        return True, {}, {"leave": at_event(rng.randint(3, 20))}
    if sample.prompt_tokens > 512:  # in prefill: when the first chunk is read
        return True, {"return_progress": True}, {"leave": at_event(1)}
    return (
        rng.random() < 0.5,
        {},
        {"leave_after": rng.uniform(0.0, 0.3)},
    )  # in the queue, or wherever it is


def at_event(number: int) -> Callable[[Reply], bool]:
    """Whether so many events have come; asked after each part of one reply."""
    seen = 0

    def leave(reply: Reply) -> bool:
        nonlocal seen
        piece = reply.pieces[-1][1]
        seen += piece.count(b"data: ") or piece.count(b'"done":false')
        return seen >= number

    return leave


async def client(
    server: RunningServer,
    rng: random.Random,
    samples: list[Sample],
    until: float,
    tally: Tally,
    leavers: float,
    key: str | None = None,
) -> None:
    """One request after the other."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    while time.perf_counter() < until:
        sample = rng.choice(samples)
        stream = rng.random() < 0.6
        fields = {}
        going = {}
        if rng.random() < leavers:
            stream, fields, going = departure(rng, sample)
        told = {} if sample.alone else {"return_token_ids": True}
        body = {**sample.body, "stream": stream, **told, **fields}
        reply = await ask(server, sample.path, body, headers, **going)
        outcome = judged(reply, sample, stream)
        tally.counts[outcome] += 1
        if outcome in ("completed", "wrong"):
            tally.kinds[sample.kind] += 1
        if outcome in ("failed", "wrong"):
            told = reply.body[-2000:].decode(errors="replace")
            tally.unexpected.append(
                [outcome, sample.kind, stream, reply.status, reply.error, told, sample.answers]
            )
        if reply.status == 429:
            await asyncio.sleep(rng.uniform(0.05, 0.2))


def judged(reply: Reply, sample: Sample, stream: bool) -> str:
    """One of `OUTCOMES`."""
    if failure_kind(reply.error) == LEFT_BY_CLIENT:
        decoding = stream and any(
            data.get("choices") or data.get("done") is False or data.get("delta")
            for data in parts_of(reply, sample)
        )
        return "left in decode" if decoding else "left before the first token"
    if reply.status == 429:
        return "429"
    if reply.status != 200 or not reply.whole:
        return "failed"
    return "completed" if answers_of(reply, sample, stream) == sample.answers else "wrong"


async def fill_histories(server: RunningServer, key: str | None = None) -> None:
    """Make so many steps, and finish so many requests, that the server forgets the first ones."""
    body = {"prompt": [100] * 8, "temperature": 0.0, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for _ in range(-(-KEPT_RECORDS // FILL_TOKENS)):
        await ask(server, COMPLETIONS, {**body, "max_tokens": FILL_TOKENS}, headers)
    for _ in range(ServerConfig.kept_timelines // 16 + 1):
        await asyncio.gather(
            *(ask(server, COMPLETIONS, {**body, "max_tokens": 1}, headers) for _ in range(16))
        )


async def soak(server: RunningServer, samples: list[Sample], args: argparse.Namespace) -> Tally:
    """All rounds."""
    keys = tenant_keys(args)
    await fill_histories(server, keys[0])
    tally = Tally()
    begin = time.perf_counter()

    def look() -> Look:
        states = process_state(server.process.pid), process_state(server.engine_pid())
        return time.perf_counter() - begin, *states

    async def watch() -> None:
        while True:
            tally.looks.append(look())
            await asyncio.sleep(SAMPLING_INTERVAL_SECONDS)

    watcher = asyncio.create_task(watch())
    for number in range(args.rounds):
        until = time.perf_counter() + 60 * args.minutes / args.rounds
        rngs = [random.Random(f"{number}-{index}") for index in range(args.clients)]
        asking = [(rng, keys[index % len(keys)]) for index, rng in enumerate(rngs)]
        await asyncio.gather(
            *(client(server, rng, samples, until, tally, args.leavers, key) for rng, key in asking)
        )
        late = time.perf_counter() + IDLE_SECONDS
        while not server.is_idle() and time.perf_counter() < late:
            await asyncio.sleep(0.1)
        tally.counts["rounds that ended idle"] += server.is_idle()
        tally.idle.append(look())
        print(
            f"round {number + 1} of {args.rounds}: {dict(tally.counts)}",
            file=sys.stderr,
            flush=True,
        )
    watcher.cancel()
    return tally


def tenant_keys(args: argparse.Namespace) -> list[str]:
    return [f"key-of-{number}" for number in range(args.tenants)]


def run(args: argparse.Namespace) -> tuple[Section, Any]:
    """The engine's own answers first, then the load."""
    samples = make_samples() + make_other_samples()
    llm = LLM(
        args.model,
        threads=args.threads,
        isa=args.isa or None,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    answer_alone(samples, llm)
    del llm
    gc.collect()
    flags = {
        "max_num_seqs": args.seats,
        "max_queued_requests": MAX_QUEUED_REQUESTS,
        "num_kv_blocks": args.blocks,
    }
    named = [f"--api-key={key}" for key in tenant_keys(args)]
    with serving(args, f"--served-model-name={NAME}", *named, **flags) as server:
        tally = run_client(soak(server, samples, args))
        metrics = {name: server.metric(name) for name in METRICS}
        code = server.stop()
        log = server.log.read_text()
    return section(args, tally, metrics, code, log), {
        **vars(tally),
        "metrics": metrics,
        "exit code": code,
        "log": log,
    }


def section(
    args: argparse.Namespace, tally: Tally, metrics: dict[str, float], code: int, log: str
) -> Section:
    """A row per process."""
    rows = []
    for index, name in ((1, "server"), (2, "engine")):
        idle = [look[index] for look in tally.idle]
        late = [look for look in tally.looks if look[0] > 30 * args.minutes]
        trend = theilslopes(
            [look[index].resident for look in late], [look[0] / 3600 for look in late]
        )
        rows.append(
            (
                name,
                f"{tally.looks[0][index].resident:.1f}",
                " ".join(f"{state.resident:.1f}" for state in idle),
                f"{trend.slope:+.1f} ({trend.low_slope:+.1f} .. {trend.high_slope:+.1f})",
                " ".join(f"{state.threads}" for state in idle),
                " ".join(f"{state.descriptors}" for state in idle),
            )
        )
    columns = (
        Column("process"),
        Column("RSS at the start", "resident memory, MiB"),
        Column("RSS idle, by round"),
        Column(
            "slope of RSS", "over the second half, MiB per hour, by Theil and Sen (95 % interval)"
        ),
        Column("threads idle"),
        Column("descriptors idle"),
    )
    counts = tally.counts
    compared = sum(tally.kinds.values())
    hits = metrics["prefix_cache_hits_total"]
    asked = metrics["prefix_cache_queries_total"]
    notes = (
        f"{args.minutes:g} minutes, {args.clients} clients of {args.tenants} tenants on "
        f"{args.seats} seats and "
        f"{args.blocks} blocks: "
        f"{', '.join(f'{counts[name]:,} {name}' for name in OUTCOMES)}.",
        f"Answers unlike the engine's own (token ids, text, finish_reason): {counts['wrong']} of "
        f"{compared:,} "
        f"({', '.join(f'{number:,} {kind}' for kind, number in sorted(tally.kinds.items()))}).",
        "Rounds after which no request, no queue and no KV block was left: "
        f"{counts['rounds that ended idle']} of "
        f"{args.rounds}.",
        f"{metrics['num_preemptions_total']:,.0f} preemptions; {hits / max(1.0, asked):.0%} of "
        "the prompt tokens were "
        f"cached; {metrics['engine_restarts_total']:.0f} restarts of the engine; exit code {code}; "
        f"{log.count('Traceback')} tracebacks in the log.",
    )
    title = "Minutes of mixed load with clients that leave"
    return Section(title, (), notes, (Table("Processes", columns, tuple(rows)),))
