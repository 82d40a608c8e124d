"""Samples tokens on the step's threads: lays out a plan for `kernels/sampling.py`.

`sampling/` on the host defines the tokens, and the kernel gives the same ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import SampledRows, SamplingPlan
from twinphase.backends.cpu.memory import aligned
from twinphase.backends.cpu.program import Buffer, Program
from twinphase.backends.cpu.threads import ThreadPool
from twinphase.backends.cpu.tiling import (
    EDITS,
    GROUPS_PER_EDGE,
    KEY_OF_INFINITY,
    PLANNED_INTS,
    RECORD_INTS,
    SAMPLED_INTS,
)


def scratch_bytes(width: int) -> int:
    """Private memory of a thread for rows of `width` logits, padding included."""
    edges = -(-width // (32 * GROUPS_PER_EDGE))
    return 5 * 4 * width + 4 * width // 32 + 128 + 8 * edges


class CpuRowSampler:
    """The command at the end of a program that samples its rows of logits."""

    def __init__(self, program: Program, logits: Buffer, pool: ThreadPool) -> None:
        """Add the command, which has no tiles but in `sample`; the pool will run the program."""
        self._cells = program.cells
        self._pool = pool
        self._logits = logits.array
        self._outputs = logits.outputs
        rows, width = self._logits.shape
        self._plans = aligned(rows * PLANNED_INTS, np.int64).reshape(rows, -1)
        self._results = aligned(rows * SAMPLED_INTS, np.int64).reshape(rows, -1)
        self._constants = [np.ones(width, np.float32), np.arange(width, dtype=np.int32)]
        self._record = aligned(RECORD_INTS, np.int64)
        arrays = [*self._constants, self._plans, self._results]
        self._record[: 4 + len(arrays)] = [
            self._logits.ctypes.data,
            self._logits.strides[0],
            width // 32,
            self._outputs,
            *(array.ctypes.data for array in arrays),
        ]
        self._tiles = program.cells.address("sampled rows", lambda counts: 0)
        args = [self._record.ctypes.data]
        program.add("sample_rows", self._tiles, args, [logits.floats.data], [])

    def sample(self, plan: SamplingPlan) -> SampledRows:
        count = len(plan.temperature)
        logits = self._logits[:count]
        logits[:, self._outputs :] = -np.inf
        results = self._results[:count]
        tops = np.zeros((count, min(plan.num_top, self._outputs)), np.int64)
        # The kernel knows these arrays by address, so they live until it is done.
        edits, arrays = self._edits(plan)
        masks = self._fill_plans(plan)
        self._record[-3:] = tops.ctypes.data, tops.shape[1], edits.ctypes.data
        self._cells.only(self._tiles, count)
        self._pool.run()
        del arrays, masks
        tokens, scored, best, ranks, totals = results.copy().T
        logprobs = np.zeros(count)
        top_logprobs = np.zeros(tops.shape)
        at = np.flatnonzero(best >= 0)
        if len(at):
            sums = results[at, -1].view(np.float64)
            normalizers = logits[at, best[at]].astype(np.float64) + np.log(sums)
            logprobs[at] = logits[at, scored[at]] - normalizers
            top_logprobs[at] = logits[at[:, None], tops[at]] - normalizers[:, None]
        return SampledRows(tokens, logprobs, ranks, tops, top_logprobs)

    def _fill_plans(self, plan: SamplingPlan) -> NDArray[np.uint8]:
        """Lay out the plan of each row; returns the masks, whose addresses are among that."""
        plans = self._plans[: len(plan.temperature)]
        plans[:, 0] = plan.temperature.view(np.int32)
        plans[:, 1] = KEY_OF_INFINITY
        if plan.min_p.any():
            with np.errstate(divide="ignore"):
                plans[:, 1] = np.abs(np.log(plan.min_p)).astype(np.float32).view(np.int32)
        plans[:, 2] = np.where(plan.top_k < self._outputs, plan.top_k, 0)
        plans[:, 3:5] = 0
        rows, bits = plan.masks
        masks = np.zeros((len(rows), self._logits.shape[1] // 8), np.uint8)
        if len(rows):
            masks[:, : bits.shape[1]] = bits
            plans[rows, 3] = masks.ctypes.data + masks.strides[0] * np.arange(len(rows))
            plans[rows, 4] = 1
        for ids, _ in plan.edits:
            if len(ids):
                plans[ids // self._outputs, 4] = 1
        plans[:, 5] = plan.scored
        plans[:, 6] = plan.top_p.view(np.int64)
        plans[:, 7] = plan.uniform.view(np.int64)
        return masks

    def _edits(self, plan: SamplingPlan) -> tuple[NDArray[np.int64], Any]:
        """For each kind of edit the addresses of its rows' starts, token ids and operands."""
        table = np.zeros((EDITS, 3), np.int64)
        arrays: list[Any] = []
        if len(plan.masks[0]) or any(len(ids) for ids, _ in plan.edits):
            ends = np.arange(len(plan.temperature) + 1) * self._outputs
            arrays = [(np.searchsorted(ids, ends), ids, operands) for ids, operands in plan.edits]
            table[:] = [[array.ctypes.data for array in kind] for kind in arrays]
        return table, arrays
