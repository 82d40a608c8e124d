"""The memory of a step's inputs: kernels know it by address, so it never moves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from twinphase.backends.base import KVCacheSpec, StepInputs
from twinphase.backends.cpu.attention_units import Limits
from twinphase.backends.cpu.attention_work import AttentionWork, runs_of
from twinphase.backends.cpu.memory import aligned
from twinphase.blueprint import Blueprint, KVShape


class StepMemory:
    """Fixed arrays for the inputs of a step, as large as the largest step needs.

    Attributes:
        works: attention's queries and units, by the rows that attend and the shape of KV.
    """

    def __init__(self, spec: KVCacheSpec, blueprint: Blueprint, limits: Limits) -> None:
        """Reserve memory."""
        self._block_size = spec.block_size
        most = limits.rows
        limits = replace(limits, runs=min(limits.runs, most), block_size=spec.block_size)
        self.token_ids = aligned(most, np.int32)
        self.positions = aligned(most, np.int32)
        self.logit_positions = aligned(most, np.int32)
        self.slots = aligned(most, np.int64)
        self.logit_rows = aligned(most, np.int32)
        columns = -(-limits.positions // spec.block_size)
        self.block_tables = aligned(limits.runs * columns, np.int32).reshape(-1, columns)
        heads = blueprint.num_heads
        self.works: dict[tuple[str, KVShape], AttentionWork] = {
            ("tokens", shape): AttentionWork("tokens", shape, heads, limits)
            for shape in spec.groups
        }
        if blueprint.shared_kv_layers:
            # Any row may be wanted alone.
            limits = replace(limits, runs=most)
            for shape in spec.groups:
                self.works["logits", shape] = AttentionWork("logits", shape, heads, limits)

    def fill(self, inputs: StepInputs) -> dict[str, int]:
        """Copy a step's inputs in; returns its counts by name."""
        tokens = inputs.num_tokens
        logits = len(inputs.logit_rows)
        self.token_ids[:tokens] = inputs.token_ids
        self.positions[:tokens] = inputs.positions
        self.slots[:tokens] = inputs.slot_mapping
        self.logit_rows[:logits] = inputs.logit_rows
        sequences = len(inputs.block_tables)
        width = inputs.block_tables.shape[1]
        if (
            width > self.block_tables.shape[1]
        ):  # fine as long as every sequence fits into the reserved columns
            width = self.block_tables.shape[1]
            longest = int(inputs.context_lens.max())
            if longest > width * self._block_size:
                raise ValueError(
                    f"a sequence has {longest} tokens; there is room for {width * self._block_size}"
                )
        self.block_tables[:sequences, :width] = inputs.block_tables[:, :width]
        self.logit_positions[:logits] = inputs.positions[inputs.logit_rows]
        counts = {"tokens": tokens, "logits": logits}
        plans = {rows: runs_of(inputs, rows) for rows, _ in self.works}
        for (rows, _), work in self.works.items():
            counts |= work.fill(plans[rows], inputs.block_tables)
        return counts
