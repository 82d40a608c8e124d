"""The base class of draft heads on hidden states, which draft for many requests in one call.

Hidden states arrive with each step (`read`), but drafts are requested for one request at a time
(`propose`). The first `propose` of a step drafts for all requests that are expected to follow, so
that the weights of the heads are read once.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from twinphase.batch import Batch, ScheduledRequest, StepOutput
from twinphase.request import Request
from twinphase.speculation.proposer import Draft

F32 = NDArray[np.float32]


def silu(x: F32) -> F32:
    """x / (1 + exp(-x)), in a form that does not overflow."""
    out: F32 = x * (np.float32(0.5) + np.float32(0.5) * np.tanh(np.float32(0.5) * x))
    return out


def right_rows(
    batch: Batch, output: StepOutput
) -> Iterator[tuple[ScheduledRequest, int, list[int]]]:
    """(share, first row, token ids) of each request of a step; rejected drafts are left out.

    The token ids are those that follow each of the share's rows.
    """
    first = 0
    for share in batch.scheduled:
        new = output.token_ids.get(share.request_id, [])
        count = len(share.token_ids) - (share.num_drafts + 1 - len(new) if share.samples else 0)
        if new or not share.samples:
            after = _token_at(share, new, share.num_computed_tokens + count)
            yield share, first, [*share.token_ids[1:count], after]
        first += len(share.token_ids)


def _token_at(share: ScheduledRequest, new: Sequence[int], position: int) -> int:
    """The token at `position`, which follows the accepted rows of `share`."""
    if new:
        return new[-1]
    num_prompt = len(share.prompt_token_ids)
    if position < num_prompt:
        return share.prompt_token_ids[position]
    return share.output_token_ids[position - num_prompt]


class HiddenStateProposer(ABC):
    """A `Proposer` and `HiddenReader`.

    Attributes:
        source: name of its drafts' source.
        layers: see `HiddenReader`.
        num_tokens: tokens per draft.
    """

    source: str
    layers: tuple[int, ...]
    num_tokens: int

    def __init__(self) -> None:
        # Number of known output tokens of requests that have new hidden states and no draft from
        # them.
        self._ready: dict[str, int] = {}
        # The last draft of a request, with the number of output tokens at that time.
        self._drafts: dict[str, tuple[int, list[int]]] = {}
        # The step of each request's last `propose`.
        self._last_asked: dict[str, int] = {}
        self._num_steps = 0

    @abstractmethod
    def update(self, batch: Batch, output: StepOutput, hidden: Sequence[F32]) -> None:
        """Keep the rows of `hidden` that later drafts start from."""

    @abstractmethod
    def draft_batch(self, names: Sequence[str]) -> list[list[int]]:
        """`num_tokens` draft tokens for each request, from its latest hidden states."""

    @abstractmethod
    def discard(self, name: str) -> None:
        """Drop the state of a request, which may be unknown."""

    def read(self, batch: Batch, output: StepOutput, hidden: Sequence[F32]) -> None:
        self._num_steps += 1
        try:
            self.update(batch, output, hidden)
        except Exception:  # The step's tokens are valid without a draft.
            logging.getLogger("twinphase").warning(
                "Heads failed; nothing is drafted from this step.", exc_info=True
            )
            for share in batch.scheduled:
                self._forget(share.request_id)
            return
        for share in batch.scheduled:
            new = output.token_ids.get(share.request_id)
            if new:
                self._ready[share.request_id] = len(share.output_token_ids) + len(new)

    def propose(self, request: Request, limit: int) -> list[Draft]:
        name = request.request_id
        if limit <= 0:
            self._last_asked.pop(name, None)
            return []
        if name in self._ready:
            # Requests that called in the same step as this one are expected to do so again.
            since = self._last_asked.get(name, self._num_steps - 1)
            names = [
                other
                for other in self._ready
                if other == name or self._last_asked.get(other, -1) >= since
            ]
            for other, token_ids in zip(names, self.draft_batch(names), strict=True):
                self._drafts[other] = self._ready.pop(other), token_ids
        self._last_asked[name] = self._num_steps
        num_known, token_ids = self._drafts.get(name, (-1, []))
        if num_known != len(request.output_token_ids):
            return []
        return [Draft(self.source, token_ids[:limit])]

    def forget(self, request: Request) -> None:
        self._forget(request.request_id)

    def _forget(self, name: str) -> None:
        for state in (self._ready, self._drafts, self._last_asked):
            state.pop(name, None)
        self.discard(name)
