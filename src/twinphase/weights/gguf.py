"""Opens a GGUF file as a `Checkpoint`: mapped, checked once, and remembered.

The first open reads the whole header (`gguf_header.py`) and keeps what the engine needs of it, without the vocabulary,
in a small index in the user's cache. Later opens of the same file (path, size and modification time) read only the
index, which takes milliseconds. Nothing here writes to the model file, and a cache that cannot be written costs time,
never the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from twinphase.errors import CheckpointError, ModelNotFoundError
from twinphase.weights.checkpoint import Checkpoint, TensorInfo
from twinphase.weights.gguf_header import Header, read_header
from twinphase.weights.quant import FORMATS
from twinphase.weights.storage import model_cache, write_atomically

__all__ = ["last_used", "open_gguf", "quantization_name"]

_INDEX_VERSION = 3
_INDEX_NAME = "index.msgpack"
_SAMPLE_BYTES = 1024
_MIN_BYTES = 24  # magic, version and two counts
# general.file_type, for the mixtures whose name says more than their commonest tensor type.
_FILE_TYPES = {14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M"}


@dataclass(frozen=True)
class _Index:
    """The part of a header that every run needs."""

    size: int
    mtime_ns: int
    fingerprint: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    version: int = _INDEX_VERSION


def open_gguf(path: str | Path, *, mark_used: bool = True) -> Checkpoint:
    """Opens a model file; its tensors are mapped and not yet read from disk.

    With `mark_used`, this is remembered as a use of the model (`last_used`).

    Raises:
        ModelNotFoundError: no such file, or a directory.
        CheckpointError: a file that is not GGUF, is damaged or truncated, or cannot be read.
        UnsupportedModelError: a tensor type that twinphase does not read, named with the tensor.
    """
    path = Path(path)
    buffer, stat = _map_file(path)
    folder = model_cache(path)
    index = _load_index(folder, stat)
    cache_dir: Path | None = folder
    if index is None:
        header = read_header(buffer, str(path))
        fingerprint = _fingerprint(buffer, header)
        index = _Index(stat.st_size, stat.st_mtime_ns, fingerprint, header.metadata, header.tensors)
        cache_dir = folder if _store_index(folder, index) else None
    if mark_used:
        with contextlib.suppress(OSError):
            (folder / "used").touch()
    architecture = index.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{path} does not name its architecture.", "Convert the model again.")
    return Checkpoint(
        path=path,
        architecture=architecture,
        metadata=index.metadata,
        tensors=index.tensors,
        files=(np.frombuffer(buffer, dtype=np.uint8),),  # slices of a numpy.memmap cost several times as much
        fingerprint=index.fingerprint,
        cache_dir=cache_dir,
        vocabulary=lambda: read_header(buffer, str(path)).arrays,
    )


def quantization_name(checkpoint: Checkpoint) -> str:
    """The quantization by the name users know: a mixture's, or the type that most of the bytes have."""
    file_type = checkpoint.metadata.get("general.file_type")
    if file_type in _FILE_TYPES:
        return _FILE_TYPES[file_type]
    nbytes = dict.fromkeys(FORMATS, 0)
    for tensor in checkpoint.tensors.values():
        nbytes[tensor.type] += tensor.nbytes
    return max(nbytes, key=lambda name: nbytes[name])


def last_used(path: Path) -> float | None:
    """When the file was last opened, seconds since the epoch, or None if it never was (or nothing is kept)."""
    try:
        return (model_cache(path) / "used").stat().st_mtime
    except OSError:
        return None


def _map_file(path: Path) -> tuple[mmap.mmap, os.stat_result]:
    try:
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_size < _MIN_BYTES:
                raise CheckpointError(
                    f"{path} is too short for a GGUF file ({stat.st_size} bytes).", "Fetch the file again."
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), stat
    except FileNotFoundError:
        raise ModelNotFoundError(f"There is no file {path}.", "Check the path, or pull the model first.") from None
    except IsADirectoryError:
        raise ModelNotFoundError(f"{path} is a directory.", "Give the .gguf file in it.") from None
    except (OSError, ValueError) as error:
        # ValueError: a path with a null byte, or something that cannot be mapped.
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} cannot be read: {reason}.", "Check the file and its rights.") from None


def _fingerprint(buffer: mmap.mmap, header: Header) -> str:
    """SHA-256 over the file's size (8 bytes, little endian), its header, and 1 KiB from the middle of every tensor.

    Not over every byte, which takes seconds for a large model: two files can only share a fingerprint if they agree in
    every hyper-parameter and token, and in the middle of every tensor. Training or quantizing anew changes all of them.
    """
    digest = hashlib.sha256(len(buffer).to_bytes(8, "little"))
    digest.update(buffer[: header.data_start])
    for tensor in header.tensors.values():
        start = tensor.offset + max(0, tensor.nbytes - _SAMPLE_BYTES) // 2
        digest.update(buffer[start : start + min(_SAMPLE_BYTES, tensor.nbytes)])
    return digest.hexdigest()


def _load_index(folder: Path, stat: os.stat_result) -> _Index | None:
    """The remembered index, or None when there is none, it is of another state of the file, or it is damaged."""
    try:
        index = msgspec.msgpack.decode((folder / _INDEX_NAME).read_bytes(), type=_Index)
    except (OSError, ValueError, RecursionError):  # ValueError: the base of msgspec's own
        return None
    if (index.version, index.size, index.mtime_ns) != (_INDEX_VERSION, stat.st_size, stat.st_mtime_ns):
        return None
    fits = all(
        tensor.type in FORMATS and 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= stat.st_size
        for tensor in index.tensors.values()
    )
    return index if fits else None


def _store_index(folder: Path, index: _Index) -> bool:
    """False if the cache cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # What was derived from the file's former content.
        for old in folder.iterdir():
            old.unlink(missing_ok=True)
        write_atomically(folder / _INDEX_NAME, msgspec.msgpack.encode(index))
    except OSError:
        return False
    return True
