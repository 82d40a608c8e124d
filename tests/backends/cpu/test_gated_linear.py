"""Gate and up in one pass: the same bits as a linear layer of both, and a gate after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from kernel_calls import USER_CACHE, per_isa, random_blocks
from numpy.typing import NDArray

from twinphase.backends.cpu.compiler import compile_kernels, load_kernels
from twinphase.backends.cpu.dry_run import RecordedKernels
from twinphase.backends.cpu.isa import Isa, choose_isa
from twinphase.backends.cpu.operations import Operations
from twinphase.backends.cpu.program import Buffer, Program
from twinphase.backends.cpu.threads import Command, ThreadPool, aligned
from twinphase.backends.cpu.weights import Fill, Matrix, Vector, place
from twinphase.weights.checkpoint import TensorInfo

INPUTS = 512
OUTPUTS = 1120  # 35 pairs of strips, more than there are tiles
MOST_ROWS = 320  # more than a chunk
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

    def __init__(self, isa: Isa, name: str, kind: str, kernels: Any, max_rows: int) -> None:
        self.keep: list[Any] = []
        self.program = Program(kernels, {"tokens": max_rows})
        self.fills: list[Fill] = []
        unused: Any = None
        blueprint: Any = SimpleNamespace(activation="silu")
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
    """The numbers of the first rows, whatever lies in the places of others."""
    if kind == "bf16":
        words = memory.arrays[0].view(np.uint16)
        words = words[: words.size // (16 * OUTPUTS) * 16 * OUTPUTS]
        blocks = words.reshape(-1, OUTPUTS // 2, 16, 2).transpose(0, 2, 1, 3)
        return [blocks.reshape(-1, OUTPUTS)[:rows]]
    sizes = [OUTPUTS, OUTPUTS // 32, OUTPUTS // 32, OUTPUTS // 16][: len(memory.arrays)]
    arrays = [memory.arrays[0].view(np.float32), *memory.arrays[1:]]
    arrays = arrays if kind == "f32" else memory.arrays
    return [array[: rows * size] for array, size in zip(arrays, sizes, strict=True)]


@per_isa
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "BF16", "F32"])
def test_gated_linear_has_the_bits_of_a_gate_after_a_linear_layer(isa, name):
    path = choose_isa(isa)
    rng = np.random.default_rng(2)
    for kind in KINDS if path.matrix_tiles else KINDS[:2]:
        asked = RecordedKernels(["run_program"])
        Layers(path, name, kind, asked, 1)
        packs = [f"{'pack_tiles' if path.takes_bf16(name) else 'pack'}:{name}"]
        specs = sorted([*asked, *(packs if name.startswith("Q") else [])])
        compile_kernels(USER_CACHE / "kernels", path, specs)
        kernels = load_kernels(USER_CACHE / "kernels", path, specs)
        layers = Layers(path, name, kind, kernels, MOST_ROWS)
        layers.pack(kernels)
        layers.x.array[:] = rng.standard_normal(layers.x.array.shape, np.float32)
        pool = ThreadPool(kernels["run_program"], 2, layers.operations.scratch_bytes)
        pool.load(layers.program.commands)
        for rows in (1, 2, 7, 16, 17, 32, 33, 97, 100, 256, 257, MOST_ROWS):
            for array in (*layers.found.arrays, *layers.expected.arrays):
                array.view(np.uint8)[:] = 0xFF  # every number must be written
            layers.program.cells.update({"tokens": rows})
            pool.run()
            pairs = zip(
                rows_of(layers.found, rows, kind),
                rows_of(layers.expected, rows, kind),
                strict=True,
            )
            for found, expected in pairs:
                np.testing.assert_array_equal(
                    found.view(np.uint8), expected.view(np.uint8), f"{rows} rows, {kind}"
                )
        pool.close()
