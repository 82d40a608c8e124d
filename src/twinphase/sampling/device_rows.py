"""Rows of a step that are sampled on the device: builds the plan and holds the results.

The plan assumes that all drafts are accepted. A row after a rejected draft is sampled too, and its
token is not used. `sampler.py` defines the tokens; the backend does the arithmetic
(`backends/torch/sampling.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import RowSampler, SamplingPlan
from twinphase.batch import Batch, ScheduledRequest, TokenLogprobs
from twinphase.sampling.logit_edits import NO_EDIT, OPERATIONS, Edit, logit_edits
from twinphase.sampling.sampler import (
    GREEDY_BELOW,
    NON_FINITE_LOGITS,
    NonFiniteLogitsError,
    Rows,
    position_of,
    random_of,
)

# Values of `SamplingPlan.scored` that are no token.
NOT_SCORED = -2
SAMPLED_TOKEN = -1


def is_worth_planning(batch: Batch) -> bool:
    """Whether any row needs more than its largest logit.

    The host finds the largest logit without a plan, and it is the same token either way.
    """
    return any(
        share.num_logits
        and (
            share.sampling_params.temperature >= GREEDY_BELOW
            or share.sampling_params.logprobs is not None
            or share.scored
        )
        for share in batch.scheduled
    )


class DeviceRows(Rows):
    """The rows of one step, sampled at once."""

    def __init__(
        self, sampler: RowSampler, batch: Batch, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """Sample the step that `sampler` launched last."""
        self._size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._count = sum(share.num_logits for share in batch.scheduled)
        self._errors: dict[int, BaseException] = {}
        self._edits: list[list[Edit]] = [[] for _ in OPERATIONS]
        self._masks: dict[int, NDArray[np.uint8]] = {}
        self._scored = np.full(self._count, NOT_SCORED, np.int64)
        # temperature, min_p, top_k, top_p and the random number of each row
        self._values = np.zeros((5, self._count))
        self._values[3] = 1.0
        self._num_top = 0
        row = 0
        for share in batch.scheduled:
            self._plan(share, range(row, row + share.num_logits))
            row += share.num_logits
        temperature, min_p, top_k, top_p, uniforms = self._values
        masks = np.array(list(self._masks.values()), np.uint8)
        plan = SamplingPlan(
            edits=tuple(map(_joined, self._edits)),
            masks=(
                np.array(list(self._masks), np.int64),
                masks.reshape(len(self._masks), -(-vocab_size // 8)),
            ),
            temperature=temperature.astype(np.float32),
            min_p=min_p,
            top_k=top_k.astype(np.int64),
            top_p=top_p,
            uniform=uniforms,
            scored=self._scored,
            num_top=self._num_top,
        )
        self.sampled = sampler.sample(plan)

    def __len__(self) -> int:
        return self._count

    def token(self, row: int, share: ScheduledRequest, accepted: Sequence[int]) -> int:
        self._check_finite(row)
        if row in self._errors:
            raise self._errors[row]
        return int(self.sampled.token_ids[row])

    def logprobs(self, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        """Log probabilities of the row's sampled token, or of the next prompt token."""
        self._check_finite(row)
        sampled = self.sampled
        ids = sampled.top_ids[row, :num_top].tolist()
        logprobs = sampled.top_logprobs[row, :num_top].tolist()
        return TokenLogprobs(
            token_id,
            float(sampled.logprobs[row]),
            int(sampled.ranks[row]),
            list(zip(ids, logprobs, strict=True)),
        )

    def _check_finite(self, row: int) -> None:
        if self.sampled.token_ids[row] < 0:
            raise NonFiniteLogitsError(NON_FINITE_LOGITS)

    def _plan(self, share: ScheduledRequest, rows: range) -> None:
        """Plan the rows of one request."""
        params = share.sampling_params
        scored = share.scored
        if scored:
            following = [share.prompt_token_ids[position + 1] for position in scored]
            self._scored[rows[: len(scored)]] = following
            self._num_top = max(self._num_top, params.prompt_logprobs or 0)
        if not share.samples:
            return
        drafts = share.token_ids[len(share.token_ids) - share.num_drafts :]
        output: Sequence[int] = share.output_token_ids
        if params.logprobs is not None:
            self._scored[rows[len(scored) :]] = SAMPLED_TOKEN
            self._num_top = max(self._num_top, params.logprobs)
        for number, row in enumerate(rows[len(scored) :]):
            if number:
                output = [*share.output_token_ids, *drafts[:number]]
            try:
                self._edit(row, share, output)
                if params.temperature >= GREEDY_BELOW:
                    self._values[:, row] = (
                        params.temperature,
                        params.min_p,
                        max(params.top_k, 0),
                        params.top_p,
                        random_of(params, position_of(share, number)),
                    )
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # Raised when this row's token is needed.
                self._errors[row] = error
                return
            if number < len(drafts) and not self._accepts(
                row, share, drafts[number], len(output) + 1
            ):
                return

    def _accepts(
        self, row: int, share: ScheduledRequest, draft: int, num_output_tokens: int
    ) -> bool:
        """Whether the next row can be needed: the draft is allowed and does not end the output."""
        if not 0 <= draft < self._size:  # A drafter with a larger vocabulary.
            return False
        mask = self._masks.get(row)
        if mask is not None and not mask[draft // 8] >> draft % 8 & 1:
            return False
        return not share.sampling_params.ends_at(draft, num_output_tokens, self._eos_token_ids)

    def _edit(self, row: int, share: ScheduledRequest, output: Sequence[int]) -> None:
        """Plan the edits of a row, and the mask of the request's constraint."""
        edits = logit_edits(
            share.sampling_params, share.prompt_token_ids, output, self._eos_token_ids
        )
        if share.constraint is not None:
            ids, operands = edits[0]
            excluded = operands == -np.inf
            free = np.zeros(self._size, np.float32)
            free[ids[excluded]] = -np.inf
            restricted = share.constraint.restrict(free, output)
            if restricted is not free:
                self._masks[row] = np.packbits(restricted > -np.inf, bitorder="little")
                # The mask excludes these tokens too, unless a spent thinking budget forces one.
                edits[0] = (ids[~excluded], operands[~excluded])
        for planned, (ids, operands) in zip(self._edits, edits, strict=True):
            if len(ids):
                planned.append((ids + row * self._size, operands))


def _joined(edits: Sequence[Edit]) -> Edit:
    """The edits of all rows as one."""
    if not edits:
        return NO_EDIT
    ids, operands = zip(*edits, strict=True)
    return np.concatenate(ids), np.concatenate(operands)
