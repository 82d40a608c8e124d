"""Linear kernels against a float64 matrix product of the same quantized numbers."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from kernel_calls import (
    call_kernel,
    kernel,
    pack,
    per_isa,
    per_isa_and_element,
    per_isa_and_format,
    random_blocks,
)
from numpy.typing import NDArray

from twinphase.backends.cpu.formats import FORMATS
from twinphase.backends.cpu.isa import choose_isa
from twinphase.backends.cpu.memory import aligned
from twinphase.backends.cpu.tiling import (
    ELEMENTWISE_TILE_ROWS,
    MATRIX_MIN_ROWS,
    MATRIX_TILE_ROWS,
)
from twinphase.backends.cpu.weights import _pack_dense, _pack_tiles, _strip_bytes
from twinphase.weights.checkpoint import TensorInfo

F32 = NDArray[np.float32]
ROW_CHUNK = 192  # rows of a tile
TOLERANCE = 1e-5  # relative norm; float32 sums over some thousand inputs
# Some weights with a minimum are rounded otherwise, since the kernel does not round their product.
BF16_TOLERANCE = 1e-4


class Activations:
    """Rows as the kernel `quantize` writes them and, for bfloat16 tiles, `round_rows`."""

    def __init__(self, isa: str, x: F32) -> None:
        rows, inputs = x.shape
        self.x = x
        groups = inputs // 32
        self.data = aligned(rows * inputs, np.int8).reshape(rows, inputs)
        self.scale = aligned(rows * groups, np.float32).reshape(rows, groups)
        self.fsum = aligned(rows * groups, np.float32).reshape(rows, groups)
        self.isum = aligned(rows * groups * 2, np.int32).reshape(rows, groups, 2)
        self.rows = np.array([rows], np.int64)
        args = [self.rows.ctypes.data, x.ctypes.data, 4 * inputs, groups]
        args += [array.ctypes.data for array in (self.data, self.scale, self.fsum, self.isum)]
        call_kernel(kernel(isa, "quantize"), args, -(-rows // ELEMENTWISE_TILE_ROWS))
        blocks = -(-rows // MATRIX_TILE_ROWS)
        self.tiles = aligned(blocks * MATRIX_TILE_ROWS * inputs, np.uint16)
        self.tiles[:] = 0x7FC0  # not a number, as places of rows that are not there may be
        if choose_isa(isa).matrix_tiles:
            args = [self.rows.ctypes.data, x.ctypes.data, x.strides[0], groups]
            call_kernel(kernel(isa, "round_rows"), [*args, self.tiles.ctypes.data], blocks)

    def values(self, in_bf16: bool) -> NDArray[np.float64]:
        """What the int8 numbers stand for, or those in bfloat16."""
        if in_bf16:
            return rounded(self.x)
        groups = self.data.reshape(len(self.x), -1, 32) * self.scale.astype(np.float64)[..., None]
        return groups.reshape(self.x.shape)


def linear(
    isa: str,
    spec: str,
    weights: int,
    groups: int,
    outputs: int,
    x: Activations,
    per_tile: int,
    residual: F32 | None = None,
) -> F32:
    """Run the kernel over all its tiles; [rows, outputs rounded up to strips]."""
    rows = len(x.x)
    strips = -(-outputs // 32)
    out = aligned(rows * strips * 32, np.float32).reshape(rows, -1)
    out[:] = np.nan  # every output must be written
    base, stride = (
        (aligned(strips * 32, np.float32), 0)
        if residual is None
        else (residual, residual.strides[0])
    )
    cells = np.array([rows, per_tile, ROW_CHUNK], np.int64)
    source: NDArray[np.generic] = x.data
    row_bytes = x.x.shape[1]
    if choose_isa(isa).takes_bf16(spec.partition(":")[2]):
        source = x.tiles
        row_bytes = 2 * x.x.shape[1]
    elif spec.startswith("dense"):
        source = x.x
        row_bytes = x.x.strides[0]
    args = [weights, groups, source.ctypes.data, row_bytes]
    args += [x.scale.ctypes.data, x.fsum.ctypes.data, 4 * (x.x.shape[1] // 32), x.isum.ctypes.data]
    args += [out.ctypes.data, out.strides[0], base.ctypes.data, stride]
    args += [strips, *(cells.ctypes.data + 8 * i for i in range(3))]
    tiles = -(-strips // per_tile) * -(-rows // ROW_CHUNK)
    call_kernel(kernel(isa, spec), args, tiles)
    return out


def rounded(x: F32) -> NDArray[np.float64]:
    """Numbers in bfloat16."""
    return torch.from_numpy(x).bfloat16().double().numpy()


def multiplied(raw: NDArray[np.uint8], name: str, in_bf16: bool) -> NDArray[np.float64]:
    """The weights of a matrix, in bfloat16 where they are multiplied in it."""
    weights = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    return rounded(weights) if in_bf16 else weights.astype(np.float64)


def random_rows(rng: np.random.Generator, rows: int, inputs: int) -> F32:
    """Activations with a few outliers, as models have, and some groups of zeros."""
    x = aligned(rows * inputs, np.float32).reshape(rows, inputs)
    x[:] = rng.standard_normal((rows, inputs)) * np.where(rng.random((rows, inputs)) < 0.01, 30, 1)
    x[0, : inputs // 64 * 32] = 0
    return x


def relative(actual: F32, expected: NDArray[np.float64]) -> float:
    """Relative error of the norm."""
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@per_isa
def test_activations(isa):
    x = random_rows(np.random.default_rng(0), 7, 96)
    rows = Activations(isa, x)
    groups = x.reshape(7, 3, 32)
    largest = np.abs(groups).max(axis=2)
    np.testing.assert_allclose(rows.scale, largest / 127, rtol=1e-6)
    np.testing.assert_array_equal(
        np.abs(rows.data.reshape(7, 3, 32)).max(axis=2), np.where(largest > 0, 127, 0)
    )
    error = np.abs(rows.values(False) - x).reshape(7, 3, 32)
    assert (error <= 0.5001 * rows.scale[..., None]).all()
    if choose_isa(isa).matrix_tiles:
        tiles = rows.tiles.reshape(3, 16, 16, 2).transpose(2, 0, 1, 3).reshape(16, 96)[:7]
        np.testing.assert_array_equal(tiles, (rounded(x).astype(np.float32).view(np.uint32) >> 16))
    np.testing.assert_array_equal(
        rows.isum, rows.data.reshape(7, 3, 2, 16).sum(axis=3, dtype=np.int32)
    )
    np.testing.assert_allclose(rows.fsum, rows.scale * rows.isum.sum(axis=2), rtol=1e-6)


@per_isa_and_format
def test_quantized(name, isa):
    rng = np.random.default_rng(2)
    unit = 256 if FORMATS[name].nested else 32
    for outputs, inputs, rows, per_tile in (
        (32, unit, 1, 1),
        (70, 3 * unit, 5, 2),
        (100, 7 * unit, 11, 3),
        (33, 2 * unit, ROW_CHUNK + 3, 1),
        (200, unit, ROW_CHUNK + 3, 7),  # more sums than wait at once in bfloat16 tiles
    ):
        raw = random_blocks(rng, outputs, inputs, name)
        weights = pack(isa, name, raw, inputs)
        x = Activations(isa, random_rows(rng, rows, inputs))
        in_bf16 = choose_isa(isa).takes_bf16(name)
        matrix = multiplied(raw, name, in_bf16)
        out = linear(
            isa, f"quantized_linear:{name}", weights.ctypes.data, inputs // 32, outputs, x, per_tile
        )
        tolerance = BF16_TOLERANCE if in_bf16 else TOLERANCE
        assert relative(out[:, :outputs], x.values(in_bf16) @ matrix.T) < tolerance
        assert not out[:, outputs:].any(), "padding"


# Rows in matrix tiles, in whole ones and with a rest, and few, beside each row alone.
@per_isa_and_format
def test_a_row_has_the_same_bits_among_any_number(name, isa):
    rng = np.random.default_rng(6)
    inputs = 768 if FORMATS[name].nested else 608
    outputs = 70
    raw = random_blocks(rng, outputs, inputs, name)
    x = random_rows(rng, 128, inputs)
    packed = pack(isa, name, raw, inputs)
    residual = random_rows(rng, 128, 96)
    spec = f"quantized_linear:{name}"
    weights = packed.ctypes.data
    groups = inputs // 32
    alone = [
        linear(
            isa,
            spec,
            weights,
            groups,
            outputs,
            Activations(isa, x[m : m + 1]),
            1,
            residual[m : m + 1],
        )
        for m in range(128)
    ]
    for rows in (
        *range(2, 20),
        31,
        48,
        64,
        MATRIX_MIN_ROWS - 1,
        MATRIX_MIN_ROWS,
        MATRIX_MIN_ROWS + 1,
        111,
        112,
        113,
        128,
    ):
        together = linear(
            isa, spec, weights, groups, outputs, Activations(isa, x[:rows]), 1, residual[:rows]
        )
        np.testing.assert_array_equal(together, np.concatenate(alone[:rows]), f"{rows} rows")


@per_isa_and_format
def test_extreme_codes_do_not_overflow(name, isa):
    # All codes at an end of their range, all activations +-127: the largest sums that 16-bit lanes
    # could meet.
    rng = np.random.default_rng(3)
    inputs = 256
    for fill in (0, 255):
        raw = random_blocks(rng, 32, inputs, name, fill)
        # As many as are multiplied in panels.
        x = random_rows(rng, 24, inputs)
        x[::3] = 1
        x[1::3] = -1
        x[2] = np.where(np.arange(inputs) % 2, 1, -1)
        weights = pack(isa, name, raw, inputs)
        rows = Activations(isa, x)
        in_bf16 = choose_isa(isa).takes_bf16(name)
        matrix = multiplied(raw, name, in_bf16)
        out = linear(
            isa, f"quantized_linear:{name}", weights.ctypes.data, inputs // 32, 32, rows, 1
        )
        expected = rows.values(in_bf16) @ matrix.T
        # The alternating row cancels to nearly nothing: compare with what was added, not with what
        # is left.
        added = np.abs(rows.values(in_bf16)) @ np.abs(matrix).T
        assert (np.abs(out - expected) <= (BF16_TOLERANCE if in_bf16 else TOLERANCE) * added).all()


@per_isa
def test_residual(isa):
    rng = np.random.default_rng(4)
    raw = random_blocks(rng, 40, 64, "Q4_1")
    x = Activations(isa, random_rows(rng, 9, 64))
    weights = pack(isa, "Q4_1", raw, 64)
    residual = aligned(9 * 64, np.float32).reshape(9, 64)
    residual[:] = rng.standard_normal((9, 64)) * 10
    alone = linear(isa, "quantized_linear:Q4_1", weights.ctypes.data, 2, 40, x, 1)
    out = linear(isa, "quantized_linear:Q4_1", weights.ctypes.data, 2, 40, x, 1, residual)
    np.testing.assert_array_equal(out, alone + residual)


def dense(isa: str, name: str, matrix: F32, x: F32, residual: F32 | None = None) -> F32:
    """x @ matrix.T by the kernel, [rows, outputs rounded up to strips]."""
    outputs, inputs = matrix.shape
    kind = gguf.GGMLQuantizationType[name]
    info = TensorInfo("a.weight", matrix.shape, name, 0, 0)
    tiled = choose_isa(isa).takes_bf16(name)
    memory = aligned(1 << 22, np.uint8)
    order = _pack_tiles if tiled else _pack_dense
    stored = gguf.quants.quantize(matrix, kind).view(np.uint8).reshape(-1)
    strips = -(-outputs // 32)
    strip_bytes = _strip_bytes(info, tiled)
    order(stored, info, memory[: strips * strip_bytes].reshape(strips, strip_bytes))
    rows = Activations(isa, x)
    return linear(
        isa, f"dense_linear:{name}", memory.ctypes.data, inputs, outputs, rows, 2, residual
    )


@per_isa_and_element
def test_dense(name, isa):
    rng = np.random.default_rng(5)
    for outputs, inputs, rows in (
        (64, 32, 1),
        (40, 96, 5),
        (96, 48, 3),
        (100, 1120, 37),
        (64, 160, ROW_CHUNK + 17),
    ):
        if inputs % 32 and choose_isa(isa).takes_bf16(name):
            continue  # rows come from buffers that are padded
        matrix = (rng.standard_normal((outputs, inputs)) / 8).astype(np.float32)
        kind = gguf.GGMLQuantizationType[name]
        x = random_rows(rng, rows, inputs)
        exact = gguf.quants.dequantize(gguf.quants.quantize(matrix, kind), kind)
        out = dense(isa, name, matrix, x)
        if choose_isa(isa).takes_bf16(name):  # which takes activations in bfloat16 too
            x = rounded(x).astype(np.float32)
        assert (
            relative(out[:, :outputs], x.astype(np.float64) @ exact.astype(np.float64).T)
            < TOLERANCE
        )
        assert not out[:, outputs:].any(), "padding"


@per_isa_and_element
def test_a_row_of_dense_weights_has_the_same_bits_among_any_number(name, isa):
    rng = np.random.default_rng(7)
    matrix = (rng.standard_normal((70, 1120)) / 8).astype(np.float32)
    x = random_rows(rng, 80, 1120)
    residual = random_rows(rng, 80, 96)
    alone = [dense(isa, name, matrix, x[m : m + 1], residual[m : m + 1]) for m in range(80)]
    for rows in (2, 15, 16, 17, 31, 32, 33, 48, 63, 80):
        together = dense(isa, name, matrix, x[:rows], residual[:rows])
        np.testing.assert_array_equal(together, np.concatenate(alone[:rows]), f"{rows} rows")
