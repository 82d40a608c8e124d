"""Load on one prefill and two decode workers; one is killed every 20 s: is anything lost or leaked?

Streams and whole replies, greedy and seeded, short and long prompts with shared beginnings, on KV
caches so small that requests lose their blocks to others; a tenth of the clients leaves. Every
answer that came to its end must have the tokens, the text and the reason that one engine alone gave
before. `--model tiny` is a random one of a few kilobytes, whose workers are back in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import time
from collections import Counter
from typing import Any

from running import RunningServer
from serving.mixed_requests import Sample
from serving.processes import COMPLETIONS, ProcessState, process_state, serving
from serving.soak import IDLE_SECONDS, Tally, client, fill_histories
from tiny_gguf import write_tiny_gguf
from twinphase import LLM, SamplingParams
from twinphase_bench.client.client import run as run_client
from twinphase_bench.report.report import Column, Section, Table

OPTIONS = {
    "minutes": (10.0, "of load"),
    "every": (20.0, "seconds between two kills"),
    "clients": (8, "at once"),
    "blocks": (256, "num_kv_blocks of each worker"),
}
# Of load before the first look at the server, which has then filled what it keeps of the past.
WARM_SECONDS = 20.0


def make_samples(model: str, isa: str) -> list[Sample]:
    """Requests, and what one engine alone answers."""
    rng = random.Random(0)
    prefixes = [[rng.randrange(10, 300) for _ in range(500)] for _ in range(3)]
    llm = LLM(model, threads=1, isa=isa or None, max_num_seqs=1, enable_prefix_caching=False)
    samples = []
    for number in range(60):
        prompt = rng.choice(prefixes)[: rng.choice([16, 200, 500])] + [
            rng.randrange(10, 300) for _ in range(40)
        ]
        params: dict[str, Any] = {
            "temperature": rng.choice([0.0, 1.2]),
            "seed": number,
            "ignore_eos": True,
        }
        params["max_tokens"] = rng.choice([1, 8, 64, 200, 400])
        (output,) = llm.generate([prompt], SamplingParams(**params))
        answer = output.outputs[0]
        answers = [(answer.token_ids, answer.text, str(answer.finish_reason))]
        body = {"prompt": prompt, **params}
        samples.append(
            Sample("completion", COMPLETIONS, body, answers=answers, prompt_tokens=len(prompt))
        )
    return samples


async def load(
    server: RunningServer, samples: list[Sample], seconds: float, clients: int, tally: Tally
) -> None:
    until = time.perf_counter() + seconds
    rngs = [random.Random(f"{seconds}-{number}") for number in range(clients)]
    await asyncio.gather(*(client(server, rng, samples, until, tally, 0.1) for rng in rngs))
    late = time.perf_counter() + IDLE_SECONDS
    while time.perf_counter() < late and not await asyncio.to_thread(is_whole, server):
        await asyncio.sleep(0.2)


def workers(server: RunningServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/v1/cluster")[1]["workers"]
    return found


def is_whole(server: RunningServer) -> bool:
    return server.is_idle() and all(one["state"] == "ready" for one in workers(server))


async def kill_some(server: RunningServer, every: float, kills: Counter[str]) -> None:
    rng = random.Random(1)
    while True:
        await asyncio.sleep(every)
        victim = rng.choice([one for one in await asyncio.to_thread(workers, server) if one["pid"]])
        os.kill(victim["pid"], signal.SIGKILL)
        kills[victim["role"]] += 1


async def soak(
    server: RunningServer, samples: list[Sample], args: argparse.Namespace
) -> dict[str, Any]:
    """What became of the requests, and what the server's process held before and after."""
    await fill_histories(server)
    await load(server, samples, WARM_SECONDS, args.clients, Tally())
    tally = Tally()
    kills = Counter[str]()
    before = process_state(server.process.pid)
    killer = asyncio.create_task(kill_some(server, args.every, kills))
    working = asyncio.create_task(load(server, samples, 60 * args.minutes, args.clients, tally))
    await asyncio.sleep(60 * args.minutes - args.every / 2)
    killer.cancel()  # the last that was killed is back at the end
    await working
    after = process_state(server.process.pid)
    whole = is_whole(server)
    return {
        "counts": tally.counts,
        "unexpected": tally.unexpected,
        "kills": kills,
        "before": before,
        "after": after,
        "whole": whole,
        "workers": workers(server),
    }


def run(args: argparse.Namespace) -> tuple[Section, Any]:
    """One engine's own answers first, then the load."""
    if args.model == "tiny":
        args.out.mkdir(parents=True, exist_ok=True)
        args.model = str(write_tiny_gguf(args.out / "tiny.gguf", vocab=320, context=2048))
    samples = make_samples(args.model, args.isa)
    args.threads = 1
    options = {"prefill_workers": 1, "decode_workers": 2, "num_kv_blocks": args.blocks}
    with serving(args, **options) as server:
        found = run_client(soak(server, samples, args))
        found |= {"exit code": server.stop(), "log": server.log.read_text()}
    return section(args, found), found


def section(args: argparse.Namespace, found: dict[str, Any]) -> Section:
    counts = found["counts"]
    kills = found["kills"]
    log = found["log"]
    continued = sum(map(int, re.findall(r"other workers continue its (\d+) requests", log)))
    # These were refused, and are neither wrong nor lost.
    again = sum("service_unavailable_error" in one[5] for one in found["unexpected"])
    counts["wrong or lost"] = counts.pop("wrong", 0) + counts.pop("failed", 0) - again
    counts["refused, since no decode worker was left"] = again
    notes = (
        f"{args.minutes:g} minutes, {args.clients} clients, a worker killed every {args.every:g} "
        "s: "
        f"{sum(counts.values()):,} requests, "
        f"{', '.join(f'{count:,} {name}' for name, count in counts.items())}.",
        f"{kills.total()} kills "
        f"({', '.join(f'{count} {role}' for role, count in sorted(kills.items()))}), "
        f"{continued} requests continued at another worker; "
        f"{sum(one['first_token_mismatches'] for one in found['workers'])} first tokens differed.",
        f"At the end {'all workers were ready and idle' if found['whole'] else 'NOT IDLE'}; "
        f"exit code {found['exit code']}; {log.count('Traceback')} tracebacks in the log.",
    )

    def row(name: str, state: ProcessState) -> tuple[str, ...]:
        return name, f"{state.resident:.1f}", str(state.threads), str(state.descriptors)

    columns = (Column("server, idle"), Column("RSS, MiB"), Column("threads"), Column("descriptors"))
    table = Table(
        "The server's process",
        columns,
        (row("before", found["before"]), row("after", found["after"])),
    )
    return Section("Pools whose workers are killed", (), notes, (table,))
