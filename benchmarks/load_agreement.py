"""The same load through our client and through aiperf, a public load tool: do they report the same latencies?

    python benchmarks/load_agreement.py URL --aiperf VENV/bin/aiperf --tokenizer NAME [--rounds 5]

Both send the same prompts, at the same rate, to the same server, in turn, in an order drawn anew for each round. The
server must not keep prefixes (`twinphase serve --no-enable-prefix-caching`), or whoever comes second is served from
them. aiperf wants a tokenizer that it can load without a network (`HF_HOME`, `HF_HUB_OFFLINE=1`); it counts tokens by
the server's usage here, as we do.

Where both tools and the server share few cores, the heavier tool slows the server down. So the server's own means of
TTFT and ITL during each tool's runs (its /metrics, if it has vLLM's names) stand beside what the tool saw.

For: trust in the client of `twinphase bench`. Not for: judging a server.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families as parse_metrics

from twinphase.bench.client.client import run
from twinphase.bench.conditions import Bystanders, conditions
from twinphase.bench.load.arrivals import Closed, Constant
from twinphase.bench.load.run import LoadResult, run_load
from twinphase.bench.load.workload import Lengths, Workload, make_workload
from twinphase.bench.progress import live
from twinphase.bench.statistics import median_interval, percentile
from twinphase.bench.targets.openai import OpenAITarget

RESULTS = Path(__file__).resolve().parent / "results" / "load-agreement.json"
# (name, unit, its name in aiperf's export, which of its statistics)
FIGURES = (
    ("TTFT p50", "ms", "time_to_first_token", "p50"),
    ("TTFT p90", "ms", "time_to_first_token", "p90"),
    ("TPOT p50", "ms", "inter_token_latency", "p50"),
    ("TPOT p90", "ms", "inter_token_latency", "p90"),
    ("ITL p50", "ms", "inter_chunk_latency", "p50"),
    ("ITL p99", "ms", "inter_chunk_latency", "p99"),
    ("E2E p50", "ms", "request_latency", "p50"),
    ("output tokens", "tok/s", "output_token_throughput", "avg"),
    ("requests", "req/s", "request_throughput", "avg"),
)


OWN = {"TTFT": "time_to_first_token_seconds", "ITL": "inter_token_latency_seconds"}  # of the server's histograms


def own_sums(url: str) -> dict[str, tuple[float, float]]:
    """(sum, count) of the server's histograms since it began; empty where it has none."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
            text = reply.read().decode()
    except OSError:
        return {}
    samples = {sample.name: sample.value for family in parse_metrics(text) for sample in family.samples}
    found = {}
    for name, wanted in OWN.items():
        whole = next((key for key in samples if key.endswith(f"{wanted}_sum")), None)
        if whole:
            found[name] = (samples[whole], samples[whole.removesuffix("sum") + "count"])
    return found


def ours(result: LoadResult) -> dict[str, float]:
    """Our figures, by name."""
    if result.failures:
        raise SystemExit(f"requests failed: {result.failures}")
    pools = {"TTFT": result.ttft, "TPOT": result.tpot, "ITL": result.itl, "E2E": result.e2e}
    found = {}
    for name, *_ in FIGURES[:-2]:
        pool, _, q = name.partition(" p")
        found[name] = 1e3 * percentile(pools[pool], float(q))
    found |= {f"{name} mean": 1e3 * sum(pools[name]) / len(pools[name]) for name in OWN}
    return {**found, "output tokens": result.output_rate or float("nan"), "requests": result.request_rate}


def aiperf(args: argparse.Namespace, workload: Workload, load: Mapping[str, Any]) -> dict[str, float]:
    """aiperf's figures for the same requests, by our names."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        lines = (json.dumps({"text": request.prompt.text}) for request in workload.requests)
        prompts.write_text("\n".join(lines) + "\n")
        command = [
            args.aiperf, "profile", "--model", args.model, "--url", args.url, "--tokenizer", args.tokenizer,
            "--endpoint-type", "completions", "--streaming", "--use-server-token-count",
            "--input-file", str(prompts), "--custom-dataset-type", "single_turn",
            "--dataset-sampling-strategy", "sequential",
            "--request-count", str(len(workload.requests)), "--warmup-request-count", str(len(workload.warm_up)),
            "--output-artifact-dir", folder, "--workers-max", "1", "--record-processors", "1", "--ui", "none",
            "--extra-inputs", f"max_tokens:{args.output_len}", "--extra-inputs", "ignore_eos:true",
            "--extra-inputs", "temperature:0",
            "--connection-reuse-strategy", "never",  # as ours; but its TTFT has the opening of the connection in it
        ]  # fmt: skip
        for option, value in load.items():
            command += [option, str(value)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        exported = list(Path(folder).rglob("profile_export_aiperf.json"))
        if done.returncode or not exported:
            raise SystemExit(f"aiperf failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        found = json.loads(exported[0].read_text())
    failed = found.get("error_request_count", {}).get("avg", 0)
    if failed:
        raise SystemExit(f"{failed} of aiperf's requests failed")
    means = {"TTFT mean": "time_to_first_token", "ITL mean": "inter_chunk_latency"}
    return {name: float(found[key][statistic]) for name, _, key, statistic in FIGURES} | {
        name: float(found[key]["avg"]) for name, key in means.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--aiperf", required=True, help="the executable")
    parser.add_argument("--tokenizer", required=True, help="for aiperf: a name that it can load")
    parser.add_argument("--rate", type=float, help="requests a second, evenly; --concurrency if left out")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--num-prompts", type=int, default=30)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    target = run(OpenAITarget.open(args.url, endpoint="completions"))
    args.model, sizing = target.model, run(target.sizing())
    arrivals = Constant(args.rate) if args.rate else Closed(args.concurrency)
    load = {"--request-rate": args.rate, "--arrival-pattern": "constant"} if args.rate else {
        "--concurrency": args.concurrency
    }  # fmt: skip
    lengths = Lengths((args.input_len, args.input_len), (args.output_len, args.output_len))
    order, found = random.Random(args.seed), {"twinphase bench": [], "aiperf": []}
    others: dict[str, list[float]] = {name: [] for name in found}
    voids = []
    with live("load agreement") as progress:
        for number in range(args.rounds):
            workload = make_workload(lengths, args.num_prompts, sizing, seed=args.seed + number)
            for name in order.sample(sorted(found), len(found)):
                progress(f"{name}, round {number + 1}", 2 * number + (len(found["aiperf"]) > number), 2 * args.rounds)
                before = own_sums(args.url)
                with Bystanders() as watch:
                    if name == "aiperf":
                        found[name].append(aiperf(args, workload, load))
                    else:
                        result = run(run_load(target, workload, arrivals))
                        voids += result.void
                        found[name].append(ours(result))
                others[name].append(watch.cores or float("nan"))
                for figure, (total, count) in own_sums(args.url).items():
                    total, count = total - before[figure][0], count - before[figure][1]
                    found[name][-1][f"server's {figure} mean"] = 1e3 * total / count if count else float("nan")
    print(f"\n{arrivals}; {workload.description}; medians of {args.rounds} rounds, in turn\n")
    print("| figure | twinphase bench | aiperf | aiperf / ours, round by round: median (interval) |")
    print("|---|---:|---:|---:|")
    for name, unit, *_ in FIGURES:
        a, b = ([one[name] for one in found[tool]] for tool in ("twinphase bench", "aiperf"))
        ratios = [y / x for x, y in zip(a, b, strict=True)]
        interval = median_interval(ratios)
        print(f"| {name}, {unit} | {percentile(a, 50):,.2f} | {percentile(b, 50):,.2f} | "
              f"{percentile(ratios, 50):.3f} ({interval.low:.3f} .. {interval.high:.3f}) |")  # fmt: skip
    if all(f"server's {figure} mean" in one[0] for figure in OWN for one in found.values()):
        print("\n| mean, ms | at the client | by the server itself, in the same runs | client - server |")
        print("|---|---:|---:|---:|")
        for tool, runs in found.items():
            for figure in OWN:
                a, b = ([one[name] for one in runs] for name in (f"{figure} mean", f"server's {figure} mean"))
                gaps = percentile([x - y for x, y in zip(a, b, strict=True)], 50)
                print(f"| {figure}, {tool} | {percentile(a, 50):,.2f} | {percentile(b, 50):,.2f} | {gaps:,.2f} |")
    print(f"\nour client: {'; '.join(voids) or 'never the limit'}")
    facts = conditions(target.facts)
    for key in ("date", "engine", "model", "processor", "cores"):
        print(f"- {key}: {facts[key]}")
    for name, cores in others.items():
        print(f"- CPU used outside this process with {name}: {percentile(cores, 50):.2f} cores")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"conditions": facts, "found": found, "void": voids, "cores": others}, indent=1))
    print(f"values: {args.out}")


if __name__ == "__main__":
    main()
