"""Opens a GGUF file, or all parts of a split one, as a `Checkpoint`.

The first open reads the whole header (`gguf_header.py`) and stores the engine's part of it, without
the vocabulary, as a small index in the user's cache. Later opens of the same file (path, size and
modification time) read only the index, which takes milliseconds. Model files are never written, and
an unwritable cache costs time but is not an error.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from twinphase.errors import CheckpointError
from twinphase.weights import storage
from twinphase.weights.block_formats import FORMATS
from twinphase.weights.checkpoint import Checkpoint, TensorInfo
from twinphase.weights.gguf_header import Header, read_header
from twinphase.weights.split import is_later_part, part_names
from twinphase.weights.storage import map_file, model_cache, replace_derived

_INDEX_VERSION = 4
_INDEX_NAME = "index.msgpack"
# The size of the magic number, the version and two counts.
_MIN_BYTES = 24
_FETCH_PARTS = "Fetch all parts of one model again, and keep their names."
# llama.cpp's prefixes of vision, audio and projection tensors, which Ollama stores in the text
# model's file.
_OTHER_MODALITIES = ("v.", "a.", "mm.")
# llama.cpp's converter writes this norm of Falcon-H1 without a suffix.
_WITHOUT_SUFFIX = ".ffn_norm"
# Names by general.file_type, for mixtures whose name says more than their most common tensor type.
_FILE_TYPES = {
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    21: "Q2_K_S",
}


@dataclass(frozen=True)
class _Index:
    """The part of a header that every run needs.

    `states` are size and modification time (ns) of each file.
    """

    states: tuple[tuple[int, int], ...]
    fingerprint: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    version: int = _INDEX_VERSION


def open_gguf(path: str | Path, *, mark_used: bool = True) -> Checkpoint:
    """Open a model file, or the first part of a split model; tensors are mapped but not read.

    With `mark_used`, this is recorded as a use of the model (`last_used`).

    Raises:
        ModelNotFoundError: there is no such file, or it is a directory.
        CheckpointError: a file is not GGUF, is damaged or truncated, or cannot be read; or a part
            is missing or does not belong to the others.
        UnsupportedModelError: a tensor's type is not supported; the message names both.
    """
    path = Path(path)
    buffers, states = _map_parts(path)
    folder = model_cache(path)
    index = _load_index(folder, states)
    cache_dir: Path | None = folder
    if index is None:
        headers = [read_header(buffer, name) for name, buffer in buffers.items()]
        metadata = headers[0].metadata
        tensors = _joined_tensors(list(buffers), headers)
        index = _Index(states, _fingerprint(list(buffers.values()), headers), metadata, tensors)
        kept = replace_derived(folder / _INDEX_NAME, msgspec.msgpack.encode(index))
        cache_dir = folder if kept else None
    if mark_used:
        storage.mark_used(path)
    architecture = index.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{path} does not name its architecture.", "Convert the model again.")
    first = next(iter(buffers.values()))
    tensors = {
        f"{name}.weight" if name.endswith(_WITHOUT_SUFFIX) else name: info
        for name, info in index.tensors.items()
    }
    return Checkpoint(
        path=path,
        architecture=architecture,
        metadata=index.metadata,
        tensors=tensors,
        # Slices of a numpy.memmap are several times slower.
        files=tuple(np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers.values()),
        fingerprint=index.fingerprint,
        cache_dir=cache_dir,
        vocabulary=lambda: read_header(first, str(path)).arrays,
    )


def quantization_name(checkpoint: Checkpoint) -> str:
    """The usual name of the quantization: a mixture's, or the type of most bytes."""
    file_type = checkpoint.metadata.get("general.file_type")
    if file_type in _FILE_TYPES:
        return _FILE_TYPES[file_type]
    nbytes = dict.fromkeys(FORMATS, 0)
    for tensor in checkpoint.tensors.values():
        nbytes[tensor.type] += tensor.nbytes
    return max(nbytes, key=lambda name: nbytes[name])


def _map_parts(path: Path) -> tuple[dict[str, mmap.mmap], tuple[tuple[int, int], ...]]:
    """The mapped files by name, in order, and their sizes and modification times."""
    if is_later_part(path.name):
        raise CheckpointError(
            f"{path} is not the first part of a split model.",
            "Give the part that ends in -00001-of-...",
        )
    buffers: dict[str, mmap.mmap] = {}
    states: list[tuple[int, int]] = []
    for name in part_names(str(path)):
        if buffers and not os.path.exists(name):
            raise CheckpointError(
                f"The model lacks its part {name}.", "Put all parts into one folder."
            )
        buffers[name], stat = map_file(Path(name), _MIN_BYTES, "too short for a GGUF file")
        states.append((stat.st_size, stat.st_mtime_ns))
    return buffers, tuple(states)


def _joined_tensors(names: list[str], headers: list[Header]) -> dict[str, TensorInfo]:
    """The text model's tensors in all parts, which must agree on the number of parts."""
    tensors: dict[str, TensorInfo] = {}
    for number, (name, header) in enumerate(zip(names, headers, strict=True)):
        count = header.metadata.get("split.count", 0)
        place = header.metadata.get("split.no", 0)
        if (max(count, 1) if isinstance(count, int) else count, place) != (len(names), number):
            raise CheckpointError(
                f"{name} is by its header part {place} (from 0) of {count}, by its name {number} "
                f"of {len(names)}.",
                _FETCH_PARTS,
            )
        for key, info in header.tensors.items():
            if key in tensors:
                raise CheckpointError(
                    f"{name} has a tensor {key!r} that another part has too.",
                    "Fetch the parts again.",
                )
            tensors[key] = replace(info, file=number)
    total = headers[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            f"{names[0]} says {total} tensors, its parts have {len(tensors)}.",
            "Fetch the parts again.",
        )
    return {key: info for key, info in tensors.items() if not key.startswith(_OTHER_MODALITIES)}


def _fingerprint(buffers: list[mmap.mmap], headers: list[Header]) -> str:
    """SHA-256 over each file's size (8 bytes, little endian), header, and a sample of every tensor.

    Hashing every byte would take seconds for a large model. Two files can share a fingerprint only
    if they agree in every hyper-parameter and token and in the middle of every tensor, which any
    training or quantization changes.
    """
    digest = hashlib.sha256()
    for buffer, header in zip(buffers, headers, strict=True):
        digest.update(len(buffer).to_bytes(8, "little"))
        digest.update(buffer[: header.data_start])
        for tensor in header.tensors.values():
            digest.update(tensor.sample(buffer))
    return digest.hexdigest()


def _load_index(folder: Path, states: tuple[tuple[int, int], ...]) -> _Index | None:
    """The stored index; None if it is missing, damaged, or of an older state of the files."""
    try:
        index = msgspec.msgpack.decode((folder / _INDEX_NAME).read_bytes(), type=_Index)
    except (OSError, ValueError, RecursionError):  # msgspec's error is a ValueError.
        return None
    if (index.version, index.states) != (_INDEX_VERSION, states):
        return None
    fits = all(
        tensor.type in FORMATS
        and 0 <= tensor.file < len(states)
        and 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= states[tensor.file][0]
        for tensor in index.tensors.values()
    )
    return index if fits else None
