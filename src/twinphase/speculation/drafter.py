"""The seam between an engine and whoever guesses its requests' next tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twinphase.batch import Batch, StepOutput
from twinphase.request import Request


class Drafter(Protocol):
    """Asked once a step, before it is scheduled. A wrong guess costs time; it changes no answer."""

    @property
    def num_failures(self) -> int:
        """Times that a source of guesses failed since the engine started."""

    def draft(self, requests: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        """Guesses at the tokens that follow the last known ones, by request id; those without a guess are left out.

        `requests` decode in the next step, unless they are preempted.
        """

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """What came of the step. Its lists are lent until the next step begins."""

    def forget(self, request: Request) -> None:
        """The request has ended."""


class HiddenReader(Protocol):
    """Who guesses from the target's hidden states.

    Attributes:
        layers: those whose inputs it reads, ascending; the number of layers stands for what the
            head reads.
    """

    layers: tuple[int, ...]

    def read(self, batch: Batch, output: StepOutput, hidden: Sequence[NDArray[np.float32]]) -> None:
        """A batch was computed; it may be a part of a step.

        Raises nothing: the tokens of `output` are good.

        Args:
            batch: as scheduled.
            output: what became of it; drafts that were wrong are still rows of `batch` and of
                `hidden`.
            hidden: for each of `layers`, float32 [num_tokens, hidden_size], or [num_logits,
                hidden_size] of what the head reads; lent until this returns.
        """
