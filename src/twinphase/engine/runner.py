"""The executor that computes: builds the step's inputs, runs the model on its backend, samples."""

from __future__ import annotations

from collections.abc import Collection
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import Backend
from twinphase.batch import Batch, StepOutput
from twinphase.engine.inputs import build
from twinphase.models.decoder import Decoder
from twinphase.sampling.drawn_rows import DrawnRows
from twinphase.sampling.sampler import Rows
from twinphase.speculation.drafter import HiddenReader
from twinphase.speculation.verify import sample

__all__ = ["Runner"]


class Runner:
    """A model on a backend whose KV cache is allocated."""

    def __init__(self, model: Decoder, backend: Backend, *, block_size: int, eos_token_ids: Collection[int]) -> None:
        self.model = model
        self.backend = backend
        self.block_size = block_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.reader: HiddenReader | None = None

    def show_hidden(self, reader: HiddenReader) -> None:
        """Show `reader` the hidden states of every step from the first on; call it before that."""
        self.reader, self.model.kept = reader, reader.layers

    def execute(self, batch: Batch) -> StepOutput:
        inputs, drawer = build(batch, self.block_size), getattr(self.backend, "drawer", None)
        rows: Rows | NDArray[np.float32]
        if drawer is None:
            rows = self.backend.execute(self.model.forward, inputs)
            start = perf_counter()
        else:
            drawer.launch(self.model.forward, inputs)
            start = perf_counter()
            rows = DrawnRows(drawer, batch, self.model.blueprint.vocab_size, self.eos_token_ids)
        output = sample(rows, batch, self.eos_token_ids)
        output.sampling_seconds = perf_counter() - start
        if self.reader is not None:
            self.reader.read(batch, output, self.backend.kept())
        return output
