"""The order of requests under each policy.

One key orders admission, chunks and preemption.
"""

from __future__ import annotations

from collections.abc import Callable

from twinphase.request import Request

Key = Callable[[Request], tuple[int, int]]


def policy_key(policy: str) -> Key:
    """The sort key of "fcfs" (arrival) or "priority" (lower priority first, then arrival).

    Admission and chunks go from the smallest key, preemption from the largest: the lowest priority
    and the youngest. A preempted request keeps its place in the queue, so that it is the first to
    be admitted again.
    """
    if policy == "fcfs":
        return lambda request: (0, request.order)
    return lambda request: (request.priority, request.order)
