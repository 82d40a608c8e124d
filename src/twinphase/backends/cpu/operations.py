"""The operations of the CPU backend: each adds commands to the program that is being captured."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import KVCacheSpec
from twinphase.backends.cpu import kv_layout, tiling
from twinphase.backends.cpu.formats import FORMATS, GROUP, STRIP
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.program import Buffer, Memory, Program
from twinphase.backends.cpu.specs import attention_spec, linear_spec, merge_spec, rope_spec
from twinphase.backends.cpu.step import StepMemory
from twinphase.backends.cpu.threads import aligned, libc_address
from twinphase.backends.cpu.weights import Embedding, Matrix, Part, Vector, padded
from twinphase.backends.group import Group
from twinphase.blueprint import Blueprint, Rope, Span

GATE_PARTS = tiling.GATE_PARTS
LOGIT_PARTS = tiling.LOGIT_PARTS
ROWS_PER_TILE = tiling.ROWS_PER_TILE
FEW_ROWS = 16
TILES_PER_THREAD = 8
COPY_ARGS = 21  # of copy_columns, whatever it copies
MAX_TILES = 1 << 17  # of a linear layer; a claim word holds numbers below 2^18
LOG2_E = 1.4426950408889634


def float_bits(value: float) -> int:
    """The bits of a float32, as kernels take float arguments."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines, float32 [max_positions, dim / 2] each."""

    rope: Rope
    cos: NDArray[np.float32]
    sin: NDArray[np.float32]


class Operations:
    """What models call while the forward pass is captured.

    Memory and weights are `CpuBackend`'s.
    """

    threads: int
    isa: Isa
    blueprint: Blueprint
    kv_spec: KVCacheSpec
    kv_cache_dtype: str
    group: Group | None
    _program: Program
    _step: StepMemory
    _layers: list[list[int]]  # addresses of each layer's keys, scales and values
    _per_chunk: int
    _linear_scratch: int  # bytes of a thread's that linear layers need
    _keep: list[NDArray[np.generic]]
    _kept: list[Buffer]

    def embed(self, table: Embedding, scale: float = 1.0) -> Buffer:
        """Embedding rows of the step's tokens."""
        program = self._program
        out = Buffer(self._program, "tokens", padded(table.width))
        args = [self._step.token_ids.ctypes.data, table.address, table.row_bytes, table.width]
        args += [out.floats.data, out.floats.stride, float_bits(scale)]
        program.add(
            f"embed:{table.type}", program.count("tokens"), args, [], [(out.floats.data, 0)]
        )
        return out

    def keep(self, x: Buffer) -> None:
        """Hold the buffer, so that no later command of the program gets its memory."""
        self._kept.append(x)
        x.memory(quantized=False)

    def logit_rows(self, x: Buffer) -> Buffer:
        """The rows whose logits are wanted, side by side."""
        out = Buffer(self._program, "logits", x.width)
        self.pick_rows(self._step.logit_rows, x.floats, out.floats)
        return out

    def pick_rows(
        self, numbers: NDArray[np.generic], source: Memory, out: Memory, reads: tuple[int, ...] = ()
    ) -> None:
        """Copy the rows of those numbers."""
        program = self._program
        kind = "q8" if source.quantized else "f32"
        args = [numbers.ctypes.data, source.groups, *source.addresses, *out.addresses]
        program.add(
            f"pick_rows:{kind}",
            program.count(out.rows),
            args,
            [source.data, *reads],
            [(out.data, 0)],
        )

    def rms_norm(self, x: Buffer, weight: Vector, eps: float) -> Buffer:
        """RMSNorm; what its reader wants is written in the same pass."""
        program = self._program
        source = x.floats
        if x.width != len(weight.values):
            raise ValueError(f"rms_norm of {x.width} columns with weights for {len(weight.values)}")

        def make(quantized: bool) -> Memory:
            out = Memory(program, x.rows, x.width, quantized)
            args = [program.count(x.rows), source.data, source.stride, weight.values.ctypes.data]
            args += [weight.width, float_bits(eps), source.groups, *out.addresses]
            spec = f"rms_norm:{'q8' if quantized else 'f32'}"
            tiles = program.tiles(x.rows, ROWS_PER_TILE)
            program.add(spec, tiles, args, [source.data], [(out.data, 0)])
            return out

        return Buffer(program, x.rows, x.width, make=make)

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
        program = self._program
        out = Buffer(program, x.rows, weight.width, columns=weight.columns, outputs=weight.sizes[0])
        base = None if residual is None else residual.floats
        for part in weight.parts:
            column = 4 * part.column
            source = x.rounded if part.tiled else x.memory(part.type in FORMATS)
            at = source.addresses
            self._reserve_scratch(part, tiling.MATRIX_CHUNK_ROWS)
            strips_per_tile, chunk, tiles = self._linear_tiles(
                x.rows, part.strips, source.stride, part.tiled
            )
            args = [
                part.address,
                part.groups,
                part.strips,
                at[0],
                source.stride,
                *at[1:3],
                source.groups * 4,
                at[3],
            ]
            args += [out.floats.data + column, out.floats.stride]
            if bias is not None:
                args += [bias.values.ctypes.data + column, 0]  # one row for all
            else:
                args += (
                    [self.zeros(part.strips), 0]
                    if base is None
                    else [base.data + 4 * first + column, base.stride]
                )
            args += [program.count(x.rows), strips_per_tile, chunk]
            reads = [source.data] if base is None else [source.data, base.data]
            program.add(
                linear_spec(part.type), tiles, args, reads, [(out.floats.data, part.column)]
            )
        return out

    def _reserve_scratch(self, part: Part, rows: int) -> None:
        """Have threads bring what a layer with up to `rows` rows in a tile needs."""
        if part.tiled:
            self._linear_scratch = max(self._linear_scratch, 64)  # of the tiles' shapes
        elif self.isa.matrix_tiles and part.type in FORMATS:
            self._linear_scratch = max(
                self._linear_scratch, tiling.matrix_scratch_bytes(part.type, rows)
            )

    def zeros(self, strips: int) -> int:
        """Address of a row of zeros, the residual of a layer without one."""
        if self._keep[0].size < strips * STRIP:
            self._keep.append(self._keep[0])
            self._keep[0] = aligned(strips * STRIP, np.float32)
        return int(self._keep[0].ctypes.data)

    def _linear_tiles(
        self, rows: str, strips: int, row_bytes: int, tiled: bool
    ) -> tuple[int, int, int]:
        """Addresses of the strips and of the rows a tile takes, and of the number of tiles.

        Many rows: one strip, so that its weights stay in the first-level cache and the rows in the
        second; several of `tiled` weights, for each of which a panel of the rows comes from there.
        Few rows: about eight tiles a thread, long enough to stream memory, short enough to even
        out.
        """
        wanted = TILES_PER_THREAD * self.threads
        row_bytes = min(row_bytes, tiling.DENSE_PANEL_BYTES) if tiled else row_bytes

        def chunk(counts: dict[str, int]) -> int:
            return tiling.row_chunk(counts[rows], row_bytes, strips, wanted, self.isa.matrix_tiles)

        def chunks(counts: dict[str, int]) -> int:
            return -(-counts[rows] // chunk(counts))

        def per_tile(counts: dict[str, int]) -> int:
            if counts[rows] <= FEW_ROWS:
                return max(1, strips // wanted)
            several = min(tiling.DENSE_STRIPS, strips * chunks(counts) // wanted) if tiled else 1
            return max(several, -(-strips * chunks(counts) // MAX_TILES))

        def tiles(counts: dict[str, int]) -> int:
            return -(-strips // per_tile(counts)) * chunks(counts)

        key = (rows, strips, row_bytes, tiled)
        address = self._program.cells.address
        return (
            address(("strips", *key), per_tile),
            address(("chunk", *key), chunk),
            address(("tiles", *key), tiles),
        )

    def add(self, x: Buffer, h: Buffer, scale: float = 1.0) -> Buffer:
        """x + scale * h."""
        program = self._program
        out = Buffer(self._program, x.rows, x.width)
        sources = [x.floats.data, h.floats.data]
        args = [
            program.count(x.rows),
            *sources,
            float_bits(scale),
            x.floats.groups,
            out.floats.data,
        ]
        program.add(
            "add", program.tiles(x.rows, ROWS_PER_TILE), args, sources, [(out.floats.data, 0)]
        )
        return out

    def add_norm(
        self, x: Buffer, h: Buffer, weight: Vector, eps: float, scale: float = 1.0
    ) -> Buffer:
        """x + scale * rms_norm(h)."""
        program = self._program
        out = Buffer(self._program, x.rows, x.width)
        sources = [x.floats.data, h.floats.data]
        args = [
            program.count(x.rows),
            *sources,
            weight.values.ctypes.data,
            weight.width,
            float_bits(eps),
        ]
        args += [float_bits(scale), x.floats.groups, out.floats.data]
        program.add(
            "add_norm", program.tiles(x.rows, ROWS_PER_TILE), args, sources, [(out.floats.data, 0)]
        )
        return out

    def rope_kv_write(
        self,
        qkv: Buffer,
        rope: RopeTables | None,
        layer: int,
        q_norm: Vector | None = None,
        k_norm: Vector | None = None,
    ) -> StepMemory:
        """Normalize, rotate, write the cache; the queries stay in the step's memory, as int8."""
        program = self._program
        step = self._step
        source = qkv.floats
        b = self.blueprint
        columns = qkv.columns
        if len(columns) == 1:  # one stored matrix
            columns = (0, b.num_heads * b.head_dim, (b.num_heads + b.num_kv_heads) * b.head_dim)
        if b.qk_norm == "width" and q_norm is not None and k_norm is not None:
            self._norm_columns(qkv, columns, (q_norm, k_norm))
        # The Hadamard transform of both sides multiplies their products by its size.
        scale = b.scale * LOG2_E / kv_layout.spread_size(b.head_dim)
        args = [source.data + 4 * column for column in columns] + [source.stride]
        args += [0, 0] if rope is None else [rope.cos.ctypes.data, rope.sin.ctypes.data]
        args += [step.positions.ctypes.data, step.slots.ctypes.data]
        args += [b.num_heads, b.num_kv_heads, *self._layers[layer], *step.query_addresses]
        args += [float_bits(scale), self._per_chunk]
        args += [0 if norm is None else norm.values.ctypes.data for norm in (q_norm, k_norm)] + [
            float_bits(b.norm_eps)
        ]
        writes = [(step.query_addresses[0], 0), (self._layers[layer][0], 0)]
        spec = rope_spec(b, None if rope is None else rope.rope, self.kv_cache_dtype)
        program.add(spec, program.count("tokens"), args, [source.data], writes)
        return step

    def _norm_columns(
        self, qkv: Buffer, columns: tuple[int, ...], weights: tuple[Vector, Vector]
    ) -> None:
        """RMSNorm of queries and of keys over their whole width."""
        program = self._program
        x = qkv.floats
        parts = list(zip(columns, self.blueprint.norm_spans, strict=False))
        wholes = [self._gathered(qkv, span, False, column) if span else x for column, span in parts]
        for part, ((column, span), whole, weight) in enumerate(
            zip(parts, wholes, weights, strict=True)
        ):
            here = x.data + 4 * column
            width = weight.width
            first, count = (span.first, span.size) if span else (0, width)
            args = [whole.data if span else here, whole.stride, width, here, x.stride, count]
            args += [weight.values.ctypes.data + 4 * first, float_bits(self.blueprint.norm_eps)]
            program.add(
                "norm_columns",
                program.count("tokens"),
                args,
                [whole.data, x.data],
                [(x.data, part)],
            )

    def attention(
        self, q: StepMemory, layer: int, window: int | None = None, sinks: Vector | None = None
    ) -> Buffer:
        """Units of one token, units of several and the merge of those that were cut; whichever the step has."""
        program = self._program
        cache = self._layers[layer]
        b = self.blueprint
        out = Buffer(program, "tokens", b.num_heads * b.head_dim)
        common = [*q.query_addresses, *cache, b.num_kv_heads, q.block_tables.ctypes.data]
        common += [
            q.block_tables.strides[0],
            self.kv_spec.block_size // kv_layout.CELL,
            self._per_chunk,
        ]
        reads = [q.query_addresses[0], cache[0]]
        partials = q.partials.ctypes.data
        limits = [window or 0, 0 if sinks is None else sinks.values.ctypes.data]
        target = out.floats.data
        for part, (phase, units) in enumerate(q.units.items()):
            args = [units.ctypes.data, *common, target, partials, *limits]
            spec = attention_spec(phase, b, self.kv_cache_dtype)
            program.add(
                spec,
                program.count(f"{phase}_units"),
                args,
                reads,
                [(partials, part), (target, part)],
            )
        args = [q.merges.ctypes.data, partials, b.num_kv_heads, target, *limits]
        program.add(
            merge_spec(b),
            program.count(f"merges*{b.num_heads}"),
            args,
            [partials],
            [(target, len(q.units))],
        )
        return out

    def gate_mul(self, gate_up: Buffer) -> Buffer:
        """activation(gate) * up; what its reader wants is written in the same pass."""
        program = self._program
        source = gate_up.floats
        b = self.blueprint
        width = (
            gate_up.outputs if len(gate_up.columns) == 2 else gate_up.outputs // 2
        )  # one stored matrix
        gate, up = gate_up.columns if len(gate_up.columns) == 2 else (0, width)

        def make(quantized: bool) -> Memory:
            out = Memory(program, gate_up.rows, padded(width), quantized)
            args = [source.data + 4 * gate, source.data + 4 * up, source.stride]
            args += [out.groups, *out.addresses]
            spec = f"gate_mul:{b.activation}:{'q8' if quantized else 'f32'}"
            program.add(
                spec,
                program.tiles(gate_up.rows, 1, GATE_PARTS),
                args,
                [source.data],
                [(out.data, 0)],
            )
            return out

        return Buffer(program, gate_up.rows, padded(width), make=make)

    def gather(self, x: Buffer, span: Span | None) -> Buffer:
        """Every rank copies its columns to shared memory, as its reader wants them, and waits."""
        if span is None:
            return x
        # `make` refers neither to the buffer nor to itself: memory in a cycle is freed whenever the
        # collector runs, but all ranks have to find the same memory free.
        floats: list[Memory] = []

        def make(quantized: bool) -> Memory:
            if quantized and not floats and span.multiple % GROUP == 0:
                return self._gathered(x, span, True)
            if not floats:
                floats.append(self._gathered(x, span, False))
            return self._program.quantize(floats[0]) if quantized else floats[0]

        return Buffer(self._program, x.rows, padded(span.total), outputs=span.total, make=make)

    def _gathered(self, x: Buffer, span: Span, quantized: bool, column: int = 0) -> Memory:
        """The ranks' columns; this one's of `x`, which begin at `column` (0 where they are quantized)."""
        program = self._program
        group = self.group
        assert group is not None
        source = x.memory(quantized)
        whole = Memory(program, x.rows, padded(span.total), quantized, shared=True)
        units = (GROUP, 4, 4, 8) if quantized else (4,)  # bytes of a group, or of a column
        first, size = (
            (span.first // GROUP, -(-span.size // GROUP)) if quantized else (span.first, span.size)
        )
        args = [program.count(x.rows)]
        for unit, mine, all_ranks in zip(units, source.arrays, whole.arrays, strict=True):
            strides = [
                unit * (memory.groups if quantized else memory.width) for memory in (source, whole)
            ]
            args += [
                mine.ctypes.data + unit * column,
                strides[0],
                all_ranks.ctypes.data + unit * first,
                strides[1],
                unit * size,
            ]
        tiles = program.tiles(x.rows, ROWS_PER_TILE)
        written = [(whole.data, 0)]
        program.add(
            "copy_columns", tiles, args + [0] * (COPY_ARGS - len(args)), [source.data], written
        )
        args = [
            group.address,
            group.rank,
            group.ranks,
            libc_address("usleep"),
            libc_address("clock_gettime"),
        ]
        program.add("meet", program.cells.constant(1), args, [whole.data], written)
        program.met()
        return whole

    def cap_logits(self, logits: Buffer, scale: float, softcap: float | None) -> Buffer:
        """The logits times `scale`, then softcap * tanh(logits / softcap) when there is one."""
        program = self._program
        source = logits.floats
        out = Buffer(program, logits.rows, logits.width, outputs=logits.outputs)
        cap = softcap or 1.0
        args = [source.data, source.groups, out.floats.data]
        args += [float_bits(value) for value in (scale, 2 * LOG2_E / cap, cap)]
        spec = f"cap_logits:{int(bool(softcap))}"
        tiles = program.tiles(logits.rows, 1, LOGIT_PARTS)
        program.add(spec, tiles, args, [source.data], [(out.floats.data, 0)])
        return out
