"""The operations of recurrent layers as commands, and where sequences keep their states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import StepInputs
from twinphase.backends.cpu.experts import ExpertOperations
from twinphase.backends.cpu.program import Buffer, Memory
from twinphase.backends.cpu.threads import aligned
from twinphase.backends.cpu.tiling import GATE_TILES_PER_ROW
from twinphase.backends.cpu.weights import Vector
from twinphase.backends.states import FINAL, PENDING, SOURCE, TARGET, SlotLayout


class StateMemory:
    """The slots, and what kernels read of a step's sequences; it never moves.

    Attributes:
        layout: of a slot.
        places: of each row: its number in its sequence, and the offset in bytes of the end of its
            sequence's history, from a layer's first slot on; int64 [tokens, 2].
        plans: of each state to be written: first row of its sequence, rows up to the state, drafts
            after them, offset of the end of the sequence's history, offset of the slot; int64
            [states, 5].
    """

    def __init__(
        self, layout: SlotLayout, slots: NDArray[np.uint8], max_tokens: int, max_seqs: int
    ) -> None:
        """`slots` are the bytes of all slots, one after another."""
        self.layout = layout
        self._slots = slots
        self.places = aligned(2 * max_tokens, np.int64).reshape(-1, 2)
        # Each sequence's target, and a snapshot of every block that the step may complete.
        self.plans = aligned(5 * (max_seqs + max_tokens), np.int64).reshape(-1, 5)

    def layer(self, number: int) -> int:
        """Address of a recurrent layer's part of the first slot."""
        return int(self._slots.ctypes.data) + 4 * number * self.layout.layer_floats

    def fill(self, inputs: StepInputs) -> dict[str, int]:
        """Note where a step's sequences keep their states; returns the counts by name."""
        states = inputs.states
        if states is None:
            raise ValueError("the step names no states of its sequences")
        layout = self.layout
        drafts = int((np.diff(inputs.query_start) - states[:, FINAL]).max())
        if drafts > layout.num_drafts:
            raise ValueError(f"{drafts} drafts; a slot has room for {layout.num_drafts}")
        first = inputs.query_start[:-1].astype(np.int64)
        rows = inputs.query_start[1:] - first
        row_bytes = 4 * layout.channels
        slots = states.astype(np.int64)
        before = (
            slots[:, SOURCE] * layout.nbytes + (slots[:, PENDING] + layout.taps - 1) * row_bytes
        )
        final = slots[:, FINAL]
        plan = first, final, rows - final, before, slots[:, TARGET] * layout.nbytes
        self.plans[: len(first)] = np.stack(plan, axis=1)
        for number, (row, slot) in enumerate(inputs.snapshots.tolist(), len(first)):
            sequence = int(np.searchsorted(first, row, side="right")) - 1
            start = first[sequence]
            target = slot * layout.nbytes
            self.plans[number] = start, row + 1 - start, 0, before[sequence], target
        places = self.places[: inputs.num_tokens]
        places[:, 0] = np.arange(inputs.num_tokens) - np.repeat(first, rows)
        places[:, 1] = np.repeat(before, rows)
        return {"states": len(first) + len(inputs.snapshots)}


@dataclass(frozen=True)
class _Columns:
    """Some columns of a buffer's rows."""

    address: int
    stride: int


class RecurrentOperations(ExpertOperations):
    """Those of a model with recurrent layers, too; `states` is set before they are used."""

    states: StateMemory

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._by_tap: list[NDArray[np.float32]] = []  # kernels know them by address

    def short_conv(self, bcx: Buffer, weight: Vector, layer: int) -> Buffer:
        """B * x in full, then the convolution times C, then what the next step needs of B * x."""
        program = self.program
        source = bcx.floats
        width = self.states.layout.channels
        b, c, x = (_Columns(source.data + 4 * i * width, source.stride) for i in range(3))
        product = Memory(program, bcx.rows, width, quantized=False)
        args = [b.address, x.address, source.stride, product.groups, product.data]
        program.add_rows("multiply", args, [source.data], product)

        def make(quantized: bool) -> Memory:
            out = Memory(program, bcx.rows, width, quantized)
            self._convolve(product, weight, layer, c, out, source.data)
            return out

        self._keep_history(product, layer)
        return Buffer(program, bcx.rows, width, make=make)

    def _convolve(
        self,
        x: Memory,
        weight: Vector,
        layer: int,
        gate: _Columns,
        out: Memory,
        gate_memory: int,
    ) -> None:
        taps = self.states.layout.taps
        # One row for each tap, so that a group of channels is one vector.
        by_tap = np.ascontiguousarray(weight.values[:, :taps].T)
        self._by_tap.append(by_tap)
        args = [x.data, x.stride, x.groups, self.states.places.ctypes.data]
        args += [self.states.layer(layer), by_tap.ctypes.data, gate.address, gate.stride]
        self.program.add(
            f"causal_conv:{taps}:{'q8' if out.quantized else 'f32'}",
            self.program.tiles(out.rows, 1, GATE_TILES_PER_ROW),
            [*args, *out.addresses],
            [x.data, gate_memory],
            [(out.data, 0)],
        )

    def _keep_history(self, x: Memory, layer: int) -> None:
        """No command of the step reads what this writes: it is another slot."""
        states = self.states
        args = [x.data, x.stride, x.groups, states.plans.ctypes.data, states.layer(layer)]
        self.program.add(
            f"keep_history:{states.layout.taps}",
            self.program.count(f"states*{GATE_TILES_PER_ROW}"),
            args,
            [x.data],
            [(states.layer(layer), 0)],
        )
