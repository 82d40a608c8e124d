"""What heads have in common that guess from the target's hidden states: whose guesses are made when.

The target's states come with each step (`read`), guesses are asked for one request at a time
(`propose`), and are made for all who will ask in the same step together, so that the heads' weights
are read once.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from twinphase.batch import Batch, StepOutput
from twinphase.request import Request
from twinphase.speculation.proposer import Draft

F32 = NDArray[np.float32]


def silu(x: F32) -> F32:
    """x / (1 + exp(-x)), written so that nothing overflows."""
    out: F32 = x * (np.float32(0.5) + np.float32(0.5) * np.tanh(np.float32(0.5) * x))
    return out


class HiddenProposer(ABC):
    """A `Proposer` and `HiddenReader`.

    Attributes:
        source: of its drafts.
        layers: see `HiddenReader`.
        num_tokens: of a draft.
    """

    source: str
    layers: tuple[int, ...]
    num_tokens: int

    def __init__(self) -> None:
        self._due: dict[str, int] = {}  # output tokens known of who may be guessed for
        self._guessed: dict[str, tuple[int, list[int]]] = {}
        self._asked: dict[str, int] = {}  # in which step a request asked last
        self._num_steps = 0

    @abstractmethod
    def follow(self, batch: Batch, output: StepOutput, hidden: Sequence[F32]) -> None:
        """Take from `hidden` what guesses are made of."""

    @abstractmethod
    def guess(self, names: Sequence[str]) -> list[list[int]]:
        """`num_tokens` tokens for each request, from what was taken last."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """Keep nothing of a request, which may be unknown."""

    def read(self, batch: Batch, output: StepOutput, hidden: Sequence[F32]) -> None:
        """See `HiddenReader`."""
        self._num_steps += 1
        try:
            self.follow(batch, output, hidden)
        except Exception:  # a guess is a favour: the tokens of the step are good
            logging.getLogger("twinphase").warning(
                "Heads failed; nothing is drafted from this step.", exc_info=True
            )
            for share in batch.scheduled:
                self._forget(share.request_id)
            return
        for share in batch.scheduled:
            new = output.token_ids.get(share.request_id)
            if new:
                self._due[share.request_id] = len(share.output_token_ids) + len(new)

    def propose(self, request: Request, limit: int) -> list[Draft]:
        """See `Proposer`."""
        name = request.request_id
        if limit <= 0:
            self._asked.pop(name, None)
            return []
        if name in self._due:
            last = self._asked.get(
                name, self._num_steps - 1
            )  # who asked then too is expected to ask now
            names = [
                other for other in self._due if other == name or self._asked.get(other, -1) >= last
            ]
            for other, token_ids in zip(names, self.guess(names), strict=True):
                self._guessed[other] = self._due.pop(other), token_ids
        self._asked[name] = self._num_steps
        known, token_ids = self._guessed.get(name, (-1, []))
        return (
            [Draft(self.source, token_ids[:limit])]
            if known == len(request.output_token_ids)
            else []
        )

    def forget(self, request: Request) -> None:
        """See `Proposer`."""
        self._forget(request.request_id)

    def _forget(self, name: str) -> None:
        self._due.pop(name, None)
        self._guessed.pop(name, None)
        self._asked.pop(name, None)
        self.drop(name)
