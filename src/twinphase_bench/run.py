"""`twinphase bench` from a target to a report: runs the measurements and joins their parts.

`commands/bench.py` has the options; `sweep/report.py` and `load/report.py` report the findings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinphase import Progress
from twinphase_bench.conditions import conditions
from twinphase_bench.report.report import Metric, Report, Section, Status, Verdict
from twinphase_bench.sweep.plan import DEFAULT_CONTEXT_TOKENS, SweepOptions, make_plan
from twinphase_bench.sweep.report import sweep_data, sweep_metrics, sweep_noise, sweep_sections
from twinphase_bench.sweep.run import PhaseSweep, calibrate, sweep
from twinphase_bench.sweep.verdicts import sweep_verdicts
from twinphase_bench.targets.phases_of_url import PhasesOfUrl
from twinphase_bench.targets.target import Target, TargetFacts

CLIENT = "client"
# The length of a text prompt is only approximate, so a part of the context stays free.
PLANNED_TEXT_SHARE = 0.95


@dataclass(frozen=True)
class Parts:
    """The contribution of one measurement to the report; `data` is stored under `name`."""

    name: str
    verdicts: Sequence[Verdict]
    sections: Sequence[Section]
    metrics: Sequence[Metric] = ()
    noise: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, object] = field(default_factory=dict)


def run_sweep(target: Target, options: SweepOptions, progress: Progress) -> PhaseSweep:
    """Warm up, plan by the target's pace, and measure."""
    facts = target.facts
    server = facts.kind == "openai"
    context = facts.context_length
    if server and context is not None:
        context = int(context * PLANNED_TEXT_SHARE)
    pace = calibrate(target, progress)
    if isinstance(target, PhasesOfUrl):
        target.forget()
    plan = make_plan(context, options, pace)
    # A server on this machine would count as another program; one elsewhere is not visible.
    return sweep(target, plan, progress, watch_others=not server)


def sweep_parts(result: PhaseSweep) -> Parts:
    """The parts of the report from a sweep."""
    plan = result.plan
    batches = sorted({place.batch for place in plan.places})
    flags = {
        "repetitions": plan.repetitions,
        "longest prompt": f"{plan.longest:,} tokens",
        "batch sizes": ", ".join(map(str, batches)),
        "steps of a decode measurement": plan.decode_tokens,
        "seed of prompts and order": plan.seed,
    }
    if result.facts.context_length is None:
        flags["context length"] = f"unknown to us; planned for {DEFAULT_CONTEXT_TOKENS:,}"
    return Parts(
        "phase sweep",
        sweep_verdicts(result),
        sweep_sections(result),
        metrics=sweep_metrics(result),
        noise=sweep_noise(result),
        data=sweep_data(result),
        flags=flags,
    )


def client_parts(target: Target) -> list[Parts]:
    """Whether the client kept up with a server's sweep; empty for other targets."""
    if not isinstance(target, PhasesOfUrl):
        return []
    fault = target.client_fault()
    verdicts = []
    if fault:
        verdicts = [Verdict(Status.VOID, "The client was the limit: this sweep is void.", fault)]
    noise = [
        f"The client was late in {len(target.late)} of {target.num_measured} measurements, "
        "repetitions included."
    ]
    data = {"requests": target.observations, "client late": list(target.late)}
    return [Parts(CLIENT, verdicts, [], noise=noise, data=data)]


def bench_report(facts: TargetFacts, parts: Sequence[Parts]) -> Report:
    """The report of a target; `parts` are the measurements, most important first."""
    flags = {key: value for part in parts for key, value in part.flags.items()}
    verdicts = [verdict for part in parts for verdict in part.verdicts]
    return Report(
        kind="bench",
        title=f"{facts.model} on {facts.engine}: "
        f"{' and '.join(part.name for part in parts if part.name != CLIENT)}",
        verdicts=sorted(verdicts, key=lambda verdict: verdict.status is not Status.VOID),
        conditions=conditions(facts, flags=flags),
        noise=[line for part in parts for line in part.noise],
        sections=[section for part in parts for section in part.sections],
        metrics=[metric for part in parts for metric in part.metrics],
        data={"target": facts, **{part.name: part.data for part in parts}},
    )
