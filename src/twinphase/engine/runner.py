"""The executor that computes: builds the step's inputs, runs the model on its backend, samples."""

from __future__ import annotations

from collections.abc import Collection
from time import perf_counter

import numpy as np

from twinphase.backends.base import Backend, RowSampler, StepInputs
from twinphase.batch import Batch, StepOutput
from twinphase.cache.state_cache import ZERO_SLOT
from twinphase.engine.inputs import build
from twinphase.models.decoder import Decoder
from twinphase.sampling.device_rows import DeviceRows, is_worth_planning
from twinphase.sampling.sampler import Rows
from twinphase.speculation.drafter import HiddenReader
from twinphase.speculation.verify import F32, sample

# The made-up row goes from the zero state to a slot that requests write before they read it.
MADE_UP_STATE = np.array([[ZERO_SLOT, ZERO_SLOT + 1, 0, 1]], np.int32)


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
        """Show `reader` the hidden states of every step; call it before the first step."""
        self.reader = reader
        self.model.kept = reader.layers

    def first_step(self) -> None:
        """Compute a made-up row, so that no step of a request pays for one-time costs.

        Its keys and values lie in block 0: a request overwrites them before it reads.
        """
        if getattr(self.backend, "device_sampler", None) is None:
            row = np.zeros(1, np.int32)
            inputs = StepInputs(
                token_ids=row,
                positions=row,
                slot_mapping=row.astype(np.int64),
                query_start=np.arange(2, dtype=np.int32),
                block_tables=row[None],
                num_decodes=0,
                logit_rows=row,
                states=MADE_UP_STATE if self.model.blueprint.recurrent_layers else None,
            )
            self.backend.execute(self.model.forward, inputs)

    def execute(self, batch: Batch) -> StepOutput:
        begin = perf_counter()
        inputs = build(batch, self.block_size)
        sampler = getattr(self.backend, "device_sampler", None)
        start = perf_counter()
        if sampler is None:
            logits: F32 | Rows = self.backend.execute(self.model.forward, inputs)
            forward_end = perf_counter()
            planner = getattr(self.backend, "row_sampler", None)
            if planner is not None and is_worth_planning(batch):
                logits = self._planned(planner, batch)
            output = sample(logits, batch, self.eos_token_ids)
        else:
            sampler.launch(self.model.forward, inputs)
            rows = self._planned(sampler, batch)
            output = sample(rows, batch, self.eos_token_ids)
            forward_end = start + rows.sampled.forward_seconds
            output.times.device = rows.sampled.forward_seconds + rows.sampled.sampling_seconds
        output.times.building = start - begin
        output.times.sampling = perf_counter() - forward_end
        output.times.rank_wait = getattr(self.backend, "rank_wait", 0.0)
        if self.reader is not None:
            self.reader.read(batch, output, self.backend.kept())
        return output

    def _planned(self, sampler: RowSampler, batch: Batch) -> DeviceRows:
        return DeviceRows(sampler, batch, self.model.blueprint.vocab_size, self.eos_token_ids)
