"""Linear layers as commands of a program, and the gate of a feed-forward layer."""

from __future__ import annotations

import numpy as np

from twinphase.backends.cpu import tiling
from twinphase.backends.cpu.formats import FORMATS, GROUP_INPUTS, STRIP_OUTPUTS
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.memory import aligned
from twinphase.backends.cpu.program import ALL_KINDS, Buffer, Memory, Program, rows_in
from twinphase.backends.cpu.tiling import GATE_TILES_PER_ROW
from twinphase.backends.cpu.weights import Matrix, Part, Vector, padded
from twinphase.blueprint import Blueprint

FEW_ROWS = 16
TILES_PER_THREAD = 8


def layer_spec(kind: str, type_name: str) -> str:
    """The kernel of a "linear" layer, or of the same layer of all "experts"."""
    return f"{'quantized' if type_name in FORMATS else 'dense'}_{kind}:{type_name}"


def kind_of_rows(part: Part) -> str:
    """The kind of rows (`Buffer`) that a linear layer multiplies."""
    return "bf16" if part.tiled else "q8" if part.type in FORMATS else "f32"


class LinearOperations:
    """The linear layers of a model.

    Attributes:
        scratch_bytes: what they need of each thread's private memory.
    """

    def __init__(self, program: Program, blueprint: Blueprint, isa: Isa, threads: int) -> None:
        self.program = program
        self.blueprint = blueprint
        self.isa = isa
        self.threads = threads
        self.scratch_bytes = 0
        self._zeros = [aligned(64, np.float32)]

    def linear(
        self,
        x: Buffer,
        weight: Matrix,
        *,
        residual: Buffer | None = None,
        first: int = 0,
        bias: Vector | None = None,
    ) -> Buffer:
        """x @ weight.T + residual or bias, into new memory: a kernel may compute a row twice."""
        if residual is not None and bias is not None:
            raise ValueError("a linear layer adds a residual or a bias")
        if weight.paired:
            raise ValueError("strips of gate and up take turns: use gated_linear")
        program = self.program
        out = Buffer(program, x.rows, weight.width, columns=weight.columns, outputs=weight.sizes[0])
        base = None if residual is None else residual.floats
        for part in weight.parts:
            source = x.memory(kind_of_rows(part))
            self._reserve_scratch(part, tiling.most_chunk_rows(source.stride))
            strips_per_tile, chunk, tiles = self._linear_tiles(x.rows, part, source.stride)
            term = [self.zeros(part.strips), 0]
            if bias is not None:
                term = [bias.values.ctypes.data + 4 * part.column, 0]  # one row for all
            elif base is not None:
                term = [base.data + 4 * (first + part.column), base.stride]
            args = self.linear_args(part, source, out.floats)
            args += [*term, part.strips, program.count(x.rows), strips_per_tile, chunk, 0, 0]
            reads = [source.data] if base is None else [source.data, base.data]
            written = [(out.floats.data, part.column)]
            program.add(layer_spec("linear", part.type), tiles, args, reads, written)
        return out

    def gated_linear(self, x: Buffer, weight: Matrix, *, bias: Vector | None = None) -> Buffer:
        """activation(gate) * up of the linear layer of both.

        Where their strips are paired, a tile gates its own sums as soon as it has them.
        """
        if not weight.paired:
            return self.gate_mul(self.linear(x, weight, bias=bias))
        if bias is not None:
            raise ValueError("gate and up with a bias are not paired")
        (part,) = weight.parts
        width = padded(weight.sizes[0])

        def make(kind: str) -> Memory:
            out = self.program.memory_for(kind, x.rows, width)
            self._add_gated_linear(x, part, kind, width, out)
            return out

        kinds = ALL_KINDS if part.tiled else ALL_KINDS[:2]
        return Buffer(self.program, x.rows, width, make=make, kinds=kinds)

    def _add_gated_linear(self, x: Buffer, part: Part, kind: str, width: int, out: Memory) -> None:
        program = self.program
        source = x.memory(kind_of_rows(part))
        most = tiling.most_chunk_rows(source.stride)
        self._reserve_scratch(part, most)
        results_at = 0
        if kind != "bf16":  # else sums are gated where the matrix tiles leave them
            results_at = padded(self._scratch_of(part, most), 64) + 64  # 0 says that there are none
            rows = rows_in(program.max_rows, x.rows)
            tiles = TILES_PER_THREAD * self.threads
            waiting = tiling.gated_results(rows, most, part.strips // 2, tiles)
            self.scratch_bytes = max(self.scratch_bytes, results_at + waiting)
        strips_per_tile, chunk, tiles = self._linear_tiles(x.rows, part, source.stride, 2)
        args = self.linear_args(part, source, out)
        args += [self.zeros(part.strips), 0, part.strips, program.count(x.rows)]
        gate = program.kernels[f"gate_tile:{self.blueprint.activation}:{kind}"]
        args += [strips_per_tile, chunk, gate, results_at, width // GROUP_INPUTS, *out.addresses]
        spec = layer_spec("linear", part.type)
        program.add(spec, tiles, args, [source.data], [(out.data, 0)])

    def linear_args(self, part: Part, source: Memory, out: Memory) -> list[int]:
        """The first operands of a linear layer's kernel (`kernels/register_tile.py`)."""
        data, scale, fsum, isum = source.addresses
        args = [part.address, part.groups, data, source.stride, scale, fsum]
        return [*args, 4 * source.groups, isum, out.data + 4 * part.column, out.stride]

    def _reserve_scratch(self, part: Part, rows: int) -> None:
        """Have threads bring what a layer with up to `rows` rows in a tile needs."""
        self.scratch_bytes = max(self.scratch_bytes, self._scratch_of(part, rows))

    def _scratch_of(self, part: Part, rows: int) -> int:
        if part.tiled:
            return tiling.BF16_SCRATCH_BYTES
        return tiling.scratch_bytes(self.isa, part.type, rows) if part.type in FORMATS else 0

    def zeros(self, strips: int) -> int:
        """Address of a row of zeros, the residual of a layer without one."""
        if self._zeros[-1].size < strips * STRIP_OUTPUTS:
            self._zeros.append(aligned(strips * STRIP_OUTPUTS, np.float32))
        return int(self._zeros[-1].ctypes.data)

    def _linear_tiles(
        self, rows: str, part: Part, row_bytes: int, together: int = 1
    ) -> tuple[int, int, int]:
        """Addresses of the strips and of the rows a tile takes, and of the number of tiles.

        Many rows: one strip, or as many as go `together`, so that its weights stay in the
        first-level cache and the rows in the second. Few rows: about eight tiles a thread, long
        enough to stream memory, short enough to even out. Tiles in bfloat16 are cut by
        `tiling.bf16_chunk`.
        """
        wanted = TILES_PER_THREAD * self.threads
        strips = part.strips // together
        tiled = part.tiled

        def chunk(counts: dict[str, int]) -> int:
            if tiled:
                return tiling.bf16_chunk(counts[rows], row_bytes, strips, wanted)[0]
            return tiling.row_chunk(counts[rows], row_bytes, strips, wanted, self.isa.matrix_tiles)

        def chunks(counts: dict[str, int]) -> int:
            return -(-counts[rows] // chunk(counts))

        def per_tile(counts: dict[str, int]) -> int:
            least = -(-strips * chunks(counts) // tiling.MAX_LINEAR_TILES)
            if tiled:
                return max(least, tiling.bf16_chunk(counts[rows], row_bytes, strips, wanted)[1])
            if counts[rows] <= FEW_ROWS:
                return max(1, strips // wanted)
            return max(1, least)

        def tiles(counts: dict[str, int]) -> int:
            return -(-strips // per_tile(counts)) * chunks(counts)

        key = (rows, strips, row_bytes, tiled)
        address = self.program.cells.address
        return (
            address(("strips", together, *key), lambda counts: together * per_tile(counts)),
            address(("chunk", *key), chunk),
            address(("tiles", *key), tiles),
        )

    def gate_mul(self, gate_up: Buffer, up: Buffer | None = None, first: int = 0) -> Buffer:
        """activation(gate) * up; what its reader wants is written in the same pass."""
        program = self.program
        b = self.blueprint
        stacked = len(gate_up.columns) == 2 or up is not None
        width = gate_up.outputs if stacked else gate_up.outputs // 2  # one stored matrix
        source = gate_up.floats
        other = source if up is None else up.floats
        if up is None:
            first = gate_up.columns[1] if stacked else width
        rows = gate_up.rows

        def make(kind: str) -> Memory:
            out = program.memory_for(kind, rows, padded(width))
            args = [source.data, other.data + 4 * first, source.stride, other.stride]
            program.add(
                f"gate_mul:{b.activation}:{kind}",
                program.tiles(rows, 1, GATE_TILES_PER_ROW),
                [*args, out.groups, *out.addresses],
                [source.data, other.data],
                [(out.data, 0)],
            )
            return out

        return Buffer(program, rows, padded(width), make=make)
