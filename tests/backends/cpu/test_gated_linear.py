"""Gate and up in one pass: the same bits as a linear layer of both, and a gate after it."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from kernel_calls import USER_CACHE, per_isa, random_blocks
from numpy.typing import NDArray

from twinphase.backends.cpu import tiling
from twinphase.backends.cpu.compiler import compile_kernels, load_kernels
from twinphase.backends.cpu.dry_run import RecordedKernels
from twinphase.backends.cpu.formats import STRIP_OUTPUTS
from twinphase.backends.cpu.isa import ISAS, Isa, choose_isa
from twinphase.backends.cpu.linear_operations import TILES_PER_THREAD, LinearOperations
from twinphase.backends.cpu.memory import aligned
from twinphase.backends.cpu.operations import Operations
from twinphase.backends.cpu.program import Buffer, Program
from twinphase.backends.cpu.threads import Command, ThreadPool
from twinphase.backends.cpu.weights import Fill, Matrix, Part, Vector, place
from twinphase.weights.checkpoint import TensorInfo

INPUTS = 512
OUTPUTS = 1100  # 35 pairs of strips, more than there are tiles; the last ones are padded
WIDTH = 1120
MOST_ROWS = 320
PAIRED = ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight")
APART = ("blk.0.a.weight", "blk.0.b.weight")
KINDS = ("f32", "q8", "bf16")


class Tensors:
    """A checkpoint of gate and up, under names that pair them and names that do not."""

    def __init__(self, name: str) -> None:
        rng = np.random.default_rng(1)
        self.metadata: dict[str, Any] = {}
        raws = [self._random(rng, name) for _ in PAIRED]
        self._raw = dict(zip((*PAIRED, *APART), raws * 2, strict=True))
        self.tensors = {
            one: TensorInfo(one, (OUTPUTS, INPUTS), name, 0, raw.nbytes)
            for one, raw in self._raw.items()
        }

    def _random(self, rng: np.random.Generator, name: str) -> NDArray[np.uint8]:
        if name not in ("F32", "BF16"):
            return random_blocks(rng, OUTPUTS, INPUTS, name).reshape(-1)
        values = (rng.standard_normal((OUTPUTS, INPUTS)) / 16).astype(np.float32)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8).ravel()

    def raw(self, name: str) -> NDArray[np.uint8]:
        return self._raw[name]


class Layers:
    """A norm, and both ways to the same rows behind it, as one program."""

    def __init__(
        self, isa: Isa, name: str, kind: str, activation: str, kernels: Any, max_rows: int
    ) -> None:
        self.keep: list[Any] = []
        self.program = Program(kernels, {"tokens": max_rows})
        self.fills: list[Fill] = []
        unused: Any = None
        blueprint: Any = SimpleNamespace(activation=activation)
        self.operations = Operations(self.program, blueprint, isa, 2, unused, unused)
        self.x = Buffer(self.program, "tokens", INPUTS)
        weight = Vector(np.linspace(0.5, 1.5, INPUTS, dtype=np.float32), INPUTS)
        self.keep.append(weight)
        tensors = Tensors(name)
        paired, apart = (self._matrix(tensors, names, isa) for names in (PAIRED, APART))
        assert paired.paired and not apart.paired
        normed = self.operations.rms_norm(self.x, weight, 1e-5)
        gated = self.operations.gated_linear(normed, paired)
        # The same rows, normalized and rounded by commands of their own.
        again = self.operations.rms_norm(self.x, weight, 1e-5)
        again.memory("f32")
        plain = self.operations.gate_mul(self.operations.linear(again, apart))
        plain.memory("f32")
        self.found, self.expected = (one.memory(kind) for one in (gated, plain))

    def _matrix(self, tensors: Any, names: tuple[str, ...], isa: Isa) -> Matrix:
        def take(nbytes: int) -> NDArray[np.uint8]:
            self.keep.append(aligned(nbytes, np.uint8))
            return self.keep[-1]

        matrix, fills = place(tensors, names, take, isa)
        self.fills += fills
        return matrix

    def pack(self, kernels: Any) -> None:
        def command(kernel: str, args: Any, strips: int) -> Command:
            return Command(kernels[kernel], self.program.cells.constant(strips), False, args)

        commands = [one for fill in self.fills for one in fill.commands(command)]
        if commands:
            self.program.cells.update({"tokens": 1})
            pool = ThreadPool(kernels["run_program"], 1, 64)
            pool.load(commands)
            pool.run()
            pool.close()


def rows_of(memory: Any, rows: int, kind: str) -> list[NDArray[np.generic]]:
    """The values of the first `rows` rows; the places of the other rows may hold anything."""
    if kind == "bf16":
        words = memory.arrays[0].view(np.uint16)
        words = words[: words.size // (16 * WIDTH) * 16 * WIDTH]
        blocks = words.reshape(-1, WIDTH // 2, 16, 2).transpose(0, 2, 1, 3)
        return [blocks.reshape(-1, WIDTH)[:rows]]
    sizes = [WIDTH, WIDTH // 32, WIDTH // 32, WIDTH // 16][: len(memory.arrays)]
    arrays = [memory.arrays[0].view(np.float32), *memory.arrays[1:]]
    arrays = arrays if kind == "f32" else memory.arrays
    return [array[: rows * size] for array, size in zip(arrays, sizes, strict=True)]


@per_isa
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "BF16", "F32"])
def test_gated_linear_has_the_bits_of_a_gate_after_a_linear_layer(isa, name, monkeypatch):
    path = choose_isa(isa)
    kinds = KINDS if path.matrix_tiles else KINDS[:2]
    for kind, activation in [*((kind, "silu") for kind in kinds), (kinds[-1], "gelu")]:
        compare(path, name, kind, activation)
    # Rows in several chunks, and a panel of inputs for several pairs of strips.
    for limit in ("CHUNK_BYTES", "MATRIX_CHUNK_BYTES", "BF16_CHUNK_BYTES"):
        monkeypatch.setattr(tiling, limit, 32 << 10)
    compare(path, name, kinds[-1], "silu")


def compare(path: Isa, name: str, kind: str, activation: str) -> None:
    """Both ways, with few rows and many."""
    asked = RecordedKernels(["run_program"])
    Layers(path, name, kind, activation, asked, 1)
    packs = [f"{'pack_tiles' if path.takes_bf16(name) else 'pack'}:{name}"]
    specs = sorted([*asked, *(packs if name.startswith("Q") else [])])
    compile_kernels(USER_CACHE / "kernels", path, specs)
    kernels = load_kernels(USER_CACHE / "kernels", path, specs)
    layers = Layers(path, name, kind, activation, kernels, MOST_ROWS)
    layers.pack(kernels)
    x = layers.x.array
    x[:] = np.random.default_rng(2).standard_normal(x.shape, np.float32)
    pool = ThreadPool(kernels["run_program"], 2, layers.operations.scratch_bytes)
    pool.load(layers.program.commands)
    for rows in (1, 2, 7, 16, 17, 32, 33, 97, 100, 256, 257, MOST_ROWS):
        for array in (*layers.found.arrays, *layers.expected.arrays):
            array.view(np.uint8)[:] = 0xFF  # every number must be written
        layers.program.cells.update({"tokens": rows})
        pool.run()
        both = (rows_of(memory, rows, kind) for memory in (layers.found, layers.expected))
        for found, expected in zip(*both, strict=True):
            np.testing.assert_array_equal(
                found.view(np.uint8), expected.view(np.uint8), f"{rows} rows, {kind}"
            )
        if kind == "f32":
            assert not found.view(np.float32).reshape(rows, -1)[:, OUTPUTS:].any(), "padding"
    pool.close()


def test_what_is_paired_and_what_that_forbids():
    path = ISAS["avx2"]

    def placed(tensors: Any) -> Matrix:
        return place(tensors, PAIRED, lambda nbytes: np.empty(0, np.uint8), path)[0]

    tensors = Tensors("Q8_0")
    paired = placed(tensors)
    unused: Any = None
    operations = LinearOperations(Program(RecordedKernels([]), {"tokens": 1}), unused, path, 1)
    x = Buffer(operations.program, "tokens", INPUTS)
    with pytest.raises(ValueError, match="gated_linear"):
        operations.linear(x, paired)
    bias = Vector(np.zeros(2 * WIDTH, np.float32), 2 * OUTPUTS)
    with pytest.raises(ValueError, match="bias"):
        operations.gated_linear(x, paired, bias=bias)

    for change in ("type", "bias"):
        others = Tensors("Q8_0")
        up = others.tensors[PAIRED[1]]
        if change == "type":
            others.tensors[PAIRED[1]] = replace(up, type="Q4_K")
        else:
            others.tensors["blk.0.ffn_up.bias"] = replace(up, name="blk.0.ffn_up.bias")
        assert not placed(others).paired, change
    assert paired.paired


def test_results_that_wait_for_a_gate_have_room():
    """The scratch memory is as much as any number of rows needs."""
    rng = np.random.default_rng(0)
    for isa in ("avx2", "avx512-amx", "avx512-amx-bf16"):
        path = ISAS[isa]
        for _ in range(200):
            pairs = int(rng.integers(1, 4000))
            groups = int(rng.integers(1, 300))
            threads = int(rng.integers(1, 33))
            most = int(rng.integers(1, 1 << 16))
            tiled = path.bf16_weights
            program = Program(RecordedKernels([]), {"tokens": 1})
            unused: Any = None
            operations = LinearOperations(program, unused, path, threads)
            part = Part("Q8_0", 0, 2 * pairs, groups, 0, 0, tiled)
            row_bytes = 32 * groups * (2 if tiled else 1)
            cells = operations._linear_tiles("tokens", part, row_bytes, 2)[:2]
            room = tiling.gated_results(
                most, tiling.most_chunk_rows(row_bytes), pairs, TILES_PER_THREAD * threads
            )
            for rows in {1, 16, 17, 32, 33, 100, most, *rng.integers(1, most + 1, 20).tolist()}:
                if rows <= most:
                    program.cells.update({"tokens": rows})
                    strips, chunk = (ctypes.c_int64.from_address(cell).value for cell in cells)
                    needed = min(rows, chunk) * min(strips, 2 * pairs) * 4 * STRIP_OUTPUTS
                    assert tiling.GATE_RECORD_BYTES + needed <= room, (rows, pairs, groups, threads)
