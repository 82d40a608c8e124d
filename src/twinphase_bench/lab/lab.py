"""The lab: tests claims about prefill and decode on this machine, each with a verdict.

It plans the time, runs the experiments one after the other, and judges them. `report.py` makes the
report.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from twinphase import (
    InvalidRequestError,
    Progress,
    StorageError,
    TwinphaseError,
    Workshop,
    measure_ceilings,
    measured_ceilings,
)
from twinphase.phases.hardware import Ceilings, save_ceilings
from twinphase_bench.conditions import Bystanders
from twinphase_bench.lab.experiment import Experiment, Judged, Trial, decide, overall
from twinphase_bench.lab.experiments.batching import batching
from twinphase_bench.lab.experiments.bounds import bounds
from twinphase_bench.lab.experiments.chunked_prefill import chunked_prefill
from twinphase_bench.lab.experiments.cores import cores
from twinphase_bench.lab.experiments.no_kv_cache import no_kv_cache
from twinphase_bench.lab.experiments.phase_ratio import phase_ratio
from twinphase_bench.lab.experiments.prefill_length import prefill_length
from twinphase_bench.lab.experiments.prompt_cache import prompt_cache
from twinphase_bench.lab.experiments.queue import queue
from twinphase_bench.lab.experiments.same_tokens import same_tokens
from twinphase_bench.lab.experiments.separate_pools import separate_pools
from twinphase_bench.lab.experiments.speculation import speculation
from twinphase_bench.lab.experiments.static_batching import static_batching
from twinphase_bench.lab.workbench import MIN_ROUNDS, Workbench
from twinphase_bench.report.report import Status

EXPERIMENTS = (
    prefill_length,
    phase_ratio,
    bounds,
    batching,
    prompt_cache,
    chunked_prefill,
    queue,
    cores,
    same_tokens,
    no_kv_cache,
    static_batching,
    speculation,
    separate_pools,
)
# With 8 repetitions, one disturbed repetition at either end does not change the interval.
USUAL_ROUNDS = 8
# No engine of the lab computes a larger step.
MAX_STEP_TOKENS = 4096
SECOND_MODEL_KV_BLOCKS = 256
KV_TOKENS_PER_REQUEST = 160


@dataclass(frozen=True)
class Conclusion:
    """The outcome of one experiment.

    Attributes:
        experiment: the experiment.
        trial: measurements; without runs if they failed.
        status: the verdict.
        judged: verdicts on its rules.
        seconds: duration.
        reduced: deviations from the planned size, with reasons.
        others: cores that other programs used during the experiment; None is unknown.
    """

    experiment: Experiment
    trial: Trial
    status: Status
    judged: Sequence[Judged]
    seconds: float
    reduced: Sequence[str]
    others: float | None

    @property
    def missed(self) -> str:
        """The rules that failed or are undecided, with reasons; "" if the claim holds."""
        if self.status is Status.FAILS:
            broken = [one.rule for one in self.judged if one.status is Status.FAILS]
            return " ".join(f"The rule was: {rule.name} {rule.text}." for rule in broken)
        rules: dict[str, list[str]] = {}
        for one in self.judged:
            rules.setdefault(one.reason, []).append(one.rule.name)
        return " ".join(
            f"{reason} ({'; '.join(names)})" for reason, names in rules.items() if reason
        )

    @property
    def reason(self) -> str:
        """Why the claim does not hold, or is undecided; "" if it holds."""
        return f"{self.missed} {self.trial.why}" if self.status is Status.FAILS else self.missed


@dataclass
class LabSetting:
    """The model and machine that all experiments share."""

    model: str
    workshop: Workshop
    ceilings: Ceilings | None
    recordings: Path | None = None
    notes: list[str] = field(default_factory=list)


def choose(only: Sequence[str] = (), quick: bool = False) -> tuple[Experiment, ...]:
    """Experiments by number (from 1) or name, in the lab's order; without names all or `quick`.

    Raises:
        InvalidRequestError: there is no experiment with that number or name.
    """
    keys = {
        key: one.name
        for number, one in enumerate(EXPERIMENTS, 1)
        for key in (str(number), one.name)
    }
    for wanted in only:
        if wanted not in keys:
            names = ", ".join(f"{number} {one.name}" for number, one in enumerate(EXPERIMENTS, 1))
            raise InvalidRequestError(
                f"There is no experiment {wanted!r}.", f"Use one of: {names}."
            )
    named = {keys[wanted] for wanted in only}
    return tuple(
        one for one in EXPERIMENTS if (one.name in named if named else one.quick or not quick)
    )


def planned_seconds(experiments: Sequence[Experiment]) -> float:
    """Total measuring time of the experiments in seconds, without loading and the report."""
    return sum(one.seconds for one in experiments)


def run_lab(
    model: str,
    *,
    experiments: Sequence[Experiment] = EXPERIMENTS,
    seconds: float | None = None,
    recordings: Path | None = None,
    progress: Progress = lambda what, done, total: None,
    **config: Any,
) -> tuple[LabSetting, list[Conclusion], Bystanders]:
    """Test claims on this machine.

    Args:
        model: path, or a name that `twinphase pull` accepts.
        experiments: experiments to run.
        seconds: total measuring time; by default as planned. Experiments that do not fit use
            smaller sizes; if these are too slow as well, the verdict is undecided, and the report
            says so.
        recordings: folder for recordings for the live page: one additional repetition of each
            variant that runs an engine in this process.
        progress: called before every measurement.
        config: fields of `EngineConfig`, such as `threads`.

    Returns:
        The shared setting, the conclusion of each experiment, and the load of other programs.

    Raises:
        TwinphaseError: the model cannot be found, read or run.
        InvalidRequestError: `seconds` is not a positive time, or a field of the configuration is
            out of range.
        StorageError: the folder for recordings cannot be created.
    """
    seconds = planned_seconds(experiments) if seconds is None else seconds
    if not math.isfinite(seconds) or seconds <= 0:
        raise InvalidRequestError(f"The time is {seconds!r} seconds.", "Use a number above 0.")
    if recordings is not None:
        try:
            recordings.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            cause = f"The folder {recordings} cannot be made: {error.strerror}."
            raise StorageError(cause, "Give another folder.") from None
    with Bystanders() as bystanders:
        setting = _prepare(model, config, progress)
        setting.recordings = recordings
        conclusions = []
        end = time.perf_counter() + seconds
        for number, experiment in enumerate(experiments):
            left = max(0.0, end - time.perf_counter())
            share = left * experiment.seconds / planned_seconds(experiments[number:])
            nested = partial(_nested, progress, number, len(experiments))
            conclusions.append(_try(experiment, setting, share, config, nested))
            # The memory and the threads of a second model must be free before the next experiment.
            gc.collect()
    progress("report", len(experiments), len(experiments))
    return setting, conclusions, bystanders


def _nested(progress: Progress, number: int, count: int, what: str, done: int, total: int) -> None:
    """An experiment's own progress, in hundredths of an experiment."""
    progress(
        f"claim {number + 1} of {count}: {what}", 100 * number + 100 * done // total, 100 * count
    )


def _prepare(model: str, config: dict[str, Any], progress: Progress) -> LabSetting:
    progress("loading the model", 0, 0)
    workshop = Workshop(
        model,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        compile_progress=lambda done, total, kernel: progress(
            f"compiling kernels {done}/{total}", 0, 0
        ),
        **config,
    )
    progress("measuring this machine's ceilings", 0, 0)
    setting = LabSetting(model, workshop, measured_ceilings(workshop.config))
    if workshop.config.backend == "cpu":
        try:
            # Memory bandwidth is shared with other users of the host and changes: peaks are the
            # best ever measured, bandwidth is the present one.
            [now] = measure_ceilings(workshop.config)
            best = setting.ceilings.merged(now) if setting.ceilings else now
            setting.ceilings = replace(best, bandwidth=now.bandwidth)
            if not best.provisional:
                save_ceilings(best)
        except OSError as error:
            setting.notes.append(
                f"The ceilings could not be kept for later runs: {error.strerror}."
            )
        except TwinphaseError as error:
            setting.notes.append(str(error))
    progress("warming up", 0, 0)
    workshop.engine().prefill([1] * min(1024, workshop.max_model_len - 8))
    return setting


def _try(
    experiment: Experiment,
    setting: LabSetting,
    seconds: float,
    config: dict[str, Any],
    progress: Progress,
) -> Conclusion:
    """Run and judge one experiment; a failure leaves it undecided, and the lab continues."""
    # Experiments open the model by its path instead of its name, so that no look-up is repeated.
    path = str(setting.workshop.path)
    bench = Workbench(
        setting.workshop,
        setting.ceilings,
        seconds,
        lambda **changed: Workshop(
            path,
            max_num_batched_tokens=MAX_STEP_TOKENS,
            **{**config, "num_kv_blocks": SECOND_MODEL_KV_BLOCKS, **changed},
        ),
        progress,
        experiment.name,
        recordings=setting.recordings,
    )
    with Bystanders() as others:
        try:
            reduced = _choose_size(experiment, bench)
            trial = experiment.measure(bench)
        except (TwinphaseError, MemoryError) as failure:
            error = f"It could not be measured: {str(failure) or 'the memory is not enough.'}"
            trial = Trial({}, [error] * len(experiment.rules), error)
            reduced = []
    if 0 < bench.rounds < MIN_ROUNDS:
        reduced.append(f"{bench.rounds} repetitions instead of {MIN_ROUNDS} to fit the time limit")
    pairs = zip(experiment.rules, trial.measured, strict=True)
    judged = [decide(rule, measured, bench.size, others.cores or 0.0) for rule, measured in pairs]
    return Conclusion(
        experiment,
        trial,
        overall(judged),
        judged,
        seconds=bench.clock() - bench.started,
        reduced=reduced,
        others=others.cores,
    )


def _choose_size(experiment: Experiment, bench: Workbench) -> list[str]:
    """Set the largest size that fits the context and the time; return the reductions."""
    config = bench.workshop.config
    room = bench.workshop.max_model_len - 64
    if experiment.sized_in == "requests":
        room = min(config.max_num_seqs, bench.workshop.capacity // KV_TOKENS_PER_REQUEST)
    sizes = [size for size in experiment.sizes if size <= room] or [
        max(1, min(room, experiment.sizes[-1]))
    ]
    bench.size = _affordable(experiment, bench, sizes) if len(sizes) > 1 else sizes[0]
    if bench.size == experiment.sizes[0]:
        return []
    why = "to fit the time limit" if bench.size < sizes[0] else "because no more fit the context"
    return [f"{bench.size:,} {experiment.sized_in} instead of {experiment.sizes[0]:,} {why}"]


def _affordable(experiment: Experiment, bench: Workbench, sizes: Sequence[int]) -> int:
    """The largest size with time for the usual number of repetitions, else for the minimum.

    One round at each of the two smallest sizes determines how the time grows with the size.
    """
    smallest = sizes[-1]
    second = sizes[-2]
    setup, each = _rehearse(experiment, bench, smallest)
    if setup + MIN_ROUNDS * each > bench.left:
        return smallest
    second_setup, second_each = _rehearse(experiment, bench, second)
    for rounds in (USUAL_ROUNDS, MIN_ROUNDS):
        needed = setup + rounds * each
        slope = max(0.0, second_setup + rounds * second_each - needed) / (second - smallest)
        fitting = [size for size in sizes if needed + slope * (size - smallest) <= bench.left]
        if fitting:
            return fitting[0]
    return smallest


def _rehearse(experiment: Experiment, bench: Workbench, size: int) -> tuple[float, float]:
    """Seconds before the first round, and of one round, at a size."""
    rehearsal = replace(
        bench, size=size, max_rounds=1, progress=lambda what, done, total: None, recordings=None
    )
    experiment.measure(rehearsal)
    return bench.clock() - rehearsal.started - rehearsal.round_seconds, rehearsal.round_seconds
