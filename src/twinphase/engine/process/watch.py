"""Reports for watchers of an engine: the requests of each step, and the holders of KV blocks.

They are made only while the engine is watched. Totals are in `StepStats`.
"""

from __future__ import annotations

from itertools import takewhile

from twinphase.batch import ScheduledRequest
from twinphase.engine.engine import Engine, StepResult
from twinphase.engine.process.messages import BlocksHeld, StepView
from twinphase.outcome import PrefixMiss
from twinphase.phases.timeline import IntervalKind


class StepWatch:
    """Reports the steps of an engine from its creation to `close`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._pool = engine.scheduler.kv_cache.pool
        self._pool.left = []
        self._running = {request.request_id for request in self._scheduler.running}
        self._blocks: dict[str, list[int]] = {}  # By request, as last reported.

    def close(self) -> None:
        self._pool.left = None

    def step(self, result: StepResult) -> StepView:
        """The view of a step; call it once after each step."""
        batch = result.batch
        record = result.record
        scheduler = self._scheduler
        started: dict[str, str] = {}
        misses: dict[str, PrefixMiss] = {}
        finished = {request.request_id: request for request in result.finished}
        self._running.difference_update(batch.preempted)
        for share in batch.scheduled:
            name = share.request_id
            if name in self._running:
                continue
            started[name] = self._wait_reason(name)
            request = scheduler.get(name) or finished.get(name)
            if request is not None and request.counts.prefix_miss is not None:
                misses[name] = request.counts.prefix_miss
        self._running = {request.request_id for request in scheduler.running}
        return StepView(
            record.index,
            record.predicted,
            bookkeeping=max(0.0, self._engine.ledger.settled - record.end),
            held_back=batch.held_back or "",
            running=len(scheduler.running),
            waiting=len(scheduler.fair),
            prefills=[
                (share.request_id, len(share.token_ids), own, num_new_tokens(share))
                for share, own in zip(batch.prefills, record.chunk_seconds, strict=True)
            ],
            decodes=[
                (share.request_id, num_new_tokens(share), share.num_drafts)
                for share in batch.decodes
            ],
            preempted=list(batch.preempted),
            started=started,
            misses=misses,
        )

    def blocks(self) -> BlocksHeld | None:
        """Changes since the last call; None if there are none."""
        lanes = []
        holders = {request.request_id: request.block_ids for request in self._scheduler.running}
        for name in [name for name in self._blocks if name not in holders]:
            del self._blocks[name]
            lanes.append((name, 0, list[int]()))
        for name, block_ids in holders.items():
            before = self._blocks.get(name, [])
            if block_ids != before:
                kept = _num_equal(before, block_ids)
                lanes.append((name, kept, block_ids[kept:]))
                self._blocks[name] = block_ids[:]
        left = self._pool.left
        if not lanes and not left:
            return None
        self._pool.left = []
        is_held = self._pool.is_held
        alone = [block_id for block_id in dict.fromkeys(left or ()) if not is_held(block_id)]
        cached = self._pool.cached
        return self._report(
            lanes,
            [block_id for block_id in alone if block_id in cached],
            [block_id for block_id in alone if block_id not in cached],
        )

    def all_blocks(self) -> BlocksHeld:
        """The present holders of all blocks, for the first report."""
        self._blocks = {
            request.request_id: request.block_ids[:] for request in self._scheduler.running
        }
        self._pool.left = []
        lanes = [(name, 0, block_ids) for name, block_ids in self._blocks.items()]
        return self._report(lanes, list(self._pool.cached), [], whole=True)

    def _report(
        self,
        lanes: list[tuple[str, int, list[int]]],
        cached: list[int],
        freed: list[int],
        *,
        whole: bool = False,
    ) -> BlocksHeld:
        pool = self._pool
        return BlocksHeld(
            lanes,
            cached,
            freed,
            num_held=pool.num_held,
            num_shared=pool.num_shared,
            num_cached=pool.num_cached,
            num_free=pool.num_free,
            whole=whole,
        )

    def _wait_reason(self, request_id: str) -> str:
        """The resource that the first in line lacked for most of a request's wait (its ledger)."""
        timeline = self._engine.timelines.get(request_id)
        intervals = reversed(timeline.intervals) if timeline is not None else ()
        queued = (one for one in intervals if one.kind is IntervalKind.QUEUE)
        last = next(queued, None)
        return last.reason if last is not None else ""


def num_new_tokens(share: ScheduledRequest) -> int:
    """Output tokens that a step gave a request; its lists have grown by them in the commit."""
    if not share.samples:
        return 0
    known = share.num_computed_tokens + len(share.token_ids) - share.num_drafts
    return len(share.output_token_ids) + len(share.prompt_token_ids) - known


def _num_equal(before: list[int], now: list[int]) -> int:
    """The length of the common beginning."""
    if now[: len(before)] == before:
        return len(before)
    pairs = zip(before, now, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
