"""The decode half of a step: every running request that decodes gets its one token.

Where blocks run out, the last in the policy's order gives up its own, as often as it takes. The first in order always
gets through, since no request is accepted that the whole cache could not hold; so there is progress in every step.
"""

from __future__ import annotations

from collections.abc import Callable

from twinphase.batch import Phase, ScheduledRequest
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.request import Request
from twinphase.scheduler.phase import give_tokens, phase_of

__all__ = ["schedule_decodes"]


def schedule_decodes(
    running: list[Request], kv_cache: KVCacheManager, preempt: Callable[[Request], None]
) -> list[ScheduledRequest]:
    """One token for each running request in `DECODE`.

    Args:
        running: in the policy's order.
        kv_cache: where their next tokens need room.
        preempt: takes a request's blocks and removes it from `running`.
    """
    decodes: list[ScheduledRequest] = []
    index = 0
    while index < len(running):
        request = running[index]
        if phase_of(request) is Phase.DECODE:
            while not kv_cache.grow(request, request.num_computed_tokens + 1):
                preempt(running[-1])
                if index == len(running):  # it was the last itself
                    return decodes
            decodes.append(give_tokens(request, 1))
        index += 1
    return decodes
