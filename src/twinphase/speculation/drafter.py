"""The interfaces between an engine and its source of draft tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twinphase.batch import Batch, StepOutput
from twinphase.request import Request


class Drafter(Protocol):
    """A source of drafts, called before scheduling; rejected drafts only cost time."""

    @property
    def num_failures(self) -> int:
        """Number of times that a source of drafts failed since the engine started."""

    def draft(self, requests: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        """Draft tokens by request id; requests without a draft are left out.

        `requests` decode in the next step, unless they are preempted.
        """

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """Learn from a step's output; the output's lists may be kept until the next step begins."""

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended."""


class HiddenReader(Protocol):
    """A drafter that reads the target's hidden states.

    Attributes:
        layers: indices of the layers whose inputs are needed, ascending. The number of layers
            stands for the input of the output head in rows with logits, and that number + 1 for it
            in all rows.
    """

    layers: tuple[int, ...]

    def read(self, batch: Batch, output: StepOutput, hidden: Sequence[NDArray[np.float32]]) -> None:
        """Read the hidden states of a batch, which may be part of a step; must not raise.

        Args:
            batch: the batch as scheduled.
            output: the batch's output; rejected drafts still have rows in `batch` and `hidden`.
            hidden: for each of `layers`, float32 [num_tokens, hidden_size], or [num_logits,
                hidden_size] for the input of the head; valid during this call.
        """
