"""What the measured points of `twinphase roofline` mean: medians, their places under the roofline, break-even batches.

Not for measuring (`measure.py`) nor for words and tables (`report.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from twinphase.bench.roofline.arithmetic import Placed, breakeven_batch, knee, place
from twinphase.bench.roofline.measure import ModelPoints, RooflinePoint, Sample
from twinphase.phases.hardware import Ceilings

__all__ = ["OUTSIDE", "TOLERANCE", "BreakEven", "PointFinding", "break_evens", "find"]

TOLERANCE = 0.10  # of a whole step's time, within which the parts must add up
NAMES = {"linear": "linear layers", "attention": "attention", "other": "other operations"}
OUTSIDE = "outside the forward pass"


@dataclass(frozen=True)
class PointFinding:
    """One point: medians over its repetitions.

    Attributes:
        point: which.
        samples: its repetitions.
        seconds: of the whole prompt or decode step.
        tokens_per_second: one value per repetition.
        parts: seconds by name, of the repetition of median time with clock readings inside; they add up to that time.
        disagreement: median of (forward pass with readings - without) / without.
        whole, linear, attention: places under the roofline.
    """

    point: RooflinePoint
    samples: Sequence[Sample]
    seconds: float
    tokens_per_second: tuple[float, ...]
    parts: dict[str, float]
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


def find(point: RooflinePoint, samples: Sequence[Sample], ceilings: Ceilings | None) -> PointFinding:
    """The medians of one point's repetitions, placed under `ceilings`."""
    seconds = statistics.median(sample.seconds for sample in samples)
    split = sorted(samples, key=lambda sample: sample.split_seconds)[(len(samples) - 1) // 2]
    parts = {NAMES[name]: spent for name, spent in split.parts.items()}
    linear, attention = (statistics.median(s.parts[name] for s in samples) for name in ("linear", "attention"))
    return PointFinding(
        point=point,
        samples=samples,
        seconds=seconds,
        tokens_per_second=tuple(sample.tokens / sample.seconds for sample in samples),
        parts={**parts, OUTSIDE: split.split_seconds - sum(parts.values())},
        disagreement=statistics.median(sample.split_forward / sample.forward - 1 for sample in samples),
        whole=place(samples[0].linear.plus(samples[0].attention), seconds, ceilings),
        linear=place(samples[0].linear, linear, ceilings),
        attention=place(samples[0].attention, attention, ceilings),
    )


@dataclass(frozen=True)
class BreakEven:
    """Where batched decode turns from memory-bound to compute-bound, at one context.

    Attributes:
        what: "linear layers" or "whole step".
        context: tokens.
        predicted: batch, by the ceilings and the counts; as `breakeven_batch` gives it.
        knee: batch, by the measured times; None if it is not among the measured batches.
        knees: one per repetition, where it could be told.
        measured_to: the largest batch measured.
    """

    what: str
    context: int
    predicted: float | None
    knee: float | None
    knees: tuple[float, ...]
    measured_to: int


def break_evens(measured: ModelPoints, found: Sequence[PointFinding], ceilings: Ceilings | None) -> list[BreakEven]:
    """Break-even batches of the linear layers and of whole steps, at each decode context that was measured."""
    by_context: dict[int, dict[int, PointFinding]] = {}
    for one in found:
        if one.point.phase == "decode":
            by_context.setdefault(one.point.tokens, {})[one.point.batch] = one
    result = []
    for context, by_batch in sorted(by_context.items()):
        for what in ("linear layers", "whole step"):
            whole = what == "whole step"
            if not whole and len(by_batch) == 1 and len(by_context) > 1:
                continue  # they do not look at the context: once, where batches were measured, is enough
            predicted = breakeven_batch(measured.shape, measured.units, ceilings, context, attention=whole)
            times = {
                batch: [sample.seconds if whole else sample.parts["linear"] for sample in one.samples]
                for batch, one in by_batch.items()
            }
            each = (knee({b: seconds[i] for b, seconds in times.items()}) for i in range(min(map(len, times.values()))))
            middle = knee({batch: statistics.median(seconds) for batch, seconds in times.items()})
            knees = tuple(value for value in each if value is not None)
            result.append(BreakEven(what, context, predicted, middle, knees, max(by_batch)))
    return result
