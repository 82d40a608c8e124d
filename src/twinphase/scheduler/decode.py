"""The decode half of a step: a token for each decoding request, and room for its drafts.

If blocks run out, requests are preempted from the end of the policy's order until enough blocks are
free. The first request in order always gets its token, since no request is accepted that the whole
cache could not hold; so every step makes progress.

Drafts take only unused rows and blocks of a step. If few are left, drafts get shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from twinphase.batch import Phase, ScheduledRequest
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.request import Request
from twinphase.scheduler.phase import give_tokens, phase_of


def schedule_decodes(
    running: list[Request], kv_cache: KVCacheManager, preempt: Callable[[Request], None]
) -> list[ScheduledRequest]:
    """One token for each running request in `DECODE`.

    Args:
        running: in the policy's order.
        kv_cache: gives the blocks for their next tokens.
        preempt: takes a request's blocks and removes it from `running`.
    """
    decodes: list[ScheduledRequest] = []
    index = 0
    while index < len(running):
        request = running[index]
        if phase_of(request) is Phase.DECODE:
            while not kv_cache.grow(request, request.num_computed_tokens + 1):
                preempt(running[-1])
                if index == len(running):  # The request itself was the last one, and was preempted.
                    return decodes
            kv_cache.plan_snapshots(request, 1)
            decodes.append(give_tokens(request, 1))
        index += 1
    return decodes


def with_drafts(
    decodes: list[ScheduledRequest],
    drafts: Mapping[str, Sequence[int]],
    num_rows: int,
    longest: Callable[[ScheduledRequest], int],
) -> list[ScheduledRequest]:
    """The same shares with the drafted tokens after their own.

    Args:
        decodes: shares without drafts.
        drafts: token ids by request.
        num_rows: rows of the step that all drafts together may take; requests are served in order.
        longest: drafted tokens that a request could still use.
    """
    drafted = []
    for share in decodes:
        draft = list(drafts.get(share.request_id, ()))[: max(0, min(num_rows, longest(share)))]
        num_rows -= len(draft)
        drafted.append(
            replace(share, token_ids=share.token_ids + draft, num_drafts=len(draft))
            if draft
            else share
        )
    return drafted


def fit_drafts(
    decodes: list[ScheduledRequest], get: Callable[[str], Request | None], kv_cache: KVCacheManager
) -> None:
    """Take free blocks for the drafts in `decodes`, and shorten the others; evict nothing.

    Call it last, when all other requests have their blocks of this step. `get` finds a request
    by its id.
    """
    for index, share in enumerate(decodes):
        request = get(share.request_id) if share.num_drafts else None
        if request is None:
            continue
        room = (
            len(share.block_ids) + kv_cache.pool.num_free
        ) * kv_cache.block_size - share.num_computed_tokens
        count = min(len(share.token_ids), room)
        kv_cache.grow(request, share.num_computed_tokens + count)
        if count < len(share.token_ids):
            decodes[index] = replace(share, token_ids=share.token_ids[:count], num_drafts=count - 1)
