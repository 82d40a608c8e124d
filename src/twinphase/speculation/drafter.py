"""The seam between an engine and whoever guesses its requests' next tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from twinphase.batch import Batch, StepOutput
from twinphase.request import Request

__all__ = ["Drafter"]


class Drafter(Protocol):
    """Asked once a step, before it is scheduled. A wrong guess costs time; it changes no answer."""

    def draft(self, requests: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        """Guesses at the tokens that follow the last known ones, by request id; those without a guess are left out.

        `requests` decode in the next step, unless they are preempted.
        """

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """What came of the step. Its lists are lent until the next step begins."""

    def forget(self, request: Request) -> None:
        """The request has ended."""
