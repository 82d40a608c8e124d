"""The prefill half of a step: chunks, in the policy's order, that fill what the decodes left of the token budget."""

from __future__ import annotations

from collections.abc import Iterable

from twinphase.batch import Phase, ScheduledRequest
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.request import Request
from twinphase.scheduler.chunk import ChunkBudget
from twinphase.scheduler.phase import give_tokens, phase_of

__all__ = ["schedule_prefills"]


def schedule_prefills(
    running: Iterable[Request], kv_cache: KVCacheManager, budget: ChunkBudget
) -> list[ScheduledRequest]:
    """A chunk for each running request in `PREFILL`, until the budget is used up.

    Their blocks were taken when they were admitted.
    """
    prefills: list[ScheduledRequest] = []
    for request in running:
        if budget.num_tokens == 0:
            break
        if phase_of(request) is Phase.PREFILL:
            kv_cache.share_new_prefix(request)
            chunk = budget.take(request.num_computed_tokens, request.num_tokens - request.num_computed_tokens)
            if not chunk:
                break
            prefills.append(give_tokens(request, chunk))
    return prefills
