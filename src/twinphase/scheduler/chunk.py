"""How large a prefill chunk may be, by the token budget and the inter-token SLO."""

from __future__ import annotations

from typing import Protocol

from twinphase.batch import StepWork
from twinphase.scheduler.pace import Pace

# Logits of a vocabulary of 151,936 take 78 MB for this many rows.
MAX_SCORED_ROWS = 128
# A chunk that the pace cuts ends on a block boundary if that wastes at most this share of its time.
MAX_UNUSED_SHARE = 1 / 8


class StepCost(Protocol):
    """Predicts how long a step takes; the measured cost model does.

    Attributes:
        window: tokens that a row attends to at most in those layers of the model that have a
            window, as a step's work counts it; None is no window.
    """

    window: int | None

    def step_limit(self, slo_seconds: float) -> float:
        """Longest predicted step, seconds, that meets the SLO, after gaps and prediction error."""

    def seconds(self, work: StepWork) -> float:
        """Predicted time of a step, seconds; does not fall when work is added."""


class ChunkBudget:
    """What prefill may still add to one step."""

    def __init__(
        self,
        num_tokens: int,
        decodes: StepWork,
        times: StepCost,
        pace: Pace,
        block_size: int,
        is_shared: bool = False,
        usual: StepWork | None = None,
    ) -> None:
        """Begin with the step's decodes.

        Args:
            num_tokens: tokens of the budget that the decodes left.
            decodes: work of the decodes.
            times: predicts step times.
            pace: the gap that running requests keep; it limits a step only if a request decodes in
                it, or with `is_shared`.
            block_size: chunks end on block boundaries where they can, so that others can share the
                blocks.
            is_shared: whether there are several tenants: a request of another tenant may arrive
                during any step, and has to wait for the end of that step.
            usual: work that the pace's factor multiplies: the decodes without drafts and without
                requests that decode for the first time. None is all of `decodes`.
        """
        self.num_tokens = num_tokens
        self._work = decodes
        self._times = times
        self._block_size = block_size
        self._limit = None
        if pace.slo_seconds is not None and (decodes.rows or is_shared):
            self._limit = max(
                times.step_limit(pace.slo_seconds),
                pace.step_factor * times.seconds(usual or decodes),
            )
        self._given = False

    def take(self, start: int, remaining: int, *, scored: bool = False) -> int:
        """Tokens of the next chunk of a request with `start` computed and `remaining` to compute.

        If the prompt is `scored`, each of these tokens may need its logits, which take much memory,
        so the chunk is small.

        The first chunk of a step has a block's worth of tokens even where the SLO has no room: a
        request that waits forever is worse than a late token.
        """
        allowed = min(self.num_tokens, remaining, MAX_SCORED_ROWS if scored else remaining)
        most = allowed
        if self._limit is not None:
            most = self._fitting(start, allowed, remaining, scored)
        if most < remaining:
            unused = min(most, (start + most) % self._block_size)
            # A chunk of a few blocks that ended on a boundary would leave much of the time that the
            # pace allows, and the prompt would need more steps. The first chunk of a step may end
            # within a block: its last block is shared from the next chunk on.
            is_short = most < allowed and unused > MAX_UNUSED_SHARE * most
            # Another chunk that ends within a block is not worth beginning: the request could
            # share nothing until the next boundary.
            if self._given or not is_short and unused < most:
                most -= unused
        if most > 0:
            self._work = self._work.plus(self._chunk(start, most, remaining, scored))
            self.num_tokens -= most
            self._given = True
        return most

    def _chunk(self, start: int, count: int, remaining: int, scored: bool) -> StepWork:
        return StepWork.of_chunk(
            start, count, count if scored else count == remaining, self._times.window
        )

    def _fitting(self, start: int, most: int, remaining: int, scored: bool) -> int:
        """The largest chunk up to `most` whose step is predicted to stay within the limit."""
        limit = self._limit
        assert limit is not None

        def fits(count: int) -> bool:
            return (
                self._times.seconds(self._work.plus(self._chunk(start, count, remaining, scored)))
                <= limit
            )

        if fits(most):
            return most
        # `low` tokens fit, and `high` tokens do not.
        low = 0
        high = most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        least = 0 if self._given else min(self._block_size, most)
        return max(low, least)
