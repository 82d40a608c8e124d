"""Rows whose tokens are sampled on the device: the plan that it gets, and the results.

A row behind drafts is told as if they were right: if they were not, nobody asks for its token. What
the tokens are is `sampler.py`'s; the device's arithmetic is the backend's
(`backends/torch/sampling.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import DeviceSampler, SamplingPlan
from twinphase.batch import Batch, ScheduledRequest, TokenLogprobs
from twinphase.sampling.logit_filters import subtracted
from twinphase.sampling.sampler import (
    GREEDY_BELOW,
    NON_FINITE_LOGITS,
    NonFiniteLogitsError,
    Rows,
    position_of,
    random_of,
)

NOT_SCORED = -2
DRAWN = -1


class DeviceRows(Rows):
    """The rows of one step, drawn at once."""

    def __init__(
        self, sampler: DeviceSampler, batch: Batch, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """Sample the step that `sampler` launched last."""
        self._size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._count = sum(share.num_logits for share in batch.scheduled)
        self._errors: dict[int, BaseException] = {}
        self._edits: tuple[_Edits, _Edits, _Edits] = ([], []), ([], []), ([], [])
        self._masks: dict[int, NDArray[np.uint8]] = {}
        self._scored = np.full(self._count, NOT_SCORED, np.int64)
        self._values = np.zeros((5, self._count))  # temperature, min_p, top_k, top_p, uniform
        self._values[3] = 1.0
        self._num_top = row = 0
        for share in batch.scheduled:
            self._plan(share, range(row, row + share.num_logits))
            row += share.num_logits
        temperature, min_p, top_k, top_p, uniforms = self._values
        bits = np.array(list(self._masks.values()), np.uint8).reshape(
            len(self._masks), -(-vocab_size // 8)
        )
        self.sampled = sampler.sample(
            SamplingPlan(
                (_joined(self._edits[0]), _joined(self._edits[1]), _joined(self._edits[2])),
                (np.array(list(self._masks), np.int64), bits),
                temperature.astype(np.float32),
                min_p,
                top_k.astype(np.int64),
                top_p,
                uniforms,
                self._scored,
                self._num_top,
            )
        )

    def __len__(self) -> int:
        return self._count

    def token(self, row: int, share: ScheduledRequest, accepted: Sequence[int]) -> int:
        """See `Rows`."""
        self._check_finite(row)
        if row in self._errors:
            raise self._errors[row]
        return int(self.sampled.token_ids[row])

    def logprobs(self, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        """See `Rows`; of the token that the row gave, or of the prompt's next."""
        self._check_finite(row)
        sampled = self.sampled
        top = zip(
            sampled.top_ids[row, :num_top].tolist(),
            sampled.top_logprobs[row, :num_top].tolist(),
            strict=True,
        )
        return TokenLogprobs(
            token_id, float(sampled.logprobs[row]), int(sampled.ranks[row]), list(top)
        )

    def _check_finite(self, row: int) -> None:
        if self.sampled.token_ids[row] < 0:
            raise NonFiniteLogitsError(NON_FINITE_LOGITS)

    def _plan(self, share: ScheduledRequest, rows: range) -> None:
        """What is to be done with the rows of one request."""
        params = share.sampling_params
        scored = share.scored
        if scored:
            self._scored[rows[: len(scored)]] = [
                share.prompt_token_ids[position + 1] for position in scored
            ]
            self._num_top = max(self._num_top, params.prompt_logprobs or 0)
        if not share.samples:
            return
        drafts = share.token_ids[len(share.token_ids) - share.num_drafts :]
        if params.logprobs is not None:
            self._scored[rows[len(scored) :]] = DRAWN
            self._num_top = max(self._num_top, params.logprobs)
        for number, row in enumerate(rows[len(scored) :]):
            output = [*share.output_token_ids, *drafts[:number]]
            try:
                self._edit(row, share, output)
                if params.temperature >= GREEDY_BELOW:
                    at = position_of(share, number)
                    own = (
                        params.temperature,
                        params.min_p,
                        max(params.top_k, 0),
                        params.top_p,
                        random_of(params, at),
                    )
                    self._values[:, row] = own
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # of this request alone, if its row is asked for
                self._errors[row] = error
                return
            if number < len(drafts) and not self._goes_on(
                row, share, drafts[number], len(output) + 1
            ):
                return

    def _goes_on(
        self, row: int, share: ScheduledRequest, draft: int, num_output_tokens: int
    ) -> bool:
        """Whether the row behind this one can be asked for: the draft is allowed, and does not end the output."""
        mask = self._masks.get(row)
        if mask is not None and not mask[draft // 8] >> draft % 8 & 1:
            return False
        return not share.sampling_params.ends_at(draft, num_output_tokens, self._eos_token_ids)

    def _edit(self, row: int, share: ScheduledRequest, output: Sequence[int]) -> None:
        """What `logit_filters.process` and the request's constraint do to the row."""
        params = share.sampling_params
        added = dict(share.sampling_params.logit_bias or {})
        if len(output) < params.min_tokens:
            added |= dict.fromkeys([*self._eos_token_ids, *(params.stop_token_ids or ())], -np.inf)
        if share.constraint is not None:
            free = np.zeros(self._size, np.float32)
            held_back = [token_id for token_id, value in added.items() if value == -np.inf]
            free[held_back] = -np.inf
            restricted = share.constraint.restrict(free, output)
            if restricted is not free:
                self._masks[row] = np.packbits(restricted > -np.inf, bitorder="little")
                for (
                    token_id
                ) in held_back:  # the mask says so; a thinking budget that is spent lifts it
                    del added[token_id]
        ids = np.array(list(added), np.int64)
        values = np.array(list(added.values()), np.float32)
        self._put(0, row, ids, values)
        if params.repetition_penalty != 1.0:
            ids = np.unique(np.array([*share.prompt_token_ids, *output], np.int64))
            self._put(1, row, ids, np.full(len(ids), params.repetition_penalty, np.float32))
        if params.frequency_penalty or params.presence_penalty:
            self._put(2, row, *subtracted(params, output))

    def _put(
        self, which: int, row: int, ids: NDArray[np.signedinteger], values: NDArray[np.float32]
    ) -> None:
        if len(ids):
            self._edits[which][0].append(ids + row * self._size)
            self._edits[which][1].append(values)


_Edits = tuple[list[NDArray[np.int64]], list[NDArray[np.float32]]]


def _joined(edits: _Edits) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Those of all rows."""
    at, values = edits
    return (
        (np.concatenate(at), np.concatenate(values))
        if at
        else (np.zeros(0, np.int64), np.zeros(0, np.float32))
    )
