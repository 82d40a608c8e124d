"""How much a simulation of a large fleet costs: processor time, memory, and routing decisions.

python benchmarks/scale.py                                     # 16, 64, 256 and 1,000 workers, 10 s
python benchmarks/scale.py --workers 1000 --seconds 600        # 600,000 requests

Llama-3.1-8B in 16 bits, one L40S per worker by its datasheet, a request per second and worker
(Poisson) of 1,000 prompt tokens of its own and 200 answer tokens, no ledgers. Prints one row per
fleet.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import time
from array import array
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from twinphase import Deployment, Machine, TraceRequest, roles_of
from twinphase.cluster.routing import Routing
from twinphase.phases.statistics import percentile
from twinphase.simulate.simulation import Simulation

PROMPT_TOKENS = 1000
OUTPUT_TOKENS = 200
# The least that never evicts a prefix which a later request would find, since none is shared.
KV_BLOCKS = 2048
FIRST_ID = 1 << 20


def requests(count: int, per_second: float, seed: int) -> Iterator[TraceRequest]:
    draw = random.Random(f"scale/{seed}")
    now = 0.0
    for number in range(count):
        now += draw.expovariate(per_second)
        prompt = [FIRST_ID + number]
        yield TraceRequest(now, OUTPUT_TOKENS, lambda prompt=prompt: prompt * PROMPT_TOKENS)


def play(args: argparse.Namespace, workers: int) -> tuple[Simulation, float]:
    engine = {"num_kv_blocks": KV_BLOCKS}
    deployment = Deployment(
        "llama-3.1-8b", Machine("l40s"), roles_of(workers, None, None), engine=engine
    )
    spec = deployment.fleet(args.seed, ledgers=False)
    simulation = Simulation(spec, Routing(block_size=spec.block_size))
    count = round(workers * args.rate * args.seconds)
    began = time.process_time()
    # The collector would search millions of blocks again and again, and find nothing.
    gc.disable()
    simulation.run(requests(count, workers * args.rate, args.seed))
    gc.enable()
    return simulation, time.process_time() - began


def row(workers: int, run: Simulation, seconds: float) -> tuple[str, ...]:
    outcomes = run.outcomes
    tokens = sum(one.num_outputs for one in outcomes)
    ttft = array("d", (one.ttft for one in outcomes))
    tpot = array("d", (one.tpot for one in outcomes))
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return (
        f"{workers:,}",
        f"{len(outcomes):,}",
        f"{seconds:,.0f}",
        f"{1e6 * seconds / tokens:.1f}",
        f"{1e6 * seconds / run.num_steps:.0f}",
        ", ".join(f"{1e6 * percentile(run.routing_seconds, q):,.0f}" for q in (50, 99)),
        f"{gigabytes:.1f}",
        ", ".join(f"{1e3 * percentile(ttft, q):,.0f}" for q in (50, 99)),
        ", ".join(f"{1e3 * percentile(tpot, q):,.1f}" for q in (50, 99)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="*", default=[16, 64, 256, 1000])
    parser.add_argument("--seconds", type=float, default=10.0, help="simulated")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second and worker")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    table = Table(
        "workers",
        "requests",
        "CPU s",
        "µs per token",
        "µs per step",
        "µs per decision p50, p99",
        "peak GB",
        "TTFT p50, p99 (ms)",
        "TPOT p50, p99 (ms)",
    )
    for workers in args.workers:
        table.add_row(*row(workers, *play(args, workers)))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
