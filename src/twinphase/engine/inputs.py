"""Flattens a `Batch` into the arrays of a step. Decodes first, so that attention can split by phase."""

from __future__ import annotations

from itertools import chain

import numpy as np

from twinphase.backends.base import StepInputs
from twinphase.batch import Batch

__all__ = ["build"]


def build(batch: Batch, block_size: int) -> StepInputs:
    """The inputs of one step; `batch` must not be empty.

    Args:
        batch: requests whose blocks already hold the tokens to compute.
        block_size: tokens of a block.
    """
    shares = batch.scheduled
    lengths = np.array([share.num_scheduled_tokens for share in shares], np.int32)
    query_start = np.zeros(len(shares) + 1, np.int32)
    np.cumsum(lengths, out=query_start[1:])
    num_tokens = int(query_start[-1])

    token_ids = np.fromiter(chain.from_iterable(share.token_ids for share in shares), np.int32, num_tokens)
    sequence = np.repeat(np.arange(len(shares)), lengths)  # [num_tokens], the sequence of each row
    first_position = np.array([share.num_computed_tokens for share in shares], np.int32)
    row_in_sequence = np.arange(num_tokens, dtype=np.int32) - query_start[:-1][sequence]
    positions = first_position[sequence] + row_in_sequence

    block_tables = np.zeros((len(shares), max(len(share.block_ids) for share in shares)), np.int32)
    for table, share in zip(block_tables, shares, strict=True):
        table[: len(share.block_ids)] = share.block_ids
    block_ids = block_tables[sequence, positions // block_size].astype(np.int64)
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=block_ids * block_size + positions % block_size,
        query_start=query_start,
        block_tables=block_tables,
        num_decodes=len(batch.decodes),
        logit_rows=np.array([query_start[i + 1] - 1 for i, s in enumerate(shares) if s.samples], np.int32),
    )
