"""Many users behind one long prompt: new tokens per second, beside other servers.

Each user's prompt is the shared text and a few words of its own; no two are the same. One request
has been answered when the first round begins, so a server that shares the prefix between requests
computes it once. One that keeps a prefix per slot computes it for each slot in the first round, and
finds it in later ones. Every server gets the same texts, and the servers take turns.

Start the peers beforehand, with the same model and as many threads. A peer that spins while it is
idle slows the others down: measure it alone. Without a peer only our own server is measured.

    llama-server -m FILE.gguf -t 2 -fa on -np 64 -c 135168 --cache-reuse 64 --port 8081
    OMP_NUM_THREADS=2 VLLM_CPU_KVCACHE_SPACE=4 PEERS_DIR/vllm/bin/python \\
        -m vllm.entrypoints.openai.api_server --model PEERS_DIR/models/smollm2-bf16 --port 8082 \\
        --max-model-len 4096 --max-num-seqs 64 --enable-prompt-tokens-details
    PEERS_DIR/openvino/bin/python benchmarks/peers/openvino_server.py \\
        PEERS_DIR/models/ov-int8 --port 8083

The last one does not report what it finds cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from serving.processes import COMPLETIONS, serving
from twinphase_bench.client.client import SEND_NOW, Address, exchange
from twinphase_bench.client.client import run as run_client
from twinphase_bench.load.workload import TextMaker
from twinphase_bench.report.report import Column, Section, Table

OPTIONS = {
    "peers": ("", "NAME=URL,NAME=URL of OpenAI-compatible servers of the same model"),
    "users": (64, "requests at once"),
    "prefix": (2000, "tokens of the shared prompt"),
    "output": (32, "new tokens of each request"),
    "repetitions": (3, "rounds after the first one"),
}
OWN_WORDS = 16
PROBE_WORDS = 400
TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class Round:
    """What a server did for all users: seconds, and tokens by its own count."""

    seconds: float
    new_tokens: int
    prompt_tokens: int
    cached_tokens: int | None  # None where the server does not report it.

    @property
    def rate(self) -> float:
        return self.new_tokens / self.seconds


async def complete(url: str, prompt: str, output: int) -> tuple[float, float, dict[str, Any]]:
    """When a request was sent and ended, and its usage."""
    address = Address.parse(url)
    body = {"prompt": prompt, "max_tokens": output, "temperature": 0.0, "ignore_eos": True}
    data = msgspec.json.encode(body)
    request = address.head("POST", COMPLETIONS, {}, len(data)) + data
    reply = await exchange(address, request, intended=SEND_NOW, timeout=TIMEOUT_SECONDS)
    if reply.status != 200:
        raise SystemExit(f"{url} answers {reply.status}: {reply.body[:500]!r}")
    answer = json.loads(reply.body)
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or {}
    # llama.cpp's own field, which older versions have instead of OpenAI's.
    usage["cached"] = details.get("cached_tokens") or answer.get("timings", {}).get("cache_n")
    return reply.sent, reply.ended, usage


async def together(url: str, prompts: Sequence[str], output: int) -> Round:
    replies = await asyncio.gather(*(complete(url, prompt, output) for prompt in prompts))
    usages = [usage for _, _, usage in replies]
    cached = [usage["cached"] for usage in usages]
    return Round(
        max(ended for _, ended, _ in replies) - min(sent for sent, _, _ in replies),
        sum(usage["completion_tokens"] for usage in usages),
        sum(usage["prompt_tokens"] for usage in usages),
        None if None in cached else sum(cached),
    )


async def measure(urls: dict[str, str], args: argparse.Namespace) -> dict[str, list[Round]]:
    """All rounds of each server."""
    texts = TextMaker(seed=1)
    first = next(iter(urls.values()))
    _, _, probe = await complete(first, texts.words(PROBE_WORDS, 0), 1)
    words = round(PROBE_WORDS * args.prefix / probe["prompt_tokens"])
    shared = texts.words(words, 1)
    number = 2

    def prompts(count: int) -> list[str]:
        nonlocal number
        number += count
        own = range(number - count, number)
        return [f"{shared} {texts.words(OWN_WORDS, one)}" for one in own]

    found: dict[str, list[Round]] = {name: [] for name in urls}
    opening = prompts(1)
    for url in urls.values():
        await together(url, opening, args.output)
    names = list(urls)
    for repetition in range(args.repetitions + 1):
        ours = prompts(args.users)
        for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
            found[name].append(await together(urls[name], ours, args.output))
            print(name, found[name][-1], flush=True)
    return found


def run(args: argparse.Namespace) -> tuple[Section, Any]:
    """Our server, started here, and the peers."""
    peers = dict(peer.split("=", 1) for peer in args.peers.split(",") if peer)
    with serving(args, max_num_seqs=args.users) as server:
        found = run_client(measure({"twinphase": server.url} | peers, args))
    rates = {name: [one.rate for one in rounds] for name, rounds in found.items()}
    rows = tuple(row(name, found[name], rates, args.users) for name in found)
    columns = (
        Column("server"),
        Column("first round, tokens/s", "new tokens per second"),
        Column("later rounds, tokens/s", "median (lowest to highest)"),
        Column("twinphase / it", "in the first round and in later ones"),
        Column("prompt tokens", "of each request"),
        Column("found cached", "part of the prompt tokens, first round and later"),
    )
    title = f"{args.users} users behind a shared prompt of {args.prefix:,} tokens"
    return Section(title, (), (), (Table(title, columns, rows),)), found


def row(
    name: str, rounds: list[Round], rates: dict[str, list[float]], users: int
) -> tuple[str, ...]:
    first, *later = rates[name]
    ours = rates["twinphase"]
    cached = [
        one.cached_tokens / one.prompt_tokens for one in rounds if one.cached_tokens is not None
    ]
    return (
        name,
        f"{first:.1f}",
        f"{median(later):.1f} ({min(later):.1f} to {max(later):.1f})",
        f"{ours[0] / first:.2f} and {median(ours[1:]) / median(later):.2f}",
        f"{rounds[0].prompt_tokens / users:.0f}",
        f"{cached[0]:.0%} and {median(cached[1:]):.0%}" if len(cached) > 1 else "unknown",
    )
