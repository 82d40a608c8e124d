"""The operations that models call during capture: each adds commands to a program."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.cpu import kv_layout, tiling
from twinphase.backends.cpu.attention_units import KERNELS
from twinphase.backends.cpu.attention_work import AttentionWork
from twinphase.backends.cpu.formats import FORMATS, GROUP_INPUTS, STRIP_OUTPUTS
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.program import Buffer, Memory, Program, gather_columns, rows_in
from twinphase.backends.cpu.step import StepMemory
from twinphase.backends.cpu.threads import aligned
from twinphase.backends.cpu.tiling import (
    ELEMENTWISE_TILE_ROWS,
    GATE_TILES_PER_ROW,
    LOGIT_TILES_PER_ROW,
    MATRIX_TILE_ROWS,
)
from twinphase.backends.cpu.weights import Embedding, Matrix, Part, Vector, padded
from twinphase.blueprint import Blueprint, KVShape, Rope, Span

FEW_ROWS = 16
TILES_PER_THREAD = 8
# Kinds of rows (`Buffer`).
ALL_KINDS = ("f32", "q8", "bf16")
LOG2_E = 1.4426950408889634


def float_bits(value: float) -> int:
    """The bits of a float32, as kernels take float arguments."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def softmax_scale(blueprint: Blueprint, head_dim: int) -> float:
    """What the queries' int8 scales carry, so that attention can exponentiate in base 2."""
    # The Hadamard transform of both sides multiplies their products by its size.
    return blueprint.scale * LOG2_E / kv_layout.spread_size(head_dim)


def layer_spec(kind: str, type_name: str) -> str:
    """The kernel of a "linear" layer, or of the same layer of all "experts"."""
    return f"{'quantized' if type_name in FORMATS else 'dense'}_{kind}:{type_name}"


def kind_of_rows(part: Part) -> str:
    """The kind of rows (`Buffer`) that a linear layer multiplies."""
    return "bf16" if part.tiled else "q8" if part.type in FORMATS else "f32"


@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines, float32 [max_positions, dim / 2] each.

    `softmax_scales`, float32 [max_positions], replaces the scale of all positions.
    """

    rope: Rope
    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    softmax_scales: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class LayerCache:
    """Where a layer's keys and values are.

    Attributes:
        addresses: of its keys, scales and values.
        cells_per_chunk: over all heads and layers of its shape.
    """

    shape: KVShape
    addresses: list[int]
    cells_per_chunk: int


@dataclass(frozen=True)
class CacheAddresses:
    """Where the KV cache is; `dtype` is one of `kv_layout.KV_CACHE_DTYPES`."""

    dtype: str
    layers: list[LayerCache]
    cells_per_block: int


class Operations:
    """The operations of a dense model: each adds commands to a program.

    Attributes:
        kept: buffers that the model keeps (`keep`).
        scratch_bytes: what the linear layers need of each thread's private memory.
    """

    def __init__(
        self,
        program: Program,
        blueprint: Blueprint,
        isa: Isa,
        threads: int,
        step: StepMemory,
        cache: CacheAddresses,
    ) -> None:
        self.program = program
        self.blueprint = blueprint
        self.isa = isa
        self.threads = threads
        self.kept: list[Buffer] = []
        self.scratch_bytes = 0
        self._step = step
        self._cache = cache
        self._zeros = [aligned(64, np.float32)]

    def embed(self, table: Embedding, scale: float = 1.0) -> Buffer:
        """Embedding rows of the step's tokens."""
        program = self.program
        out = Buffer(self.program, "tokens", padded(table.width))
        args = [self._step.token_ids.ctypes.data, table.address, table.row_bytes, table.width]
        args += [out.floats.data, out.floats.stride, float_bits(scale)]
        program.add(
            f"embed:{table.type}", program.count("tokens"), args, [], [(out.floats.data, 0)]
        )
        return out

    def keep(self, x: Buffer) -> None:
        """Hold the buffer, so that no later command of the program gets its memory."""
        self.kept.append(x)
        x.memory("f32")

    def logit_rows(self, x: Buffer) -> Buffer:
        """The rows whose logits are wanted, side by side."""
        out = Buffer(self.program, "logits", x.width)
        self.pick_rows(self._step.logit_rows, x.floats, out.floats)
        return out

    def pick_rows(
        self, numbers: NDArray[np.generic], source: Memory, out: Memory, reads: tuple[int, ...] = ()
    ) -> None:
        """Copy the rows of those numbers."""
        program = self.program
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
        program = self.program
        source = x.floats
        if x.width != len(weight.values):
            raise ValueError(f"rms_norm of {x.width} columns with weights for {len(weight.values)}")

        def make(kind: str) -> Memory:
            out = program.memory_for(kind, x.rows, x.width)
            args = [program.count(x.rows), source.data, source.stride, weight.values.ctypes.data]
            args += [weight.width, float_bits(eps), source.groups, *out.addresses]
            per_tile = MATRIX_TILE_ROWS if kind == "bf16" else ELEMENTWISE_TILE_ROWS
            tiles = program.tiles(x.rows, per_tile)
            program.add(f"rms_norm:{kind}", tiles, args, [source.data], [(out.data, 0)])
            return out

        return Buffer(program, x.rows, x.width, make=make, kinds=ALL_KINDS)

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
            args += [*term, part.strips, program.count(x.rows), strips_per_tile, chunk]
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

    def add(self, x: Buffer, h: Buffer, scale: float = 1.0) -> Buffer:
        """x + scale * h."""
        return self._sum("add", x, h, [float_bits(scale)])

    def add_norm(
        self,
        x: Buffer,
        h: Buffer,
        weight: Vector,
        eps: float,
        *,
        scale: float = 1.0,
        factor: Vector | None = None,
    ) -> Buffer:
        """(x + scale * rms_norm(h)) * factor; parts of a row are rows of the kernel."""
        norm = [weight.values.ctypes.data, weight.width, float_bits(eps)]
        times = 1.0 if factor is None else float(factor.values[0])
        numbers = [*norm, float_bits(scale), float_bits(times)]
        return self._sum("add_norm", x, h, numbers, x.width // len(weight.values))

    def _sum(
        self, spec: str, x: Buffer, h: Buffer, parameters: list[int], parts: int = 1
    ) -> Buffer:
        program = self.program
        out = Buffer(program, x.rows, x.width)
        sources = [x.floats.data, h.floats.data]
        rows = f"{x.rows}*{parts}"
        args = [program.count(rows), *sources, *parameters, x.floats.groups // parts]
        program.add(
            spec,
            program.tiles(rows, ELEMENTWISE_TILE_ROWS),
            [*args, out.floats.data],
            sources,
            [(out.floats.data, 0)],
        )
        return out

    def rope_kv_write(
        self,
        qkv: Buffer,
        rope: RopeTables | None,
        layer: int,
        q_norm: Vector | None = None,
        k_norm: Vector | None = None,
    ) -> AttentionWork:
        """Normalize, rotate, write the cache; the queries stay in memory, as int8."""
        program = self.program
        step = self._step
        source = qkv.floats
        b = self.blueprint
        cache = self._cache.layers[layer]
        dim = cache.shape.head_dim
        work = step.works[qkv.rows, cache.shape]
        kv_heads = cache.shape.num_heads
        columns = qkv.columns
        if len(columns) == 1 and qkv.outputs == b.num_heads * dim:  # queries alone
            kv_heads = 0
            columns = (0, 0)
        elif len(columns) == 1:  # one stored matrix
            columns = (0, b.num_heads * dim, (b.num_heads + kv_heads) * dim)
        if b.qk_norm == "width" and q_norm is not None and k_norm is not None:
            self._norm_columns(qkv, columns, (q_norm, k_norm))
        # Keys are values where those have no columns.
        args = [source.data + 4 * column for column in (*columns, columns[-1])[:3]]
        args += [source.stride]
        args += [0, 0] if rope is None else [rope.cos.ctypes.data, rope.sin.ctypes.data]
        positions = step.positions if qkv.rows == "tokens" else step.logit_positions
        args += [positions.ctypes.data, step.slots.ctypes.data]
        args += [b.num_heads, kv_heads, *cache.addresses, *work.query_addresses]
        scales = None if rope is None else rope.softmax_scales
        factor = float_bits(softmax_scale(b, dim)) if scales is None else scales.ctypes.data
        args += [factor, cache.cells_per_chunk]
        args += [0 if norm is None else norm.values.ctypes.data for norm in (q_norm, k_norm)] + [
            float_bits(b.norm_eps)
        ]
        writes = [(work.query_addresses[0], 0)]
        writes += [(cache.addresses[0], 0)] if kv_heads else []
        turned, interleaved = (
            (0, 0) if rope is None else (rope.rope.dim, int(rope.rope.interleaved))
        )
        # Over their whole width, queries and keys were normalized above.
        norm = "none" if b.qk_norm == "width" else b.qk_norm
        spec = f"rope_kv_write:{dim}:{turned}:{interleaved}:{self._cache.dtype}:{norm}"
        spec += ":gated" if b.attention_gate else ""
        spec += ":values" if b.value_norm else ""
        spec += "" if scales is None else ":scales"
        program.add(spec, program.count(qkv.rows), args, [source.data], writes)
        return work

    def _norm_columns(
        self, qkv: Buffer, columns: tuple[int, ...], weights: tuple[Vector, Vector]
    ) -> None:
        """RMSNorm of queries and of keys over their whole width."""
        program = self.program
        x = qkv.floats
        parts = list(zip(columns, self.blueprint.norm_spans, strict=False))
        wholes = [
            gather_columns(self.program, qkv, span, False, column) if span else x
            for column, span in parts
        ]
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
        self, q: AttentionWork, layer: int, window: int | None = None, sinks: Vector | None = None
    ) -> Buffer:
        """Units of few rows and of many, what continues them, and the merge of cut units.

        Layers with a window compute each sequence apart: its rows do not see what others share.
        """
        program = self.program
        cache = self._cache.layers[layer]
        b = self.blueprint
        dim = q.shape.head_dim
        kv_heads = q.shape.num_heads
        units = q.units(not window)
        out = Buffer(program, q.rows, b.num_heads * dim)
        target = out.floats.data
        partials = q.partials.ctypes.data
        states = q.states.ctypes.data
        tables = self._step.block_tables
        common = [*q.query_addresses, *cache.addresses, kv_heads, tables.ctypes.data]
        common += [tables.strides[0], self._cache.cells_per_block, cache.cells_per_chunk]
        limits = [window or 0, 0 if sinks is None else sinks.values.ctypes.data]
        cap = b.attention_softcap or 0
        kernel_shape = f"{dim}:{q.group}:{self._cache.dtype}:{cap:g}:{int(b.sinks)}"
        for part, (name, array) in enumerate(units.lists.items()):
            reads = [q.query_addresses[0], cache.addresses[0]]
            writes = [(partials, part), (target, part)]
            if name.endswith("_rest"):
                reads.append(states)
            else:
                writes.append((states, part))
            args = [array.ctypes.data, units.row_numbers.ctypes.data, *common]
            program.add(
                f"attention_{KERNELS[name]}:{kernel_shape}",
                program.count(q.count(name, units.shares_prefixes)),
                [*args, target, partials, states, *limits],
                reads,
                writes,
            )
        merges = q.count("merges", units.shares_prefixes)
        program.add(
            f"attention_merge:{dim}:{q.group}:{int(b.sinks)}",
            program.count(f"{merges}*{b.num_heads}"),
            [units.merges.ctypes.data, partials, states, kv_heads, target, *limits],
            [partials],
            [(target, len(KERNELS))],
        )
        return out

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

    def gather(self, x: Buffer, span: Span | None) -> Buffer:
        """Every rank copies its columns to shared memory, as its reader wants them, and waits."""
        if span is None:
            return x
        # `make` refers neither to the buffer nor to itself: memory in a cycle is freed whenever the
        # collector runs, but all ranks have to find the same memory free.
        floats: list[Memory] = []

        def make(kind: str) -> Memory:
            if kind == "q8" and not floats and span.multiple % GROUP_INPUTS == 0:
                return gather_columns(self.program, x, span, True)
            if not floats:
                floats.append(gather_columns(self.program, x, span, False))
            return floats[0] if kind == "f32" else self.program.quantize(floats[0])

        return Buffer(self.program, x.rows, padded(span.total), outputs=span.total, make=make)

    def cap_logits(self, logits: Buffer, scale: float, softcap: float | None) -> Buffer:
        """The logits times `scale`, then softcap * tanh(logits / softcap) when there is one."""
        program = self.program
        source = logits.floats
        out = Buffer(program, logits.rows, logits.width, outputs=logits.outputs)
        cap = softcap or 1.0
        args = [source.data, source.groups, out.floats.data]
        args += [float_bits(value) for value in (scale, 2 * LOG2_E / cap, cap)]
        spec = f"cap_logits:{int(bool(softcap))}"
        tiles = program.tiles(logits.rows, 1, LOGIT_TILES_PER_ROW)
        program.add(spec, tiles, args, [source.data], [(out.floats.data, 0)])
        return out
