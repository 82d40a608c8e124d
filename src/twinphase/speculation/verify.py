"""Verifies a step's drafts and samples each request's new tokens.

A draft token is accepted if it is the token that the request samples without drafts, from the same
logits and with the same randomness. So the output is bit-identical to that without speculation, at
any temperature ("drafter-invariant", Daliri et al., 2024, arXiv:2408.07978). No other rule accepts
more tokens of drafts without probabilities.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from twinphase.batch import Batch, ScheduledRequest, StepOutput, TokenLogprobs
from twinphase.sampling.sampler import ConstraintError, NonFiniteLogitsError, Rows

F32 = NDArray[np.float32]


def sample(logits: F32 | Rows, batch: Batch, eos_token_ids: Collection[int]) -> StepOutput:
    """Sample the new tokens of each request in `batch` that needs one.

    Args:
        logits: float32 [num_logits, vocab_size], rows in the batch's order, which are not changed;
            or the rows that a device sampled.
        batch: batch of the step.
        eos_token_ids: tokens that end an output; `min_tokens` excludes them.

    Returns:
        One token per sampling request and one per accepted draft. If a request cannot be sampled,
        such as from infinite logits, `errors` has the reason, and only that request fails.
    """
    output = StepOutput()
    row = 0
    step = logits if isinstance(logits, Rows) else Rows(logits, eos_token_ids)
    if len(step) != sum(share.num_logits for share in batch.scheduled):
        raise ValueError(f"the step has {len(step)} rows of logits, not those of its requests")
    for share in batch.scheduled:
        if not share.num_logits:
            continue
        rows = range(row, row + share.num_logits)
        row = row + share.num_logits
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        try:
            if scored := share.scored:
                output.prompt_logprobs[share.request_id] = (
                    scored.start + 1,
                    score(step, rows, share),
                )
                rows = rows[len(scored) :]
            for token_id, entry in (
                verify(step, rows, share, eos_token_ids) if share.samples else ()
            ):
                token_ids.append(token_id)
                if entry is not None:
                    logprobs.append(entry)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # After accepted tokens, the failed row is computed again.
            if not token_ids:  # After accepted tokens, the row that failed is computed again.
                output.errors[share.request_id] = _reason(error)
                continue
        if share.samples:
            output.token_ids[share.request_id] = token_ids
            if share.sampling_params.logprobs is not None:
                output.logprobs[share.request_id] = logprobs
    return output


def verify(
    step: Rows, rows: Sequence[int], share: ScheduledRequest, eos_token_ids: Collection[int]
) -> Iterator[tuple[int, TokenLogprobs | None]]:
    """Sample one request's tokens, row by row, while its drafts are accepted.

    The first token that differs from its draft is also valid, because its row attended to accepted
    tokens only. No row is sampled after a token that ends the output.

    Args:
        step: samples the rows.
        rows: indices of this request's 1 + num_drafts rows.
        share: the request's share of the step; its `token_ids` end with the drafts.
        eos_token_ids: tokens that end an output.

    Yields:
        Each new token, and its log probabilities if requested.

    Raises:
        Exception: as `sample_row`; the tokens of earlier rows are valid.
    """
    params = share.sampling_params
    accepted = list[int]()
    drafts = share.token_ids[len(share.token_ids) - share.num_drafts :]
    for row, draft in zip(rows, [*drafts, None], strict=True):
        token_id = step.token(row, share, accepted)
        yield (
            token_id,
            None if params.logprobs is None else step.logprobs(row, token_id, params.logprobs),
        )
        accepted.append(token_id)
        if token_id != draft or params.ends_at(
            token_id, len(share.output_token_ids) + len(accepted), eos_token_ids
        ):
            return


def score(step: Rows, rows: Sequence[int], share: ScheduledRequest) -> list[TokenLogprobs]:
    """Log probabilities of the prompt tokens after `share.scored`, from the first of `rows`."""
    num_top = share.sampling_params.prompt_logprobs or 0
    following = [share.prompt_token_ids[position + 1] for position in share.scored]
    return [
        step.logprobs(row, token_id, num_top)
        for row, token_id in zip(rows, following, strict=False)
    ]


def _reason(error: BaseException) -> str:
    if isinstance(error, (NonFiniteLogitsError, ConstraintError)):
        return str(error)
    return f"Sampling failed: {type(error).__name__}: {error}"
