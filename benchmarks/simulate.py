"""How far `twinphase simulate` is from a real server: the same trace, run for real and simulated.

python benchmarks/simulate.py                                    # two configurations, three traces
python benchmarks/simulate.py --requests 1000 --repeats 2 --configurations all --keep
python benchmarks/simulate.py --configurations engine --traces agents --requests 60

Each server is first sent a load that has none of the trace's requests; the calibration is learned
from the steps of its log so far (for several workers, from one engine with its share of the cores).
Then it is sent the trace, at a rate that keeps the workers busy for the given share of the time.
The client measures; the simulation gets the trace and the calibration only. Prints a row per pair,
and with --keep writes what every answer of `simulate` shows as its error. Run it on a quiet
machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from twinphase import (
    Calibration,
    Deployment,
    Distribution,
    Machine,
    Simulated,
    Traced,
    Trial,
    calibration_of,
    read_trials,
    roles_of,
    threads_of_each,
    write_trials,
)
from twinphase.phases.hardware import processor_name
from twinphase.phases.observation import Observation
from twinphase.phases.slo import Slos, goodput
from twinphase.phases.statistics import percentile
from twinphase.simulate.errors import FIGURES, NAMES
from twinphase_bench.client.client import run
from twinphase_bench.load.plan import LoadOptions
from twinphase_bench.load.run import run_load
from twinphase_bench.load.traces import trace_workload
from twinphase_bench.simulate.ask import simulated
from twinphase_bench.simulate.calibrate import (
    QUIET,
    calibrate,
    front_of,
    running_server,
    send_stages,
)
from twinphase_bench.simulate.options import UserOptions, load_plan
from twinphase_bench.targets.openai import OpenAITarget

SLOS = Slos(ttft=1.0, tpot=0.05)
# Requests of the simulation that finds the rate.
PROBE_REQUESTS = 60


@dataclass(frozen=True)
class Shape:
    """A made-up trace: lengths, and how many of the requests share each beginning of 512 tokens."""

    prompt: str
    output: str
    prefixes: int = 0


TRACES = {
    "conversation": Shape("lognormal:300:0.7", "lognormal:60:0.6"),
    "agents": Shape("uniform:540:760", "lognormal:24:0.5", prefixes=4),
    "reasoning": Shape("lognormal:90:0.5", "lognormal:220:0.5"),
}
# Options of `serve`.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "engine": {},
    "replicas": {"replicas": 2},
    "pools": {"prefill_workers": 1, "decode_workers": 1},
    "tight": {"itl_slo_ms": 25},
    "no-cache": {"enable_prefix_caching": False},
    "few-seats": {"max_num_seqs": 4},
}
CLUSTER = ("replicas", "prefill_workers", "decode_workers")
DEFAULT = ("engine", "few-seats")


def write_trace(path: Path, shape: Shape, requests: int, rate: float, seed: int) -> None:
    """Lines as Mooncake's, at random times (Poisson)."""
    draw = random.Random(f"trace/{seed}")
    prompt = Distribution.parse(shape.prompt)
    output = Distribution.parse(shape.output)
    now = 0.0
    with path.open("w") as file:
        for number in range(requests):
            # The second block is the request's own.
            own = shape.prefixes + number
            blocks = [draw.randrange(shape.prefixes), own] if shape.prefixes else []
            line = {
                "timestamp": round(1e3 * now, 3),
                "input_length": min(1500, prompt.draw(draw)),
                "output_length": min(500, output.draw(draw)),
                "hash_ids": blocks,
            }
            file.write(json.dumps(line) + "\n")
            now += draw.expovariate(rate)


def words_of(options: dict[str, Any]) -> list[str]:
    """Options as they are written for `serve`."""
    words = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", str(value)]
    return words


def deployment(model: str, options: dict[str, Any], calibration: Calibration) -> Deployment:
    roles = roles_of(*(options.get(name) for name in CLUSTER))
    engine = {name: value for name, value in options.items() if name not in CLUSTER}
    return Deployment(model, Machine("this", calibration), roles, engine)


def simulate(found: Deployment, path: Path, seed: int) -> Simulated:
    plan = load_plan(LoadOptions(trace=path, seed=seed), UserOptions(), 1 << 20)
    return simulated(found, plan, SLOS, seed, silent).done


def rate_for(found: Deployment, shape: Shape, utilisation: float, folder: Path) -> float:
    """Requests per second that keep the workers busy for that share of the time."""
    path = folder / "probe.jsonl"
    write_trace(path, shape, PROBE_REQUESTS, 1.0, 10**6)
    rate = 1.0
    for _ in range(4):  # larger batches make a request cheaper
        write_trace(path, shape, PROBE_REQUESTS, rate, 10**6)
        rate *= utilisation / busy(simulate(found, path, 1))
    return rate


def silent(what: str, done: float, total: int) -> None:
    """No progress bar."""


def busy(done: Simulated) -> float:
    """The busiest pool's share of the time."""
    return max(pool.prefill + pool.decode for pool in done.pools)


async def serve_trace(url: str, path: Path, seed: int) -> list[Observation]:
    target = await OpenAITarget.open(url)
    try:
        workload = trace_workload(path, await target.sizing(), seed=seed)
        result = await run_load(target, workload, Traced(), slos=SLOS)
        return result.observations
    finally:
        await target.close()


def figures(observations: Sequence[Observation]) -> dict[str, float]:
    seen = [one for one in observations if one.succeeded]
    seconds = max(one.ended for one in seen) - min(one.intended for one in seen)
    gaps = [gap for one in seen for gap in one.itl]
    ttft = [one.ttft for one in seen if one.ttft is not None]
    return {
        "ttft_p50": percentile(ttft, 50),
        "ttft_p99": percentile(ttft, 99),
        "itl_p50": percentile(gaps, 50),
        "itl_p99": percentile(gaps, 99),
        "goodput": goodput(observations, SLOS, seconds).rate or 0.0,
    }


def trial(args: argparse.Namespace, name: str, trace: str, folder: Path) -> Trial:
    """Run one pair for real, then simulate it."""
    options = CONFIGURATIONS[name]
    workers = len(roles_of(*(options.get(one) for one in CLUSTER)))
    path = folder / f"{trace}.jsonl"
    log = folder / "steps.jsonl"
    runs = []
    words = [*words_of(options), *QUIET]
    words += ["--trace-file", str(log)] if workers == 1 else []
    if workers > 1:
        steps = {"threads": threads_of_each(workers)}
        calibration = calibrate(args.model, steps, silent)
    with running_server(args.model, words) as url:
        if workers == 1:
            sent = run(send_stages(url, silent))
            so_far = shutil.copy(log, folder / "so_far.jsonl")
            calibration = calibration_of(so_far, model=args.model, front=front_of(sent))
        found = deployment(args.model, options, calibration)
        shape = TRACES[trace]
        rate = rate_for(found, shape, args.utilisation, folder)
        write_trace(path, shape, args.requests, rate, args.seed)
        for repeat in range(args.repeats):
            runs.append(figures(run(serve_trace(url, path, args.seed + 1000 * repeat))))
    done = simulate(found, path, args.seed)
    real = {figure: median(one[figure] for one in runs) for figure in FIGURES}
    spread = {
        figure: (max(one[figure] for one in runs) - min(one[figure] for one in runs)) / real[figure]
        for figure in FIGURES
        if len(runs) > 1 and real[figure]
    }
    return Trial(
        processor_name(),
        args.model,
        time.strftime("%Y-%m-%d"),
        configuration=" ".join(words_of(options)) or "one engine",
        trace=trace,
        requests=args.requests,
        utilisation=busy(done),
        real=real,
        simulated=figures(done.observations),
        spread=spread,
    )


def row(found: Trial) -> str:
    cells = []
    for figure in FIGURES:
        unit, scale = ("", 1.0) if figure == "goodput" else (" ms", 1e3)
        real, other = (scale * values[figure] for values in (found.real, found.simulated))
        spread = f" ±{found.spread[figure] / 2:.0%}" if figure in found.spread else ""
        cells.append(
            f"{NAMES[figure]} {real:,.3g}{spread}{unit} {other:,.3g} ({found.error(figure):+.0%})"
        )
    head = f"{found.configuration}, {found.trace}, {found.requests} requests, "
    return f"{head}busy {found.utilisation:.0%}: real, simulated: {'; '.join(cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--configurations", default=",".join(DEFAULT), help="all, or names")
    parser.add_argument("--traces", default=",".join(TRACES), help="names")
    parser.add_argument("--requests", type=int, default=100, help="of each trace")
    parser.add_argument("--repeats", type=int, default=1, help="real runs of each pair")
    parser.add_argument("--utilisation", type=float, default=0.75, help="of the workers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="store the errors in the package")
    args = parser.parse_args()
    console = Console()
    names = [*CONFIGURATIONS] if args.configurations == "all" else args.configurations.split(",")
    found: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for trace in args.traces.split(","):
                one = trial(args, name, trace, Path(folder))
                console.print(row(one), soft_wrap=True)
                found.append(one)
                if args.keep:
                    keep(found)
    errors = {figure: median(abs(one.error(figure)) for one in found) for figure in FIGURES}
    console.print(
        "Median error: "
        + ", ".join(f"{NAMES[f]} {e:.0%}" for f, e in errors.items() if e < math.inf)
    )


def keep(found: Sequence[Trial]) -> None:
    """Replace stored trials of the same pairs."""
    pairs = {(one.configuration, one.trace) for one in found}
    others = [one for one in read_trials() if (one.configuration, one.trace) not in pairs]
    write_trials([*others, *found])


if __name__ == "__main__":
    main()
