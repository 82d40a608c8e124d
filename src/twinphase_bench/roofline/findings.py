"""Medians of the measured points of `twinphase roofline`, placed under the roofline.

Not for measuring (`measure.py`) nor for words and tables (`report.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from twinphase.phases.hardware import Ceilings
from twinphase.phases.roofline import Placed, place
from twinphase_bench.roofline.measure import RooflinePoint, Sample

# The parts must add up to the whole step's time within this share.
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
    """One point: medians over its repetitions.

    Attributes:
        point: which.
        samples: its repetitions.
        seconds: of the whole prompt or decode step.
        tokens_per_second: one value per repetition.
        parts: seconds by name, of the repetition of median time with clock readings inside; they
            add up to that time.
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
        """Whether reading the clock left the step's duration as it was."""
        return abs(self.disagreement) <= MAX_DISAGREEMENT

    @property
    def placed(self) -> tuple[tuple[str, Placed], ...]:
        """The whole and its parts, by name."""
        return (
            ("whole step", self.whole),
            ("linear layers", self.linear),
            ("attention", self.attention),
        )


def find(
    point: RooflinePoint, samples: Sequence[Sample], ceilings: Ceilings | None
) -> PointFinding:
    """The medians of one point's repetitions, placed under `ceilings`."""
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
