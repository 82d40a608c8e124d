"""How far `twinphase simulate` is from a real server: the same trace, run for real and simulated.

python benchmarks/simulate.py --configurations all --requests 60 --folder truth --keep
python benchmarks/simulate.py --configurations all --requests 1000 --repeats 2 --folder truth --keep
python benchmarks/simulate.py --configurations engine --traces agents --requests 60
python benchmarks/simulate.py --calibrations roofline/result.json     # its step times as well

Each server is first sent a load that has none of the traces' requests, for half a minute. Before
each trace a calibration is learned from the steps of its log so far; of replicas, from one of them
while the others are busy too, and of pools from each pool. Then the server is sent the trace, at a
rate that keeps the workers busy for the given share of the time. The client measures; the
simulation gets the trace and the calibration only.

Prints a row per pair: what was real and simulated, and below it the parts of the mean request's
time to first token and of a token. A second simulation has the step times that the trace's own run
took: what it misses is the simulator's error, and the rest is that of a machine that changed since
its calibration. A third has the calibration of the folder's first single engine, as `simulate` has
with a kept one. With --keep, writes the pairs from which `simulate` and `plan` compute their bands,
after each pair. Run it on a quiet machine.

A pair that fails is reported, and the others go on. With --folder, traces, step logs and results
are kept, and the same command continues with the pairs that the folder does not have.
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
from statistics import mean, median
from typing import Any

import msgspec
from rich.console import Console

from twinphase import (
    Calibration,
    Deployment,
    Distribution,
    Front,
    Machine,
    Simulated,
    Traced,
    Trial,
    calibration_of,
    read_calibration,
    read_trials,
    roles_of,
    run_requests,
    write_trials,
)
from twinphase.phases.hardware import processor_name
from twinphase.phases.observation import Observation
from twinphase.phases.slo import Slos, goodput
from twinphase.phases.statistics import percentile
from twinphase.simulate.calibration import WARM_UP_STEPS
from twinphase.simulate.errors import FIGURES, FILE, KEPT, NAMES
from twinphase_bench.client.client import run
from twinphase_bench.load.plan import LoadOptions
from twinphase_bench.load.run import run_load
from twinphase_bench.load.traces import trace_workload
from twinphase_bench.simulate.ask import simulated
from twinphase_bench.simulate.calibrate import (
    QUIET,
    front_of,
    running_server,
    send_stages,
)
from twinphase_bench.simulate.from_bench import measured_machine
from twinphase_bench.simulate.options import LoadPlan, UserOptions, load_plan
from twinphase_bench.targets.openai import OpenAITarget

SLOS = Slos(ttft=1.0, tpot=0.05)
# A prefill worker makes few steps in half a minute.
MIN_STEPS = 8
# Files of a folder: all trials, and a server's calibration.
RESULTS = "trials.json"
KEPT_FILE = "calibration.json"
POOL_WARM_UP_STEPS = 8
# Parts of a request's time that are printed.
PARTS = ("tokenize", "queue", "prefill", "prefill_wait", "decode", "batching", "stall")
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
    # 160 blocks of 16 tokens: a few requests fill them, so that requests are preempted.
    "tight": {"num_kv_blocks": 160},
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


@dataclass(frozen=True)
class Logs:
    """The step logs of a server.

    Attributes:
        by_role: the log of one worker of each role.
    """

    by_role: dict[str, Path]

    @classmethod
    def of(cls, options: dict[str, Any], log: Path) -> Logs:
        roles = roles_of(*(options.get(name) for name in CLUSTER))
        if len(roles) == 1:
            return cls({"both": log})
        # The cluster's first worker of each role.
        first = {role: roles.index(role) for role in roles}
        names = {role: f"worker-{number}" for role, number in first.items()}
        if "prefill" in roles:
            names = {role: f"{role}-0" for role in first}
        return cls({role: Path(f"{log}.{name}") for role, name in names.items()})

    def num_steps(self) -> dict[str, int]:
        return {
            role: sum('"observe"' in line for line in path.open())
            for role, path in self.by_role.items()
        }

    def calibrations(
        self, model: str, front: Front, since: dict[str, int], folder: Path
    ) -> dict[str, Calibration]:
        """What the logs show of the steps since those of that number, by role.

        Of a worker that made fewer than `MIN_STEPS` since then, all steps count.
        """
        found = {}
        steps = self.num_steps()
        for role, path in self.by_role.items():
            so_far = shutil.copy(path, folder / "so_far.jsonl")
            warm_up = WARM_UP_STEPS if role == "both" else POOL_WARM_UP_STEPS
            first = since.get(role, warm_up)
            first = first if steps[role] - first >= MIN_STEPS else warm_up
            found[role] = calibration_of(
                so_far, model=model, front=front, first=first, least=MIN_STEPS
            )
        return found


def deployment(
    model: str, options: dict[str, Any], calibrations: dict[str, Calibration]
) -> Deployment:
    roles = roles_of(*(options.get(name) for name in CLUSTER))
    engine = {name: value for name, value in options.items() if name not in CLUSTER}
    machine = Machine("this", calibrations.get("prefill") or calibrations["both"])
    decode = calibrations.get("decode")
    return Deployment(
        model,
        machine,
        roles,
        engine,
        decode_machine=Machine("this", decode) if decode is not None else None,
    )


def simulate(found: Deployment, path: Path, seed: int) -> Simulated:
    return simulated(found, plan_of(path, seed), SLOS, seed, silent).done


def plan_of(path: Path, seed: int) -> LoadPlan:
    return load_plan(LoadOptions(trace=path, seed=seed), UserOptions(), 1 << 20)


def rate_for(found: Deployment, shape: Shape, utilisation: float, folder: Path) -> float:
    """Requests per second that keep the workers busy for that share of the time."""
    path = folder / "probe.jsonl"
    write_trace(path, shape, PROBE_REQUESTS, 1.0, 10**6)
    rate = 1.0
    for _ in range(4):  # larger batches make a request cheaper
        write_trace(path, shape, PROBE_REQUESTS, rate, 10**6)
        probe = run_requests(found.fleet(1, ledgers=False), **plan_of(path, 1).given)
        rate *= utilisation / busy(probe)
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


def trials(args: argparse.Namespace, name: str, folder: Path, console: Console) -> list[str]:
    """Run a configuration under each trace for real, then simulate it; return what failed."""
    pairs = [
        Pair(args, name, trace, args.seed + 100 * number)
        for number, trace in enumerate(args.traces.split(","))
    ]
    kept = {
        (one.configuration, one.trace)
        for one in read_trials(folder / RESULTS)
        if (one.model, one.requests) == (args.model, args.requests)
    }
    missing = [pair for pair in pairs if (pair.title, pair.trace) not in kept]
    if not missing:
        return []
    own = folder / name
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    log = own / "steps.jsonl"
    words = [*words_of(CONFIGURATIONS[name]), *QUIET, "--trace-file", str(log)]
    failed = []
    try:
        with running_server(args.model, words) as url:
            front = front_of(run(send_stages(url, silent)))
            logs = Logs.of(CONFIGURATIONS[name], log)
            for pair in missing:
                try:
                    found = pair.run(url, logs, front, own, console)
                except Exception as error:  # The other pairs do not depend on this one.
                    failed.append(f"{name}, {pair.trace}: {error!r}")
                    continue
                keep(found, folder / RESULTS)
                if args.keep:
                    keep(found, FILE)
    except Exception as error:  # The other configurations have servers of their own.
        failed.append(f"{name}: {error!r}")
    return failed


@dataclass(frozen=True)
class Pair:
    """A configuration under a trace."""

    args: argparse.Namespace
    configuration: str
    trace: str
    seed: int

    @property
    def title(self) -> str:
        return " ".join(words_of(CONFIGURATIONS[self.configuration])) or "one engine"

    def run(
        self, url: str, logs: Logs, front: Front, folder: Path, console: Console
    ) -> list[Trial]:
        """Run it for real and simulate it, by each calibration."""
        args = self.args
        options = CONFIGURATIONS[self.configuration]
        path = folder / f"{self.trace}.jsonl"
        before = logs.num_steps()
        found = deployment(args.model, options, logs.calibrations(args.model, front, {}, folder))
        shape = TRACES[self.trace]
        write_trace(
            path, shape, args.requests, rate_for(found, shape, args.utilisation, folder), self.seed
        )
        seen = [
            run(serve_trace(url, path, self.seed + 1000 * repeat)) for repeat in range(args.repeats)
        ]
        (folder / f"{self.trace}-real.json").write_bytes(msgspec.json.encode(seen))
        own = logs.calibrations(args.model, front, before, folder)
        hindsight = simulate(deployment(args.model, options, own), path, self.seed)
        done = simulate(found, path, self.seed)
        kept = [self._trial(seen, done, "steps", figures(hindsight.observations))]
        console.print(row(kept[0]), soft_wrap=True, markup=False)
        for what, observations in (
            ("real", seen[0]),
            ("simulated", done.observations),
            ("with the step times of the run", hindsight.observations),
        ):
            console.print(f"  {what}: {parts_of(observations)}", soft_wrap=True, markup=False)
        for file in self._kept_calibrations(found, folder):
            kept_one = deployment(args.model, options, {"both": read_calibration(file)})
            one = simulate(kept_one, path, self.seed)
            kept.append(self._trial(seen, one, KEPT, {}))
            console.print(f"  by {file}: {row(kept[-1])}", soft_wrap=True, markup=False)
        for file in args.calibrations:
            measured = measured_machine(
                file, deployment(args.model, options, {"both": own_any(own)})
            )
            assert measured.calibration is not None
            one = simulate(
                deployment(args.model, options, {"both": measured.calibration}), path, self.seed
            )
            kept.append(self._trial(seen, one, measured.source, {}))
            console.print(f"  by {measured.source}: {row(kept[-1])}", soft_wrap=True, markup=False)
        return kept

    def _kept_calibrations(self, found: Deployment, folder: Path) -> list[Path]:
        """Keep this server's calibration, and find the one of another single engine, if any."""
        calibration = found.machine.calibration
        if calibration is None or found.roles != ("both",):
            return []
        calibration.save(folder / KEPT_FILE)
        others = (path for path in sorted(folder.parent.glob(f"*/{KEPT_FILE}")))
        return [path for path in others if path.parent != folder][:1]

    def _trial(
        self,
        seen: Sequence[Sequence[Observation]],
        done: Simulated,
        source: str,
        hindsight: dict[str, float],
    ) -> Trial:
        runs = [figures(observations) for observations in seen]
        real = {figure: median(one[figure] for one in runs) for figure in FIGURES}
        spread = {
            figure: (max(one[figure] for one in runs) - min(one[figure] for one in runs))
            / real[figure]
            for figure in FIGURES
            if len(runs) > 1 and real[figure]
        }
        return Trial(
            processor_name(),
            self.args.model,
            time.strftime("%Y-%m-%d"),
            configuration=self.title,
            trace=self.trace,
            requests=self.args.requests,
            utilisation=busy(done),
            real=real,
            simulated=figures(done.observations),
            spread=spread,
            source=source,
            hindsight=hindsight,
        )


def own_any(calibrations: dict[str, Calibration]) -> Calibration:
    return next(iter(calibrations.values()))


def parts_of(observations: Sequence[Observation]) -> str:
    """Milliseconds of the mean request by part of its ledger, and outside the engine."""
    ledgers = [one.claims["timings"]["ledger_ms"] for one in observations if one.succeeded]
    means = {part: mean(ledger.get(part) or 0.0 for ledger in ledgers) for part in PARTS}
    rest = mean(
        sum(value or 0.0 for part, value in ledger.items() if part not in PARTS)
        for ledger in ledgers
    )
    return ", ".join(f"{part} {value:,.0f}" for part, value in [*means.items(), ("rest", rest)])


def row(found: Trial) -> str:
    cells = []
    for figure in FIGURES:
        unit, scale = ("", 1.0) if figure == "goodput" else (" ms", 1e3)
        real, other = (scale * values[figure] for values in (found.real, found.simulated))
        spread = f" ±{found.spread[figure] / 2:.0%}" if figure in found.spread else ""
        cells.append(
            f"{NAMES[figure]} {real:,.3g}{spread}{unit} {other:,.3g} ({found.error(figure):+.0%})"
        )
        if found.hindsight:
            cells[-1] += f" [{found.hindsight_error(figure):+.0%}]"
    head = f"{found.configuration}, {found.trace}, {found.requests} requests, "
    head += f"busy {found.utilisation:.0%}: real, simulated [with the step times of the run]: "
    return head + "; ".join(cells)


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
    parser.add_argument(
        "--calibrations",
        type=Path,
        nargs="*",
        default=[],
        help="results of bench or roofline on this machine, whose step times are tried as well",
    )
    parser.add_argument("--folder", type=Path, help="keep all files in it, and continue from them")
    parser.add_argument("--keep", action="store_true", help="store the errors in the package")
    args = parser.parse_args()
    console = Console()
    names = [*CONFIGURATIONS] if args.configurations == "all" else args.configurations.split(",")
    if unknown := {*names, *args.traces.split(",")} - {*CONFIGURATIONS, *TRACES}:
        known = ", ".join([*CONFIGURATIONS, *TRACES])
        parser.error(f"unknown: {', '.join(unknown)}; there are {known}.")
    if missing := [str(file) for file in args.calibrations if not file.exists()]:
        parser.error(f"--calibrations: there is no {', '.join(missing)}.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        failed = [one for name in names for one in trials(args, name, folder, console)]
        found = read_trials(folder / RESULTS)
    for source in dict.fromkeys(one.source for one in found):
        shown = [one for one in found if one.source == source]
        errors = {figure: median(abs(one.error(figure)) for one in shown) for figure in FIGURES}
        cells = ", ".join(f"{NAMES[f]} {e:.0%}" for f, e in errors.items() if e < math.inf)
        console.print(f"Median error with {source} ({len(shown)} pairs): {cells}")
    if failed:
        raise SystemExit("\n".join(["Failed:", *failed]))


def keep(found: Sequence[Trial], file: Path) -> None:
    """Replace the file's trials of the same pairs."""

    def key(one: Trial) -> tuple[str, str, str]:
        return one.configuration, one.trace, one.source

    replaced = {key(one) for one in found}
    others = [one for one in read_trials(file) if key(one) not in replaced]
    write_trials([*others, *found], file)


if __name__ == "__main__":
    main()
