"""The interfaces between an engine and its source of draft tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twinphase.batch import Batch, StepOutput
from twinphase.request import Request


class Drafter(Protocol):
    """Called once per step, before scheduling. Rejected drafts cost time and change no output."""

    @property
    def num_failures(self) -> int:
        """Times that a source of guesses failed since the engine started."""

    def draft(self, requests: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        """Draft tokens by request id; requests without a draft are left out.

        `requests` decode in the next step, unless they are preempted.
        """

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """Learn from a step's output; its lists may be kept until the next step begins."""

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended."""


class HiddenReader(Protocol):
    """Drafts from the target's hidden states.

    Attributes:
        layers: the layers whose inputs are needed, ascending; the number of layers stands for the
            input of the language model head, and that number + 1 for what its input would be in
            all rows.
    """

    layers: tuple[int, ...]

    def read(self, batch: Batch, output: StepOutput, hidden: Sequence[NDArray[np.float32]]) -> None:
        """Take the hidden states of a batch, which may be a part of a step. Raises nothing.

        Args:
            batch: the batch as scheduled.
            output: its output; rejected drafts still have rows in `batch` and `hidden`.
            hidden: for each of `layers`, float32 [num_tokens, hidden_size], or for the input of the
                head [num_logits, hidden_size]; valid until this call returns.
        """
