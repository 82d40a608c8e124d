"""How much a simulation of a large fleet costs: processor time, memory, and routing decisions.

python benchmarks/scale.py                                     # 16, 64, 256 and 1,000 workers, 10 s
python benchmarks/scale.py --largest-seconds 600               # 600,000 requests of the last fleet

Llama-3.1-8B in 16 bits, one L40S per worker by its datasheet, a request per second and worker
(Poisson) of 1,000 prompt tokens of its own and 200 answer tokens, no ledgers. Prints one row per
fleet, and on stderr how far it is.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from twinphase import Deployment, Machine, TraceRequest, roles_of
from twinphase.cluster.routing import Routing
from twinphase.phases.statistics import percentile
from twinphase.simulate.simulation import Simulation
from twinphase.simulate.spec import Outcome

PROMPT_TOKENS = 1000
OUTPUT_TOKENS = 200
# The least that never evicts a prefix which a later request would find, since none is shared.
KV_BLOCKS = 2048
FIRST_ID = 1 << 20
REPORT_INTERVAL_SECONDS = 15.0


def requests(count: int, per_second: float, seed: int) -> Iterator[TraceRequest]:
    draw = random.Random(f"scale/{seed}")
    now = 0.0
    for number in range(count):
        now += draw.expovariate(per_second)
        prompt = [FIRST_ID + number]
        yield TraceRequest(now, OUTPUT_TOKENS, lambda prompt=prompt: prompt * PROMPT_TOKENS)


def gigabytes() -> float:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


@dataclass
class Run:
    """What is left of the requests that have ended; their outcomes are not kept.

    Attributes:
        count: requests of the whole load.
    """

    workers: int
    count: int
    ttft: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))
    num_tokens: int = 0
    began: float = field(default_factory=time.monotonic)
    cpu_began: float = field(default_factory=time.process_time)
    reported: float = field(default_factory=time.monotonic)

    def take(self, asked: TraceRequest, outcome: Outcome) -> None:
        self.ttft.append(outcome.ttft)
        self.tpot.append(outcome.tpot)
        self.num_tokens += outcome.num_outputs
        now = time.monotonic()
        if now - self.reported > REPORT_INTERVAL_SECONDS:
            self.reported = now
            self.report(now - self.began)

    def report(self, seconds: float) -> None:
        done = len(self.ttft)
        left = seconds / done * (self.count - done)
        print(
            f"{self.workers:,} workers: {done:,} of {self.count:,} requests, "
            f"{done / self.count:.0%}; {seconds:,.0f} s so far, about {left:,.0f} s left; "
            f"processor {time.process_time() - self.cpu_began:,.0f} s; {gigabytes():.1f} GB",
            file=sys.stderr,
            flush=True,
        )


def play(args: argparse.Namespace, workers: int, seconds: float) -> tuple[str, ...]:
    """Simulate a fleet; returns its row."""
    engine = {"num_kv_blocks": KV_BLOCKS}
    deployment = Deployment(
        "llama-3.1-8b", Machine("l40s"), roles_of(workers, None, None), engine=engine
    )
    spec = deployment.fleet(args.seed, ledgers=False)
    simulation = Simulation(spec, Routing(block_size=spec.block_size), keep_outcomes=False)
    run = Run(workers, round(workers * args.rate * seconds))
    # The collector would search millions of blocks again and again, and find nothing.
    gc.disable()
    load = requests(run.count, workers * args.rate, args.seed)
    simulation.run(load, follow_up=run.take)
    gc.enable()
    seconds = time.monotonic() - run.began
    cpu_seconds = time.process_time() - run.cpu_began
    return (
        f"{workers:,}",
        f"{run.count:,}",
        f"{seconds:,.0f}",
        f"{cpu_seconds:,.0f}",
        f"{1e6 * cpu_seconds / run.num_tokens:.1f}",
        f"{1e6 * cpu_seconds / simulation.num_steps:.0f}",
        ", ".join(f"{1e6 * percentile(simulation.routing_seconds, q):,.0f}" for q in (50, 99)),
        f"{gigabytes():.1f}",
        ", ".join(f"{1e3 * percentile(run.ttft, q):,.0f}" for q in (50, 99)),
        ", ".join(f"{1e3 * percentile(run.tpot, q):,.1f}" for q in (50, 99)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="*", default=[16, 64, 256, 1000])
    parser.add_argument("--seconds", type=float, default=10.0, help="simulated")
    parser.add_argument(
        "--largest-seconds", type=float, help="of the last fleet instead of --seconds"
    )
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second and worker")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    table = Table(
        "workers",
        "requests",
        "s",
        "CPU s",
        "µs per token",
        "µs per step",
        "µs per decision p50, p99",
        "peak GB",
        "TTFT p50, p99 (ms)",
        "TPOT p50, p99 (ms)",
    )
    for place, workers in enumerate(args.workers, 1):
        is_last = place == len(args.workers)
        seconds = (args.largest_seconds if is_last else None) or args.seconds
        table.add_row(*play(args, workers, seconds))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
