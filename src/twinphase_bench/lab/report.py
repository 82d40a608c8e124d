"""The lab's report: verdicts first, then each claim with its rules, numbers and plot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from twinphase import available_cores
from twinphase.phases.hardware import Ceilings
from twinphase_bench.conditions import Bystanders, conditions
from twinphase_bench.lab.experiment import BUSY_CORES
from twinphase_bench.lab.lab import EXPERIMENTS, Conclusion, LabSetting
from twinphase_bench.lab.presentation import metrics, plot, table
from twinphase_bench.report.report import Column, Report, Section, Status, Verdict, table_of


def make_report(
    setting: LabSetting, conclusions: Sequence[Conclusion], bystanders: Bystanders
) -> Report:
    workshop = setting.workshop
    config = workshop.config
    flags = {
        "model": setting.model,
        "precision": f"{workshop.quantization} weights, KV cache {config.kv_cache_dtype}",
        "context length": f"{workshop.max_model_len:,}",
        "time to measure": f"{sum(one.seconds for one in conclusions):.0f} s",
        "ceilings": _ceilings(setting.ceilings, workshop.shape.weight_bytes),
    }
    stated = conditions(
        model=workshop.path,
        threads=config.threads or available_cores(),
        isa=setting.ceilings.isa if setting.ceilings else "",
        flags=flags,
    )
    return Report(
        kind="lab",
        title=_title([one.status for one in conclusions], bystanders.cores),
        verdicts=[
            Verdict(one.status, f"{one.experiment.claim} {_numbers(one)}", one.reason)
            for one in conclusions
        ],
        conditions=stated,
        noise=(bystanders.noise(), *setting.notes, *_noise(conclusions)),
        sections=[*map(_section, conclusions)],
        metrics=[metric for one in conclusions for metric in metrics(one.experiment, one.trial)],
        data={
            "ceilings": asdict(setting.ceilings) if setting.ceilings else None,
            "experiments": {one.experiment.name: _raw(one) for one in conclusions},
        },
    )


def _title(statuses: Sequence[Status], others: float | None) -> str:
    holds, fails, undecided = (
        statuses.count(status) for status in (Status.HOLDS, Status.FAILS, Status.UNKNOWN)
    )
    title = (
        f"Prefill and decode on this machine: {holds} hold, {fails} do not, {undecided} could not "
        "be decided"
    )
    if others is None or others < BUSY_CORES:
        return title
    return (
        f"{title} (others used {others:.2f} of {os.cpu_count()} cores: run it again when it is "
        "quiet)"
    )


def _ceilings(ceilings: Ceilings | None, weights: int) -> str:
    if ceilings is None:
        return "unknown"
    units = (
        ("int8", ceilings.int8_ops),
        ("float32", ceilings.float32_flops),
        ("bfloat16", ceilings.bfloat16_flops),
    )
    peaks = [f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in units if rate]
    rate = ceilings.read_bandwidth(weights)
    reading = (
        [f"{rate / 1e9:.1f} GB/s reading the weights' {weights / 1e6:,.0f} MB"] if rate else []
    )
    return ", ".join([*peaks, *reading])


def _numbers(conclusion: Conclusion) -> str:
    text = "; ".join(f"{one.line}, must be {one.rule.text}" for one in conclusion.judged)
    return f"{text[:1].upper()}{text[1:]}." if text else "Nothing was measured."


def _noise(conclusions: Sequence[Conclusion]) -> list[str]:
    disturbed = [
        f"{one.experiment.name} ({one.others:.1f} cores)"
        for one in conclusions
        if one.others is not None and one.others >= BUSY_CORES
    ]
    lines = [f"Other programs computed during: {', '.join(disturbed)}."] if disturbed else []
    return lines + [
        f"{one.experiment.name}: {text}." for one in conclusions for text in one.reduced
    ]


def _section(conclusion: Conclusion) -> Section:
    experiment = conclusion.experiment
    trial = conclusion.trial
    number = [one.name for one in EXPERIMENTS].index(experiment.name) + 1
    columns = (
        "the rule, stated before measuring",
        "formula",
        "must be",
        Column("measured", "median of the repetitions, and its interval (90 % or more)"),
        "repetitions",
        "verdict",
    )
    rows = (
        (
            one.rule.name,
            one.rule.formula or one.rule.name,
            experiment.limit(one.rule),
            one.reading.shown(one.rule.number),
            str(one.reading.n),
            one.status.word,
        )
        for one in conclusion.judged
    )
    # The meaning follows from the claim, so it is shown only if the claim holds.
    meaning = (
        [f"What this means for you: {experiment.meaning}"]
        if conclusion.status is Status.HOLDS
        else []
    )
    return Section(
        title=f"{number}. {experiment.claim}",
        verdicts=(Verdict(conclusion.status, _numbers(conclusion), conclusion.missed),),
        paragraphs=(f"How it was tried: {experiment.method}", trial.why, *meaning),
        tables=(
            table_of("The claim holds if every rule holds", columns, rows),
            *((table(experiment, trial),) if trial.runs else ()),
        ),
        plots=(plot(experiment, trial),) if trial.runs else (),
    )


def _raw(conclusion: Conclusion) -> dict[str, Any]:
    return {
        "claim": conclusion.experiment.claim,
        "status": conclusion.status.value,
        "rules": [
            {
                **asdict(one.rule),
                **asdict(one.reading),
                "status": one.status.value,
                "reason": one.reason,
            }
            for one in conclusion.judged
        ],
        "seconds": conclusion.seconds,
        "reduced": list(conclusion.reduced),
        "others": conclusion.others,
        "why": conclusion.trial.why,
        "runs": conclusion.trial.runs,
    }
