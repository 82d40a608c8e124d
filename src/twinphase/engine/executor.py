"""The seam between deciding a step and computing it."""

from __future__ import annotations

from typing import Protocol

from twinphase.batch import Batch, StepOutput


class Executor(Protocol):
    """Computes a batch: `Runner` on a model, a simulator from a cost model."""

    def execute(self, batch: Batch) -> StepOutput:
        """Compute all scheduled tokens of `batch`, and sample for the requests that need a token.

        If sampling fails for one request, its entry is missing in the output's `token_ids`, and
        `errors` has the reason; other requests are unaffected. After an exception, no token of the
        batch counts as computed.
        """
