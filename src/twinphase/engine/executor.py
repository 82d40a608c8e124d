"""The seam between deciding a step and computing it."""

from __future__ import annotations

from typing import Protocol

from twinphase.batch import Batch, StepOutput


class Executor(Protocol):
    """Computes a batch: `Runner` on a model, a simulator from a cost model."""

    def execute(self, batch: Batch) -> StepOutput:
        """Compute every scheduled token of `batch` and sample where a share says so.

        A share that samples but has no entry in the output's `token_ids` could not be sampled,
        `errors` says why; the others are unaffected. An exception means that nothing of the batch
        counts as computed.
        """
