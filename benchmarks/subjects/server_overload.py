"""Four times the load that it can serve: what is refused, how soon, and what those who were let in notice of it.

Two loads in turn on one server. `full`: as many clients as seats and places in the queue, each of which sends its next
request when its last one is answered; this is the capacity. `overload`: requests come by a Poisson process at `--times`
the capacity, whatever becomes of those before; a time counts from the moment at which the request was due. Gaps between
tokens are taken while the load is on, the first seconds of it left out.
Not for: priorities, or a load that just fits.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from typing import Any

import msgspec
from loads import Report, spread
from sse_client import ask, events

from subjects.server_process import Server
from twinphase.bench.client.client import Reply
from twinphase.bench.client.client import run as run_client
from twinphase.bench.statistics import percentile

SUBJECT = "overload"
PATH = "/v1/completions"
METHOD = "both loads in turn on one server; prompts are random token ids"
SETTLE = 3.0  # seconds until all seats are taken and out of step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--seats", type=int, default=16, help="max_num_seqs (default: %(default)s)")
    parser.add_argument("--queued", type=int, default=8, help="max_queued_requests (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--output", type=int, default=64, help="new tokens (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="of each load (default: %(default)s)")
    parser.add_argument("--times", type=float, default=4, help="arrivals / capacity (default: %(default)s)")


async def full(port: int, clients: int, seconds: float, make: Any) -> tuple[float, list[Reply]]:
    """Clients that send a request after the other: when they began, and all replies."""
    start = time.perf_counter()
    end = start + seconds

    async def client() -> list[Reply]:
        replies = []
        while time.perf_counter() < end:
            replies.append(await ask(port, PATH, make()))
        return replies

    return start, [reply for own in await asyncio.gather(*(client() for _ in range(clients))) for reply in own]


async def overload(port: int, rate: float, seconds: float, make: Any, seed: int) -> tuple[float, list[Reply]]:
    """Requests at random moments, `rate` a second: when the first second began, and all replies."""
    rng, at, planned = random.Random(seed), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        planned.append((at, msgspec.json.encode(make())))
    start = time.perf_counter()  # not before all bodies are there: no request is late because of them
    return start, await asyncio.gather(*(ask(port, PATH, body, due=start + at) for at, body in planned))


def summary(replies: list[Reply], start: float, seconds: float) -> dict[str, Any]:
    """Of one load: milliseconds, and requests by what became of them."""
    gaps, ttft, served, refusals, other = [], [], 0, [], []
    for reply in replies:
        if reply.status == 429:
            refusals.append((reply.ended - reply.intended) * 1e3)
            continue
        if reply.status != 200 or not reply.whole:
            other.append([reply.status, reply.error])
            continue
        times: list[float] = []
        for moment, data in events(reply):
            for choice in data["choices"]:
                times += [moment] * len(choice["token_ids"])
        ttft.append((times[0] - reply.intended) * 1e3)
        served += start + SETTLE <= reply.ended <= start + seconds
        pairs = zip(times, times[1:], strict=False)
        gaps += [(b - a) * 1e3 for a, b in pairs if start + SETTLE <= b <= start + seconds]
    return {
        "rate": served / (seconds - SETTLE),
        "sent": len(replies),
        "refused": len(refusals),
        "other": other,
        **{f"itl_p{q}": percentile(gaps, q) for q in (50, 99, 100)},
        **{f"ttft_p{q}": percentile(ttft, q) for q in (50, 99)},
        **{f"refusal_p{q}": percentile(refusals, q) for q in (50, 99, 100)},
    }


def run(bench: Any) -> Report:
    """Both loads in turn, repeated after a rehearsal that finds the capacity."""
    args = bench.args
    tokens = (args.seats + 2) * (args.prompt + args.output)
    body = {"max_tokens": args.output, "temperature": 0.0, "ignore_eos": True, "stream": True, "return_token_ids": True}

    def make() -> dict[str, Any]:
        return {**body, "prompt": bench.prompts.take(args.prompt)}

    flags = [f"--max-num-seqs={args.seats}", f"--max-queued-requests={args.queued}", "--no-enable-prefix-caching"]
    found: dict[str, list[dict[str, Any]]] = {"full": [], "overload": []}
    with bench.serve(*flags, f"--num-kv-blocks={-(-tokens // 16) + args.seats}") as server:

        def once(name: str, rate: float) -> dict[str, Any]:
            if name == "full":
                start, replies = run_client(full(server.port, args.seats + args.queued, args.seconds, make))
            else:
                start, replies = run_client(overload(server.port, rate, args.seconds, make, len(found[name])))
            value = summary(replies, start, args.seconds)
            settle(server)
            return value

        capacity = once("full", 0.0)["rate"]
        with bench.steps(2 * args.reps):
            for rep in range(args.reps):
                for name in ("full", "overload") if rep % 2 == 0 else ("overload", "full"):
                    value = bench.measure(name, lambda name=name: once(name, args.times * capacity))
                    found[name].append(value)
    return make_report(bench, bench.complete(found), capacity)


def settle(server: Server) -> None:
    """Wait until nothing runs."""
    while not server.is_idle():
        time.sleep(0.1)


def make_report(bench: Any, found: dict[str, list[dict[str, Any]]], capacity: float) -> Report:
    """One line a load."""
    rows = []
    for name, reps in found.items():
        sent, refused = (sum(one[key] for one in reps) for key in ("sent", "refused"))
        cells = [f"{name}", spread([one["rate"] for one in reps], digits=2), f"{sent}", f"{refused}"]
        cells.append(f"{sum(len(one['other']) for one in reps)}")
        for key in ("itl_p50", "itl_p99", "ttft_p50", "ttft_p99", "refusal_p50", "refusal_p99", "refusal_p100"):
            known = [one[key] for one in reps if one["refused"] or not key.startswith("refusal")]
            cells.append(spread(known) if known else "-")
        rows.append(cells)
    args = bench.args
    ratios = {
        key: statistics.median(b[key] / a[key] for a, b in zip(found["full"], found["overload"], strict=True))
        for key in ("itl_p50", "itl_p99", "rate")
    }
    notes = [
        f"{args.seats} seats, {args.queued} places in the queue; {args.prompt} prompt, {args.output} new tokens each",
        f"{args.seconds:g} s a load; overload: {args.times:g} times {capacity:.2f} requests/s",
        f"overload / full, median of the pairs: ITL p50 {ratios['itl_p50']:.3f}, p99 {ratios['itl_p99']:.3f}, "
        f"requests/s {ratios['rate']:.3f}",
        "milliseconds, median ± half range of the repetitions' percentiles; a refusal is timed to its last byte",
        "failed: any other reply than a whole one or a 429",
    ]
    header = ["load", "served/s", "sent", "429", "failed", "ITL p50", "ITL p99", "TTFT p50", "TTFT p99"]
    header += ["429 after, p50", "429 after, p99", "429 after, most"]
    return Report("Four times the load that can be served", header, rows, notes, {"capacity": capacity, **found})
