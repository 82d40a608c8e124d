"""Why a request took as long as it did: a waterfall, what bound each phase, the causes, and what to change.

Reads a timeline; the cost model says what another setting, or an empty engine, would do. Not for
dividing time (`phases/ledger.py`), nor for drawing (the terminal does).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from twinphase.explain.alone import Alone, had_it_run_alone
from twinphase.explain.causes import prefix_sentence, speculation_sentence
from twinphase.explain.diagnosis import Diagnosis, diagnose
from twinphase.explain.evidence import Efficiency, Evidence, Machine
from twinphase.explain.levers import Lever, duration, percent, rank
from twinphase.explain.waterfall import Waterfall, waterfall
from twinphase.phases.cost import CostError
from twinphase.phases.report import FORMULAS
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import RequestCounts


@dataclass(frozen=True)
class Explanation:
    """Where the time went.

    Attributes:
        bounds: what held prefill and decode back, as `hardware.bound` says it.
        diagnoses: causes of a bad TTFT, then of bad tokens per second, each the largest share
            first.
    """

    dominant: IntervalKind  # the kind of interval with the most time
    bounds: dict[str, str]
    sentences: tuple[str, ...]  # for a reader, most important first
    levers: tuple[
        Lever, ...
    ]  # what to change, the most predicted gain first, then by the time that they address
    waterfall: Waterfall | None = (
        None  # the wall time in parts that add up to it; None where nothing has happened yet
    )
    diagnoses: tuple[Diagnosis, ...] = ()
    efficiency: dict[str, Efficiency] | None = None
    alone: Alone | None = None  # None without a cost model
    error: CostError | None = None  # of the cost model, in everything that is predicted
    ttft: float | None = None
    tpot: float | None = None

    def __str__(self) -> str:
        return "\n".join(
            [*self.sentences, *(f"To change it: {lever.advice}" for lever in self.levers)]
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, in seconds, with the formulas."""
        return {**asdict(self), "dominant": self.dominant.value, "formulas": FORMULAS}


def explain(
    request: RequestCounts, timeline: RequestTimeline, machine: Machine, *, names: bool = False
) -> Explanation:
    """Explain a request that has finished, or has come as far as its timeline tells.

    With `names` other requests are called by their ids; only for someone who may know of them.
    """
    return explain_evidence(Evidence(request, timeline, machine, names=names))


def explain_evidence(evidence: Evidence) -> Explanation:
    """Explain a request by whatever is known of it.

    Raises:
        WaterfallError: the parts of the ledger do not add up.
    """
    timeline = evidence.timeline
    totals = {IntervalKind(kind): seconds for kind, seconds in timeline.totals().items()}
    if timeline.end <= timeline.arrival or not any(totals.values()):
        return Explanation(IntervalKind.QUEUE, {}, ("Nothing has happened yet.",), ())
    near = {phase: evidence.efficiency(phase) for phase in ("prefill", "decode")}
    falls = waterfall(timeline, evidence.before)
    diagnoses = diagnose(evidence)
    return Explanation(
        dominant=max(totals, key=lambda kind: totals[kind]),
        bounds={phase: found.bound for phase, found in near.items()},
        sentences=tuple(_sentences(evidence, falls, diagnoses)),
        levers=rank(one.lever for one in diagnoses if one.lever),
        waterfall=falls,
        diagnoses=diagnoses,
        efficiency=near,
        alone=had_it_run_alone(evidence),
        error=evidence.model_error,
        ttft=timeline.ttft,
        tpot=timeline.tpot,
    )


def _sentences(evidence: Evidence, falls: Waterfall, diagnoses: tuple[Diagnosis, ...]) -> list[str]:
    """The headline, the causes by their time, what bound each phase, the cached prefix, and the model's error."""
    largest = sorted(falls.bars, key=lambda bar: -bar.seconds)[:4]
    named = ", ".join(f"{percent(bar.share)} {bar.name}" for bar in largest)
    lines = [f"{duration(falls.wall_seconds)} from its arrival to its end: {named}."]
    lines += [one.evidence for one in sorted(diagnoses, key=lambda one: -(one.seconds or 0.0))]
    for phase in ("prefill", "decode"):
        totals = getattr(evidence.timeline, phase)
        bound = evidence.efficiency(phase).bound
        if totals.steps:
            steps = "1 step" if totals.steps == 1 else f"{totals.steps} steps"
            lines.append(
                f"{phase.title()}: {totals.tokens} of its tokens in {steps}, which took "
                f"{duration(totals.seconds)} "
                f"with everybody in them{'' if bound == 'unknown' else f', bound by {bound}'}."
            )
    routes = dict.fromkeys(
        one.reason for one in evidence.intervals(IntervalKind.ROUTE) if one.reason
    )
    if routes:
        lines.append(f"Routed to {'; then '.join(routes)}.")
    lines += [
        f"Went on at {one.reason}."
        for one in evidence.intervals(IntervalKind.TRANSFER)
        if one.reason
    ]
    if (guesses := speculation_sentence(evidence)) is not None:
        lines.append(guesses)
    if all(one.cause != "missed_prefix" for one in diagnoses):
        lines.append(prefix_sentence(evidence))
    error = evidence.model_error
    if error is not None and error.median is not None and error.p95 is not None:
        lines.append(
            f"Shares and estimates come from the cost model, whose last {error.steps} "
            "predictions had a median error "
            f"of {percent(error.median)}, and {percent(error.p95)} at the 95th percentile."
        )
    return lines
