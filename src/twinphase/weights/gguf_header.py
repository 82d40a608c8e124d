"""A bounds-checking reader of the GGUF header: no count, length or offset is trusted.

The header is untrusted input, and its lengths determine how much is read and allocated. Tensor data
stays in the mapped file; `gguf.py` caches the header. `gguf.GGUFReader` makes an array object of
every vocabulary entry, which takes seconds for a typical model, and trusts lengths. Therefore the
`gguf` package is used only as the oracle of the tests, and here to name unsupported tensor types.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import Any, NoReturn

import numpy as np

from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.weights.block_formats import FORMATS
from twinphase.weights.checkpoint import TensorInfo, quoted
from twinphase.weights.quant import tensor_nbytes

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4
# Longer arrays are data, not hyper-parameters: no list by layer is nearly as long.
_MAX_METADATA_ARRAY = 4096

_STRING = 8
_ARRAY = 9
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_DTYPES = {number: np.dtype(code) for number, code in _SCALARS.items()}
_TENSOR_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    20: "IQ4_NL",
    23: "IQ4_XS",
    30: "BF16",
    39: "MXFP4",
}
# The size of the shortest entry: an empty name, its type, and one byte of value; or no dimensions,
# type and offset.
_MIN_METADATA_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
_FIX = "The file is damaged or incomplete: fetch it again."


@dataclass(frozen=True)
class Header:
    """The content of a GGUF file before its tensor data.

    Attributes:
        metadata: scalars, strings and short lists.
        arrays: the tokenizer's arrays and other long ones, as lists of strings or NumPy arrays.
        tensors: tensors by name; offsets are relative to the start of the file.
        data_start: start of the tensor data, bytes from the start of the file.
    """

    metadata: Mapping[str, Any]
    arrays: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data_start: int


def read_header(buffer: mmap | bytes, name: str) -> Header:
    """Read and check everything before the tensor data.

    `buffer` is the whole file, and `name` its name in errors.

    Raises:
        CheckpointError: the file is not GGUF, its version is not supported, or its header does not
            fit its size.
        UnsupportedModelError: a tensor's type is not supported.
    """
    walker = _Walker(buffer, name)
    if bytes(buffer[:4]) != _MAGIC:
        raise CheckpointError(
            f"{name} is not a GGUF file (it does not start with 'GGUF').",
            "Give a .gguf model file.",
        )
    walker.skip(4, "the magic number")
    version = walker.u32("the version")
    if version & 0xFFFF == 0:
        raise CheckpointError(
            f"{name} is a big-endian GGUF file.", "Use the little-endian file of the model."
        )
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{name} has GGUF version {version}; versions 2 and 3 are read.",
            "Convert the model again.",
        )
    tensor_count = walker.count("tensors", _MIN_TENSOR_BYTES)
    metadata_count = walker.count("metadata entries", _MIN_METADATA_BYTES)
    metadata, arrays = _read_metadata(walker, metadata_count)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if (
        not isinstance(alignment, int)
        or not 0 < alignment <= _MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        walker.fail(f"alignment {alignment!r} is not a power of two up to {_MAX_ALIGNMENT}")
    entries = [_read_tensor_entry(walker) for _ in range(tensor_count)]
    data_start = -(-walker.position // alignment) * alignment
    return Header(
        metadata, arrays, _place_tensors(walker, entries, data_start, alignment), data_start
    )


class _Walker:
    """A position in the file that cannot leave the file's bounds."""

    def __init__(self, buffer: mmap | bytes, name: str) -> None:
        self.buffer = buffer
        self.size = len(buffer)
        self.name = name
        self.position = 0

    def fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.name}: {what}.", _FIX)

    def skip(self, nbytes: int, what: str) -> int:
        """Advance by `nbytes` bytes, and return the position before."""
        start = self.position
        if nbytes > self.size - start:
            self.fail(f"{what} needs {nbytes} bytes at byte {start}, the file ends at {self.size}")
        self.position = start + nbytes
        return start

    def u32(self, what: str) -> int:
        return int(self.scalar(_DTYPES[4], what))

    def u64(self, what: str) -> int:
        return int(self.scalar(_DTYPES[10], what))

    def count(self, what: str, min_bytes: int) -> int:
        """Read a 64-bit count of items with at least `min_bytes` each, which must fit the rest."""
        count = self.u64(f"the number of {what}")
        if count > (self.size - self.position) // min_bytes:
            self.fail(f"{count} {what} do not fit into a file of {self.size} bytes")
        return count

    def string(self, what: str) -> str:
        length = self.u64(f"the length of {what}")
        start = self.skip(length, what)
        try:
            return str(self.buffer[start : start + length], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} at byte {start} is not UTF-8")

    def scalar(self, dtype: np.dtype[Any], what: str) -> Any:
        start = self.skip(dtype.itemsize, what)
        return np.frombuffer(self.buffer, dtype, 1, start)[0].item()

    def strings(self, count: int, what: str) -> list[str]:
        """Read `count` strings; optimized for vocabularies with hundreds of thousands of them."""
        buffer = self.buffer
        position = self.position
        size = self.size
        unpack_length = struct.Struct("<Q").unpack_from
        values = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack_length(buffer, position)[0]
                if position > size:
                    self.fail(
                        f"{what} has a string of {position - start} bytes at byte {start}, past "
                        "the file's end"
                    )
                values.append(str(buffer[start:position], "utf-8"))
        except struct.error:
            self.fail(f"{what} ends early, at byte {position}")
        except UnicodeDecodeError:
            self.fail(f"{what} has a string that is not UTF-8 at byte {start}")
        self.position = position
        return values


def _read_metadata(walker: _Walker, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    metadata: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for i in range(count):
        key = walker.string(f"the name of metadata entry {i}")
        what = f"metadata entry {quoted(key)}"
        if key in metadata or key in arrays:
            walker.fail(f"{what} occurs twice")
        type_ = walker.u32(f"the type of {what}")
        if type_ == _ARRAY:
            values = _read_array(walker, what)
            if key.startswith("tokenizer.ggml.") or len(values) > _MAX_METADATA_ARRAY:
                arrays[key] = values
            else:
                metadata[key] = values if isinstance(values, list) else values.tolist()
        elif type_ == _STRING:
            metadata[key] = walker.string(what)
        elif type_ in _DTYPES:
            metadata[key] = walker.scalar(_DTYPES[type_], what)
        else:
            walker.fail(f"{what} has the unknown type {type_}")
    return metadata, arrays


def _read_array(walker: _Walker, what: str) -> Any:
    """Read a list of strings or a NumPy array; models do not contain arrays of arrays."""
    type_ = walker.u32(f"the element type of {what}")
    if type_ == _STRING:
        return walker.strings(walker.count(f"strings of {what}", 8), what)
    if type_ not in _DTYPES:
        walker.fail(f"{what} is an array of the unknown type {type_}")
    dtype = _DTYPES[type_]
    count = walker.count(f"elements of {what}", dtype.itemsize)
    start = walker.skip(count * dtype.itemsize, what)
    # The copy does not keep a reference to the mapped file.
    return np.frombuffer(walker.buffer, dtype, count, start).copy()


def _read_tensor_entry(walker: _Walker) -> tuple[str, tuple[int, ...], str, int]:
    """Read name, row-major shape, type, and offset from the start of the tensor data."""
    name = walker.string("a tensor's name")
    what = f"tensor {quoted(name)}"
    dimensions = walker.u32(f"the dimensions of {what}")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        walker.fail(f"{what} has {dimensions} dimensions")
    # GGUF lists the fastest-varying dimension first.
    shape = tuple(walker.u64(f"the shape of {what}") for _ in range(dimensions))[::-1]
    number = walker.u32(f"the type of {what}")
    if number not in _TENSOR_TYPES:
        raise UnsupportedModelError(
            f"{walker.name}: {what} has type {_type_name(number)}, which is not supported.",
            f"Use a file with {', '.join(FORMATS)} tensors.",
        )
    return name, shape, _TENSOR_TYPES[number], walker.u64(f"the offset of {what}")


def _place_tensors(
    walker: _Walker,
    entries: list[tuple[str, tuple[int, ...], str, int]],
    data_start: int,
    alignment: int,
) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_name, offset in entries:
        what = f"tensor {quoted(name)}"
        if name in tensors:
            walker.fail(f"{what} occurs twice")
        if 0 in shape:
            walker.fail(f"{what} has the shape {shape}")
        try:
            nbytes = tensor_nbytes(shape, type_name)
        except CheckpointError as error:
            walker.fail(f"{what}: {error.cause.rstrip('.')}")
        if offset % alignment:
            walker.fail(
                f"{what} starts at byte {offset} of the data, which is not a multiple of "
                f"{alignment}"
            )
        if data_start + offset + nbytes > walker.size:
            walker.fail(
                f"{what} ends at byte {data_start + offset + nbytes}, the file at {walker.size}"
            )
        tensors[name] = TensorInfo(name, shape, type_name, data_start + offset, nbytes)
    _check_layout(walker, list(tensors.values()), data_start, alignment)
    return tensors


def _check_layout(
    walker: _Walker, tensors: list[TensorInfo], data_start: int, alignment: int
) -> None:
    """Refuse tensors that overlap, and gaps that the alignment does not explain.

    This detects wrong offsets, types and shapes, because every writer puts each tensor at the first
    aligned byte after the previous one. llama.cpp has the same rule.
    """
    end = data_start
    before = "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        what = f"tensor {quoted(tensor.name)}"
        start = data_start + -(-(end - data_start) // alignment) * alignment
        if tensor.offset != start:
            relation = "overlaps" if tensor.offset < end else "leaves a gap after"
            walker.fail(
                f"{what} ({tensor.type}) starts at byte {tensor.offset} and {relation} {before}, "
                f"which ends at byte {end}"
            )
        end = tensor.offset + tensor.nbytes
        before = f"{what} ({tensor.type})"
    if tensors and walker.size - end >= alignment:
        walker.fail(f"{before} ends at byte {end}, the file at {walker.size}")


def _type_name(number: int) -> str:
    # The import is only for an error message, because it takes a fifth of a second.
    from gguf import GGMLQuantizationType

    names = {type_.value: type_.name for type_ in GGMLQuantizationType}
    return names.get(number, f"number {number}")
