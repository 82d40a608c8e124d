"""The executor that computes: builds the step's inputs, runs the model on its backend, samples."""

from __future__ import annotations

from collections.abc import Collection
from time import perf_counter

from twinphase.backends.base import Backend
from twinphase.batch import Batch, StepOutput
from twinphase.engine.inputs import build
from twinphase.models.decoder import Decoder
from twinphase.sampling.device_rows import DeviceRows
from twinphase.speculation.drafter import HiddenReader
from twinphase.speculation.verify import sample


class Runner:
    """A model on a backend whose KV cache is allocated."""

    def __init__(
        self, model: Decoder, backend: Backend, *, block_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self.model = model
        self.backend = backend
        self.block_size = block_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.reader: HiddenReader | None = None

    def show_hidden(self, reader: HiddenReader) -> None:
        """Show `reader` the hidden states of every step from the first on; call it before that."""
        self.reader = reader
        self.model.kept = reader.layers

    def execute(self, batch: Batch) -> StepOutput:
        begin = perf_counter()
        inputs = build(batch, self.block_size)
        sampler = getattr(self.backend, "device_sampler", None)
        start = perf_counter()
        if sampler is None:
            logits = self.backend.execute(self.model.forward, inputs)
            forward_end = perf_counter()
            output = sample(logits, batch, self.eos_token_ids)
        else:
            sampler.launch(self.model.forward, inputs)
            rows = DeviceRows(sampler, batch, self.model.blueprint.vocab_size, self.eos_token_ids)
            output = sample(rows, batch, self.eos_token_ids)
            forward_end = start + rows.sampled.forward_seconds
            output.times.device = rows.sampled.forward_seconds + rows.sampled.sampling_seconds
        output.times.building = start - begin
        output.times.sampling = perf_counter() - forward_end
        output.times.rank_wait = getattr(self.backend, "rank_wait", 0.0)
        if self.reader is not None:
            self.reader.read(batch, output, self.backend.kept())
        return output
