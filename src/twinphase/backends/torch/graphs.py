"""Captured decode steps: one call starts all kernels, since starts take longer than runs.

A step is captured for a number of rows and a context, and serves every step that is no larger: the
inputs are copied to where the capture read them, and padded by rows of no sequence, which write to
a spare block. Not for prefill, nor for drafts: their steps are long enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from twinphase.backends.base import KVCacheSpec, StepInputs

# With longer contexts attention takes longer than starting kernels.
MIN_CONTEXT_TOKENS = 512
MAX_CONTEXT_TOKENS = 8192


class Graph(Protocol):
    """One step's kernels."""

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        """Record what `compute` starts; the tensor where each replay leaves its result."""

    def replay(self) -> None:
        """Start it all again, on the same memory."""


class CudaGraph:
    """A `Graph` of CUDA."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        with torch.cuda.graph(self._graph, pool=self._pool):
            return compute()

    def replay(self) -> None:
        self._graph.replay()


def cuda_graphs() -> Callable[[], Graph]:
    """A maker of graphs that share their memory, as they never run at once."""
    pools: list[Any] = []

    def make() -> Graph:
        if not pools:
            pools.append(torch.cuda.graph_pool_handle())
        return CudaGraph(pools[0])

    return make


@dataclass
class Captured:
    """A step of `rows` sequences that decode after at most `context` tokens.

    Attributes:
        buffer: what its kernels read besides weights and cache.
        kept: hidden states, see `Backend.keep`.
    """

    rows: int
    context: int
    spec: KVCacheSpec
    graph: Graph = field(init=False)
    buffer: Tensor = field(init=False)
    logits: Tensor = field(init=False)
    kept: list[Tensor] = field(init=False)

    def padded(self, inputs: StepInputs | None) -> StepInputs:
        """The step padded to this size; None is a step of no sequence."""
        count = 0 if inputs is None else inputs.num_tokens
        spare = self.spec.num_blocks
        tokens, positions = np.zeros((2, self.rows), np.int32)
        slots = np.full(self.rows, spare * self.spec.block_size, np.int64)
        tables = np.full((self.rows, -(-self.context // self.spec.block_size)), spare, np.int32)
        if inputs is not None:
            tokens[:count] = inputs.token_ids
            positions[:count] = inputs.positions
            slots[:count] = inputs.slot_mapping
            width = min(tables.shape[1], inputs.block_tables.shape[1])
            tables[:count, :width] = inputs.block_tables[:, :width]
        rows = np.arange(self.rows + 1, dtype=np.int32)
        return StepInputs(
            token_ids=tokens,
            positions=positions,
            slot_mapping=slots,
            query_start=rows,
            block_tables=tables,
            num_decodes=self.rows,
            logit_rows=rows[:-1],
        )


class Graphs:
    """The sizes of one engine, the largest first: what is captured later fits into its memory."""

    def __init__(self, spec: KVCacheSpec, max_num_seqs: int, max_model_len: int) -> None:
        rows = _doubling(1, max_num_seqs)
        contexts = _doubling(MIN_CONTEXT_TOKENS, min(max_model_len, MAX_CONTEXT_TOKENS))
        self.sizes = [
            Captured(count, context, spec) for context in contexts[::-1] for count in rows[::-1]
        ]

    def find(self, inputs: StepInputs) -> Captured | None:
        """The smallest that serves the step; None if there is none."""
        rows = inputs.num_tokens
        if not rows == inputs.num_decodes == len(inputs.logit_rows) == len(inputs.context_lens):
            return None
        longest = int(inputs.context_lens.max())
        fits = (
            size for size in reversed(self.sizes) if size.rows >= rows and size.context >= longest
        )
        return next(fits, None)


def _doubling(first: int, last: int) -> list[int]:
    """`first`, twice as much, and so on, until `last` is covered."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(2 * sizes[-1])
    return sizes
