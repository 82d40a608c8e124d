"""Why a request took as long as it did: a waterfall, what bound each phase, the causes, and what to change.

Reads a timeline; the cost model says what another setting, or an empty engine, would do. Estimates carry the model's
own error. Not for dividing time (`ledger.py`), nor for drawing (the terminal does).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from twinphase.explain.alone import Alone, had_it_run_alone
from twinphase.explain.diagnosis import Diagnosis, diagnose, prefix_sentence
from twinphase.explain.evidence import Efficiency, Evidence, Machine
from twinphase.explain.levers import ABOUT, WORTH_NAMING, Lever, duration, rank
from twinphase.explain.waterfall import Waterfall, waterfall
from twinphase.phases.cost import CostError
from twinphase.phases.report import FORMULAS
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import RequestCounts

__all__ = ["Alone", "Explanation", "Lever", "Machine", "explain", "explain_evidence"]


@dataclass(frozen=True)
class Explanation:
    """Where the time went.

    Attributes:
        dominant: the kind of interval with the most time.
        bounds: what held prefill and decode back: "compute", "memory", "overhead" or "unknown".
        sentences: for a reader, most important first.
        levers: what to change, the most predicted gain first, then by the time that they address.
        waterfall: the wall time in parts that add up to it; None where nothing has happened yet.
        diagnoses: causes of a bad TTFT, then of bad tokens a second, each the largest share first.
        efficiency: of "prefill" and "decode".
        alone: None without a cost model.
        error: of the cost model, in everything that is predicted.
        ttft, tpot: as measured; None where there were too few tokens.
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
        return "\n".join([*self.sentences, *(f"To change it: {lever.advice}" for lever in self.levers)])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, seconds as they are, with the formulas."""
        return {**asdict(self), "dominant": self.dominant.value, "formulas": FORMULAS}


def explain(request: RequestCounts, timeline: RequestTimeline, machine: Machine, *, names: bool = False) -> Explanation:
    """Explain a request that has finished, or has come as far as its timeline tells.

    Args:
        request: with its prefix miss and preemptions.
        timeline: of the request.
        machine: settings, cost model and ceilings.
        names: call other requests by their ids; only for who may know of them.
    """
    return explain_evidence(Evidence(request, timeline, machine, names=names))


def explain_evidence(evidence: Evidence) -> Explanation:
    """The same, of whatever is known.

    Raises:
        WaterfallError: the parts of the ledger do not add up.
    """
    timeline = evidence.timeline
    totals = {IntervalKind(kind): seconds for kind, seconds in timeline.totals().items()}
    wall = timeline.end - timeline.arrival
    ranked = sorted((kind for kind in totals if totals[kind] > 0), key=lambda kind: -totals[kind])
    if not ranked or wall <= 0:
        return Explanation(IntervalKind.QUEUE, {}, ("Nothing has happened yet.",), ())
    near = {phase: evidence.efficiency(phase) for phase in ("prefill", "decode")}
    diagnoses = diagnose(evidence)
    falls = waterfall(timeline, evidence.before)
    sentences = [_headline(falls)]
    levers = [diagnosis.lever for diagnosis in diagnoses if diagnosis.lever]
    for kind in ranked:
        if totals[kind] >= WORTH_NAMING * wall or kind is ranked[0]:
            sentence, lever = ABOUT[kind](evidence, totals[kind])
            sentences.append(sentence)
            if lever is not None:
                addressed = totals[kind] if lever.addressed_seconds is None else lever.addressed_seconds
                levers.append(replace(lever, addressed_seconds=addressed))
    sentences += _phases(timeline, near) + [prefix_sentence(evidence)]
    error = evidence.machine.cost_model.error() if evidence.machine else None
    if error is not None and error.median is not None and error.p95 is not None:
        sentences.append(
            f"Shares and estimates are the cost model's, whose last {error.steps} predictions were off by "
            f"{error.median:.0%} in the middle and {error.p95:.0%} at the 95th percentile."
        )
    bounds = {phase: found.bound for phase, found in near.items()}
    return Explanation(
        ranked[0], bounds, tuple(sentences), rank(levers), falls, diagnoses, near,
        had_it_run_alone(evidence), error, timeline.ttft, timeline.tpot,
    )  # fmt: skip


def _headline(falls: Waterfall) -> str:
    ranked = sorted(falls.bars, key=lambda bar: -bar.seconds)
    named = ", ".join(f"{bar.share:.0%} {bar.name}" for bar in ranked[:4])
    return f"{duration(falls.wall_seconds)} in all: {named}."


def _phases(timeline: RequestTimeline, near: dict[str, Efficiency]) -> list[str]:
    lines = []
    for name, totals in (("Prefill", timeline.prefill), ("Decode", timeline.decode)):
        if totals.steps:
            limit = near[name.lower()].bound
            what = "" if limit == "unknown" else f", bound by {limit}"
            steps = "1 step" if totals.steps == 1 else f"{totals.steps} steps"
            lines.append(
                f"{name}: {totals.tokens} of its tokens in {steps}; {duration(totals.seconds)} with all others in them"
                f"{what}."
            )
    return lines
