"""The prefill half of a step: chunks, first come first served, that fill what the decodes left of the token budget."""

from __future__ import annotations

from collections.abc import Iterable

from twinphase.batch import Phase, ScheduledRequest
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.request import Request
from twinphase.scheduler.phase import give_tokens, phase_of

__all__ = ["schedule_prefills"]


def schedule_prefills(
    running: Iterable[Request], kv_cache: KVCacheManager, token_budget: int
) -> list[ScheduledRequest]:
    """A chunk for each running request in `PREFILL`, in order of arrival, until `token_budget` is used up."""
    prefills: list[ScheduledRequest] = []
    for request in running:
        if token_budget == 0:
            break
        if phase_of(request) is Phase.PREFILL:
            chunk = min(token_budget, request.num_tokens - request.num_computed_tokens)
            kv_cache.allocate(request, chunk)
            prefills.append(give_tokens(request, chunk))
            token_budget -= chunk
    return prefills
