"""The edits that a request's parameters make to its logits before sampling, for host and device.

An edit is a list of token ids, each at most once, and one float32 operand per id. `OPERATIONS` says
what an operand does to its logit; edits are applied in that order, which is vLLM's: logit_bias and
min_tokens, repetition penalty, frequency and presence penalties.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from twinphase.request import SamplingParams

F32 = NDArray[np.float32]
Edit = tuple[NDArray[np.int64], F32]


def penalize_repetition(logits: F32, penalty: F32) -> F32:
    """Divide positive logits and multiply the others (Keskar et al., 2019)."""
    return np.where(logits > 0, logits / penalty, logits * penalty)


OPERATIONS: tuple[Callable[[F32, F32], F32], ...] = (np.add, penalize_repetition, np.subtract)


NO_EDIT: Edit = (np.zeros(0, np.int64), np.zeros(0, np.float32))


def logit_edits(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    eos_token_ids: Collection[int],
) -> list[Edit]:
    """One edit per operation; -inf is added to tokens that `min_tokens` excludes."""
    edits = [NO_EDIT] * len(OPERATIONS)
    added = dict(params.logit_bias or {})
    if len(output_token_ids) < params.min_tokens:
        added |= dict.fromkeys([*eos_token_ids, *(params.stop_token_ids or ())], -np.inf)
    if added:
        edits[0] = (np.array(list(added)), np.array(list(added.values()), np.float32))
    if params.repetition_penalty != 1.0:
        ids = np.unique(np.array([*prompt_token_ids, *output_token_ids], np.int64))
        edits[1] = (ids, np.full(len(ids), params.repetition_penalty, np.float32))
    if params.frequency_penalty or params.presence_penalty:
        # OpenAI's formula: frequency counts every occurrence, presence counts once.
        ids, counts = np.unique(np.array(output_token_ids, np.int64), return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        edits[2] = (ids, penalties.astype(np.float32))
    return edits


def edited(logits: F32, edits: Sequence[Edit]) -> F32:
    """A row of logits with the edits applied; `logits` itself if there are none."""
    result = logits
    for operation, (ids, operands) in zip(OPERATIONS, edits, strict=True):
        if len(ids):
            if result is logits:
                result = logits.copy()
            result[ids] = operation(result[ids], operands)
    return result
