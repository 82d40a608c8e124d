"""A model's weights in the CPU's memory: packed matrices in one huge-page arena, and the commands that pack them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.cpu.formats import FORMATS, GROUP, STRIP
from twinphase.backends.cpu.threads import Command
from twinphase.errors import OutOfMemoryError, UnsupportedModelError
from twinphase.weights.checkpoint import Checkpoint, TensorInfo
from twinphase.weights.quant import dequantize

__all__ = ["DENSE_BYTES", "Arena", "Embedding", "Matrix", "Part", "Vector", "arena_bytes", "check_types", "load_matrix"]

DENSE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def padded(count: int, multiple: int = STRIP) -> int:
    """`count` rounded up."""
    return -(-count // multiple) * multiple


class Arena:
    """One block of memory for weights or KV cache, on huge pages where the system has them.

    Huge pages let decode stream memory without a page-table miss every 4 KB.
    """

    def __init__(self, nbytes: int, purpose: str) -> None:
        """Reserve `nbytes`; pages are taken when they are first written.

        Raises:
            OutOfMemoryError: the system refuses; the message names the purpose.
        """
        page = 2 << 20
        # Private, because Linux gives shared anonymous memory (Python's default) no huge pages.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        try:
            self._map = mmap.mmap(-1, padded(nbytes, page) + page, **private)
        except (OSError, OverflowError, ValueError) as error:
            raise OutOfMemoryError(
                f"No memory for the {purpose}: {nbytes / 1e9:.1f} GB.", "Lower --max-model-len, or use a smaller model."
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, np.uint8)
        start = -whole.ctypes.data % page
        self._free: NDArray[np.uint8] = whole[start:]

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """The next `nbytes`, zeros, 64-byte aligned."""
        taken, self._free = self._free[:nbytes], self._free[padded(nbytes, 64) :]
        if len(taken) < nbytes:
            raise MemoryError("the weight arena is too small")
        return taken


@dataclass(frozen=True)
class Part:
    """Strips of one type; `column` is where its outputs start in the layer's result."""

    type: str
    address: int
    strips: int
    groups: int  # of 32 inputs, or single inputs in a dense part
    column: int
    strip_bytes: int


@dataclass(frozen=True)
class Matrix:
    """A linear layer's weights.

    Attributes:
        parts: runs of strips.
        columns: first output column of each named tensor.
        sizes: outputs of each named tensor.
        width: columns of the result, padding included.
    """

    parts: tuple[Part, ...]
    columns: tuple[int, ...]
    sizes: tuple[int, ...]
    width: int


@dataclass(frozen=True)
class Vector:
    """A float32 vector: `width` values, padded with zeros to a multiple of 32."""

    values: NDArray[np.float32]
    width: int


@dataclass(frozen=True)
class Embedding:
    """The token embedding, as stored in the mapped file."""

    type: str
    address: int
    row_bytes: int
    width: int


def _strip_bytes(info: TensorInfo) -> int:
    inputs = info.shape[1]
    return FORMATS[info.type].strip_bytes(inputs) if info.type in FORMATS else STRIP * inputs * DENSE_BYTES[info.type]


def check_types(types: Iterable[str]) -> None:
    """Raises UnsupportedModelError for a tensor type that no kernel multiplies by."""
    known = (*FORMATS, *DENSE_BYTES)
    for name in types:
        if name not in known:
            raise UnsupportedModelError(
                f"The cpu backend does not compute with {name} tensors.",
                f"Use --backend reference, or a file with {', '.join(known)} tensors.",
            )


def arena_bytes(checkpoint: Checkpoint) -> int:
    """Memory for all matrices, the embedding included when it is also the output head."""
    matrices = [t for t in checkpoint.tensors.values() if len(t.shape) == 2]
    tied = "output.weight" not in checkpoint.tensors
    return sum(
        padded(t.shape[0]) // STRIP * _strip_bytes(t) + 64 for t in matrices if tied or t.name != "token_embd.weight"
    )


def load_matrix(
    checkpoint: Checkpoint, names: Sequence[str], arena: Arena, pack: Callable[[str, Sequence[int], int], Command]
) -> tuple[Matrix, list[Command]]:
    """Place a layer's tensors in the arena; returns the matrix and the commands that will fill it.

    Args:
        checkpoint: where the tensors are.
        names: tensors stacked along the outputs.
        arena: where they go.
        pack: makes the packing command of a type from its arguments and number of strips.
    """
    parts: list[Part] = []
    columns, commands, column = [], [], 0
    infos = [checkpoint.tensors[name] for name in names]
    for info in infos:
        outputs, inputs = info.shape
        strips = padded(outputs) // STRIP
        memory = arena.take(strips * _strip_bytes(info))
        if info.type in FORMATS:
            groups = inputs // GROUP
            source = checkpoint.raw(info.name)
            args = (source.ctypes.data, info.nbytes // outputs, outputs, groups, memory.ctypes.data)
            commands.append(pack(info.type, args, strips))
        else:
            groups = inputs
            _pack_dense(checkpoint, info, memory, strips)
        columns.append(column)
        here = Part(info.type, memory.ctypes.data, strips, groups, column, _strip_bytes(info))
        parts = _joined(parts, here)
        column += padded(outputs)
    sizes = tuple(info.shape[0] for info in infos)
    return Matrix(tuple(parts), tuple(columns), sizes, column), commands


def _joined(parts: list[Part], new: Part) -> list[Part]:
    """Parts with `new` added; strips that follow each other in memory and are of one type are one part."""
    last = parts[-1] if parts else None
    if last and last.type == new.type and last.address + last.strips * last.strip_bytes == new.address:
        return [*parts[:-1], replace(last, strips=last.strips + new.strips)]
    return [*parts, new]


def _pack_dense(checkpoint: Checkpoint, info: TensorInfo, memory: NDArray[np.uint8], strips: int) -> None:
    outputs, inputs = info.shape
    word = np.dtype(f"u{DENSE_BYTES[info.type]}")
    rows = checkpoint.raw(info.name).view(word).reshape(outputs, inputs)
    whole = memory.view(word).reshape(strips, inputs, STRIP)
    full = outputs // STRIP
    whole[:full] = rows[: full * STRIP].reshape(full, STRIP, inputs).transpose(0, 2, 1)
    if full < strips:
        whole[full, :, : outputs - full * STRIP] = rows[full * STRIP :].T


def vector_of(checkpoint: Checkpoint, name: str, plus: float) -> NDArray[np.float32]:
    """A float32 vector with `plus` added, padded with zeros to a multiple of `STRIP`."""
    info = checkpoint.tensors[name]
    out = np.zeros(padded(info.shape[0]), np.float32)
    out[: info.shape[0]] = dequantize(checkpoint.raw(name), info.shape, info.type) + np.float32(plus)
    return out
