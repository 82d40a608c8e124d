"""The operations that models call during capture: each adds commands to a program."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.cpu import kv_layout
from twinphase.backends.cpu.attention_units import KERNELS
from twinphase.backends.cpu.attention_work import AttentionWork
from twinphase.backends.cpu.formats import GROUP_INPUTS
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.linear_operations import LinearOperations
from twinphase.backends.cpu.program import (
    ALL_KINDS,
    Buffer,
    Memory,
    Program,
    gather_columns,
)
from twinphase.backends.cpu.step import StepMemory
from twinphase.backends.cpu.tiling import (
    ELEMENTWISE_TILE_ROWS,
    LOGIT_TILES_PER_ROW,
    MATRIX_TILE_ROWS,
)
from twinphase.backends.cpu.weights import Embedding, Vector, padded
from twinphase.blueprint import Blueprint, KVShape, Rope, Span

LOG2_E = 1.4426950408889634


def float_bits(value: float) -> int:
    """The bits of a float32, as kernels take float arguments."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def softmax_scale(blueprint: Blueprint, head_dim: int) -> float:
    """What the queries' int8 scales carry, so that attention can exponentiate in base 2."""
    # The Hadamard transform of both sides multiplies their products by its size.
    return blueprint.scale * LOG2_E / kv_layout.spread_size(head_dim)


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


class Operations(LinearOperations):
    """The operations of a dense model: each adds commands to a program.

    Attributes:
        kept: buffers that the model keeps (`keep`).
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
        super().__init__(program, blueprint, isa, threads)
        self.kept: list[Buffer] = []
        self._step = step
        self._cache = cache

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
