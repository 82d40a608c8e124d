"""A calibration from measured points of both phases, as `bench` and `roofline` measure them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from twinphase.batch import StepWork
from twinphase.errors import InvalidRequestError
from twinphase.phases.cost import CostModel, starting_prices
from twinphase.phases.hardware import processor_name
from twinphase.simulate.calibration import Calibration
from twinphase.simulate.deployment import ASSUMED_FRONT, Deployment

# Number of times that the cost model sees every point, which lets its prices converge.
ROUNDS = 40


@dataclass(frozen=True)
class MeasuredPoint:
    """A prefill of `tokens`, or a decode step of `batch` sequences after `tokens` tokens each.

    Attributes:
        seconds: time of the whole prefill or of the decode step.
    """

    phase: str
    tokens: int
    seconds: float
    batch: int = 1

    def works(self, chunk: int, window: int | None) -> list[StepWork]:
        """The work of the point's steps; prompts are divided into chunks."""
        if self.phase == "decode":
            return [StepWork.of_decodes(self.batch, self.tokens + 1, window)]
        return [
            StepWork.of_chunk(
                start,
                min(chunk, self.tokens - start),
                start + chunk >= self.tokens,
                window,
            )
            for start in range(0, self.tokens, chunk)
        ]


def calibration_of_points(
    points: Sequence[MeasuredPoint], deployment: Deployment, source: str
) -> Calibration:
    """Fit prices to the points; the calibration has no noise and no time between steps.

    Args:
        points: measured points of both phases.
        deployment: model on this machine, with the options of the measurement.
        source: "bench" or "roofline".

    Raises:
        InvalidRequestError: one of the phases has no points.
    """
    if {point.phase for point in points} != {"prefill", "decode"}:
        raise InvalidRequestError(
            f"The result of {source} does not have both phases of a model.",
            f"Give the result of `twinphase {source} MODEL`.",
        )
    shape = deployment.shape
    config = deployment.config(deployment.machine)
    costs = CostModel(starting_prices(shape, None), shape.windowed_share, shape.window)
    for _ in range(ROUNDS):
        for point in points:
            works = point.works(config.max_num_batched_tokens, shape.window)
            predicted = [costs.seconds(work) for work in works]
            scale = point.seconds / sum(predicted)
            for work, seconds in zip(works, predicted, strict=True):
                costs.observe(work, seconds * scale)
    return Calibration(
        deployment.model,
        processor_name(),
        config.threads or 0,
        time.strftime("%Y-%m-%d"),
        costs.learned,
        asdict(config),
        between_steps=0.0,
        between_steps_per_request=0.0,
        noise=(),
        front=ASSUMED_FRONT,
        steps=len(points),
        median_error=costs.error().median or 0.0,
        source=source,
    )
