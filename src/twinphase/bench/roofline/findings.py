"""What the measured points of `twinphase roofline` mean: medians, their places under the roofline, break-even batches.

Not for measuring (`roofline_measure.py`) nor for words and tables (`roofline_report.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from twinphase.bench.roofline.arithmetic import Breakeven, Part, Placed, breakeven_batch, knee, place
from twinphase.bench.roofline.measure import ModelPoints, Point, Sample
from twinphase.phases.hardware import Ceilings

__all__ = ["TOLERANCE", "Break", "Finding", "breaks", "findings"]

TOLERANCE = 0.10  # of a whole step's time, within which the parts must add up
NAMES = {"linear": "linear layers", "attention": "attention", "other": "other operations"}
OUTSIDE = "outside the forward pass"


@dataclass(frozen=True)
class Finding:
    """One point: medians over its repetitions.

    Attributes:
        point: which.
        samples: its repetitions.
        seconds: of the whole prompt or decode step.
        tokens_per_second: one value a repetition.
        parts: median seconds by name, of the steps with clock readings inside; they add up to `split_seconds`.
        split_seconds: of those steps.
        disagreement: median of (forward pass with readings - without) / without.
        whole, linear, attention: places under the roofline.
    """

    point: Point
    samples: Sequence[Sample]
    seconds: float
    tokens_per_second: tuple[float, ...]
    parts: dict[str, float]
    split_seconds: float
    disagreement: float
    whole: Placed
    linear: Placed
    attention: Placed

    @property
    def adds_up(self) -> bool:
        """Whether reading the clock left the step as it was, so that its parts are the whole step's."""
        return abs(self.disagreement) <= TOLERANCE

    @property
    def placed(self) -> tuple[tuple[str, Placed], ...]:
        """The whole and its parts, by name."""
        return ("whole step", self.whole), ("linear layers", self.linear), ("attention", self.attention)


def findings(measured: ModelPoints, ceilings: Ceilings | None) -> list[Finding]:
    """Each point's medians, placed under `ceilings`."""
    return [finding(point, samples, ceilings) for point, samples in measured.samples.items()]


def finding(point: Point, samples: Sequence[Sample], ceilings: Ceilings | None) -> Finding:
    """The medians of one point's repetitions."""
    seconds = statistics.median(sample.seconds for sample in samples)
    # Parts of one repetition, so that they add up: the one with the median time.
    split = sorted(samples, key=lambda sample: sample.split_seconds)[(len(samples) - 1) // 2]
    parts = {NAMES[name]: spent for name, spent in split.parts.items()}
    parts[OUTSIDE] = split.split_seconds - sum(parts.values())
    work = samples[0]

    def part(name: str, of: Part) -> Placed:
        return place(of, statistics.median(sample.parts[name] for sample in samples), ceilings)

    return Finding(
        point=point,
        samples=samples,
        seconds=seconds,
        tokens_per_second=tuple(sample.tokens / sample.seconds for sample in samples),
        parts=parts,
        split_seconds=split.split_seconds,
        disagreement=statistics.median(sample.split_forward / sample.forward - 1 for sample in samples),
        whole=place(work.whole, seconds, ceilings),
        linear=part("linear", work.linear),
        attention=part("attention", work.attention),
    )


@dataclass(frozen=True)
class Break:
    """Where batched decode turns from memory-bound to compute-bound, at one context.

    Attributes:
        what: "linear layers" or "whole step".
        predicted: by the ceilings and the counts.
        knee: by the measured times; None if it is not among the measured batches.
        knees: one a repetition, where it could be told.
        measured_to: the largest batch measured.
    """

    what: str
    context: int
    predicted: Breakeven
    knee: float | None
    knees: tuple[float, ...]
    measured_to: int


def breaks(measured: ModelPoints, found: Sequence[Finding], ceilings: Ceilings | None) -> list[Break]:
    """Break-even batches of the linear layers and of whole steps, at each decode context that was measured."""
    by_context: dict[int, dict[int, Finding]] = {}
    for one in found:
        if one.point.phase == "decode":
            by_context.setdefault(one.point.tokens, {})[one.point.batch] = one
    result = []
    for context, by_batch in sorted(by_context.items()):
        for what, parts in (("linear layers", ("linear",)), ("whole step", ("linear", "attention"))):
            if what == "linear layers" and len(by_batch) == 1 and len(by_context) > 1:
                continue  # they do not look at the context: once, where batches were measured, is enough
            predicted = breakeven_batch(measured.shape, measured.units, ceilings, context, parts)
            repetitions = min(len(one.samples) for one in by_batch.values())
            medians = {b: statistics.median(_times(one, what)) for b, one in by_batch.items()}
            each = (knee({b: _times(one, what)[i] for b, one in by_batch.items()}) for i in range(repetitions))
            knees = tuple(value for value in each if value is not None)
            result.append(Break(what, context, predicted, knee(medians), knees, max(by_batch)))
    return result


def _times(found: Finding, what: str) -> list[float]:
    """Seconds a step, one a repetition."""
    if what == "linear layers":
        return [sample.parts["linear"] for sample in found.samples]
    return [sample.seconds for sample in found.samples]
