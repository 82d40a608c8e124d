"""A mixture of experts as commands: route, sort and gather rows, experts' layers, add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.cpu.formats import STRIP_OUTPUTS
from twinphase.backends.cpu.linear_operations import (
    FEW_ROWS,
    TILES_PER_THREAD,
    kind_of_rows,
    layer_spec,
)
from twinphase.backends.cpu.memory import aligned
from twinphase.backends.cpu.operations import Operations, float_bits
from twinphase.backends.cpu.program import Buffer, Memory, rows_in
from twinphase.backends.cpu.tiling import MAX_LINEAR_TILES, SLOT_INTS
from twinphase.backends.cpu.weights import Matrix, Vector
from twinphase.blueprint import Experts


@dataclass(frozen=True)
class Routing:
    """Where the rows of a layer go; memory that all layers share.

    Attributes:
        numbers, weights: of each row's choices, int32 and float32 [rows * used].
        rows: the row of each sorted row, int32 [rows * used].
        places: of each row's choices among the sorted rows, int32 [rows * used].
        slots: expert, first sorted row and end of its rows, int32 [experts, 3]; empty ones behind.
    """

    numbers: NDArray[np.generic]
    weights: NDArray[np.generic]
    rows: NDArray[np.generic]
    places: NDArray[np.generic]
    slots: NDArray[np.generic]


class ExpertOperations(Operations):
    """The operations of a model with experts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._routings: dict[tuple[str, int, int], Routing] = {}

    def moe(
        self,
        x: Buffer,
        router: Matrix,
        gate_up: Matrix,
        down: Matrix,
        experts: Experts,
        *,
        router_bias: Vector | None = None,
        choice_bias: Vector | None = None,
        gate_up_bias: Vector | None = None,
        down_bias: Vector | None = None,
    ) -> Buffer:
        """The weighted sum of each row's chosen experts."""
        program = self.program
        used = experts.used
        routing = self._route(self.linear(x, router, bias=router_bias), experts, choice_bias)
        pairs = f"{x.rows}*{used}"

        def gathered(kind: str) -> Memory:
            out = program.memory_for(kind, pairs, x.width)
            self.pick_rows(routing.rows, x.memory(kind), out, (routing.rows.ctypes.data,))
            return out

        h = Buffer(program, pairs, x.width, make=gathered)
        h = self.gate_mul(self._expert_linear(h, gate_up, gate_up_bias, routing, experts))
        h = self.gather(h, self.blueprint.span("experts"))
        h = self._expert_linear(h, down, down_bias, routing, experts)
        out = Buffer(program, x.rows, h.width)
        source = h.floats
        args = [used, routing.places.ctypes.data, routing.weights.ctypes.data]
        args += [source.data, source.groups, out.floats.data]
        reads = [source.data, routing.numbers.ctypes.data, routing.rows.ctypes.data]
        program.add_rows("combine", args, reads, out.floats)
        return out

    def add_gated(self, x: Buffer, h: Buffer, y: Buffer, weight: Vector) -> Buffer:
        """x + sigmoid(y . weight) * h."""
        sources = [x.floats.data, h.floats.data, y.floats.data]
        out = Buffer(self.program, x.rows, x.width)
        args = [*sources, weight.values.ctypes.data, x.floats.groups, out.floats.data]
        self.program.add_rows("add_gated", args, sources, out.floats)
        return out

    def _route(self, logits: Buffer, experts: Experts, choice_bias: Vector | None) -> Routing:
        program = self.program
        source = logits.floats
        key = (logits.rows, experts.count, experts.used)
        if key not in self._routings:
            pairs = rows_in(program.max_rows, logits.rows) * experts.used
            self._routings[key] = Routing(
                numbers=aligned(pairs, np.int32),
                weights=aligned(pairs, np.float32),
                rows=aligned(pairs, np.int32),
                places=aligned(pairs, np.int32),
                slots=aligned(experts.count * SLOT_INTS, np.int32),
            )
        routing = self._routings[key]
        numbers = routing.numbers.ctypes.data
        rows = routing.rows.ctypes.data
        args = [source.data, source.stride, experts.count, experts.used]
        spec = "route"
        if experts.scores == "sigmoid":
            spec = "route_sigmoid"
            zeros = self.zeros(-(-experts.count // STRIP_OUTPUTS))
            args += [zeros if choice_bias is None else choice_bias.values.ctypes.data]
        args += [int(experts.renormalize)]
        args += [float_bits(experts.scale)] if experts.scores == "sigmoid" else []
        args += [numbers, routing.weights.ctypes.data]
        program.add(spec, program.count(logits.rows), args, [source.data], [(numbers, 0)])
        args = [program.count(logits.rows), experts.count, experts.used, numbers, rows]
        args += [routing.places.ctypes.data, routing.slots.ctypes.data]
        program.add("sort_rows", program.cells.constant(1), args, [numbers], [(rows, 0)])
        return routing

    def _expert_linear(
        self, x: Buffer, weight: Matrix, bias: Vector | None, routing: Routing, experts: Experts
    ) -> Buffer:
        """Sorted rows through the weights of their experts."""
        program = self.program
        out = Buffer(program, x.rows, weight.width, columns=weight.columns, outputs=weight.sizes[0])
        for part in weight.parts:
            source = x.memory(kind_of_rows(part))
            # A token goes to an expert once.
            self._reserve_scratch(part, program.max_rows["tokens"])
            strips_per_tile, tiles = self._expert_tiles(x.rows, part.strips, experts.count)
            args = self.linear_args(part, source, out.floats)
            args += (
                [self.zeros(part.strips), 0]
                if bias is None
                else [bias.values.ctypes.data + 4 * part.column, bias.stride]
            )
            args += [part.nbytes, part.strips, routing.slots.ctypes.data, strips_per_tile]
            reads = [source.data, routing.rows.ctypes.data]
            program.add(
                layer_spec("experts", part.type),
                tiles,
                args,
                reads,
                [(out.floats.data, part.column)],
            )
        return out

    def _expert_tiles(self, rows: str, strips: int, count: int) -> tuple[int, int]:
        """Addresses of the strips that a tile takes and of the number of tiles.

        Which experts have rows is known only within the step: there are tiles for as many as could
        have some.
        """
        wanted = TILES_PER_THREAD * self.threads

        def slots(counts: dict[str, int]) -> int:
            return min(count, rows_in(counts, rows))

        def per_tile(counts: dict[str, int]) -> int:
            strips_in_all = slots(counts) * strips
            if rows_in(counts, rows) <= FEW_ROWS * min(count, 8):
                return max(1, min(strips, strips_in_all // wanted))
            return max(1, -(-strips_in_all // MAX_LINEAR_TILES))

        def tiles(counts: dict[str, int]) -> int:
            return slots(counts) * -(-strips // per_tile(counts))

        key = (rows, strips, count)
        address = self.program.cells.address
        return address(("expert strips", *key), per_tile), address(("expert tiles", *key), tiles)
