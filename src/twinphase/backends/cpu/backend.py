"""The CPU backend: operations become commands of a program, which a thread pool replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.base import Forward, KVCacheSpec, StepInputs, WeightLoader
from twinphase.backends.cpu import kv_layout
from twinphase.backends.cpu.attention_units import Limits
from twinphase.backends.cpu.compiler import compile_kernels, kernel_digest, load_kernels
from twinphase.backends.cpu.dry_run import DryLoader, RecordedKernels, private_group
from twinphase.backends.cpu.formats import STRIP_OUTPUTS
from twinphase.backends.cpu.isa import choose_isa
from twinphase.backends.cpu.memory import Arena
from twinphase.backends.cpu.operations import (
    CacheAddresses,
    LayerCache,
    RopeTables,
    softmax_scale,
)
from twinphase.backends.cpu.program import Buffer, Program
from twinphase.backends.cpu.program_layout import TILE_BITS
from twinphase.backends.cpu.recurrent import RecurrentOperations, StateMemory
from twinphase.backends.cpu.sampling import CpuRowSampler, scratch_bytes
from twinphase.backends.cpu.stamps import StampedProgram
from twinphase.backends.cpu.step import StepMemory
from twinphase.backends.cpu.threads import Command, ThreadPool
from twinphase.backends.cpu.tiling import (
    ELEMENTWISE_TILE_ROWS,
    GATE_TILES_PER_ROW,
    LOGIT_TILES_PER_ROW,
)
from twinphase.backends.cpu.weights import (
    Embedding,
    Fill,
    Matrix,
    Vector,
    arena_bytes,
    load_vector,
    place,
)
from twinphase.backends.group import Group, shared_bytes
from twinphase.backends.kv_frames import is_finite, kv_fingerprint, pack_frames, unpack_frames
from twinphase.backends.rope_tables import query_scales, rope_tables
from twinphase.backends.states import slot_layout
from twinphase.blueprint import Blueprint, DeltaNet, KVShape, Mamba2, MatrixStates, Rope
from twinphase.config import available_cores
from twinphase.errors import InvalidRequestError, UnsupportedModelError
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.storage import cache_root

PACK_BATCH_BYTES = 64 << 20
MAX_ROWS = 1 << 16
MAX_HEAD_DIM = 512
# Where values are multiplied as they are stored, shorter prefixes are found in the caches by every
# sequence at little cost; other paths convert them for each.
BF16_SHARING_TILES = 8
F32 = NDArray[np.float32]


class CpuBackend:
    """The `Backend` protocol on this processor's vector instructions."""

    name = "cpu"
    block_multiple = kv_layout.CELL_TOKENS
    kv_cache_dtypes: tuple[str, ...] = kv_layout.KV_CACHE_DTYPES
    device_sampler = None
    row_sampler: CpuRowSampler | None = None
    group: Group | None = None

    def __init__(
        self,
        *,
        threads: int | None = None,
        isa: str | None = None,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 16,
        kv_cache_dtype: str = "auto",
        progress: Callable[[float, int, str], None] | None = None,
    ) -> None:
        """Choose the instruction-set path; everything else waits for the model.

        Args:
            threads: compute threads; None is one a core.
            isa: instruction-set path; None is the best this processor has.
            max_num_batched_tokens: most rows of a step.
            max_num_seqs: most sequences of a step.
            kv_cache_dtype: "auto" (int8 keys with a scale a token and head, 16-bit values) or
                "int8" (values too).
            progress: called with (done, total, name) while kernels compile.
        """
        if max_num_batched_tokens > MAX_ROWS:
            raise InvalidRequestError(
                f"max_num_batched_tokens is {max_num_batched_tokens} with the cpu backend.",
                f"Use at most {MAX_ROWS}.",
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
        self._fills: list[Fill] = []
        self._pool: ThreadPool | None = None
        self._stamped: StampedProgram | None = None

    # Preparation and weights
    def prepare(
        self,
        checkpoint: Checkpoint,
        blueprint: Blueprint,
        forward_on: Callable[[WeightLoader], Forward],
    ) -> None:
        """Compile the kernels that the model's first step runs, and reserve memory for its weights.

        Raises:
            InvalidRequestError: more rows in a step than kernels have tiles for.
            UnsupportedModelError: head sizes that the attention kernels do not cover, or a tensor
                type without a kernel.
        """
        _check_heads(blueprint)
        most = _most_rows(blueprint)
        if self.max_rows["tokens"] > most:
            raise InvalidRequestError(
                f"max_num_batched_tokens is {self.max_rows['tokens']} with this model on the cpu "
                "backend.",
                f"Use at most {most}.",
            )
        self.blueprint = blueprint
        self._checkpoint = checkpoint
        self._max_positions = blueprint.context_length
        specs = self._first_step_kernels(forward_on)
        folder = cache_root() / "kernels"
        compile_kernels(folder, self.isa, specs, self._progress)
        self._kernels = load_kernels(folder, self.isa, specs)
        self._program = Program(self._kernels, self.max_rows, self.group)
        self._arena = Arena(arena_bytes(checkpoint, blueprint.tied, self.isa), "weights")
        self._keep: list[NDArray[np.generic]] = []  # arrays that kernels know by address

    def _first_step_kernels(self, forward_on: Callable[[WeightLoader], Forward]) -> list[str]:
        """Specs of the kernels that pack the weights and run a step, recorded without memory."""
        b = self.blueprint
        loader = DryLoader(self.isa)
        forward = forward_on(loader)
        rows = {"tokens": 1, "logits": 1}
        spec = KVCacheSpec.of(b, 1)
        step = StepMemory(spec, b, Limits(rows=1, runs=1, positions=1, threads=1))
        layers = [LayerCache(shape, [0, 0, 0], 1) for shape in spec.layers]
        cache = CacheAddresses(self.kv_cache_dtype, layers, 1)
        kernels = RecordedKernels(["run_program", "sample_rows", *loader.packs])
        with private_group(self.group, shared_bytes(b.whole, 1)) as group:
            program = Program(kernels, rows, group)
            operations = RecurrentOperations(program, b, self.isa, self.threads, step, cache)
            if b.recurrent_layers:
                operations.states = StateMemory(slot_layout(b, 0), np.empty(0, np.uint8), 1, 1)
            logits = forward(operations)
            logits.memory("f32")
        return sorted(kernels)

    def matrix(self, checkpoint: Checkpoint, names: Sequence[str]) -> Matrix:
        """Packed weights, or those of every expert, as soon as the KV cache is allocated."""
        matrix, fills = place(checkpoint, names, self._arena.take, self.isa)
        self._fills += fills
        # All at once would have the whole file in memory together with the packed weights.
        if sum(fill.info.nbytes for fill in self._fills) >= PACK_BATCH_BYTES:
            self._fill_now()
        return matrix

    def exact_matrix(self, checkpoint: Checkpoint, names: Sequence[str]) -> Matrix:
        """Weights in float32, which take float32 rows."""
        matrix, fills = place(checkpoint, names, self._arena.take, self.isa, exact=True)
        self._fills += fills
        return matrix

    experts = matrix

    def _fill_now(self) -> None:
        commands = [command for fill in self._fills for command in fill.commands(self._pack)]
        if commands:
            pool = ThreadPool(self._kernels["run_program"], self.threads, 64)
            self._program.cells.update({})
            pool.load(commands)
            pool.run()
            pool.close()
        for fill in self._fills:
            fill.checkpoint.release(fill.info.name)
        self._fills = []

    def _pack(self, kernel: str, args: Sequence[int], strips: int) -> Command:
        return Command(self._kernels[kernel], self._program.cells.constant(strips), False, args)

    def vector(self, checkpoint: Checkpoint, names: Sequence[str], plus: float = 0.0) -> Vector:
        """The tensors side by side, each padded as the outputs of stacked matrices are."""
        out = load_vector(checkpoint, names, plus)
        self._keep.append(out.values)
        return out

    def embedding(self, checkpoint: Checkpoint, name: str) -> Embedding:
        """The embedding where it lies in the mapped file."""
        info = checkpoint.tensors[name]
        address = checkpoint.raw(name).ctypes.data
        return Embedding(info.type, address, info.nbytes // info.shape[0], info.shape[1])

    def rope(self, rope: Rope, max_positions: int) -> RopeTables:
        """Cosines and sines."""
        scales = query_scales(rope, max_positions)
        if scales is not None:
            scales *= np.float32(softmax_scale(self.blueprint, self.blueprint.head_dim))
            self._keep.append(scales)
        tables = RopeTables(rope, *rope_tables(rope, max_positions), scales)
        self._keep += [tables.cos, tables.sin]
        self._max_positions = max_positions
        return tables

    def allocate_kv_cache(self, spec: KVCacheSpec) -> None:
        """Make the paged cache (`kv_layout`) and pack the weights."""
        if spec.block_size % kv_layout.CELL_TOKENS:
            raise InvalidRequestError(
                f"block_size is {spec.block_size} with the cpu backend.", "Use a multiple of 16."
            )
        self.kv_spec = spec
        per_block = spec.block_size // kv_layout.CELL_TOKENS
        chunks = -(-spec.num_blocks * per_block // kv_layout.CHUNK_CELLS)
        cells = {
            shape: chunks * kv_layout.chunk_cells(count, shape.num_heads)
            for shape, count in spec.groups.items()
        }
        nbytes = sum(count * sum(self._cell_sizes(shape)) for shape, count in cells.items())
        arena = Arena(nbytes + 128 * len(cells), "KV cache")
        # Of each shape: keys, scales, values.
        self.kv_memory = {
            shape: [arena.take(count * size) for size in self._cell_sizes(shape)]
            for shape, count in cells.items()
        }
        layers = [self._layer_cache(*spec.place(layer)) for layer in range(spec.num_layers)]
        self._cache = CacheAddresses(self.kv_cache_dtype, layers, per_block)
        limits = Limits(
            rows=self.max_rows["tokens"],
            runs=self.max_num_seqs,
            positions=self._max_positions,
            threads=self.threads,
            dtype=self.kv_cache_dtype,
            prefill_rows=self.isa.attention_rows,
            sharing_tiles=BF16_SHARING_TILES if self.isa.bf16_dot else 1,
        )
        self._step = StepMemory(spec, self.blueprint, limits)
        self._states = self._make_states(spec) if spec.num_state_slots else None
        self._fill_now()

    def _make_states(self, spec: KVCacheSpec) -> StateMemory:
        layout = slot_layout(self.blueprint, spec.state_log_rows)
        nbytes = spec.num_state_slots * layout.nbytes
        slots = Arena(nbytes + 64, "states of recurrent layers").take(nbytes)
        return StateMemory(layout, slots, self.max_rows["tokens"], self.max_num_seqs)

    def _layer_cache(self, shape: KVShape, number: int) -> LayerCache:
        first = number * shape.num_heads * kv_layout.CHUNK_CELLS  # cell
        arrays = zip(self.kv_memory[shape], self._cell_sizes(shape), strict=True)
        addresses = [array.ctypes.data + first * size for array, size in arrays]
        per_chunk = kv_layout.chunk_cells(self.kv_spec.groups[shape], shape.num_heads)
        return LayerCache(shape, addresses, per_chunk)

    def kv_bytes_per_token(
        self, dtype: str | None = None, layers: Sequence[KVShape] | None = None
    ) -> int:
        """Keys in int8 with a scale, values in 16 bits or likewise."""
        shapes = layers or self.kv_spec.layers
        cells = (s.num_heads * sum(self._cell_sizes(s, dtype)) for s in shapes)
        return sum(cells) // kv_layout.CELL_TOKENS

    def _cell_sizes(self, shape: KVShape, dtype: str | None = None) -> tuple[int, int, int]:
        """Bytes of one head's keys, scales and values in a cell."""
        dtype = dtype or self.kv_cache_dtype
        return (
            kv_layout.key_bytes(shape.head_dim),
            kv_layout.scale_bytes(dtype),
            kv_layout.value_bytes(shape.head_dim, dtype),
        )

    @cached_property
    def kv_fingerprint(self) -> str:
        """The path that runs, and the sources of its kernels, which lay out the cache too."""
        path = {"backend": self.name, "isa": self.isa.name, "kernels": kernel_digest(self.isa)}
        return kv_fingerprint(
            self._checkpoint,
            self.blueprint,
            self.kv_spec,
            **path,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    def read_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Keys, scales and values, uint8 [cells of a block, layers, KV heads, bytes] each.

        Those of layers of one shape after those of another.
        """
        at = self._cells(block_ids)
        parts = [
            view[at[0], :, :, at[1]].reshape(len(block_ids), -1) for view in self._cell_views()
        ]
        return pack_frames(self.kv_fingerprint, np.concatenate(parts, axis=1))

    def write_blocks(self, block_ids: Sequence[int], frames: Sequence[bytes | memoryview]) -> None:
        nbytes = self.kv_bytes_per_token() * self.kv_spec.block_size
        blocks = unpack_frames(self.kv_fingerprint, frames, nbytes)
        at = self._cells(block_ids)
        start = 0
        for view in self._cell_views():
            shape = *at[0].shape, *view.shape[1:3], view.shape[4]
            end = start + int(np.prod(shape[1:]))
            view[at[0], :, :, at[1]] = blocks[:, start:end].reshape(shape)
            start = end

    def frame_parts(self) -> list[tuple[int, int, int]]:
        """List keys, scales and values, those of layers of one shape after those of another."""
        per_block = self.kv_spec.block_size // kv_layout.CELL_TOKENS
        groups = enumerate(self.kv_spec.groups.items())
        return [
            (number, per_block * count, size)
            for number, (shape, count) in groups
            for size in self._cell_sizes(shape)
        ]

    def has_finite_numbers(self, frame: bytes | bytearray | memoryview) -> bool:
        """Check the scales of int8 values, which are finite themselves, or the 16-bit values."""
        whole = KVCacheSpec.of(self.blueprint.whole, 1)
        wide = "bfloat16" if self.isa.bf16_dot else "float16"
        types = (None, "float32", None if self.kv_cache_dtype == "int8" else wide)
        start = 0
        for (_, rows, size), (shape, dtype) in zip(
            self.frame_parts(), product(whole.groups, types), strict=True
        ):
            nbytes = rows * shape.num_heads * size
            if dtype and not is_finite(frame, dtype, start, nbytes):
                return False
            start += nbytes
        return True

    def _cells(self, block_ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Chunk, and place in it, of each cell, [blocks, cells of a block] each."""
        per_block = self.kv_spec.block_size // kv_layout.CELL_TOKENS
        return np.divmod(
            np.array(block_ids)[:, None] * per_block + np.arange(per_block), kv_layout.CHUNK_CELLS
        )

    def _cell_views(self) -> list[NDArray[np.uint8]]:
        """Keys, scales and values as [chunks, layers, KV heads, CHUNK_CELLS, bytes of a cell]."""
        return [
            array.reshape(-1, count, shape.num_heads, kv_layout.CHUNK_CELLS, size)
            for shape, count in self.kv_spec.groups.items()
            for array, size in zip(self.kv_memory[shape], self._cell_sizes(shape), strict=True)
        ]

    # One step
    def execute(self, forward: Forward, inputs: StepInputs) -> F32:
        """Run the step; captures the forward pass the first time."""
        if self._pool is None:
            self._capture(forward)
        assert self._pool is not None
        self._fill_step(inputs)
        self._pool.run()
        logits: F32 = self._logits[: len(inputs.logit_rows), : self._outputs]
        return logits

    def execute_in_parts(
        self, forward: Forward, inputs: StepInputs
    ) -> tuple[F32, Mapping[str, float]]:
        """As `execute`, about two percent slower, with the seconds of each of `stamps.PARTS`."""
        if self._pool is None:
            self._capture(forward)
        if self._stamped is None:
            self._stamped = StampedProgram(self._program, self.threads, self._scratch_bytes())
        self._fill_step(inputs)
        seconds = self._stamped.run()
        return self._logits[: len(inputs.logit_rows), : self._outputs], seconds

    def _fill_step(self, inputs: StepInputs) -> None:
        counts = self._step.fill(inputs)
        counts |= self._states.fill(inputs) if self._states else {"sequences": 0, "states": 0}
        self._counts = counts
        self._program.cells.update(counts)
        given = self._operations.given
        if given is not None and inputs.hidden is not None:
            given.array[: inputs.num_tokens, : inputs.hidden.shape[1]] = inputs.hidden

    def kept(self) -> list[F32]:
        views = [(x.rows, x.array) for x in self._operations.kept]
        return [view[: self._counts[rows], : self.blueprint.hidden_size] for rows, view in views]

    def _scratch_bytes(self) -> int:
        b = self.blueprint
        attention = [
            kv_layout.attention_scratch_bytes(work.shape.head_dim, work.group)
            for work in self._step.works.values()
        ]
        routing = 8 * b.experts.count if b.experts else 0
        sampling = scratch_bytes(self._logits.shape[1])
        return max(*attention, routing, sampling, self._operations.scratch_bytes)

    def _capture(self, forward: Forward) -> None:
        self._operations = RecurrentOperations(
            self._program, self.blueprint, self.isa, self.threads, self._step, self._cache
        )
        if self._states:
            self._operations.states = self._states
        logits: Buffer = forward(self._operations)
        self._outputs = logits.outputs
        self._logits = logits.array
        self._pool = ThreadPool(self._kernels["run_program"], self.threads, self._scratch_bytes())
        self.row_sampler = CpuRowSampler(self._program, logits, self._pool)
        self._pool.load(self._program.commands)


def _check_heads(blueprint: Blueprint) -> None:
    """Raises UnsupportedModelError for head sizes that the attention kernels do not cover."""
    heads = blueprint.whole.num_heads
    for head_dim in {blueprint.head_dim, *(shape.head_dim for shape in blueprint.kv_shapes)}:
        if head_dim % 16 or head_dim > MAX_HEAD_DIM or heads * head_dim % 32:
            raise UnsupportedModelError(
                f"Head size {head_dim} is not supported by the cpu backend.",
                f"It must be a multiple of 16 up to {MAX_HEAD_DIM}, and all heads together of 32.",
            )
    if blueprint.layer_embedding_size % STRIP_OUTPUTS:
        raise UnsupportedModelError(
            f"Embeddings of {blueprint.layer_embedding_size} numbers per layer are not supported "
            "by the cpu backend.",
            f"There must be a multiple of {STRIP_OUTPUTS} of them.",
        )
    recurrence = blueprint.recurrence
    if recurrence and recurrence.channels % STRIP_OUTPUTS:
        raise UnsupportedModelError(
            f"Convolutions of {recurrence.channels} channels are not supported by the cpu backend.",
            f"There must be a multiple of {STRIP_OUTPUTS} of them.",
        )
    if isinstance(recurrence, MatrixStates) and (
        recurrence.key_dim % 16 or recurrence.value_dim % 16 or recurrence.num_values % 32
    ):
        raise UnsupportedModelError(
            f"States with heads of {recurrence.key_dim} and {recurrence.value_dim} are not "
            "supported by the cpu backend.",
            "Heads must be a multiple of 16 wide.",
        )
    if isinstance(recurrence, Mamba2) and recurrence.num_values % (32 * recurrence.key_heads):
        raise UnsupportedModelError(
            f"Groups of {recurrence.num_values // recurrence.key_heads} columns of Mamba-2 are not "
            "supported by the cpu backend.",
            "They must be a multiple of 32 wide.",
        )
    if isinstance(recurrence, DeltaNet) and recurrence.value_dim % 32:
        raise UnsupportedModelError(
            f"Value heads of {recurrence.value_dim} are not supported by the cpu backend.",
            "They must be a multiple of 32 wide.",
        )
    if blueprint.attention_gate and blueprint.head_dim % 32:
        raise UnsupportedModelError(
            f"Head size {blueprint.head_dim} with a gate is not supported by the cpu backend.",
            "It must be a multiple of 32.",
        )


def _most_rows(blueprint: Blueprint) -> int:
    """Rows that a step may have, so that no kernel has more tiles than a claim word can count."""
    times = GATE_TILES_PER_ROW * (blueprint.experts.used if blueprint.experts else 1)
    if blueprint.layer_embedding_size:
        times = max(times, -(-blueprint.num_layers // ELEMENTWISE_TILE_ROWS))
    if blueprint.logit_scale != 1 or blueprint.logit_softcap:
        times = max(times, LOGIT_TILES_PER_ROW)
    return ((1 << TILE_BITS) - 1) // times
