"""A tensor between a model's files and its `Checkpoint`: stored there, or converted when read.

`safetensors.py` reads sources, `experts.py`, `packed.py` and `quantize.py` convert them, and
`made.py` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twinphase.errors import CheckpointError
from twinphase.weights.quant import dequantize, tensor_nbytes

FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Source:
    """One tensor, stored or to be converted.

    Attributes:
        shape: row-major shape.
        type: a key of `FORMATS`, or safetensors' name of a type that only a folder has (I32,
            F8_E4M3).
        read: returns its bytes, contiguous uint8 [nbytes]; slow if they must be converted.
        stored: (file, offset) of the same bytes in the model's files; None if they must be
            converted.
    """

    shape: tuple[int, ...]
    type: str
    read: Callable[[], NDArray[np.uint8]]
    stored: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.shape, self.type)

    def values(self) -> NDArray[np.float32]:
        """The tensor in float32; only of types in `FORMATS`."""
        return dequantize(self.read(), self.shape, self.type)


def made_from_values(
    shape: Sequence[int], type: str, values: Callable[[], NDArray[np.float32]]
) -> Source:
    """A float tensor that is computed when it is read, and rounded to `type` (F32 or BF16)."""

    def read() -> NDArray[np.uint8]:
        computed = np.ascontiguousarray(values(), dtype=np.float32)
        return bfloat16_bytes(computed) if type == "BF16" else computed.reshape(-1).view(np.uint8)

    return Source(tuple(shape), type, read)


def bfloat16_bytes(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round finite float32 to the nearest bfloat16, ties to even; uint8 [2 * size]."""
    bits = values.reshape(-1).view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16).view(np.uint8)


def stacked(name: str, parts: Sequence[Source]) -> Source:
    """Stack matrices of the same shape: [len(parts), ...].

    Raises:
        CheckpointError: the matrices differ in shape or type.
    """
    first = parts[0]
    if any((part.shape, part.type) != (first.shape, first.type) for part in parts):
        raise CheckpointError(
            f"The experts of {name} differ in shape or type.", "Fetch the model again."
        )
    shape = (len(parts), *first.shape)
    return Source(shape, first.type, lambda: np.concatenate([part.read() for part in parts]))
