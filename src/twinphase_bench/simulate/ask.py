"""Runs the simulation that the options of `twinphase simulate` describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from twinphase import (
    Calibration,
    Deployment,
    Machine,
    Progress,
    SimulationRecorder,
    read_calibration,
    run_requests,
    threads_of_each,
    token_prices,
)
from twinphase.phases.slo import Slos
from twinphase_bench.load.plan import LoadOptions
from twinphase_bench.simulate.calibrate import calibration_here
from twinphase_bench.simulate.from_bench import is_result, measured_machine
from twinphase_bench.simulate.options import LoadPlan, UserOptions, deployment_of, load_plan
from twinphase_bench.simulate.repair import repairs
from twinphase_bench.simulate.report import Answer

# Maximum number of simulations, and of their requests together, that are compared to find the
# typical one.
MAX_RUNS = 7
MAX_REQUESTS = 3000
# Options that change the time of a step.
STEP_OPTIONS = ("threads", "tensor_parallel_size", "kv_cache_dtype")


@dataclass(frozen=True)
class Question:
    """The options of the command, by their names."""

    given: Mapping[str, Any]

    @property
    def load(self) -> LoadOptions:
        names = LoadOptions.__dataclass_fields__
        return LoadOptions(**{name: self.given[name] for name in names if name in self.given})

    @property
    def users(self) -> UserOptions:
        return UserOptions(**{name: self.given[name] for name in UserOptions.__dataclass_fields__})

    @property
    def num_workers(self) -> int:
        cluster = self.given["cluster"]
        pools = (cluster.get("prefill_workers") or 0) + (cluster.get("decode_workers") or 0)
        return pools or cluster.get("replicas") or 1

    def machine(self, progress: Progress) -> Machine:
        """The hardware of each worker; this machine is measured first if necessary."""
        given = self.given
        ranks = given["engine"].get("tensor_parallel_size", 1)
        calibration: Calibration | None = None
        if given["calibrate"] is not None and is_result(given["calibrate"]):
            named = Machine(given["hardware"], devices=ranks)
            return measured_machine(given["calibrate"], self.deployment(named))
        if given["calibrate"] is not None:
            calibration = read_calibration(given["calibrate"])
        elif given["hardware"] == "this":
            calibration = calibration_here(
                given["model"],
                self.step_options,
                progress,
                again=given["recalibrate"],
                replicas=self.num_workers,
            )
        if calibration is not None and given["save_calibration"] is not None:
            calibration.save(given["save_calibration"])
        efficiency = (given["mfu"], given["mbu"])
        return Machine(given["hardware"], calibration, *efficiency, devices=ranks)

    @property
    def step_options(self) -> dict[str, Any]:
        engine = self.given["engine"]
        found = {name: engine[name] for name in STEP_OPTIONS if name in engine}
        if self.num_workers > 1 or "threads_per_worker" in self.given["cluster"]:
            each = self.given["cluster"].get("threads_per_worker")
            found["threads"] = each or threads_of_each(self.num_workers)
        return found

    def deployment(self, machine: Machine) -> Deployment:
        given = self.given
        other = given["decode_hardware"]
        return deployment_of(
            given["model"],
            machine,
            given["engine"],
            given["cluster"],
            dtype=given["dtype"],
            decode_machine=None if other is None else Machine(other),
            acceptance=given["acceptance"],
            kv_bytes_per_second=given["kv_link"],
        )


def ask(question: Question, progress: Progress) -> Answer:
    """Simulate, and search for repairs if a service level is missed.

    Raises:
        TwinphaseError: an option is invalid, or this machine could not be measured.
    """
    given = question.given
    slos = Slos.parse(given["goodput"])
    question.users.check(question.load.wanted)
    deployment = question.deployment(question.machine(progress))
    spec = deployment.fleet(given["seed"])
    context = spec.workers[0].config.max_model_len or deployment.decoder.blueprint.context_length
    plan = load_plan(question.load, question.users, context)
    answer = simulated(deployment, plan, slos, given["seed"], progress, given["recording"])
    prices = None
    if given["price"]:
        prefill, *decode = given["price"]
        by_role = {"both": prefill, "prefill": prefill, "decode": (decode or [prefill])[0]}
        prices = token_prices(answer.done, answer.spec, by_role)
    found = repairs(answer, progress) if given["repair"] else ()
    return replace(answer, prices=prices, repairs=found)


def simulated(
    deployment: Deployment,
    plan: LoadPlan,
    slos: Slos,
    seed: int,
    progress: Progress,
    recording: Path | None = None,
) -> Answer:
    """Run a load through a deployment; with `recording`, write one.

    Measured step times vary, and the result of a short load depends on which steps are slow. Of
    several simulations with different seeds, the one with the median of the mean TTFT is returned.
    """
    number = plan.num_requests or len(plan.requests)
    typical = _typical_seed(deployment, plan, number, seed, progress)
    spec = deployment.fleet(typical)
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress("simulating requests", done, number)

    observer = SimulationRecorder(spec, deployment.model) if recording is not None else None
    found = run_requests(spec, **plan.given, observer=observer, tick=tick)
    if observer is not None and recording is not None:
        observer.write(recording)
    return Answer(deployment, spec, plan, found, slos)


def _typical_seed(
    deployment: Deployment, plan: LoadPlan, number: int, seed: int, progress: Progress
) -> int:
    """The seed, among a few, whose simulation has the median of the mean TTFT."""
    spec = deployment.fleet(seed, ledgers=False)
    runs = min(MAX_RUNS, MAX_REQUESTS // max(1, number))
    if runs < 3 or not any(worker.noise for worker in spec.workers):
        return seed
    means = []
    for run in range(runs):
        progress("simulating requests", 0, number)
        done = run_requests(replace(spec, seed=seed + run), **plan.given)
        means.append((mean(outcome.ttft for outcome in done.outcomes), seed + run))
    return sorted(means)[len(means) // 2][1]
