"""What serving costs: the same prompts by `LLM.generate` and through the server, in turn, on the same cores.

The client runs on these cores too, so its CPU time is printed beside that of the server and of the
engine.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

from running import RunningServer
from serving.processes import cpu_seconds, serving, spread
from twinphase import LLM, SamplingParams
from twinphase.workload.distributions import Lengths, Paced
from twinphase_bench.client.client import run as run_client
from twinphase_bench.load.run import run_load
from twinphase_bench.load.workload import Sizing, Workload, make_workload
from twinphase_bench.report.report import Column, Section, Table
from twinphase_bench.targets.openai import OpenAITarget

OPTIONS = {
    "streams": ("16,64", "requests at once"),
    "prompt": (256, "prompt tokens"),
    "output": (128, "new tokens"),
}
CPU = ("server", "engine", "client", "offline")


def offline(llm: LLM, workload: Workload) -> dict[str, Any]:
    """All prompts by `LLM.generate`: tokens per second, CPU seconds per token, texts."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
        for request in workload.requests
    ]
    cpu = time.process_time()
    start = time.perf_counter()
    answers = llm.generate(
        [list(request.prompt.token_ids) for request in workload.requests], params, use_tqdm=False
    )
    seconds = time.perf_counter() - start
    cpu = time.process_time() - cpu
    tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    return {
        "rate": tokens / seconds,
        "cpu": {"offline": cpu / tokens},
        "texts": [answer.outputs[0].text for answer in answers],
    }


def served(server: RunningServer, target: OpenAITarget, workload: Workload) -> dict[str, Any]:
    """The same through the server, all at once: from the first intended send to the last end."""
    pids = {"server": server.process.pid, "engine": server.engine_pid()}
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    result = run_client(run_load(target, workload, Paced(math.inf, even=True)))
    if result.failures or not result.num_output_tokens or not result.output_rate:
        raise SystemExit(f"requests failed: {result.failures}")
    used = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    used["client"] = result.client.cpu * result.seconds
    cpu = {name: seconds / result.num_output_tokens for name, seconds in used.items()}
    return {
        "rate": result.output_rate,
        "cpu": cpu,
        "texts": [seen.text for seen in result.observations],
    }


def run(args: argparse.Namespace) -> tuple[Section, Any]:
    """Pairs of both, in an order that turns; the first pair of each number of streams is a rehearsal."""
    counts = [int(count) for count in args.streams.split(",")]
    blocks = max(counts) * (-(-(args.prompt + args.output) // 16) + 1) + 64
    config = {"max_num_seqs": max(counts), "num_kv_blocks": blocks, "enable_prefix_caching": False}
    flags = {"max_num_seqs": max(counts), "num_kv_blocks": blocks}
    found: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    with serving(args, **flags) as server:
        target = run_client(OpenAITarget.open(server.url))
        llm = LLM(args.model, threads=args.threads, **config)
        sizing = Sizing(vocab_size=llm.blueprint.vocab_size)
        lengths = Lengths((args.prompt, args.prompt), (args.output, args.output))
        for rep in range(-1, args.reps):
            for count in counts:
                workload = make_workload(
                    lengths, count, sizing, seed=1000 * rep + count, num_warm_up=0
                )
                ways = {
                    "served": lambda w=workload: served(server, target, w),
                    "offline": lambda w=workload: offline(llm, w),
                }
                pair = {name: ways[name]() for name in (ways if rep % 2 else reversed(ways))}
                pair["identical"] = pair["served"].pop("texts") == pair["offline"].pop("texts")
                if rep >= 0:
                    found[count].append(pair)
    return section(args, found), found


def section(args: argparse.Namespace, found: dict[int, list[dict[str, Any]]]) -> Section:
    """A row per number of streams."""
    rows = []
    for count, pairs in found.items():
        ratios = [pair["served"]["rate"] / pair["offline"]["rate"] for pair in pairs]
        rates = [spread([pair[way]["rate"] for pair in pairs], 0) for way in ("offline", "served")]
        cpu = [{**pair["offline"]["cpu"], **pair["served"]["cpu"]} for pair in pairs]
        micros = [f"{statistics.median(one[name] for one in cpu) * 1e6:,.0f}" for name in CPU]
        rows.append((f"{count}", *rates, spread(ratios, 3), *micros))
    pairs = [pair for own in found.values() for pair in own]
    columns = [
        Column("streams"),
        Column("offline, tokens/s"),
        Column("served, tokens/s", "new tokens / (last byte - first request)"),
        Column(
            "served / offline",
            "median of the pairs (lowest .. highest); each pair has its own prompts",
        ),
        *(
            Column(f"CPU {name}, us", "of all threads, per new token, prompts included")
            for name in CPU
        ),
    ]
    notes = (
        f"{args.prompt} prompt and {args.output} new tokens each, greedy, end of text ignored, "
        "all sent at once.",
        f"The texts of {sum(pair['identical'] for pair in pairs)} of {len(pairs)} pairs are "
        "identical.",
    )
    return Section(
        "What serving costs", (), notes, (Table("Served and offline", tuple(columns), tuple(rows)),)
    )
