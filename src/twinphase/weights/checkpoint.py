"""A model file opened for reading: metadata, and tensors as raw bytes in the file's own precision.

Format-neutral words only; `gguf.py` and `safetensors.py` fill them, both with GGUF's names of
tensors and architectures. Not for packing (backends do that).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLE_BYTES = 1024


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        name: name in the file.
        shape: row-major, for a matrix (outputs, inputs).
        type: storage type by GGUF's name, a key of `quant.FORMATS`.
        offset: bytes from the start of its file.
        nbytes: size in the file.
        file: which of the checkpoint's files it is in; a model may be split.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int
    file: int = 0

    def sample(self, data: mmap.mmap | NDArray[np.uint8]) -> bytes:
        """Up to 1 KiB from the middle of the tensor, for fingerprints; `data` is its file."""
        start = self.offset + max(0, self.nbytes - SAMPLE_BYTES) // 2
        return bytes(data[start : start + min(SAMPLE_BYTES, self.nbytes)])


def quoted(name: str) -> str:
    """A name from a model's file, safe and short enough for one line of a message."""
    return repr(name if len(name) <= 64 else name[:64] + "…")


@dataclass(frozen=True)
class Checkpoint:
    """An open model: one GGUF file, the parts of a split one, or a Hugging Face folder.

    Attributes:
        path: the file (of a split model, the first), or the folder.
        architecture: by GGUF's name, e.g. "llama", "qwen3moe".
        metadata: hyper-parameters by GGUF key (strings, numbers, short lists; never the
            vocabulary); a folder has none.
        tensors: by GGUF's name in both formats.
        files: every file with tensors, memory-mapped, uint8 [file size] each.
        fingerprint: hex digest naming this file's content for caches.
        cache_dir: folder for what is derived from this very file (the built tokenizer); None if
            none can be written.
        vocabulary: reads the long arrays that `metadata` leaves out, by GGUF key; slow, so called
            only to build a tokenizer that is not cached yet.
        config: a folder's config.json, its `text_config` in front where it has one; None for GGUF.
    """

    path: Path
    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: tuple[NDArray[np.uint8], ...]
    fingerprint: str
    cache_dir: Path | None = None
    vocabulary: Callable[[], Mapping[str, Any]] = dict
    config: Mapping[str, Any] | None = None

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes as stored, uint8 [nbytes], a view into the mapped file."""
        info = self.tensors[name]
        return self.files[info.file][info.offset : info.offset + info.nbytes]

    def release(self, name: str) -> None:
        """Frees the memory that reading a tensor has filled; reading it again goes to the file."""
        info = self.tensors[name]
        source: Any = self.files[info.file].base
        source = source.obj if isinstance(source, memoryview) else source
        if not isinstance(source, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
            return  # made in memory, which would be lost
        first = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            source.madvise(mmap.MADV_DONTNEED, first, length)
