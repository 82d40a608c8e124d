"""The prefill half of a step: chunks, in the policy's order, that fill what the decodes left of the token budget."""

from __future__ import annotations

from collections.abc import Callable

from twinphase.batch import Phase, ScheduledRequest
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.request import Request
from twinphase.scheduler.chunk import ChunkBudget
from twinphase.scheduler.phase import give_tokens, phase_of

__all__ = ["schedule_prefills"]


def schedule_prefills(
    running: list[Request],
    kv_cache: KVCacheManager,
    budget: ChunkBudget,
    prefills: list[ScheduledRequest],
    let_in: Callable[[Request], None],
) -> None:
    """A chunk for each running request in `PREFILL`, until the budget is used up.

    Their blocks were taken when they were let in.

    Args:
        running: in the policy's order.
        kv_cache: where others may have computed what comes next.
        budget: what the step has room for.
        prefills: where the chunks go.
        let_in: admits the waiting requests that come before the given one in the policy's order.
    """
    for request in [request for request in running if phase_of(request) is Phase.PREFILL]:
        let_in(request)
        kv_cache.share_new_prefix(request)
        chunk = budget.take(request.num_computed_tokens, request.num_tokens - request.num_computed_tokens)
        if not chunk:
            return
        prefills.append(give_tokens(request, chunk))
