"""The CPU backend: operations become commands of a captured program, which the thread pool replays every step."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import Forward, KVCacheSpec, StepInputs
from twinphase.backends.cpu import kv_layout, tiling
from twinphase.backends.cpu.compiler import compile_kernels, load_kernels
from twinphase.backends.cpu.formats import FORMATS, STRIP
from twinphase.backends.cpu.isa import choose_isa
from twinphase.backends.cpu.program import Buffer, Memory, Program
from twinphase.backends.cpu.step import COUNTS, StepMemory
from twinphase.backends.cpu.threads import Command, ThreadPool, aligned
from twinphase.backends.cpu.weights import (
    Arena,
    Embedding,
    Matrix,
    Vector,
    arena_bytes,
    check_types,
    load_matrix,
    padded,
    vector_of,
)
from twinphase.backends.rope_tables import rope_tables
from twinphase.blueprint import Blueprint, Experts, Rope
from twinphase.config import available_cores
from twinphase.errors import InvalidRequestError, UnsupportedModelError
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.storage import cache_root

if TYPE_CHECKING:
    from twinphase.backends.cpu.stamps import StampedProgram

__all__ = ["CpuBackend"]

ROWS_PER_TILE, SILU_PARTS = tiling.ROWS_PER_TILE, tiling.SILU_PARTS
FEW_ROWS = 16
TILES_PER_THREAD = 8
MAX_ROWS = 1 << 16
MAX_TILES = 1 << 17  # of a linear layer; a claim word holds numbers below 2^18
LOG2_E = 1.4426950408889634
F32 = NDArray[np.float32]


def _bits(value: float) -> int:
    """The bits of a float32, as kernels take float arguments."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def _not_yet(b: Blueprint) -> dict[str, bool]:
    plain = (b.embedding_scale, b.residual_scale, b.logit_scale, b.attention_softcap, b.logit_softcap)
    return {
        "experts": b.experts is not None,
        "sliding windows": any(b.windows),
        "sinks": b.sinks,
        "norms of queries and keys": b.qk_norm != "none",
        "norms behind each half": b.norm_after or not b.norm_before,
        "fused matrices": b.fused_qkv or b.fused_gate_up,
        b.activation: b.activation != "silu",
        "scales and softcaps": plain != (1.0, 1.0, 1.0, None, None),
        "several rotary embeddings": len(set(b.ropes)) > 1,
    }


class CpuBackend:
    """The `Backend` protocol on this processor's vector instructions."""

    name = "cpu"
    block_multiple = kv_layout.CELL
    kv_cache_dtypes: tuple[str, ...] = kv_layout.KV_CACHE_DTYPES

    def __init__(
        self,
        *,
        threads: int | None = None,
        isa: str | None = None,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 16,
        kv_cache_dtype: str = "auto",
        progress: Callable[[int, int, str], None] | None = None,
    ) -> None:
        """Choose the instruction-set path; everything else waits for the model.

        Args:
            threads: compute threads; None is one a core.
            isa: instruction-set path; None is the best this processor has.
            max_num_batched_tokens: most rows of a step.
            max_num_seqs: most sequences of a step.
            kv_cache_dtype: "auto" (int8 keys with a scale a token and head, 16-bit values) or "int8" (values too).
            progress: called with (done, total, name) while kernels compile.
        """
        if max_num_batched_tokens > MAX_ROWS:
            raise InvalidRequestError(
                f"max_num_batched_tokens is {max_num_batched_tokens} with the cpu backend.", f"Use at most {MAX_ROWS}."
            )
        if kv_cache_dtype not in kv_layout.KV_CACHE_DTYPES:
            raise InvalidRequestError(
                f"kv_cache_dtype is {kv_cache_dtype!r} with the cpu backend.",
                f"Use one of: {', '.join(kv_layout.KV_CACHE_DTYPES)}.",
            )
        self.kv_cache_dtype = kv_cache_dtype
        self.threads = threads or available_cores()
        self.isa = choose_isa(isa)
        self.max_rows = {"tokens": max_num_batched_tokens, "logits": max_num_batched_tokens}
        self.max_num_seqs = max_num_seqs
        self._progress = progress
        self._pack_commands: list[Command] = []
        self._pool: ThreadPool | None = None
        self._stamped: StampedProgram | None = None

    # Preparation and weights
    def prepare(self, checkpoint: Checkpoint, blueprint: Blueprint) -> None:
        """Compile the kernels this model needs and reserve memory for its weights.

        Raises:
            UnsupportedModelError: head sizes that the attention kernels do not cover, or a tensor type without one.
        """
        missing = [name for name, has in _not_yet(blueprint).items() if has]
        if missing:
            raise UnsupportedModelError(
                f"The cpu backend cannot compute {', '.join(missing)} yet.", "Use --backend reference, which is slow."
            )
        rope = blueprint.ropes[0]
        assert rope is not None
        if not rope.interleaved and rope.dim % 32:
            raise UnsupportedModelError(
                f"Rotating {rope.dim} dimensions in halves is not supported.", "It must be a multiple of 32."
            )
        head_dim = blueprint.head_dim
        if head_dim % 16 or rope.dim % 16 or head_dim > 256 or blueprint.num_heads * head_dim % 32:
            raise UnsupportedModelError(
                f"Head size {head_dim} (rotated {rope.dim}) is not supported by the cpu backend.",
                "It must be a multiple of 16 up to 256, and all heads together of 32.",
            )
        self.blueprint, self._checkpoint = blueprint, checkpoint
        self._rope_spec = f"rope_kv_write:{head_dim}:{rope.dim}:{int(rope.interleaved)}:{self.kv_cache_dtype}"
        self._attention = f"{head_dim}:{blueprint.group}"
        types = {t.type for t in checkpoint.tensors.values() if len(t.shape) == 2}
        specs = [
            *(f"attention_{phase}:{self._attention}:{self.kv_cache_dtype}" for phase in ("prefill", "decode")),
            f"attention_merge:{self._attention}",
            *(f"quantized_linear:{t}" for t in sorted(types & set(FORMATS))),
            *(f"dense_linear:{t}" for t in sorted(types - set(FORMATS))),
            *(f"pack:{t}" for t in sorted(types & set(FORMATS))),
            self._rope_spec,
            *(f"{name}:{kind}" for kind in ("q8", "f32") for name in ("rms_norm", "silu_mul")),
            "quantize",
            "pick_rows",
            f"embed:{checkpoint.tensors['token_embd.weight'].type}",
            "run_program",
        ]
        check_types(types)
        folder = cache_root() / "kernels"
        compile_kernels(folder, self.isa, specs, self._progress)
        self._kernels, self._engine = load_kernels(folder, self.isa, specs)
        self._program = Program(self._kernels, self.max_rows)
        self._arena = Arena(arena_bytes(checkpoint), "weights")
        self._keep: list[NDArray[np.generic]] = [aligned(64, np.float32)]  # arrays that kernels know by address

    def matrix(self, checkpoint: Checkpoint, names: Sequence[str]) -> Matrix:
        """Packed weights; the packing itself runs when the KV cache is allocated."""
        cells = self._program.cells

        def pack(type_name: str, args: Sequence[int], strips: int) -> Command:
            return Command(self._kernels[f"pack:{type_name}"], cells.constant(strips), False, args)

        matrix, commands = load_matrix(checkpoint, names, self._arena, pack)
        self._pack_commands += commands
        return matrix

    def vector(self, checkpoint: Checkpoint, names: Sequence[str], plus: float = 0.0) -> Vector:
        """The tensors side by side, each padded as the outputs of stacked matrices are."""
        values = np.concatenate([vector_of(checkpoint, name, plus) for name in names])
        out = Vector(values, sum(checkpoint.tensors[name].shape[0] for name in names))
        self._keep.append(out.values)
        return out

    def embedding(self, checkpoint: Checkpoint, name: str) -> Embedding:
        """The embedding where it lies in the mapped file."""
        info = checkpoint.tensors[name]
        address = checkpoint.raw(name).ctypes.data
        return Embedding(info.type, address, info.nbytes // info.shape[0], info.shape[1])

    def rope(self, rope: Rope, max_positions: int) -> tuple[F32, F32]:
        """Cosines and sines, float32 [max_positions, dim / 2] each."""
        tables = rope_tables(rope, max_positions)
        self._keep += tables
        self._max_positions = max_positions
        return tables

    def allocate_kv_cache(self, spec: KVCacheSpec) -> None:
        """Make the paged cache (`kv_layout`) and pack the weights."""
        if spec.block_size % kv_layout.CELL:
            raise InvalidRequestError(f"block_size is {spec.block_size} with the cpu backend.", "Use a multiple of 16.")
        self.kv_spec = spec
        self._per_chunk = kv_layout.chunk_cells(spec.num_layers, spec.num_kv_heads)
        cells = spec.num_blocks * (spec.block_size // kv_layout.CELL)
        cells = -(-cells // kv_layout.CHUNK) * self._per_chunk
        sizes = self._cell_sizes()
        self._cache = Arena(cells * sum(sizes) + 128, "KV cache")
        memory = [self._cache.take(cells * size) for size in sizes]
        self.kv_memory = memory  # keys, scales, values
        layer_cells = spec.num_kv_heads * kv_layout.CHUNK
        self._layers = [
            [array.ctypes.data + layer * layer_cells * size for array, size in zip(memory, sizes, strict=True)]
            for layer in range(spec.num_layers)
        ]
        self._step = StepMemory(
            self.max_rows["tokens"], self.max_num_seqs, self._max_positions, spec, self.blueprint, self.threads
        )
        if self._pack_commands:
            pool = ThreadPool(self._kernels["run_program"], self.threads, 64)
            self._program.cells.update(dict.fromkeys(COUNTS, 0))
            pool.load(self._pack_commands)
            pool.run()
            pool.close()
            self._pack_commands = []

    def kv_bytes_per_token(self, dtype: str | None = None) -> int:
        """Keys in int8 with a scale, values in 16 bits or likewise."""
        spec = self.kv_spec
        return spec.num_layers * spec.num_kv_heads * sum(self._cell_sizes(dtype)) // kv_layout.CELL

    def _cell_sizes(self, dtype: str | None = None) -> tuple[int, int, int]:
        """Bytes of one head's keys, scales and values in a cell."""
        dim, dtype = self.kv_spec.head_dim, dtype or self.kv_cache_dtype
        return kv_layout.key_bytes(dim), kv_layout.scale_bytes(dtype), kv_layout.value_bytes(dim, dtype)

    # One step
    def execute(self, forward: Forward, inputs: StepInputs) -> F32:
        """Run the step; captures the forward pass the first time."""
        if self._pool is None:
            self._capture(forward)
        assert self._pool is not None
        counts = self._step.fill(inputs)
        self._program.cells.update(counts)
        self._pool.run()
        logits: F32 = self._logits[: len(inputs.logit_rows), : self._outputs]
        return logits

    def execute_in_parts(self, forward: Forward, inputs: StepInputs) -> tuple[F32, Mapping[str, float]]:
        """As `execute`, about two percent slower, with the seconds of each of `stamps.PARTS`."""
        from twinphase.backends.cpu.stamps import StampedProgram  # what serves never needs it

        if self._pool is None:
            self._capture(forward)
        if self._stamped is None:
            self._stamped = StampedProgram(self._program, self.threads, self._scratch_bytes())
        counts = self._step.fill(inputs)
        self._program.cells.update(counts)
        seconds = self._stamped.run()
        return self._logits[: len(inputs.logit_rows), : self._outputs], seconds

    def _scratch_bytes(self) -> int:
        return kv_layout.attention_scratch_bytes(self.blueprint.head_dim, self.blueprint.group)

    def _capture(self, forward: Forward) -> None:
        logits: Buffer = forward(self)
        self._outputs = logits.outputs
        self._logits: F32 = logits.floats.arrays[0].view(np.float32).reshape(-1, logits.width)
        self._pool = ThreadPool(self._kernels["run_program"], self.threads, self._scratch_bytes())
        self._pool.load(self._program.commands)

    # Operations
    def embed(self, table: Embedding, scale: float = 1.0) -> Buffer:
        """Embedding rows of the step's tokens."""
        program, out = self._program, Buffer(self._program, "tokens", padded(table.width))
        args = [self._step.token_ids.ctypes.data, table.address, table.row_bytes, table.width]
        args += [out.floats.data, out.floats.stride]
        program.add(f"embed:{table.type}", program.count("tokens"), args, [], [(out.floats.data, 0)])
        return out

    def logit_rows(self, x: Buffer) -> Buffer:
        """The rows whose logits are wanted, side by side."""
        program, source = self._program, x.floats
        out = Buffer(program, "logits", x.width)
        args = [self._step.logit_rows.ctypes.data, source.data, source.stride, source.groups, out.floats.data]
        program.add("pick_rows", program.count("logits"), args, [source.data], [(out.floats.data, 0)])
        return out

    def rms_norm(self, x: Buffer, weight: Vector, eps: float) -> Buffer:
        """RMSNorm; what its reader wants is written in the same pass."""
        program, source = self._program, x.floats
        if x.width != len(weight.values):
            raise ValueError(f"rms_norm of {x.width} columns with weights for {len(weight.values)}")

        def make(quantized: bool) -> Memory:
            out = Memory(program, x.rows, x.width, quantized)
            args = [program.count(x.rows), source.data, source.stride, weight.values.ctypes.data]
            args += [weight.width, _bits(eps), source.groups, *out.addresses]
            spec, tiles = f"rms_norm:{'q8' if quantized else 'f32'}", program.tiles(x.rows, ROWS_PER_TILE)
            program.add(spec, tiles, args, [source.data], [(out.data, 0)])
            return out

        return Buffer(program, x.rows, x.width, make=make)

    def linear(
        self, x: Buffer, weight: Matrix, *, residual: Buffer | None = None, bias: Vector | None = None
    ) -> Buffer:
        """x @ weight.T + residual or bias, into new memory: a kernel may compute a row twice."""
        if residual is not None and bias is not None:
            raise ValueError("a linear layer adds a residual or a bias")
        program = self._program
        out = Buffer(program, x.rows, weight.width, columns=weight.columns, outputs=weight.sizes[0])
        base = None if residual is None else residual.floats
        for part in weight.parts:
            quantized, column = part.type in FORMATS, 4 * part.column
            source = x.memory(quantized)
            at = source.addresses
            strips_per_tile, chunk, tiles = self._linear_tiles(x.rows, part.strips, source.stride)
            args = [part.address, part.groups, part.strips, at[0], source.stride, *at[1:3], source.groups * 4, at[3]]
            args += [out.floats.data + column, out.floats.stride]
            if bias is not None:
                args += [bias.values.ctypes.data + column, 0]  # one row for all
            else:
                args += [self._zeros(part.strips), 0] if base is None else [base.data + column, base.stride]
            args += [program.count(x.rows), strips_per_tile, chunk]
            kernel = "quantized_linear" if quantized else "dense_linear"
            reads = [source.data] if base is None else [source.data, base.data]
            program.add(f"{kernel}:{part.type}", tiles, args, reads, [(out.floats.data, part.column)])
        return out

    def _zeros(self, strips: int) -> int:
        """Address of a row of zeros, the residual of a layer without one."""
        if self._keep[0].size < strips * STRIP:
            self._keep.append(self._keep[0])
            self._keep[0] = aligned(strips * STRIP, np.float32)
        return int(self._keep[0].ctypes.data)

    def _linear_tiles(self, rows: str, strips: int, row_bytes: int) -> tuple[int, int, int]:
        """Addresses of the strips and of the rows a tile takes, and of the number of tiles.

        Many rows: one strip, so that its weights stay in the first-level cache and the rows in the second. Few rows:
        about eight tiles a thread, long enough to stream memory, short enough to even out.
        """
        wanted = TILES_PER_THREAD * self.threads

        def chunk(counts: dict[str, int]) -> int:
            return tiling.row_chunk(counts[rows], row_bytes, strips, wanted)

        def chunks(counts: dict[str, int]) -> int:
            return -(-counts[rows] // chunk(counts))

        def per_tile(counts: dict[str, int]) -> int:
            if counts[rows] <= FEW_ROWS:
                return max(1, strips // wanted)
            return -(-strips * chunks(counts) // MAX_TILES)

        def tiles(counts: dict[str, int]) -> int:
            return -(-strips // per_tile(counts)) * chunks(counts)

        key, address = (rows, strips, row_bytes), self._program.cells.address
        return address(("strips", *key), per_tile), address(("chunk", *key), chunk), address(("tiles", *key), tiles)

    def rope_kv_write(self, qkv: Buffer, rope: tuple[F32, F32] | None, layer: int, q_norm: Vector | None = None,
                      k_norm: Vector | None = None) -> StepMemory:  # fmt: skip
        """Rotate, write the cache; the queries stay in the step's memory, as int8."""
        program, step, source = self._program, self._step, qkv.floats
        # The Hadamard transform of both sides multiplies their products by its size.
        b = self.blueprint
        assert rope is not None  # so far `prepare` refuses layers without one
        scale = b.scale * LOG2_E / kv_layout.spread_size(b.head_dim)
        args = [source.data + 4 * column for column in qkv.columns] + [source.stride]
        args += [table.ctypes.data for table in rope] + [step.positions.ctypes.data, step.slots.ctypes.data]
        args += [b.num_heads, b.num_kv_heads, *self._layers[layer], *step.query_addresses]
        args += [_bits(scale), self._per_chunk]
        writes = [(step.query_addresses[0], 0), (self._layers[layer][0], 0)]
        program.add(self._rope_spec, program.count("tokens"), args, [source.data], writes)
        return step

    def attention(self, q: StepMemory, layer: int, window: int | None = None, sinks: Vector | None = None) -> Buffer:
        """Prefill's tiles, decode's tiles and the merge of the latter; whichever the step has."""
        program, cache, kv_heads = self._program, self._layers[layer], self.blueprint.num_kv_heads
        num_heads = self.blueprint.num_heads
        out = Buffer(program, "tokens", num_heads * self.blueprint.head_dim)
        common = [*q.query_addresses, *cache, kv_heads, q.block_tables.ctypes.data]
        common += [q.block_tables.strides[0], self.kv_spec.block_size // kv_layout.CELL, self._per_chunk]
        reads, partials = [q.query_addresses[0], cache[0]], q.partials.ctypes.data
        cells = program.cells
        decode_units = cells.address("decode_units", lambda counts: counts["decode_units"])
        prefill_units = cells.address("prefill_units", lambda counts: counts["prefill_units"])
        merged_heads = cells.address("merged_heads", lambda counts: counts["decode_merges"] * num_heads)
        writes = [(partials, 0), (out.floats.data, 1)]
        args = [q.decode_units.ctypes.data, *common, out.floats.data, partials]
        program.add(f"attention_decode:{self._attention}:{self.kv_cache_dtype}", decode_units, args, reads, writes)
        args = [q.prefill_units.ctypes.data, *common, out.floats.data]
        program.add(
            f"attention_prefill:{self._attention}:{self.kv_cache_dtype}",
            prefill_units,
            args,
            reads,
            [(out.floats.data, 0)],
        )
        args = [q.merges.ctypes.data, partials, kv_heads, out.floats.data]
        program.add(f"attention_merge:{self._attention}", merged_heads, args, [partials], [(out.floats.data, 2)])
        return out

    def gate_mul(self, gate_up: Buffer) -> Buffer:
        """SwiGLU; what its reader wants is written in the same pass."""
        program, source = self._program, gate_up.floats
        gate, up = gate_up.columns

        def make(quantized: bool) -> Memory:
            out = Memory(program, gate_up.rows, up - gate, quantized)
            args = [source.data + 4 * gate, source.data + 4 * up, source.stride]
            args += [out.groups, *out.addresses]
            spec, tiles = f"silu_mul:{'q8' if quantized else 'f32'}", program.tiles(gate_up.rows, 1, SILU_PARTS)
            program.add(spec, tiles, args, [source.data], [(out.data, 0)])
            return out

        return Buffer(program, gate_up.rows, up - gate, make=make)

    # What `prepare` refuses so far.
    def experts(self, checkpoint: Checkpoint, names: Sequence[str]) -> Matrix:
        raise NotImplementedError

    def add(self, x: Buffer, h: Buffer, scale: float = 1.0) -> Buffer:
        raise NotImplementedError

    def add_norm(self, x: Buffer, h: Buffer, weight: Vector, eps: float, scale: float = 1.0) -> Buffer:
        raise NotImplementedError

    def cap_logits(self, logits: Buffer, scale: float, softcap: float | None) -> Buffer:
        raise NotImplementedError

    def moe(self, x: Buffer, router: Matrix, gate_up: Matrix, down: Matrix, experts: Experts, *,
            router_bias: Vector | None = None, gate_up_bias: Vector | None = None,
            down_bias: Vector | None = None) -> Buffer:  # fmt: skip
        raise NotImplementedError
