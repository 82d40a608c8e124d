"""Calls compiled kernels one tile at a time, without a model, a program or threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from functools import cache

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from steps import ISAS_OF_LINEAR, USER_CACHE, differs_in_dot_alone, isas_that_differ, on_each
from twinphase.backends.cpu.compiler import compile_kernels, load_kernels
from twinphase.backends.cpu.formats import BY_OUTPUTS, FORMATS, STRIP_OUTPUTS, PackedFormat
from twinphase.backends.cpu.isa import choose_isa
from twinphase.backends.cpu.memory import aligned

DENSE_ELEMENTS = ("F32", "F16", "BF16")
# Of each way to multiply one: groups of 32 and of 16, with minima and without, nested and not, and
# values that codes stand for.
FEW_FORMATS = ("Q4_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS")
KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3)
_RESULT = ctypes.create_string_buffer(64)
_SCRATCH = aligned(1 << 20, np.uint8)
# Where a block of each format holds float16 numbers.
_HALVES = {
    "Q4_0": (0,),
    "Q5_0": (0,),
    "Q8_0": (0,),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}


def formats_on(isa: str) -> Collection[str]:
    """The formats to test on a path; few if a path with matrix tiles shares the code of another.

    Few where the kernels of a path with matrix tiles have the same code for fewer rows.
    """
    if choose_isa(isa).bf16_weights:
        return BY_OUTPUTS
    has_own_code = isa in isas_that_differ("lanes", "dot", "registers", "converts_f16")
    return FORMATS if has_own_code and not differs_in_dot_alone(isa) else FEW_FORMATS


def per_isa_and(names_on: Callable[[str], Collection[str]]) -> pytest.MarkDecorator:
    """Each path with its formats; all but the default path are marked slow."""
    return pytest.mark.parametrize(
        ("name", "isa"),
        [
            pytest.param(name, isa, marks=() if isa == ISAS_OF_LINEAR[0] else pytest.mark.slow)
            for isa in ISAS_OF_LINEAR
            for name in names_on(isa)
        ],
    )


per_isa = on_each(ISAS_OF_LINEAR)
per_isa_and_format = per_isa_and(formats_on)
per_isa_and_element = per_isa_and(lambda isa: DENSE_ELEMENTS)


def _pack(isa: str, name: str) -> str:
    return "pack_tiles" if choose_isa(isa).takes_bf16(name) else "pack"


@cache
def _loaded(isa: str) -> dict[str, int]:
    folder = USER_CACHE / "kernels"
    formats = formats_on(isa)
    specs = [
        *(f"{kind}:{name}" for name in formats for kind in ("quantized_linear", _pack(isa, name))),
        *(f"dense_linear:{name}" for name in DENSE_ELEMENTS),
        *(f"embed:{name}" for name in (*formats, *DENSE_ELEMENTS)),
        "quantize",
        "run_program",
        *(["round_rows"] if choose_isa(isa).matrix_tiles else []),
    ]
    compile_kernels(folder, choose_isa(isa), specs)
    return load_kernels(folder, choose_isa(isa), specs)


def kernel(isa: str, spec: str) -> int:
    """The address of a kernel; the first call compiles all kernels of its path."""
    return _loaded(isa)[spec]


def call_kernel(address: int, args: Sequence[int], tiles: int) -> None:
    """Run a kernel's tiles in order."""
    numbers = np.array([*args, *[0] * 8], np.int64)  # as in a program: zeros after them
    place = ctypes.addressof(_RESULT)
    for tile in range(tiles):
        KERNEL(address)(place, place, numbers.ctypes.data, tile, _SCRATCH.ctypes.data)


def random_blocks(
    rng: np.random.Generator, outputs: int, inputs: int, name: str, fill: int | None = None
) -> NDArray[np.uint8]:
    """Random blocks of a format, or all bytes `fill`; float16 parameters of about 0.05."""
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    low, high = (0, 256) if fill is None else (fill, fill + 1)
    raw = rng.integers(low, high, (outputs, inputs // size, nbytes), dtype=np.uint8)
    for at in _HALVES.get(name, (0, 2)):
        halves = (rng.random((outputs, inputs // size, 1)) * 0.1 - 0.03).astype(np.float16)
        raw[:, :, at : at + 2] = halves.view(np.uint8)
    if name == "MXFP4":
        raw[:, :, 0] = rng.integers(118, 124, raw.shape[:2])  # exponents
    return raw.reshape(outputs, -1)


def packed_format(isa: str, name: str) -> PackedFormat:
    """The layout of a format's packed matrices on a path."""
    return (BY_OUTPUTS if choose_isa(isa).takes_bf16(name) else FORMATS)[name]


def pack(isa: str, name: str, raw: NDArray[np.uint8], inputs: int) -> NDArray[np.uint8]:
    """The matrix in strips, uint8 [strips, bytes of a strip]."""
    outputs, row_bytes = raw.shape
    strips = -(-outputs // STRIP_OUTPUTS)
    strip_bytes = packed_format(isa, name).strip_bytes(inputs)
    packed = aligned(strips * strip_bytes, np.uint8)
    args = [raw.ctypes.data, row_bytes, outputs, inputs // 32, packed.ctypes.data, strip_bytes]
    call_kernel(kernel(isa, f"{_pack(isa, name)}:{name}"), args, strips)
    return packed[: strips * strip_bytes].reshape(strips, strip_bytes)
