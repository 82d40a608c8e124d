"""Which drafts of a step were right, and each request's new tokens.

A draft is accepted while it is the token that the request would have drawn anyway, from the same
logits and with the same randomness. So the output is that of no speculation, bit for bit and at any
temperature ("drafter-invariant", Daliri et al., 2024, arXiv:2408.07978), and for a draft without
probabilities no other rule accepts more of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from twinphase.batch import Batch, ScheduledRequest, StepOutput, TokenLogprobs
from twinphase.sampling.sampler import ConstraintError, NonFiniteLogitsError, Rows

F32 = NDArray[np.float32]


def sample(logits: F32 | Rows, batch: Batch, eos_token_ids: Collection[int]) -> StepOutput:
    """The new tokens of each request of `batch` that wants some.

    Args:
        logits: float32 [num_logits, vocab_size], rows in the batch's order; read, never written. Or
            what a device drew.
        batch: the step.
        eos_token_ids: tokens that end an output, and that `min_tokens` holds back.

    Returns:
        A token per sampling request, and one for each draft that was right. A request that cannot
        be sampled, such as from logits that are not finite, has its reason in `errors` instead: it
        alone fails.
    """
    output = StepOutput()
    row = 0
    step = logits if isinstance(logits, Rows) else Rows(logits, eos_token_ids)
    if len(step) != sum(share.num_logits for share in batch.scheduled):
        raise ValueError(
            f"the step has {len(step)} rows of logits, and its requests want other ones"
        )
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
        except (
            BaseException
        ) as error:  # whatever one request's values did, even a panic: the others get their tokens
            if not token_ids:  # else the row where it failed comes again, as the first of a step
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
    """Draw one request's tokens, row by row, for as long as the drafts were right.

    The first token that is not the draft is the request's all the same: its row saw right tokens
    only. A token that ends the output ends the window too.

    Args:
        step: whatever tells a row's token.
        rows: of this request, 1 + num_drafts.
        share: its `token_ids` end with the drafts.
        eos_token_ids: tokens that end an output.

    Yields:
        Each new token with its log probabilities, where they are asked for.

    Raises:
        Exception: what `sample_row` raises at a row; the tokens before it stand.
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
    """Log probabilities of the prompt tokens that follow the rows of `share.scored`, the first of `rows`."""
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
