"""Joins the router's and a worker's parts of a timeline by durations instead of clocks."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from twinphase.phases.timeline import IntervalKind, RequestTimeline


def shifted(timeline: RequestTimeline, seconds: float) -> RequestTimeline:
    """The timeline on a clock that is `seconds` ahead; durations do not change."""
    if not seconds:
        return timeline
    intervals = [
        replace(one, start=one.start + seconds, end=one.end + seconds) for one in timeline.intervals
    ]
    times = [moment + seconds for moment in timeline.token_times]
    return RequestTimeline(
        timeline.arrival + seconds, intervals, timeline.prefill, timeline.decode, times
    )


def joined(
    before: RequestTimeline, worker: RequestTimeline, now: float, reason: str
) -> RequestTimeline:
    """The whole timeline of a request: `before` it was sent to a worker, and the worker's part.

    The worker's part keeps the times of its own clock if they lie between `before` and `now`;
    otherwise it is moved by the smallest amount that makes it fit. The gap between both parts is
    the transmission.
    """
    start = worker.arrival
    late = worker.end - now
    early = before.end - start
    move = early if early > 0 else -min(late, -early) if late > 0 else 0.0
    part = shifted(worker, move)
    whole = RequestTimeline(
        before.arrival,
        [replace(one) for one in before.intervals],
        _together(before.prefill, part.prefill),
        _together(before.decode, part.decode),
        part.token_times,
    )
    if part.arrival > whole.end:
        whole.extend(IntervalKind.ROUTE, part.arrival, reason)
    if part.intervals:  # Rounding may leave a gap that is smaller than the clocks can show.
        first, *rest = part.intervals
        if first.end > whole.end:
            whole.intervals.append(replace(first, start=whole.end))
        whole.intervals += rest
        whole.end = part.end
    return whole


def _together(one: Any, other: Any) -> Any:
    """The sums of two workers' steps, field by field."""
    both = {
        field.name: (getattr(one, field.name), getattr(other, field.name)) for field in fields(one)
    }
    return type(one)(
        **{name: _together(*two) if name == "unmixed" else sum(two) for name, two in both.items()}
    )
