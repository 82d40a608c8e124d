"""An open model: metadata, and tensors as raw bytes in the file's own precision.

It is independent of the file format: `gguf.py` and `safetensors.py` both fill it with GGUF's names
of tensors and architectures. Backends pack the tensors.
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
        file: index of its file in the checkpoint; a model may be split.
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
    """A name from a model's file, made safe and short enough for a message."""
    return repr(name if len(name) <= 64 else name[:64] + "…")


@dataclass(frozen=True)
class Checkpoint:
    """An open model: one GGUF file, the parts of a split one, or a Hugging Face folder.

    Attributes:
        path: the file (the first one of a split model), or the folder.
        architecture: GGUF's name, such as "llama" or "qwen3moe".
        metadata: hyper-parameters by GGUF key (strings, numbers, short lists; never the
            vocabulary); a folder has none.
        tensors: tensors by GGUF's names, in both formats.
        files: every file with tensors, memory-mapped, uint8 [file size] each.
        fingerprint: hex digest that identifies the content for caches.
        cache_dir: folder for data derived from this model, such as the built tokenizer; None if it
            cannot be written.
        vocabulary: reads the long arrays that `metadata` omits, by GGUF key. This is slow, so it is
            only called to build a tokenizer that is not cached yet.
        config: a folder's config.json, overridden by its `text_config` if present; None for GGUF.
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
        """Free the memory of a tensor that was read; reading it again reads the file."""
        info = self.tensors[name]
        source: Any = self.files[info.file].base
        source = source.obj if isinstance(source, memoryview) else source
        if not isinstance(source, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
            return  # This data exists only in memory and would be lost.
        first = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            source.madvise(mmap.MADV_DONTNEED, first, length)
