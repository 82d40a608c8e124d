"""Flattens a `Batch` into the arrays of a step.

Decodes come first, so that attention can split the rows by phase.
"""

from __future__ import annotations

import numpy as np

from twinphase.backends.base import StepInputs
from twinphase.batch import Batch, ScheduledRequest


def build(batch: Batch, block_size: int) -> StepInputs:
    """The inputs of one step; `batch` must not be empty.

    The requests' blocks already have room for the tokens to compute. The function uses Python
    integers until the end: a decode step has few rows, and each small NumPy call costs a
    microsecond.
    """
    shares = batch.scheduled
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start = [0]
    logit_rows = list[int]()
    for share in shares:
        token_ids += share.token_ids
        here = range(
            share.num_computed_tokens, share.num_computed_tokens + share.num_scheduled_tokens
        )
        positions += here
        slots += [share.block_ids[p // block_size] * block_size + p % block_size for p in here]
        logit_rows += [
            query_start[-1] + position - share.num_computed_tokens for position in share.scored
        ]
        if share.samples:
            logit_rows += range(len(token_ids) - 1 - share.num_drafts, len(token_ids))
        query_start.append(len(token_ids))

    used = [
        positions[end - 1] // block_size + 1 for end in query_start[1:]
    ]  # The blocks up to the last computed token.
    block_tables = np.zeros((len(shares), max(used)), np.int32)
    for table, share, count in zip(block_tables, shares, used, strict=True):
        table[:count] = share.block_ids[:count]
    states = [_state_row(share) for share in shares if share.state is not None]
    snapshots = [
        (start + position - share.num_computed_tokens - 1, slot)
        for start, share in zip(query_start, shares, strict=False)
        for position, slot in share.snapshots.items()
    ]
    return StepInputs(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        slot_mapping=np.array(slots, np.int64),
        query_start=np.array(query_start, np.int32),
        block_tables=block_tables,
        num_decodes=len(batch.decodes),
        logit_rows=np.array(logit_rows, np.int32),
        states=np.array(states, np.int32) if states else None,
        snapshots=np.array(snapshots, np.int32).reshape(-1, 2),
    )


def _state_row(share: ScheduledRequest) -> tuple[int, int, int, int]:
    """A row of `StepInputs.states`."""
    assert share.state is not None
    source, target, pending, _ = share.state
    if share.logs_state:
        return source, source, pending, 0
    return source, target, pending, share.num_final
