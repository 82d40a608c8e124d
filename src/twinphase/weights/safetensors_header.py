"""A bounds-checking reader of the safetensors header: no length, offset or shape is trusted.

The rules are those of the format (https://github.com/huggingface/safetensors): eight bytes of
length, a JSON object, then data without gaps. The `safetensors` package checks them too, but does
not expose offsets, which views of the mapped file need. `safetensors.py` opens folders.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from mmap import mmap
from typing import Any, NoReturn

from twinphase.errors import CheckpointError
from twinphase.weights.checkpoint import TensorInfo, quoted

# The limit of the safetensors package.
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 8
_ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
_FIX = "The file is damaged or incomplete: fetch it again."


def read_safetensors_header(buffer: mmap | bytes, name: str) -> Mapping[str, TensorInfo]:
    """The tensors of a file by name, with safetensors' names of types.

    `buffer` is the whole file, and `name` its name in errors.

    Raises:
        CheckpointError: a length, type, shape or offset is impossible or does not fit the file, or
            the JSON is not valid.
    """

    def fail(what: str) -> NoReturn:
        raise CheckpointError(f"{name}: {what}.", _FIX)

    size = len(buffer)
    if size < 8:
        fail(f"{size} bytes are too short for a safetensors file")
    (length,) = struct.unpack("<Q", buffer[:8])
    if length > min(size - 8, _MAX_HEADER_BYTES):
        fail(f"a header of {length} bytes does not fit into a file of {size} bytes")
    header = strict_json(bytes(buffer[8 : 8 + length]), f"the header of {name}", _FIX)
    end = 8 + length
    entries = {
        key: _entry(key, value, end, fail) for key, value in header.items() if key != "__metadata__"
    }
    previous = "the header"
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.nbytes)):
        this = f"tensor {quoted(entry.name)}"
        if entry.offset != end:
            fail(f"{this} starts at byte {entry.offset}, but {previous} ends at {end}")
        end += entry.nbytes
        previous = this
    if end != size:
        fail(f"the tensors end at byte {end}, the file at {size}")
    return entries


def strict_json(text: bytes, what: str, fix: str) -> dict[str, Any]:
    """Parse a JSON object whose keys must be unique.

    Raises:
        CheckpointError: the text is not valid JSON, is nested too deeply, is not an object, or
            repeats a key.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice")
        return found

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError:
        raise CheckpointError(f"{what[:200]} is nested too deeply.", fix) from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors.
        reason = str(error).splitlines()[0][:120].rstrip(".")
        raise CheckpointError(f"{what[:200]} is not valid JSON: {reason}.", fix) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what[:200]} is not a JSON object.", fix)
    return value


def _entry(name: str, value: Any, data_start: int, fail: Any) -> TensorInfo:
    what = f"tensor {quoted(name)}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        fail(f"{what} lacks a dtype, a shape or offsets")
    dtype = value["dtype"]
    shape = value["shape"]
    offsets = value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        fail(f"{what} has the unknown dtype {quoted(str(dtype))}")
    if (
        not isinstance(shape, list)
        or len(shape) > _MAX_DIMENSIONS
        or not all(map(_is_count, shape))
    ):
        fail(f"{what} has an absurd shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        fail(f"{what} has absurd offsets")
    begin, end = offsets
    nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if end - begin != nbytes:
        fail(f"{what} has {end - begin} bytes, but {dtype} of shape {shape} takes {nbytes}")
    return TensorInfo(name, tuple(shape), dtype, data_start + begin, nbytes)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
