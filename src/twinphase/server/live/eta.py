"""Estimates of when a prompt will have been computed: the cost model at the pace so far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from twinphase.batch import StepWork
from twinphase.phases.cost import CostModel
from twinphase.server.live.lanes import Lane

# What keeps a request waiting for a time that no model predicts.
UNPREDICTABLE = ("seats", "blocks")


def prefill_seconds(costs: CostModel, done: int, total: int) -> float:
    """Predicted seconds of the prompt tokens from `done` to `total`, alone in one chunk."""
    if total <= done:
        return 0.0
    return costs.seconds(StepWork.of_chunk(done, total - done, 1, costs.window))


def seconds_left(costs: CostModel, cached: int, done: int, total: int, elapsed: float) -> float:
    """Seconds until a prompt of `total` tokens is computed, `done` of them after `elapsed` seconds.

    The rest is taken to keep the pace so far, which is measured in seconds per predicted second and
    includes the steps of others. The first `cached` tokens took no time.
    """
    pace = _pace(costs, cached, done, elapsed)
    return prefill_seconds(costs, done, total) * (pace or 1.0)


def first_tokens(
    lanes: Iterable[Lane], costs: CostModel, held_back: str, now: float
) -> Iterator[tuple[Lane, float]]:
    """Each lane without a first token that has an estimate, with the seconds until that token.

    Prompts that wait are taken to be computed after all those before them. Where seats or blocks
    are missing, that depends on answers whose length is not known.
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
