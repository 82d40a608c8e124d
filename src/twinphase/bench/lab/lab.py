"""The lab: every claim that people repeat about prefill and decode, tried on this machine, each with a verdict.

Plans the time, runs the experiments one after the other and makes their report. Not for the claims themselves
(`experiments/`), nor for files (`render.py`) or the terminal (`lab_terminal.py`).
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from twinphase.backends.cpu.ceilings import CeilingsError
from twinphase.bench.conditions import Bystanders, conditions
from twinphase.bench.lab.experiment import Experiment, Judged, judge, overall, tempered, unknown
from twinphase.bench.lab.experiments.batching import Batching
from twinphase.bench.lab.experiments.bounds import Bounds
from twinphase.bench.lab.experiments.chunked_prefill import ChunkedPrefill
from twinphase.bench.lab.experiments.cores import Cores
from twinphase.bench.lab.experiments.decode_position import DecodePosition
from twinphase.bench.lab.experiments.kv_int8 import KVInt8
from twinphase.bench.lab.experiments.kv_size import KVSize
from twinphase.bench.lab.experiments.phase_ratio import PhaseRatio
from twinphase.bench.lab.experiments.prefill_length import PrefillLength
from twinphase.bench.lab.experiments.prompt_cache import PromptCache
from twinphase.bench.lab.experiments.queue import Queue
from twinphase.bench.lab.experiments.request_shapes import RequestShapes
from twinphase.bench.lab.experiments.same_tokens import SameTokens
from twinphase.bench.lab.experiments.short_prompts import ShortPrompts
from twinphase.bench.lab.workbench import Speed, Workbench, calibrate
from twinphase.bench.progress import Progress
from twinphase.bench.report.report import Column, Metric, Report, Section, Status, Table, Verdict
from twinphase.bench.targets.stepped import Workshop
from twinphase.config import available_cores
from twinphase.engine.load import ceilings_now, measured_ceilings
from twinphase.errors import InvalidRequestError, TwinphaseError
from twinphase.phases.hardware import Ceilings, save_ceilings
from twinphase.weights.gguf import quantization_name

__all__ = ["EXPERIMENTS", "QUICK_SECONDS", "SECONDS", "Finding", "choose", "lab", "make_report"]

EXPERIMENTS: tuple[type[Experiment], ...] = (
    PrefillLength,
    DecodePosition,
    PhaseRatio,
    Bounds,
    RequestShapes,
    Batching,
    ShortPrompts,
    PromptCache,
    ChunkedPrefill,
    Queue,
    KVSize,
    KVInt8,
    Cores,
    SameTokens,
)
SECONDS, QUICK_SECONDS = 200.0, 60.0  # of measuring; loading and the report come on top
OTHER_BLOCKS = 256  # KV cache of a model that is loaded beside the first
NOTABLE_CORES = 0.25  # used by others during an experiment: it is named in the report


@dataclass(frozen=True)
class Finding:
    """What came of one experiment.

    Attributes:
        experiment: the claim.
        found: what the trial of it measured; None if it failed to.
        status: the verdict.
        judged: its rules.
        seconds: that it took.
        reduced: what was smaller than planned, and why.
        others: cores that other programs used meanwhile; None is unknown.
        error: why it could not be measured; "" if it was.
    """

    experiment: type[Experiment]
    found: Experiment | None
    status: Status
    judged: tuple[Judged, ...]
    seconds: float
    reduced: tuple[str, ...] = ()
    others: float | None = None
    error: str = ""

    @property
    def numbers(self) -> str:
        """The measured quantities in one line."""
        return "; ".join(one.line for one in self.judged)

    @property
    def why(self) -> Sequence[str]:
        """What lies behind them."""
        if self.found is None:
            return (f"It could not be measured: {self.error}",)
        return self.found.why(self.judged)

    @property
    def reason(self) -> str:
        """Why it does not hold, or cannot be told; "" if it holds."""
        return f"{self.missed} {self.why[-1]}" if self.status is Status.FAILS else self.missed

    @property
    def missed(self) -> str:
        """The rules that were not kept, or could not be decided and why; "" if it holds."""
        if self.status is Status.FAILS:
            broken = [one.rule for one in self.judged if one.status is Status.FAILS]
            return " ".join(f"{_capital(rule.name)} must be {rule.text}." for rule in broken)
        names: dict[str, list[str]] = {}
        for one in self.judged:
            if one.status is Status.UNKNOWN:
                names.setdefault(one.reason, []).append(one.rule.name)
        return " ".join(f"{_capital(', '.join(which))}: {reason}" for reason, which in names.items())


@dataclass
class Setting:
    """What all experiments share."""

    model: str
    workshop: Workshop
    ceilings: Ceilings | None
    speed: Speed
    notes: list[str] = field(default_factory=list)


def choose(only: Sequence[str]) -> tuple[type[Experiment], ...]:
    """Experiments by number (from 1) or name, in the lab's order; all if none is named.

    Raises:
        InvalidRequestError: there is none of that number or name.
    """
    found = []
    for wanted in only:
        for number, experiment in enumerate(EXPERIMENTS, 1):
            if wanted in (str(number), experiment.name):
                found.append(experiment)
                break
        else:
            names = ", ".join(f"{number} {one.name}" for number, one in enumerate(EXPERIMENTS, 1))
            raise InvalidRequestError(f"There is no experiment {wanted!r}.", f"Use one of: {names}.")
    return tuple(one for one in EXPERIMENTS if one in found) or EXPERIMENTS


def lab(
    model: str,
    *,
    experiments: Sequence[type[Experiment]] = EXPERIMENTS,
    seconds: float = SECONDS,
    progress: Progress = lambda what, done, total: None,
    **config: Any,
) -> tuple[Report, list[Finding]]:
    """Try claims on this machine.

    Args:
        model: a path, or a name that `twinphase pull` takes.
        experiments: which; the time is for all of them together, shared by what each needs.
        seconds: of measuring. What does not fit is measured smaller; where even that is too slow, the verdict is
            unknown, and the report says so.
        progress: told of every measurement.
        config: fields of `EngineConfig`, such as `threads`.

    Returns:
        The report, and what it was made of.

    Raises:
        TwinphaseError: the model cannot be found, read or run.
        InvalidRequestError: `seconds` is no time, or a field of the configuration is out of range.
    """
    if not math.isfinite(seconds) or seconds <= 0:
        raise InvalidRequestError(f"The time is {seconds!r} seconds.", "Use a number above 0.")
    with Bystanders() as bystanders:
        setting = _prepare(model, config, progress)
        findings = []
        end = time.perf_counter() + seconds
        for number, experiment in enumerate(experiments):
            rest = sum(one.share for one in experiments[number:])
            share = max(0.0, end - time.perf_counter()) * experiment.share / rest
            told = partial(_nested, progress, number, len(experiments))
            findings.append(_try(experiment, setting, share, config, told))
            gc.collect()  # a second model's memory and threads go before the next experiment begins
    progress("report", len(experiments), len(experiments))
    return make_report(setting, findings, bystanders, seconds), findings


def _nested(progress: Progress, number: int, count: int, what: str, done: int, total: int) -> None:
    """An experiment's own progress, in hundredths of experiments."""
    inner = min(99, 100 * done // total) if total else 0
    progress(f"claim {number + 1} of {count}: {what}", 100 * number + inner, 100 * count)


def _prepare(model: str, config: dict[str, Any], progress: Progress) -> Setting:
    notes: list[str] = []
    progress("loading the model", 0, 0)
    workshop = Workshop(
        model,
        compile_progress=lambda done, total, kernel: progress(f"compiling kernels {done}/{total}", 0, 0),
        **config,
    )
    progress("measuring this machine's ceilings", 0, 0)
    ceilings = measured_ceilings(workshop.config)
    if workshop.config.backend == "cpu":
        try:
            # Again, although they may be known: a busy machine measures peaks too low, and what memory gives is
            # shared with others on the host and changes. So peaks are the best ever, bandwidth is today's.
            today = ceilings_now(workshop.config).merged(ceilings_now(workshop.config))
            best = ceilings.merged(today) if ceilings else today
            ceilings = replace(best, bandwidth=today.bandwidth)
            save_ceilings(best)
        except OSError as error:
            notes.append(f"The ceilings could not be kept for later runs: {error.strerror}.")
        except CeilingsError as error:
            notes.append(str(error))
    progress("calibrating", 0, 0)
    return Setting(model, workshop, ceilings, calibrate(workshop), notes)


def _try(
    experiment: type[Experiment], setting: Setting, seconds: float, config: dict[str, Any], progress: Progress
) -> Finding:
    """One experiment with its verdict; what keeps it from being measured makes it unknown and not the lab fail."""
    start = time.perf_counter()
    # What an experiment opens takes a path and not a name, so that no lookup is repeated.
    path = str(setting.workshop.loaded.checkpoint.path)
    found: Experiment | None = None
    error, status = "", Status.UNKNOWN
    with Bystanders() as others:
        before = _look_again(setting) if experiment.uses_ceilings else None
        bench = Workbench(
            setting.workshop,
            setting.ceilings,
            setting.speed,
            seconds,
            lambda **changed: Workshop(path, **{**config, "num_kv_blocks": OTHER_BLOCKS, **changed}),
            progress,
            experiment.name,
        )
        progress(experiment.name, 0, 100)
        try:
            measured = replace(experiment.measure(bench), others=bench.others)
            found, status, judged = _verdict_of(measured, setting, before)
        except (TwinphaseError, MemoryError) as failure:
            error = str(failure) or "The memory is not enough."
            judged = judge(experiment.rules, dict.fromkeys(experiment.rules, unknown(error)))
    took = time.perf_counter() - start
    return Finding(experiment, found, status, tuple(judged), took, tuple(bench.reduced), others.cores, error)


def _look_again(setting: Setting) -> Ceilings | None:
    """The ceilings just now, of which the run keeps the best; None where they cannot be measured."""
    if setting.ceilings is None:
        return None
    try:
        now = ceilings_now(setting.workshop.config)
    except CeilingsError:
        return None
    setting.ceilings = setting.ceilings.merged(now)
    return now


def _verdict_of(
    found: Experiment, setting: Setting, before: Ceilings | None
) -> tuple[Experiment, Status, list[Judged]]:
    """Against the best ceilings of this run; what those around it do not bear out is unknown."""
    after = _look_again(setting) if found.uses_ceilings else None
    if before is None or after is None:
        return found, *found.evaluate()
    _, around = found.under(before.merged(after)).evaluate()
    found = found.under(setting.ceilings)
    judged = tempered(found.evaluate()[1], around)
    return found, overall(judged), judged


def make_report(setting: Setting, findings: Sequence[Finding], bystanders: Bystanders, seconds: float) -> Report:
    """Verdicts first, then each claim with its rules, numbers and plots."""
    workshop = setting.workshop
    flags = {
        "model": setting.model,
        "precision": f"{quantization_name(workshop.loaded.checkpoint)} weights, KV cache "
        f"{workshop.config.kv_cache_dtype}",
        "context length": f"{workshop.max_model_len:,}",
        "time to measure": f"{seconds:.0f} s planned, {sum(one.seconds for one in findings):.0f} s taken",
        "ceilings": _ceilings(setting.ceilings, workshop.shape.linear_bytes + workshop.shape.head_bytes),
    }
    path = workshop.loaded.checkpoint.path
    threads = workshop.config.threads or available_cores()
    stated = conditions(model=path, threads=threads, isa=setting.ceilings.isa if setting.ceilings else "", flags=flags)
    metrics: list[Metric] = [metric for one in findings if one.found for metric in one.found.metrics()]
    return Report(
        kind="lab",
        title=_title([one.status for one in findings], bystanders.cores),
        verdicts=tuple(_verdict(one) for one in findings),
        conditions=stated,
        noise=(bystanders.noise(), *setting.notes, *_noise(findings)),
        sections=tuple(map(_section, findings)),
        metrics=tuple(metrics),
        data={
            "speed": asdict(setting.speed),
            "ceilings": asdict(setting.ceilings) if setting.ceilings else None,
            "experiments": {one.experiment.name: _raw(one) for one in findings},
        },
    )


def _title(statuses: Sequence[Status], others: float | None) -> str:
    holds, fails, unknown = (statuses.count(status) for status in (Status.HOLDS, Status.FAILS, Status.UNKNOWN))
    title = f"Prefill and decode on this machine: {holds} hold, {fails} do not, {unknown} could not be decided"
    if others is None or others <= NOTABLE_CORES:
        return title
    return f"{title} (others used {others:.2f} of {os.cpu_count()} cores: run it again when it is quiet)"


def _ceilings(ceilings: Ceilings | None, weights: int) -> str:
    if ceilings is None:
        return "unknown"
    units = (("int8", ceilings.int8_ops), ("float32", ceilings.float32_flops), ("bfloat16", ceilings.bfloat16_flops))
    peaks = [f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in units if rate]
    rate = ceilings.read_bandwidth(weights)
    reading = [f"{rate / 1e9:.1f} GB/s reading the weights' {weights / 1e6:,.0f} MB"] if rate else []
    return ", ".join([*peaks, *reading])


def _verdict(finding: Finding) -> Verdict:
    return Verdict(finding.status, f"{finding.experiment.claim} {_capital(finding.numbers)}.", finding.reason)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _noise(findings: Sequence[Finding]) -> list[str]:
    lines = []
    disturbed = [one for one in findings if one.others is not None and one.others >= NOTABLE_CORES]
    if disturbed:
        named = ", ".join(f"{one.experiment.name} ({one.others:.1f} cores)" for one in disturbed)
        lines.append(f"Other programs computed during: {named}.")
    for one in findings:
        lines += [f"{one.experiment.name}: {text}." for text in one.reduced]
    return lines


def _section(finding: Finding) -> Section:
    experiment = finding.experiment
    number = [one.name for one in EXPERIMENTS].index(experiment.name) + 1
    columns = (
        Column("the rule, stated before measuring"),
        Column("formula"),
        Column("must be"),
        Column("measured", "median of the repetitions, and its interval (90 % or more)"),
        Column("repetitions"),
        Column("verdict"),
    )
    rows = tuple(
        (
            one.rule.name,
            one.rule.formula,
            f"{one.rule.text} ({one.rule.scope})" if one.rule.scope else one.rule.text,
            one.rule.measured(one.estimate),
            str(one.estimate.n),
            one.status.word,
        )
        for one in finding.judged
    )
    return Section(
        title=f"{number}. {experiment.claim}",
        verdicts=(Verdict(finding.status, f"{_capital(finding.numbers)}.", finding.missed),),  # why: the paragraphs
        paragraphs=(
            f"How it was tried: {experiment.method}",
            *finding.why,
            # It follows from the claim, so it is said only where that was seen to hold.
            *([f"What this means for you: {experiment.meaning}"] if finding.status is Status.HOLDS else []),
        ),
        tables=(
            Table("The claim holds if every rule holds", columns, rows),
            *(finding.found.tables() if finding.found else ()),
        ),
        plots=tuple(finding.found.plots()) if finding.found else (),
    )


def _raw(finding: Finding) -> dict[str, Any]:
    return {
        "claim": finding.experiment.claim,
        "status": finding.status.value,
        "rules": [
            {**asdict(one.rule), **asdict(one.estimate), "status": one.status.value, "reason": one.reason}
            for one in finding.judged
        ],
        "seconds": finding.seconds,
        "reduced": list(finding.reduced),
        "others": finding.others,
        "error": finding.error,
        "found": asdict(finding.found) if finding.found else None,
    }
