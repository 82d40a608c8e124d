"""The decode half of a step: every running request that decodes gets its one token."""

from __future__ import annotations

from collections.abc import Iterable

from twinphase.batch import Phase, ScheduledRequest
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.request import Request
from twinphase.scheduler.phase import give_tokens, phase_of

__all__ = ["schedule_decodes"]


def schedule_decodes(running: Iterable[Request], kv_cache: KVCacheManager, token_budget: int) -> list[ScheduledRequest]:
    """One token for each running request in `DECODE`, in order of arrival, up to `token_budget`."""
    decodes: list[ScheduledRequest] = []
    for request in running:
        if len(decodes) == token_budget:
            break
        if phase_of(request) is Phase.DECODE:
            kv_cache.allocate(request, 1)
            decodes.append(give_tokens(request, 1))
    return decodes
