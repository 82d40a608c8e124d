"""Commits many decode steps at a time if they differ only in the lengths of contexts.

A simulation jumps over such steps, since it knows the next tokens beforehand. `scheduler.py`
decides each step. This file predicts how long its decisions stay the same, and applies their
effects; `tests/simulate/test_jumps.py` proves that nothing differs from single steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from twinphase.batch import Batch
from twinphase.request import MAX_TOKENS, Request
from twinphase.scheduler.scheduler import Scheduler


def steady_steps(scheduler: Scheduler, batch: Batch, token_id: int) -> int:
    """Number of steps, beginning with `batch`, that decode its requests and end none of them.

    It is 0 if `batch` is the last step of a request, or if something else may
    happen: a chunk, a draft, an admission, a preemption, another tenant's turn.

    Args:
        scheduler: as `schedule` left it.
        batch: the step that it returned.
        token_id: the token that every request will get in every step.
    """
    kv_cache = scheduler.kv_cache
    if (
        batch.prefills
        or scheduler.fair.lines
        or scheduler.fair.is_shared
        or kv_cache.states is not None
        or len(batch.decodes) < len(scheduler.running)
        or any(share.num_drafts for share in batch.decodes)
    ):
        return 0
    steps = MAX_TOKENS
    for request in scheduler.running:
        params = request.sampling_params
        if params.ends_at(token_id, MAX_TOKENS, scheduler.eos_token_ids):
            return 0
        steps = min(steps, scheduler.max_tokens_total(request) - request.num_tokens - 1)
    while steps > 0 and _new_blocks(scheduler, steps) > kv_cache.pool.num_available:
        steps //= 2
    return steps


def _new_blocks(scheduler: Scheduler, steps: int) -> int:
    kv_cache = scheduler.kv_cache
    return sum(
        kv_cache.blocks_for(request.num_computed_tokens + steps) - len(request.block_ids)
        for request in scheduler.running
    )


class SteadySteps:
    """Steps in progress, whose requests get their tokens and blocks as late as possible.

    Attributes:
        requests: the decoding requests, in the order of the batch.
        block_size: tokens of a KV block.
        due: the step at whose end a change of the KV cache becomes visible, or None.
    """

    def __init__(self, scheduler: Scheduler, num_steps: int, token_id: int) -> None:
        """Begin with a step that `schedule` has returned, and that is not committed."""
        self.requests = list(scheduler.running)
        self._scheduler = scheduler
        self._token_id = token_id
        self._start = [request.num_computed_tokens for request in self.requests]
        self._num_committed = 0
        self.block_size = size = scheduler.kv_cache.block_size
        # Changes of blocks by moment: at the beginning of step s, moment 2 s, a request takes a
        # block; at its end, moment 2 s + 1, a block is full. The first moment comes last.
        changes = []
        for place, start in enumerate(self._start):
            for step in range(size - 1 - start % size, num_steps, size):
                changes.append((2 * step + 1, place))
                if step + 1 < num_steps:
                    changes.append((2 * step + 2, place))
        changes.sort(reverse=True)
        self._changes = changes

    @property
    def due(self) -> int | None:
        if not self._changes:
            return None
        free = self._scheduler.kv_cache.pool.num_free
        for moment, _ in reversed(self._changes):
            if moment % 2:
                return moment // 2
            free -= 1
            if free < 0:  # A cached block is evicted.
                return moment // 2
        return None

    def reach(self, begun: int, ended: int) -> None:
        """The first `begun` steps have begun, and the first `ended` of them have ended."""
        changes = self._changes
        kv_cache = self._scheduler.kv_cache
        while changes:
            moment, place = changes[-1]
            step = moment // 2
            if step >= (ended if moment % 2 else begun):
                return
            changes.pop()
            request = self.requests[place]
            if moment % 2:
                self._advance(request, self._start[place] + step + 1)
            else:
                kv_cache.grow(request, self._start[place] + step + 1)

    def commit(self, begun: int, seconds: Sequence[float]) -> None:
        """Commit the next steps, which took `seconds`; `begun` steps in all have begun.

        The seconds are predicted. The scheduler is as after `commit` of the last step that ended.
        """
        scheduler = self._scheduler
        self._num_committed += len(seconds)
        self.reach(begun, self._num_committed)
        for request, start in zip(self.requests, self._start, strict=True):
            self._advance(request, start + self._num_committed)
        tenant = self.requests[0].tenant
        for each in seconds:
            scheduler.seconds += each
            scheduler.fair.charge(tenant, each)
            scheduler.step_work = {tenant: each}

    def _advance(self, request: Request, computed: int) -> None:
        """Give a request tokens until it has `computed` computed ones."""
        before = request.num_computed_tokens
        outputs = request.output_token_ids
        outputs.extend([self._token_id] * (computed - before))
        request.counts.num_output_tokens = len(outputs)
        request.num_computed_tokens = computed
        self._scheduler.kv_cache.keep_computed(request, before)
