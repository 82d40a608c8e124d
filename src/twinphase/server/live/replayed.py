"""Turns a step log (`--trace-file`) into a recording, with the code that makes the feed.

The log has prompts and tokens, which the recording omits. The log has no work in FLOP or bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twinphase import __version__
from twinphase.engine.process.messages import (
    Accepted,
    RequestUpdate,
    StepStats,
    StepUpdates,
    StepView,
)
from twinphase.engine.process.watch import num_new_tokens
from twinphase.engine.trace import Replay, Replaying, replay
from twinphase.outcome import FinishReason
from twinphase.phases.ledger import step_parts
from twinphase.phases.record import RequestRecord
from twinphase.server.live.events import FORMAT, VERSION
from twinphase.server.live.lanes import Fields
from twinphase.server.live.recorder import BOOT, Lines


def recording_of(path: Path) -> tuple[Replay, list[bytes]]:
    """Replay a log; return the result and the lines of the recording.

    Raises:
        InvalidRequestError: as `replay`.
    """
    maker = _Maker()
    found = replay(path, maker.take)
    return found, maker.finish()


class _Maker:
    """Converts a replay's events to those of the feed."""

    def __init__(self) -> None:
        self._lines = Lines()
        self._records: dict[str, RequestRecord] = {}
        self._running: set[str] = set()
        self._now = 0.0
        self._origin: float | None = None
        self._index = 0

    def take(self, event: dict[str, Any], state: Replaying) -> None:
        kind = event["event"]
        if kind == "header":
            self._lines.begin(_hello(event), num_blocks=event["config"]["num_kv_blocks"])
        elif kind == "add":
            record = RequestRecord.arrived(event["request_id"], self._now)
            record.tokenized(len(event["prompt_token_ids"]), self._now)
            self._records[record.request_id] = record
            self._lines.take(Accepted(record.request_id), self._now, record)
        elif kind == "finish":
            update = self._ended(event["request_id"], FinishReason(event["reason"]))
            self._lines.take(StepUpdates(update), self._now)
        elif kind == "observe":
            self._step(event, state)

    def finish(self) -> list[bytes]:
        """Read and convert all remaining lines."""
        self._lines.flush(self._now)
        return self._lines.lines

    def _step(self, event: dict[str, Any], state: Replaying) -> None:
        drafting = event.get("drafting", 0.0)
        seconds = event["seconds"] + drafting
        start = self._now + event["gap"]
        if "start" in event:  # Older logs have only durations.
            self._origin = event["start"] - start if self._origin is None else self._origin
            start = event["start"] - self._origin
        alone, chunks = step_parts(state.parts, state.predicted, seconds, drafting)
        batch = state.batch
        self._now = start + seconds
        scheduler = state.scheduler
        self._running.difference_update(batch.preempted)
        view = StepView(
            self._index,
            state.predicted,
            bookkeeping=0.0,
            held_back=batch.held_back or "",
            running=len(scheduler.running),
            waiting=len(scheduler.fair),
            prefills=[
                (share.request_id, len(share.token_ids), own, num_new_tokens(share))
                for share, own in zip(batch.prefills, chunks, strict=True)
            ],
            decodes=[
                (share.request_id, num_new_tokens(share), share.num_drafts)
                for share in batch.decodes
            ],
            preempted=list(batch.preempted),
            started={
                share.request_id: ""
                for share in batch.scheduled
                if share.request_id not in self._running
            },
        )
        self._index += 1
        self._running = {request.request_id for request in scheduler.running}
        rest = seconds - alone
        work = (batch.prefill_work.rows, batch.decode_work.rows, 0, 0, 0, 0)
        stats = StepStats(start, self._now, rest, alone, *work, **_load(state))
        updates = [
            RequestUpdate(share.request_id, [], share.num_prefilled, share.num_cached_tokens)
            for share in batch.scheduled
        ]
        for request in state.finished:
            assert request.finish_reason is not None, "it has finished"
            updates += self._ended(request.request_id, request.finish_reason)
        self._lines.take(StepUpdates(updates, stats, view), self._now)

    def _ended(self, request_id: str, reason: FinishReason) -> list[RequestUpdate]:
        record = self._records.pop(request_id, None)
        if record is None:
            return []
        record.end(reason)
        record.timeline.end = self._now
        return [RequestUpdate(request_id, [], 0, 0, ended=record)]


def _load(state: Replaying) -> dict[str, Any]:
    scheduler = state.scheduler
    cache = scheduler.kv_cache
    return {
        "num_running": len(scheduler.running),
        "num_waiting": len(scheduler.fair),
        "kv_cache_usage": cache.pool.num_held / cache.pool.num_blocks,
        "prefix_queries": cache.num_queried_tokens,
        "prefix_hits": cache.num_hit_tokens,
        "num_preemptions": scheduler.num_preemptions,
        "itl_slo_seconds": scheduler.pace.slo_seconds or 0.0,
    }


def _hello(header: dict[str, Any]) -> Fields:
    config = header["config"]
    slo = header["slo_seconds"]
    return {
        "format": FORMAT,
        "version": VERSION,
        "boot": BOOT,
        "origin": 0.0,
        "twinphase": __version__,
        "model": "a step log",
        "context": config["max_model_len"],
        "seats": config["max_num_seqs"],
        "block_size": config["block_size"],
        "itl_slo_ms": round(1e3 * slo, 3) if slo else None,
    }
