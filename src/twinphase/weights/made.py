"""Writes converted tensors (stacked, dequantized, quantized) once, and maps them afterwards.

They are stored as one GGUF file in the model's cache folder, which is complete or absent, and made
again when the model's files change. If it cannot be written, or is small, the tensors stay in
memory. Files of removed models are deleted when another one is written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twinphase.errors import TwinphaseError
from twinphase.weights.checkpoint import TensorInfo
from twinphase.weights.gguf_header import read_header
from twinphase.weights.progress import Progress, progress_bar
from twinphase.weights.source import Source
from twinphase.weights.storage import abandoned, atomically, map_file

_Bytes = NDArray[np.uint8]
# The prefix of the files' names.
MADE = "tensors-"
_KEY = "twinphase.made_from"
_MODEL = "twinphase.made_for"
# Smaller tensors are converted at each start, which takes milliseconds.
_SMALL_BYTES = 8 << 20
_Made = tuple[dict[str, TensorInfo], list[_Bytes]]


def make_tensors(
    sources: Mapping[str, Source],
    path: Path | None,
    model: Path,
    key: str,
    progress: Progress | None,
) -> _Made:
    """Convert the tensors, or map the file that already has them.

    Args:
        sources: tensors to convert, by name.
        path: file for the tensors; None keeps them in memory.
        model: folder of the model.
        key: identifies all sources of the tensors; a file with another key is replaced.
        progress: called with the number of converted bytes; None shows a bar on a terminal.

    Returns:
        The tensors by name, and the arrays that contain them; `TensorInfo.file` is an index of
        these.
    """
    if not sources:
        return {}, []
    total = sum(source.nbytes for source in sources.values())
    if path is None or total <= _SMALL_BYTES:
        return _in_memory(sources, _steps(sources, total, lambda what, done, total: None))
    if kept := _kept(sources, path, key):
        return kept
    with contextlib.ExitStack() as stack:
        report = progress or stack.enter_context(progress_bar())
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_orphans(path.parent.parent)
            if shutil.disk_usage(path.parent).free >= 1.05 * total:
                _write(sources, path, model, key, _steps(sources, total, report))
        return _kept(sources, path, key) or _in_memory(sources, _steps(sources, total, report))


def _steps(sources: Mapping[str, Source], total: int, report: Progress) -> Iterator[_Bytes]:
    """Yield the tensors' bytes with progress; only one tensor is in memory at a time."""
    done = 0
    for source in sources.values():
        report("Preparing the weights", done, total)
        yield source.read()
        done += source.nbytes
    report("Preparing the weights", total, total)


def _in_memory(sources: Mapping[str, Source], steps: Iterator[_Bytes]) -> _Made:
    arrays = [np.ascontiguousarray(raw) for raw in steps]
    tensors = {
        name: TensorInfo(name, source.shape, source.type, 0, source.nbytes, i)
        for i, (name, source) in enumerate(sources.items())
    }
    return tensors, arrays


def _kept(sources: Mapping[str, Source], path: Path, key: str) -> _Made | None:
    """The tensors of the file; None if it is missing, damaged, or made from other sources."""
    try:
        buffer, _ = map_file(path, 1, "empty")
        header = read_header(buffer, str(path))
    except TwinphaseError:
        return None
    kept, wanted = (
        {name: (tensor.shape, tensor.type) for name, tensor in tensors.items()}
        for tensors in (header.tensors, sources)
    )
    if header.metadata.get(_KEY) != key or kept != wanted:
        return None
    return dict(header.tensors), [np.frombuffer(buffer, dtype=np.uint8)]


def _remove_orphans(caches: Path) -> None:
    """Remove files that were made from folders that no longer exist."""
    for path in caches.glob(f"*/{MADE}*.gguf"):
        with contextlib.suppress(OSError, TwinphaseError):
            with map_file(path, 1, "empty")[0] as buffer:
                model = read_header(buffer, str(path)).metadata.get(_MODEL)
            if isinstance(model, str) and not os.path.exists(model):
                path.unlink()


def _write(
    sources: Mapping[str, Source], path: Path, model: Path, key: str, steps: Iterator[_Bytes]
) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    for old in abandoned(path.parent, f".{path.name}-"):
        old.unlink(missing_ok=True)
    with atomically(path) as temporary:
        with contextlib.closing(GGUFWriter(temporary, "twinphase")) as writer:
            writer.add_string(_KEY, key)
            writer.add_string(_MODEL, str(model.absolute()))
            for tensor, source in sources.items():
                type = GGMLQuantizationType[source.type]
                writer.add_tensor_info(
                    tensor, source.shape, np.dtype(np.float32), source.nbytes, raw_dtype=type
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for raw in steps:
                writer.write_tensor_data(raw)
        with open(temporary, "rb") as file:
            # This comes before the rename, so that the file is complete even after a power failure.
            os.fsync(file.fileno())
