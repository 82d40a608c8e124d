"""What serving costs: the same prompts by `LLM.generate` and through the server, in turn, on the same cores.

Engine, server and client share this machine, so the client's own CPU time is a part of the price, and is printed. The
time from the end of a token's step to its socket and to its client comes from loads of its own, whose events carry
their token ids.
Not for: waiting times under a load that comes and goes (`overload`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loads import Report, spread

from subjects.server_process import Server, cpu_seconds
from twinphase import LLM, SamplingParams
from twinphase.bench.statistics import percentile

SUBJECT = "overhead"
METHOD = "served and offline in turn; prompts are random token ids"
HERE = Path(__file__).resolve().parent
CPU = ("server", "engine", "client", "offline")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--streams", default="16,64", help="requests at once (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--output", type=int, default=128, help="new tokens (default: %(default)s)")


def offline(llm: LLM, prompts: list[list[int]], output: int) -> dict[str, Any]:
    """The prompts by `LLM.generate`."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    cpu, start = time.process_time(), time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    return {
        "rate": tokens / seconds,
        "cpu": {"offline": cpu / tokens},
        "texts": [answer.outputs[0].text for answer in answers],
    }


def served(server: Server, prompts: list[list[int]], output: int, **fields: Any) -> dict[str, Any]:
    """The prompts through the server, all at once; from the first connection to the last byte."""
    body = {"max_tokens": output, "temperature": 0.0, "ignore_eos": True, "stream": True, **fields}
    body["stream_options"] = {"include_usage": True}
    bodies = [{**body, "prompt": prompt} for prompt in prompts]
    pids = {"server": server.process.pid, "engine": server.engine_pid}
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    command = [sys.executable, str(HERE.parent / "sse_client.py"), str(server.port)]
    done = subprocess.run(command, input=json.dumps(bodies), stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    replies = found["replies"]
    if not all(reply["whole"] and reply["status"] == 200 for reply in replies):
        raise RuntimeError(f"a reply is not whole: {[(reply['status'], reply['error']) for reply in replies]}")
    tokens = sum(reply["events"][-1][1]["usage"]["completion_tokens"] for reply in replies)
    seconds = max(reply["ended"] for reply in replies) - min(reply["began"] for reply in replies)
    cpu = {name: (cpu_seconds(pid) - before[name]) / tokens for name, pid in pids.items()}
    texts = ["".join(data["choices"][0]["text"] for _, data in reply["events"] if data["choices"]) for reply in replies]
    cpu["client"] = found["cpu_seconds"] / tokens
    return {"rate": tokens / seconds, "cpu": cpu, "texts": texts, "replies": replies}


WAYS: dict[str, Any] = {"served": served, "offline": offline}


def arrivals(replies: list[dict[str, Any]]) -> dict[str, list[float]]:
    """By request id, when each token was with the client, seconds."""
    found: dict[str, list[float]] = {}
    for reply in replies:
        for moment, data in reply["events"]:
            for choice in data["choices"]:
                found.setdefault(data["id"], []).extend([moment] * len(choice["token_ids"]))
    return found


def deliveries(noted: dict[str, Any], arrived: dict[str, list[float]]) -> dict[str, list[float]]:
    """For each token behind the first, seconds from its step's end to the socket, and to the client."""
    found: dict[str, list[float]] = {"socket": [], "client": []}
    for name, moments in arrived.items():
        tokens = [(end, handed) for count, end, handed in noted[name] for _ in range(count)]
        for (end, handed), moment in list(zip(tokens, moments, strict=True))[1:]:
            found["socket"].append(handed - end)
            found["client"].append(moment - end)
    return found


def run(bench: Any) -> Report:
    """Pairs of both, in an order that turns; then loads for the time of delivery."""
    args = bench.args
    points = [int(count) for count in args.streams.split(",")]
    blocks = max(points) * (-(-(args.prompt + args.output) // 16) + 1) + 64
    config = {"max_num_seqs": max(points), "num_kv_blocks": blocks}
    found: dict[int, list[dict[str, Any]]] = {count: [] for count in points}
    noted = Path(tempfile.mkdtemp()) / "probe.json"
    program = (str(HERE / "server_probe.py"), str(noted))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in config.items()]
    arrived: dict[int, list[dict[str, list[float]]]] = {count: [] for count in points}
    with bench.serve(*flags, "--no-enable-prefix-caching", program=program) as server:
        llm = bench.load(**config)

        def pair(count: int, served_first: bool) -> dict[str, Any]:
            prompts = [bench.prompts.take(args.prompt) for _ in range(count)]
            both: dict[str, Any] = {}
            for name in ("served", "offline") if served_first else ("offline", "served"):
                where: Any = server if name == "served" else llm
                both[name] = WAYS[name](where, prompts, args.output)
            both["identical"] = both["served"].pop("texts") == both["offline"].pop("texts")
            del both["served"]["replies"]
            return both

        def delivery(count: int) -> dict[str, list[float]]:
            prompts = [bench.prompts.take(args.prompt) for _ in range(count)]
            return arrivals(served(server, prompts, args.output, return_token_ids=True)["replies"])

        with bench.steps((args.reps + 1) * len(points) * 2):
            for rep in range(-1, args.reps):  # the first pair of each is a rehearsal
                for count in points:
                    one = bench.measure(f"{count} streams", lambda count=count, rep=rep: pair(count, rep % 2 == 0))
                    moments = bench.measure(f"{count} streams, delivery", lambda count=count: delivery(count))
                    if rep >= 0:
                        found[count].append(one)
                        arrived[count].append(moments)
    bench.complete({"rates": found, "delivery": arrived})
    probe = json.loads(noted.read_text())
    noted.unlink()
    os.rmdir(noted.parent)
    times = {count: [deliveries(probe, moments) for moments in reps] for count, reps in arrived.items()}
    return make_report(bench, found, times)


def make_report(
    bench: Any, found: dict[int, list[dict[str, Any]]], times: dict[int, list[dict[str, list[float]]]]
) -> Report:
    """One line for each number of streams."""
    rows = []
    for count, reps in found.items():
        ratios = [one["served"]["rate"] / one["offline"]["rate"] for one in reps]
        rates = [spread([one[name]["rate"] for one in reps], digits=0) for name in ("offline", "served")]
        cpu = {name: [{**one["offline"]["cpu"], **one["served"]["cpu"]}[name] for one in reps] for name in CPU}
        micros = [f"{statistics.median(cpu[name]) * 1e6:,.0f}" for name in CPU]
        waits = []
        for where in ("socket", "client"):
            pooled = [seconds for one in times[count] for seconds in one[where]]
            waits.append(" / ".join(f"{percentile(pooled, q) * 1e3:.2f}" for q in (50, 99)))
        ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"
        rows.append([f"{count}", *rates, ratio, *micros, *waits])
    args = bench.args
    pairs = [one for reps in found.values() for one in reps]
    notes = [
        f"{args.prompt} prompt and {args.output} new tokens each, greedy, end-of-text ignored, all sent at once; "
        "tokens/s: new tokens over the time from the first request to the last byte",
        "ratio: served / offline, median of the pairs (lowest .. highest); each pair has its own prompts",
        f"the texts of {sum(one['identical'] for one in pairs)} of {len(pairs)} pairs are identical",
        "CPU: of all threads of the process, for a new token, prompts included; microseconds",
        "delivery: from the end of the step to the socket, and to the client, p50 / p99 over all tokens but the "
        "first, ms; by the exact times, both processes on one clock",
    ]
    header = ["streams", "offline, tokens/s", "served, tokens/s", "ratio", *(f"CPU {name}, us" for name in CPU)]
    header += ["to the socket, ms", "to the client, ms"]
    delivery = {
        count: [{key: [percentile(one[key], q) for q in (50, 90, 99)] for key in one} for one in reps]
        for count, reps in times.items()
    }
    return Report("What serving costs", header, rows, notes, {"pairs": found, "delivery, p50 p90 p99": delivery})
