"""Estimates when a prompt will be prefilled, from the cost model and the pace so far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from twinphase.batch import StepWork
from twinphase.phases.cost import CostModel
from twinphase.server.live.lanes import Lane

# Reasons for queueing that last for an unpredictable time.
UNPREDICTABLE = ("seats", "blocks")


def prefill_seconds(costs: CostModel, done: int, total: int) -> float:
    """Predicted seconds to prefill tokens `done` to `total` of a prompt alone, in one chunk."""
    if total <= done:
        return 0.0
    return costs.seconds(StepWork.of_chunk(done, total - done, 1, costs.window))


def seconds_left(costs: CostModel, cached: int, done: int, total: int, elapsed: float) -> float:
    """Seconds until `total` prompt tokens are computed, if `done` were after `elapsed` seconds.

    The rest is assumed to keep the pace so far, in seconds per predicted second, which includes the
    steps of others. The first `cached` tokens took no time.
    """
    pace = _pace(costs, cached, done, elapsed)
    return prefill_seconds(costs, done, total) * (pace or 1.0)


def first_tokens(
    lanes: Iterable[Lane], costs: CostModel, held_back: str, now: float
) -> Iterator[tuple[Lane, float]]:
    """Seconds until the first token, for each lane without one that has an estimate.

    Queued prompts are assumed to be computed after all earlier ones. There is no estimate while
    seats or blocks are missing, because that depends on answers of unknown length.
    """
    waiting: list[Lane] = []
    ahead = 0.0
    pace = 1.0
    for lane in lanes:
        if lane.started is None:
            waiting.append(lane)
        elif lane.is_prefilling:
            elapsed = now - lane.started
            left = seconds_left(costs, lane.cached, lane.done, lane.prompt, elapsed)
            pace = _pace(costs, lane.cached, lane.done, elapsed) or pace
            ahead += left
            yield lane, left
    if held_back in UNPREDICTABLE:
        return
    for lane in waiting:
        if lane.state == "queued":
            ahead += pace * prefill_seconds(costs, 0, lane.prompt)
            yield lane, ahead


def _pace(costs: CostModel, cached: int, done: int, elapsed: float) -> float:
    spent = prefill_seconds(costs, cached, done)
    return elapsed / spent if spent > 0 else 0.0
