"""Medians of the points measured by `twinphase roofline`, placed under the roofline.

`measure.py` measures, and `report.py` writes the report.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from twinphase.phases.hardware import Ceilings
from twinphase.phases.roofline import Placed, place
from twinphase_bench.roofline.measure import RooflinePoint, Sample

# The parts must add up to the time of the whole step within this share.
MAX_DISAGREEMENT = 0.10
NAMES = {
    "linear": "linear layers",
    "attention": "attention",
    "scan": "scans of recurrent layers",
    "other": "other operations",
}
OUTSIDE = "outside the forward pass"


@dataclass(frozen=True)
class PointFinding:
    """The medians over the repetitions of one point.

    Attributes:
        point: the point.
        samples: repetitions of the point.
        seconds: seconds of the whole prompt or decode step.
        tokens_per_second: rates, one per repetition.
        parts: seconds by name in the median repetition among those timed in parts; they add up to
            that repetition's time.
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
        """Whether timing the parts did not change the step's duration."""
        return abs(self.disagreement) <= MAX_DISAGREEMENT

    @property
    def placed(self) -> tuple[tuple[str, Placed], ...]:
        """The whole step and its parts, by name."""
        return (
            ("whole step", self.whole),
            ("linear layers", self.linear),
            ("attention", self.attention),
        )


def find(
    point: RooflinePoint, samples: Sequence[Sample], ceilings: Ceilings | None
) -> PointFinding:
    """The medians of a point's repetitions, placed under `ceilings`."""
    seconds = statistics.median(sample.seconds for sample in samples)
    split = sorted(samples, key=lambda sample: sample.split_seconds)[(len(samples) - 1) // 2]
    parts = {NAMES[name]: spent for name, spent in split.parts.items()}
    linear, attention = (
        statistics.median(s.parts[name] for s in samples) for name in ("linear", "attention")
    )
    return PointFinding(
        point=point,
        samples=samples,
        seconds=seconds,
        tokens_per_second=tuple(sample.tokens / sample.seconds for sample in samples),
        parts={**parts, OUTSIDE: split.split_seconds - sum(parts.values())},
        disagreement=statistics.median(
            sample.split_forward / sample.forward - 1 for sample in samples
        ),
        whole=place(samples[0].linear.plus(samples[0].attention), seconds, ceilings),
        linear=place(samples[0].linear, linear, ceilings),
        attention=place(samples[0].attention, attention, ceilings),
    )
