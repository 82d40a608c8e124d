"""Explains a request's time: a waterfall, the bound of each phase, the causes and the levers.

The timeline has the measured times; the cost model predicts other settings and an idle engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from twinphase.explain.alone import Alone, had_it_run_alone
from twinphase.explain.decode_causes import speculation_sentence
from twinphase.explain.diagnosis import Diagnosis, diagnose
from twinphase.explain.evidence import Evidence, Machine
from twinphase.explain.levers import Lever, duration, percent, rank
from twinphase.explain.prefill_causes import prefix_sentence
from twinphase.explain.waterfall import Waterfall, waterfall
from twinphase.phases.cost import CostError
from twinphase.phases.hardware import BOUND_WORDS, Efficiency
from twinphase.phases.report import FORMULAS
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import RequestCounts


@dataclass(frozen=True)
class Explanation:
    """An explanation of one request.

    Attributes:
        dominant: kind of interval with the most time.
        bounds: by phase, as `hardware.bound` returns it.
        sentences: sentences, the most important first.
        levers: what to change, as `rank` orders them.
        waterfall: parts that add up to the wall time; None if no time has passed.
        diagnoses: causes of a long TTFT, then of slow tokens, largest share first.
        alone: estimate on an idle engine; None without a cost model.
        error: error of the cost model, which applies to all predictions.
    """

    dominant: IntervalKind
    bounds: dict[str, str]
    sentences: tuple[str, ...]
    levers: tuple[Lever, ...]
    waterfall: Waterfall | None = None
    diagnoses: tuple[Diagnosis, ...] = ()
    efficiency: dict[str, Efficiency] | None = None
    alone: Alone | None = None
    error: CostError | None = None
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
    """Explain a request, finished or not; `names` shows the ids of other requests."""
    return explain_evidence(Evidence(request, timeline, machine, names=names))


def explain_evidence(evidence: Evidence) -> Explanation:
    """Explain a request from its facts.

    Raises:
        WaterfallError: the parts of the ledger do not add up to the wall time.
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


def _sentences(
    evidence: Evidence, falls: Waterfall, diagnoses: tuple[Diagnosis, ...]
) -> Iterator[str]:
    """The headline, causes by time, bounds, the cached prefix, and the cost model's error."""
    largest = sorted(falls.bars, key=lambda bar: -bar.seconds)[:4]
    named = ", ".join(f"{percent(bar.share)} {bar.name}" for bar in largest)
    yield f"{duration(falls.wall_seconds)} from its arrival to its end: {named}."
    causes = Counter(one.cause for one in diagnoses)
    for one in sorted(diagnoses, key=lambda one: -(one.seconds or 0.0)):
        # If a cause occurs in both phases, its two sentences need the phase to differ.
        yield f"{one.phase.title()}: {one.evidence}" if causes[one.cause] > 1 else one.evidence
    for phase in ("prefill", "decode"):
        totals = getattr(evidence.timeline, phase)
        bound = evidence.efficiency(phase).bound
        if totals.steps:
            steps = "1 step" if totals.steps == 1 else f"{totals.steps} steps"
            yield (
                f"{phase.title()}: {totals.tokens} of its tokens in {steps}; with the other "
                f"requests in them, these took {duration(totals.seconds)}"
                f"{'' if bound == 'unknown' else f': {BOUND_WORDS[bound]}'}."
            )
    routes = dict.fromkeys(
        one.reason for one in evidence.intervals(IntervalKind.ROUTE) if one.reason
    )
    if routes:
        yield f"Routed to {'; then '.join(routes)}."
    for transfer in evidence.intervals(IntervalKind.TRANSFER):
        if transfer.reason:
            yield f"Continued at {transfer.reason}."
    if (speculation := speculation_sentence(evidence)) is not None:
        yield speculation
    if all(one.cause != "missed_prefix" for one in diagnoses):
        yield prefix_sentence(evidence)
    error = evidence.model_error
    if error is not None and error.median is not None and error.p95 is not None:
        yield (
            f"Shares and estimates come from the cost model, whose last {error.steps} "
            f"predictions had a median error of {percent(error.median)}, and "
            f"{percent(error.p95)} at the 95th percentile."
        )
