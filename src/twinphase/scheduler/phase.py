"""The phase of a request, derived in this one place, and a request's share of a step."""

from __future__ import annotations

from twinphase.batch import Phase, ScheduledRequest, StateStep
from twinphase.request import Request


def phase_of(request: Request) -> Phase:
    """DECODE if only one sampled token is uncomputed; else PREFILL, recomputed output too."""
    tail_is_sampled = bool(request.output_token_ids)
    return (
        Phase.DECODE
        if tail_is_sampled and request.num_computed_tokens == request.num_tokens - 1
        else Phase.PREFILL
    )


def give_tokens(request: Request, num_tokens: int) -> ScheduledRequest:
    """A request's share of a step: its next `num_tokens` uncomputed tokens.

    The request's lists are lent, not copied: the share is valid until the next commit.
    """
    start = request.num_computed_tokens
    stop = request.num_computed_tokens + num_tokens
    state = request.state
    return ScheduledRequest(
        request_id=request.request_id,
        phase=phase_of(request),
        token_ids=request.token_ids(start, stop),
        num_computed_tokens=start,
        block_ids=request.block_ids,
        samples=stop == request.num_tokens,
        sampling_params=request.sampling_params,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        most_computed_tokens=request.most_computed_tokens,
        constraint=request.constraint,
        num_cached_tokens=request.counts.num_cached_tokens,
        tenant=request.tenant,
        state=None
        if state is None
        else StateStep(state.source, state.target, state.pending, state.log_room),
        snapshots={} if state is None else state.snapshots,
    )
