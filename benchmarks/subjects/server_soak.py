"""Minutes of mixed load in which a fifth of the clients leave, in either phase: what leaks, and is every answer right?

Chats and completions, streams and whole replies, short and long prompts, shared prefixes, greedy and seeded, n = 2,
stop strings, schemas; on a KV cache so small that requests lose their blocks to others. Every answer that came to its
end must have the tokens, the text and the reason that the engine alone gave before. In rounds: after each the server
must hold nothing. What the server keeps of the past is bounded; it is filled first, so that what grows later is a leak.
Not for: speed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from loads import Report
from sse_client import ask, events

from subjects.server_pool import COMPLETION, Sample, answers_of, fill, make_pool
from subjects.server_process import ProcessState, Server, process_state
from twinphase.bench.client.client import LEFT, Reply
from twinphase.bench.client.client import run as run_client
from twinphase.bench.client.sse import failure_kind
from twinphase.bench.conditions import Bystanders
from twinphase.phases.ledger import KEPT_RECORDS
from twinphase.server.config import ServerConfig

SUBJECT = "soak"
METHOD = "closed loop; each client picks requests from the pool at random; both processes sampled all the while"
IDLE_SECONDS = 30.0
FILL_TOKENS = 1024  # of each of the requests that fill the record of steps
METRICS = ("num_preemptions_total", "prefix_cache_hits_total", "prefix_cache_queries_total", "engine_restarts_total")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--minutes", type=float, default=10, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--clients", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--seats", type=int, default=16, help="max_num_seqs (default: %(default)s)")
    parser.add_argument("--queued", type=int, default=8, help="max_queued_requests (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=160, help="num_kv_blocks (default: %(default)s)")
    parser.add_argument("--leavers", type=float, default=0.2, help="share that leaves (default: %(default)s)")
    parser.add_argument("--every", type=float, default=2, help="seconds between samples (default: %(default)s)")


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
        counts: by outcome.
        kinds: answers that were compared, by kind of request.
        wrong, failed: details.
        samples: [seconds, server's state, engine's state].
        idle: the same when a round had ended and the server was idle.
    """

    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    failed: list[Any] = field(default_factory=list)
    samples: list[tuple[float, ProcessState, ProcessState]] = field(default_factory=list)
    idle: list[tuple[float, ProcessState, ProcessState]] = field(default_factory=list)


def departure(rng: random.Random, sample: Sample) -> tuple[bool, dict[str, Any], dict[str, Any]]:
    """How a client leaves: whether it streams, fields of its request, and options of its exchange."""
    if rng.random() < 0.5:  # in decode
        return True, {}, {"leave": at_event(rng.randint(3, 20))}
    if sample.prompt_tokens > 512:  # in prefill: when the first chunk is read
        return True, {"return_progress": True}, {"leave": at_event(1)}
    return rng.random() < 0.5, {}, {"leave_after": rng.uniform(0.0, 0.3)}  # in the queue, or wherever it is


def at_event(number: int) -> Callable[[Reply], bool]:
    """Whether so many events have come; for one reply, asked after each part of it."""
    seen = 0

    def leave(reply: Reply) -> bool:
        nonlocal seen
        seen += reply.pieces[-1][1].count(b"data: ")
        return seen >= number

    return leave


async def client(port: int, rng: random.Random, pool: list[Sample], until: float, tally: Tally, leavers: float) -> None:
    """One request after the other."""
    while time.perf_counter() < until:
        sample = rng.choice(pool)
        stream, fields, going = rng.random() < 0.6, {}, {}
        if rng.random() < leavers:
            stream, fields, going = departure(rng, sample)
        body = {**sample.body, "stream": stream, "return_token_ids": True, **fields}
        reply = await ask(port, sample.path, body, **going)
        count(reply, sample, stream, failure_kind(reply.error) == LEFT, tally)
        if reply.status == 429:
            await asyncio.sleep(rng.uniform(0.05, 0.2))


def count(reply: Reply, sample: Sample, stream: bool, left: bool, tally: Tally) -> None:
    """Enter one reply; `left`: its client went away."""
    tally.counts["sent"] += 1
    if left:
        has_token = stream and any(data.get("choices") for _, data in events(reply))
        tally.counts["left in decode" if has_token else "left before the first token"] += 1
    elif reply.status == 429:
        tally.counts["429"] += 1
    elif reply.status != 200 or not reply.whole:
        tally.counts["failed"] += 1
        tally.failed.append([sample.kind, reply.status, reply.error, reply.body[-300:].decode(errors="replace")])
    else:
        answers = answers_of(reply, sample, stream)
        tally.counts["completed"] += 1
        tally.kinds[sample.kind] += 1
        if answers != sample.answers:
            tally.counts["wrong"] += 1
            tally.wrong.append([sample.kind, stream, [asdict(a) for a in answers], [asdict(a) for a in sample.answers]])


async def fill_histories(server: Server) -> None:
    """Make so many steps, and finish so many requests, that the server forgets the first ones."""
    body = {"prompt": [100] * 8, "temperature": 0.0, "ignore_eos": True}
    for _ in range(-(-KEPT_RECORDS // FILL_TOKENS)):
        await ask(server.port, COMPLETION, {**body, "max_tokens": FILL_TOKENS})
    for _ in range(ServerConfig.kept_timelines // 16 + 1):
        await asyncio.gather(*(ask(server.port, COMPLETION, {**body, "max_tokens": 1}) for _ in range(16)))


async def watch(server: Server, tally: Tally, every: float, begin: float) -> None:
    """Sample both processes until cancelled."""
    while True:
        tally.samples.append(look(server, begin))
        await asyncio.sleep(every)


def look(server: Server, begin: float) -> tuple[float, ProcessState, ProcessState]:
    """Both processes now."""
    states = process_state(server.process.pid), process_state(server.engine_pid)
    return time.perf_counter() - begin, *states


async def soak(server: Server, pool: list[Sample], args: argparse.Namespace) -> Tally:
    """All rounds."""
    await fill_histories(server)
    tally, begin, seconds = Tally(), time.perf_counter(), 60 * args.minutes / args.rounds
    watcher = asyncio.create_task(watch(server, tally, args.every, begin))
    for number in range(args.rounds):
        until = time.perf_counter() + seconds
        rngs = [random.Random(f"{number}-{index}") for index in range(args.clients)]
        await asyncio.gather(*(client(server.port, rng, pool, until, tally, args.leavers) for rng in rngs))
        late = time.perf_counter() + IDLE_SECONDS
        while not server.is_idle() and time.perf_counter() < late:
            await asyncio.sleep(0.1)
        tally.counts["rounds that ended idle"] += server.is_idle()
        tally.idle.append(look(server, begin))
        print(f"round {number + 1} of {args.rounds}: {dict(tally.counts)}", file=sys.stderr, flush=True)
    watcher.cancel()
    return tally


def trend(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Slope by Theil and Sen and its 95 % confidence interval (Kendall's), per hour of points in seconds."""
    pairs = [(a, b) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] > a[0]]
    slopes = sorted(3600 * (b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)
    n = len(points)
    reach = 1.96 * (n * (n - 1) * (2 * n + 5) / 18) ** 0.5
    low, high = int((len(slopes) - reach) / 2), int((len(slopes) + reach) / 2) + 1
    return statistics.median(slopes), slopes[max(0, low)], slopes[min(high, len(slopes) - 1)]


def run(bench: Any) -> Report:
    """The engine's own answers first, then the load."""
    args, pool = bench.args, make_pool()
    llm = bench.load(max_num_seqs=1)
    fill(pool, llm)
    del llm
    gc.collect()
    flags = [f"--max-num-seqs={args.seats}", f"--max-queued-requests={args.queued}", f"--num-kv-blocks={args.blocks}"]
    with bench.serve(*flags) as server:
        with Bystanders() as others:
            tally = run_client(soak(server, pool, args))
        bench.foreign.append(others.cores or 0.0)
        metrics = server.metrics(*METRICS)
        log = server.log()
        code = server.stop()
    return make_report(bench, tally, metrics, code, log)


def make_report(bench: Any, tally: Tally, metrics: dict[str, float], code: int, log: str) -> Report:
    """One line a process."""
    rows, args, counts = [], bench.args, tally.counts
    half = 30 * args.minutes
    for index, name in ((1, "server"), (2, "engine")):
        column = [(sample[0], sample[index]) for sample in tally.samples]
        late = [(at, state.resident) for at, state in column if at > half]
        slope, low, high = trend(late)
        idle = [sample[index] for sample in tally.idle]
        rows.append(
            [
                name, f"{column[0][1].resident:.1f}", " ".join(f"{state.resident:.1f}" for state in idle),
                f"{slope:+.1f} ({low:+.1f} .. {high:+.1f})",
                " ".join(f"{state.threads}" for state in idle), f"{max(state.threads for _, state in column)}",
                " ".join(f"{state.descriptors}" for state in idle),
                f"{max(state.descriptors for _, state in column)}",
            ]
        )  # fmt: skip
    outcomes = ("completed", "left before the first token", "left in decode", "429", "failed")
    idle_rounds = counts["rounds that ended idle"]
    notes = [
        f"{args.minutes:g} minutes, {args.clients} clients on {args.seats} seats and {args.blocks} blocks; "
        f"{counts['sent']:,} requests: {', '.join(f'{counts[name]:,} {name}' for name in outcomes)}",
        f"answers unlike the engine's own (token ids, text, finish_reason): {counts['wrong']} of "
        f"{counts['completed']:,} ({', '.join(f'{number:,} {kind}' for kind, number in sorted(tally.kinds.items()))})",
        f"rounds after which no request, no queue and no KV block was left: {idle_rounds} of {args.rounds}",
        f"{metrics['num_preemptions_total']:,.0f} preemptions; prefix cache hit "
        f"{metrics['prefix_cache_hits_total'] / max(1.0, metrics['prefix_cache_queries_total']):.0%} of the tokens; "
        f"engine restarts {metrics['engine_restarts_total']:.0f}; exit code {code}; "
        f"tracebacks in the log: {log.count('Traceback')}",
        "resident memory, MiB; slope: by Theil and Sen over the second half, MiB/h (95 % interval)",
        "threads and descriptors: idle after each round, and the most under load",
    ]
    header = ["process", "RSS at the start", "RSS idle, by round", "slope of RSS", "threads idle", "most"]
    header += ["descriptors idle", "most"]
    values = {
        "counts": counts, "kinds": tally.kinds, "wrong": tally.wrong, "failed": tally.failed, "metrics": metrics,
        "samples": [[at, asdict(a), asdict(b)] for at, a, b in tally.samples],
        "idle": [[at, asdict(a), asdict(b)] for at, a, b in tally.idle], "exit_code": code, "log": log,
    }  # fmt: skip
    return Report("Minutes of mixed load with clients that leave", header, rows, notes, values)
