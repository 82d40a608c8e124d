"""The prefill half of a step: chunks fill what the decodes left of the token budget."""

from __future__ import annotations

from collections.abc import Callable

from twinphase.batch import Phase, ScheduledRequest
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.request import Request
from twinphase.scheduler.chunk import ChunkBudget
from twinphase.scheduler.phase import give_tokens, phase_of

MIN_SHARED_TOKENS = 64


def worth_waiting_for(
    request: Request, computed: int, kv_cache: KVCacheManager, computing: set[bytes]
) -> bool:
    """Whether to delay `request` by a step, because this step computes much of its prefix.

    That is at least half of the tokens that it still needs, and enough to be worth a step.
    """
    if not computing:
        return False
    shared = kv_cache.tokens_in(request, computed, computing)
    return shared >= MIN_SHARED_TOKENS and 2 * shared >= request.num_tokens - computed


def schedule_prefills(
    running: list[Request],
    kv_cache: KVCacheManager,
    budget: ChunkBudget,
    prefills: list[ScheduledRequest],
    let_in: Callable[[Request], None],
    computing: set[bytes],
) -> None:
    """A chunk for each running request in `PREFILL`, until the budget is used up.

    Their blocks were taken at admission.

    Args:
        running: in the policy's order.
        kv_cache: finds blocks that other requests have computed meanwhile.
        budget: the room that the step has left.
        prefills: the list that gets the chunks.
        let_in: admits the waiting requests that come before the given one in the policy's order.
        computing: hashes of the blocks that this step computes; those of the chunks are added.
    """
    for request in [request for request in running if phase_of(request) is Phase.PREFILL]:
        let_in(request)
        kv_cache.share_new_prefix(request)
        if worth_waiting_for(request, request.num_computed_tokens, kv_cache, computing):
            continue
        computed = request.num_computed_tokens
        chunk = budget.take(computed, request.num_tokens - computed, scored=request.scores_prompt)
        if not chunk:
            return
        kv_cache.plan_snapshots(request, chunk)
        computing.update(kv_cache.blocks_of_chunk(request, chunk))
        prefills.append(give_tokens(request, chunk))
