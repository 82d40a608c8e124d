"""Makes commands of the operations of recurrent layers, and keeps the sequences' states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import StepInputs
from twinphase.backends.cpu.experts import ExpertOperations
from twinphase.backends.cpu.memory import aligned
from twinphase.backends.cpu.operations import float_bits
from twinphase.backends.cpu.program import Buffer, Memory
from twinphase.backends.cpu.tiling import (
    ELEMENTWISE_TILE_ROWS,
    GATE_TILES_PER_ROW,
    PLAN_INTS,
    delta_columns,
)
from twinphase.backends.cpu.weights import Vector, padded
from twinphase.backends.states import FINAL, PENDING, SOURCE, TARGET, SlotLayout
from twinphase.blueprint import DeltaNet, Mamba2, MatrixStates


class StateMemory:
    """The slots, and the arrays about a step's sequences that kernels read; they never move.

    Attributes:
        layout: layout of a slot.
        slots: the bytes of all slots, one after another.
        places: for each row: its number in its sequence, and the offset in bytes of the end of its
            sequence's history, from a layer's first slot on; int64 [tokens, 2].
        plans: for each state to be written: first row of its sequence, rows up to the state, rows
            after them that go into the log, offset of the end of the sequence's history, offset of
            the slot, rows of the log in the sequence's slot that are right, its offset, and which
            row of the log is the first to be written; int64 [states, PLAN_INTS].
        snapshots: for each row, the offset of a slot for the state after it, or -1; int64 [tokens].
    """

    def __init__(
        self, layout: SlotLayout, slots: NDArray[np.uint8], max_tokens: int, max_seqs: int
    ) -> None:
        self.layout = layout
        self.slots = slots
        self.places = aligned(2 * max_tokens, np.int64).reshape(-1, 2)
        # Each sequence's target, and a snapshot of every block that the step may complete.
        count = max_seqs + max_tokens
        self.plans = aligned(PLAN_INTS * count, np.int64).reshape(-1, PLAN_INTS)
        self.snapshots = aligned(max_tokens, np.int64)

    def layer(self, number: int) -> int:
        """Address of a recurrent layer's part of the first slot."""
        return int(self.slots.ctypes.data) + 4 * number * self.layout.layer_floats

    def fill(self, inputs: StepInputs) -> dict[str, int]:
        """Note where a step's sequences keep their states; returns the counts by name."""
        states = inputs.states
        if states is None:
            raise ValueError("the step names no states of its sequences")
        layout = self.layout
        # If no row is applied to the state, the existing log grows.
        log_at = np.where(states[:, FINAL] == 0, states[:, PENDING], 0)
        logged = int((np.diff(inputs.query_start) - states[:, FINAL] + log_at).max())
        if logged > layout.log_rows:
            raise ValueError(f"a log of {logged} rows; a slot has room for {layout.log_rows}")
        first = inputs.query_start[:-1].astype(np.int64)
        rows = inputs.query_start[1:] - first
        row_bytes = 4 * layout.channels
        slots = states.astype(np.int64)
        before = (
            slots[:, SOURCE] * layout.nbytes + (slots[:, PENDING] + layout.taps - 1) * row_bytes
        )
        final = slots[:, FINAL]
        source, target = (slots[:, which] * layout.nbytes for which in (SOURCE, TARGET))
        plan = first, final, rows - final, before, target, slots[:, PENDING], source, log_at
        self.plans[: len(first)] = np.stack(plan, axis=1)
        self.snapshots[: inputs.num_tokens] = -1
        for number, (row, slot) in enumerate(inputs.snapshots.tolist(), len(first)):
            sequence = int(np.searchsorted(first, row, side="right")) - 1
            start = first[sequence]
            self.snapshots[row] = slot * layout.nbytes
            self.plans[number] = self.plans[sequence]
            self.plans[number, 1:3] = row + 1 - start, 0
            self.plans[number, 4] = slot * layout.nbytes
            self.plans[number, 7] = 0
        places = self.places[: inputs.num_tokens]
        places[:, 0] = np.arange(inputs.num_tokens) - np.repeat(first, rows)
        places[:, 1] = np.repeat(before, rows)
        return {"sequences": len(first), "states": len(first) + len(inputs.snapshots)}


def _heads(recurrence: MatrixStates) -> str:
    """Parse the head dimensions in a kernel's name."""
    r = recurrence
    return f"{r.key_heads}:{r.value_heads}:{r.key_dim}:{r.value_dim}:{int(r.tiled)}"


@dataclass(frozen=True)
class _Columns:
    """Some columns of a buffer's rows."""

    address: int
    stride: int


class RecurrentOperations(ExpertOperations):
    """The operations of a model with recurrent layers; `states` is set before their use."""

    states: StateMemory

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.given: Buffer | None = None  # Filled before a step.
        self._kept: list[NDArray[np.float32]] = []  # Kernels know them by address.

    def short_conv(self, bcx: Buffer, weight: Vector, layer: int) -> Buffer:
        """B * x in full, then the convolution times C, then what the next step needs of B * x."""
        program = self.program
        source = bcx.floats
        width = self.states.layout.channels
        b, c, x = (_Columns(source.data + 4 * i * width, source.stride) for i in range(3))
        product = Memory(program, bcx.rows, width, quantized=False)
        args = [b.address, x.address, source.stride, product.groups, product.data]
        program.add_rows("multiply", args, [source.data], product)

        def make(kind: str) -> Memory:
            out = program.memory_for(kind, bcx.rows, width)
            self._convolve(product, weight, layer, out, gate=(c, source.data))
            return out

        self._keep_history(product, layer)
        return Buffer(program, bcx.rows, width, make=make)

    def _convolve(
        self,
        x: Memory,
        weight: Vector,
        layer: int,
        out: Memory,
        *,
        gate: tuple[_Columns, int] | None = None,
        bias: Vector | None = None,
    ) -> None:
        """Add a causal convolution, whose result is multiplied by a gate or goes through SiLU."""
        taps = self.states.layout.taps
        # One row for each tap, so that a group of channels is one vector.
        by_tap = np.ascontiguousarray(weight.values[:, :taps].T)
        self._kept.append(by_tap)
        args = [x.data, x.stride, x.groups, self.states.places.ctypes.data]
        args += [self.states.layer(layer), by_tap.ctypes.data]
        form = "gated" if gate else "biased" if bias else "silu"
        args += [gate[0].address, gate[0].stride] if gate else [0, 0]
        if bias is not None:
            args[-2] = bias.values.ctypes.data
        self.program.add(
            f"causal_conv:{taps}:{form}:{'q8' if out.quantized else 'f32'}",
            self.program.tiles(out.rows, 1, GATE_TILES_PER_ROW),
            [*args, *out.addresses],
            [x.data, gate[1]] if gate else [x.data],
            [(out.data, 0)],
        )

    def delta_rule(
        self, qkv: Buffer, gates: Buffer, weights: tuple[Vector, Vector, Vector], layer: int
    ) -> Buffer:
        """The convolution, then gates and unit rows, then the scan."""
        conv, decay, bias = weights
        delta = self.blueprint.recurrence
        assert isinstance(delta, DeltaNet)
        x = self._convolved(qkv, conv, None, layer)
        both = gates.floats
        steps = [both.data + 4 * column for column in gates.columns]
        rates = self._rates(decay, delta)
        args = [*steps, both.stride, rates, bias.values.ctypes.data]
        # Queries and keys are made as long as 1 in place.
        factors = self._gates("delta", x, both, delta, args, [(x.data, 0)])
        return self._scan("delta", (x, factors), delta, layer)

    def state_space(
        self,
        xbc: Buffer,
        steps: Buffer,
        conv: tuple[Vector, Vector],
        weights: tuple[Vector, Vector, Vector],
        layer: int,
    ) -> Buffer:
        """The convolution, then decays and steps, then the scan."""
        decay, bias, skip = weights
        space = self.blueprint.recurrence
        assert isinstance(space, Mamba2)
        x = self._convolved(xbc, *conv, layer)
        raw = steps.floats
        args = [raw.data, raw.stride, self._rates(decay, space), bias.values.ctypes.data]
        factors = self._gates("space", x, raw, space, args)
        self._kept += [bias.values, skip.values, conv[1].values]
        return self._scan("space", (x, factors), space, layer, skip.values.ctypes.data)

    def _convolved(self, x: Buffer, conv: Vector, bias: Vector | None, layer: int) -> Memory:
        source = x.floats
        out = Memory(self.program, x.rows, self.states.layout.channels, quantized=False)
        self._convolve(source, conv, layer, out, bias=bias)
        self._keep_history(source, layer)
        return out

    def _rates(self, decay: Vector, recurrence: MatrixStates) -> int:
        """Address of A."""
        rates = decay.values
        if recurrence.log_decay:
            heads = np.arange(rates.size) < recurrence.value_heads
            rates = np.where(heads, -np.exp(rates), 0).astype(np.float32)
        self._kept.append(rates)
        return int(rates.ctypes.data)

    def _gates(
        self,
        kind: str,
        x: Memory,
        steps: Memory,
        recurrence: MatrixStates,
        args: list[int],
        writes: Sequence[tuple[int, int]] = (),
    ) -> Memory:
        """What the scan reads of a row besides the convolution: a few numbers of each head."""
        program = self.program
        width = 2 * padded(recurrence.value_heads) + padded(recurrence.key_heads)
        factors = Memory(program, x.rows, width, quantized=False)
        program.add(
            f"{kind}_gates:{_heads(recurrence)}",
            program.tiles(x.rows, ELEMENTWISE_TILE_ROWS),
            [program.count(x.rows), x.data, x.stride, *args, factors.data, factors.stride],
            [x.data, steps.data],
            [(factors.data, 0), *writes],
        )
        return factors

    def _scan(
        self,
        kind: str,
        rows: tuple[Memory, Memory],
        recurrence: MatrixStates,
        layer: int,
        skip: int = 0,
    ) -> Buffer:
        x, factors = rows
        result = Buffer(self.program, x.rows, padded(recurrence.num_values))
        out = result.floats
        states = self.states
        layout = states.layout
        columns = delta_columns(self.isa, recurrence.value_dim)
        self.scratch_bytes = max(self.scratch_bytes, 4 * columns * (recurrence.key_dim + 1))
        matrices = layout.layer_floats - layout.matrix_floats
        log = matrices - layout.log_rows * layout.log_floats
        args = [x.data, x.stride, factors.data, factors.stride]
        args += [states.plans.ctypes.data, states.snapshots.ctypes.data]
        args += [states.layer(layer), 4 * log, 4 * matrices, skip, out.data, out.stride]
        self.program.add(
            f"{kind}_scan:{_heads(recurrence)}",
            self.program.count(f"sequences*{recurrence.num_values // columns}"),
            args,
            [x.data, factors.data],
            [(out.data, 0), (states.layer(layer), 1)],
        )
        return result

    def gated_norm(self, x: Buffer, weight: Vector, gate: Buffer, eps: float) -> Buffer:
        """Add the norm; it writes what its reader wants in the same pass."""
        program = self.program
        source = x.floats
        opened = gate.floats
        size = weight.width
        self._kept.append(weight.values)

        def make(kind: str) -> Memory:
            out = program.memory_for(kind, x.rows, x.width)
            args = [source.data, source.stride, weight.values.ctypes.data, float_bits(eps)]
            args += [opened.data, opened.stride, x.width // size, *out.addresses]
            self._add_parts(f"gated_norm:{size}", args, [source.data, opened.data], out)
            return out

        return Buffer(program, x.rows, x.width, make=make)

    def gate_norm(self, x: Buffer, weight: Vector, gate: Buffer, eps: float) -> Buffer:
        """Add the norm; it writes what its reader wants in the same pass."""
        program = self.program
        space = self.blueprint.whole.recurrence
        assert isinstance(space, Mamba2)
        source = x.floats
        opened = gate.floats
        runs = space.key_heads
        self._kept.append(weight.values)

        def make(kind: str) -> Memory:
            out = program.memory_for(kind, x.rows, x.width)
            args = [source.data, source.stride, weight.values.ctypes.data, float_bits(eps)]
            args += [opened.data, opened.stride, runs, source.groups // runs, *out.addresses]
            spec = f"gate_norm:{space.norm}:{kind}"
            reads = [source.data, opened.data]
            program.add(spec, program.count(f"{x.rows}*{runs}"), args, reads, [(out.data, 0)])
            return out

        return Buffer(program, x.rows, x.width, make=make)

    def gate_heads(self, h: Buffer, qkv: Buffer) -> Buffer:
        """Add the norm; it writes what its reader wants in the same pass."""
        program = self.program
        source = h.floats
        queries = qkv.floats
        b = self.blueprint

        def make(kind: str) -> Memory:
            out = program.memory_for(kind, h.rows, h.width)
            args = [source.data, source.stride, queries.data + 4 * qkv.columns[0]]
            args += [queries.stride, b.num_heads, *out.addresses]
            self._add_parts(f"gate_heads:{b.head_dim}", args, [source.data, queries.data], out)
            return out

        return Buffer(program, h.rows, h.width, make=make)

    def given_rows(self) -> Buffer:
        """Memory of their own, since they are there before the first command."""
        self.given = Buffer(self.program, "tokens", padded(self.blueprint.hidden_size))
        return self.given

    def join(self, left: Buffer, right: Buffer) -> Buffer:
        """Copy both side by side; only the last columns may be padding."""
        out = Buffer(self.program, left.rows, left.width + right.width)
        target = out.floats
        args: list[int] = []
        for part, first in ((left.floats, 0), (right.floats, left.width)):
            args += [part.data, part.stride, target.data + 4 * first, target.stride, 4 * part.width]
        self.program.add_rows("copy_columns", args, [left.floats.data, right.floats.data], target)
        return out

    def _add_parts(self, name: str, args: list[int], reads: list[int], out: Memory) -> None:
        """A command of a part of a row per tile."""
        tiles = self.program.tiles(out.rows, 1, GATE_TILES_PER_ROW)
        spec = f"{name}:{'q8' if out.quantized else 'f32'}"
        self.program.add(spec, tiles, args, reads, [(out.data, 0)])

    def _keep_history(self, x: Memory, layer: int) -> None:
        """No command of the step reads what this writes: another slot, or rows after the log's."""
        states = self.states
        args = [x.data, x.stride, x.groups, states.plans.ctypes.data, states.layer(layer)]
        self.program.add(
            f"keep_history:{states.layout.taps}",
            self.program.count(f"states*{GATE_TILES_PER_ROW}"),
            args,
            [x.data],
            [(states.layer(layer), 0)],
        )
