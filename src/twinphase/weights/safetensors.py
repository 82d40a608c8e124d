"""Opens a Hugging Face folder as a `Checkpoint`: safetensors files under GGUF's tensor names.

Tensors that are stored in the needed form are mapped; others are converted once (`made.py`).
Pickles run code when they are opened, so they are refused. The model reads hyper-parameters from
the config.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinphase.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from twinphase.weights import storage
from twinphase.weights.block_formats import FORMATS
from twinphase.weights.canonical import canonical_tensors
from twinphase.weights.checkpoint import Checkpoint, TensorInfo
from twinphase.weights.experts import stack_experts
from twinphase.weights.made import MADE, make_tensors
from twinphase.weights.packed import unpacked_tensors
from twinphase.weights.progress import Progress
from twinphase.weights.quant import dequantize
from twinphase.weights.quantize import quantized_tensors
from twinphase.weights.safetensors_header import read_safetensors_header, strict_json
from twinphase.weights.source import Source
from twinphase.weights.storage import map_file, model_cache, read_limited, replace_derived

# Increased when the same files yield other tensors.
_RECIPE = "2"
CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_JSON_BYTES = 64 << 20
_MAX_LAYERS = 10_000
_INTEGERS: dict[str, type[np.generic]] = {"I64": np.int64, "I32": np.int32, "BOOL": np.bool_}
_FETCH = "The folder is damaged or incomplete: fetch it again."


@dataclass(frozen=True)
class _Shard:
    """One mapped file."""

    name: str
    data: NDArray[np.uint8]
    stat: os.stat_result
    tensors: Mapping[str, TensorInfo]

    @property
    def state(self) -> str:
        return f"{self.name} {self.stat.st_size} {self.stat.st_mtime_ns}"


def read_folder_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json, overridden by the `text_config` of a larger model.

    Raises:
        ModelNotFoundError: there is no such folder, or it has no config.json.
        CheckpointError: the file cannot be read, is not a JSON object, or is too large.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(
            f"There is no folder {folder}.", "Check the path, or pull the model first."
        )
    if not (folder / CONFIG).exists():
        raise ModelNotFoundError(
            f"{folder} has no {CONFIG}.", "Give the folder of a Hugging Face model."
        )
    config = _read_json(folder / CONFIG)
    if isinstance(types := config.get("layers_block_type"), list):
        config.setdefault("num_hidden_layers", len(types))
    text = config.pop("text_config", None)
    if not isinstance(text, dict):
        return config
    # The whole model's field counts if it stores no head.
    return config | text | {"tied_without_head": config.get("tie_word_embeddings")}


def open_safetensors(
    folder: Path,
    architecture: str,
    *,
    quantization: str = "none",
    header_only: bool = False,
    progress: Progress | None = None,
    mark_used: bool = True,
) -> Checkpoint:
    """Open a folder; tensors are mapped but not read, except those that must be converted.

    Args:
        folder: folder with config.json and model.safetensors, or an index and its shards.
        architecture: GGUF's name of the architecture, which the caller found in the config.
        quantization: quantization of float matrices: "none", "q8_0", "q4_0" or "q4_k"
            (`quantized_tensors`).
        header_only: convert no tensors; those that need it cannot be read then.
        progress: called while tensors are converted; None shows a bar on a terminal.
        mark_used: record this as a use of the model (`last_used`).

    Raises:
        ModelNotFoundError: there is no such folder, or it has no weights.
        CheckpointError: a file is damaged, missing, or contradicts the others.
        UnsupportedModelError: the weights are pickles, or of an unsupported type.
        InvalidRequestError: the quantization is unknown.
    """
    config = read_folder_config(folder)
    layers = config.get("num_hidden_layers")
    if type(layers) is not int or not 0 < layers <= _MAX_LAYERS:
        raise CheckpointError(f"{folder / CONFIG}: num_hidden_layers is {layers!r}.", _FETCH)
    shards = _open_shards(folder)
    sources = {
        name: _source(shard, file, entry)
        for file, shard in enumerate(shards)
        for name, entry in shard.tensors.items()
    }
    sources = stack_experts(unpacked_tensors(sources, config), architecture)
    sources = canonical_tensors(
        sources, architecture, layers, config.get("tie_word_embeddings") is True
    )
    sources = quantized_tensors(sources, quantization)
    _check_types(sources, folder)
    state = "\n".join([_RECIPE, architecture, *(shard.state for shard in shards)])
    config_bytes = (folder / CONFIG).read_bytes()
    key = hashlib.sha256(state.encode() + config_bytes).hexdigest()
    fingerprint, cache_dir = _remembered(folder, shards, key, config_bytes)
    if mark_used:
        storage.mark_used(folder)
    to_make = {
        name: source
        for name, source in sources.items()
        if source.stored is None and not header_only
    }
    made_file = cache_dir / f"{MADE}{quantization}.gguf" if cache_dir else None
    made, arrays = make_tensors(to_make, made_file, folder, f"{quantization} {key}", progress)
    return Checkpoint(
        path=folder,
        architecture=architecture,
        metadata={},
        tensors={
            name: _placed(name, source, made, len(shards)) for name, source in sources.items()
        },
        files=(*(shard.data for shard in shards), *arrays),
        fingerprint=hashlib.sha256(f"{fingerprint} {quantization}".encode()).hexdigest(),
        cache_dir=cache_dir,
        config=config,
    )


def read_arrays(folder: Path) -> dict[str, NDArray[Any]]:
    """All tensors of a folder by the files' own names; floats become float32.

    This is for small files whose tensors GGUF has no names for, such as draft heads.

    Raises:
        TwinphaseError: as `open_safetensors`, or a type is not supported.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for shard in _open_shards(folder):
        for name, entry in shard.tensors.items():
            raw = shard.data[entry.offset : entry.offset + entry.nbytes]
            if entry.type in _INTEGERS:
                arrays[name] = raw.view(_INTEGERS[entry.type]).reshape(entry.shape)
            elif entry.type in ("F32", "F16", "BF16"):
                arrays[name] = dequantize(raw, entry.shape, entry.type)
            else:
                raise UnsupportedModelError(
                    f"Tensor {name[:100]!r} of {folder} has type {entry.type}, which is not "
                    "supported.",
                    "Use F32, F16 or BF16.",
                )
    return arrays


def _check_types(sources: Mapping[str, Source], folder: Path) -> None:
    for name, source in sources.items():
        if source.type not in FORMATS:
            raise UnsupportedModelError(
                f"Tensor {name} of {folder} has type {source.type}, which is not supported.",
                "Use a model with F32, F16 or BF16 tensors.",
            )


def _placed(
    name: str, source: Source, made: Mapping[str, TensorInfo], num_shards: int
) -> TensorInfo:
    if source.stored is None and name in made:
        return replace(made[name], file=num_shards + made[name].file)
    file, offset = source.stored or (num_shards, 0)
    return TensorInfo(name, source.shape, source.type, offset, source.nbytes, file)


def _source(shard: _Shard, file: int, entry: TensorInfo) -> Source:
    start = entry.offset
    end = entry.offset + entry.nbytes
    # The format allows tensors that are not aligned to their element size. They are copied, because
    # kernels read aligned addresses.
    aligned = entry.type in FORMATS and start % FORMATS[entry.type].block_bytes == 0
    return Source(
        entry.shape,
        entry.type,
        lambda: shard.data[start:end],
        (file, start) if aligned and entry.nbytes else None,
    )


def _open_shards(folder: Path) -> list[_Shard]:
    """The files with weights, each with its relevant tensors."""
    if (folder / SINGLE).exists():
        return [_open_shard(folder / SINGLE)]
    if not (folder / INDEX).exists():
        pickles = sorted(
            p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl")
        )
        if pickles:
            raise UnsupportedModelError(
                f"{folder} has its weights as a pickle ({pickles[0]}), which runs code when it "
                "is opened.",
                "It was not opened. Use a model with .safetensors or .gguf files.",
            )
        raise ModelNotFoundError(
            f"{folder} has no {SINGLE}.", "Give a folder with safetensors files."
        )
    places = read_index(folder / INDEX)
    shards = []
    for file in sorted(set(places.values())):
        if not (folder / file).exists():
            raise CheckpointError(f"{folder} lacks {file}, which its index names.", _FETCH)
        shard = _open_shard(folder / file)
        wanted = [name for name, place in places.items() if place == file]
        absent = next((name for name in wanted if name not in shard.tensors), None)
        if absent is not None:
            raise CheckpointError(
                f"{folder / file} has no tensor {absent[:100]!r}, which the index names.", _FETCH
            )
        shards.append(replace(shard, tensors={name: shard.tensors[name] for name in wanted}))
    return shards


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, from model.safetensors.index.json.

    Raises:
        CheckpointError: the file is not such an index, or names files in other folders.
    """
    places: Any = _read_json(path).get("weight_map")
    valid = isinstance(places, dict) and all(isinstance(file, str) for file in places.values())
    if not places or not valid:
        raise CheckpointError(f"{path} has no weight_map.", _FETCH)
    files: dict[str, str] = places
    for file in set(files.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path} names {file[:100]!r}, which is not a file beside it.", _FETCH
            )
    return files


def is_model_folder(folder: Path) -> bool:
    """Whether this is a Hugging Face folder with all of its safetensors files."""
    try:
        if not (folder / CONFIG).is_file():
            return False
        single = (folder / SINGLE).is_file()
        files = [] if single else set(read_index(folder / INDEX).values())
        return all((folder / file).is_file() for file in files)
    except (OSError, CheckpointError):
        return False


def folder_weights(folder: Path) -> tuple[int, str]:
    """Bytes of a folder's tensors, and its quantization or the most common type.

    Raises:
        TwinphaseError: as `open_safetensors` for a damaged folder.
    """
    nbytes: dict[str, int] = {}
    for shard in _open_shards(folder):
        for entry in shard.tensors.values():
            nbytes[entry.type] = nbytes.get(entry.type, 0) + entry.nbytes
    settings = read_folder_config(folder).get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    commonest = max(nbytes, key=lambda name: nbytes[name], default="no tensors")
    return sum(nbytes.values()), str(method)[:20].upper() if method else commonest


def _open_shard(path: Path) -> _Shard:
    buffer, stat = map_file(path, 1, "empty")
    tensors = read_safetensors_header(buffer, str(path))
    return _Shard(path.name, np.frombuffer(buffer, dtype=np.uint8), stat, tensors)


def _read_json(path: Path) -> dict[str, Any]:
    return strict_json(read_limited(path, _MAX_JSON_BYTES, _FETCH), str(path), _FETCH)


def _remembered(
    folder: Path, shards: list[_Shard], key: str, config: bytes
) -> tuple[str, Path | None]:
    """The fingerprint, cached while the files do not change; and the cache folder if writable.

    The folder's other JSON files count besides the weights, because the cache folder may contain a
    tokenizer built from them.
    """
    cache = model_cache(folder)
    states = []
    for path in sorted(
        p for p in folder.iterdir() if p.suffix in (".json", ".jinja", ".model", ".txt")
    ):
        with contextlib.suppress(OSError):  # The link is broken.
            states.append(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}")
    state = hashlib.sha256("\n".join([key, *states]).encode()).hexdigest()
    with contextlib.suppress(OSError, ValueError):
        known, fingerprint = (cache / "state").read_text().split()
        if known == state:
            return fingerprint, cache
    fingerprint = _fingerprint(shards, config)
    kept = replace_derived(cache / "state", f"{state} {fingerprint}".encode())
    return fingerprint, cache if kept else None


def _fingerprint(shards: list[_Shard], config: bytes) -> str:
    """SHA-256 over config.json and each shard's name, size, header and samples of tensors."""
    digest = hashlib.sha256(len(config).to_bytes(8, "little") + config)
    for shard in shards:
        digest.update(f"{shard.name} {shard.stat.st_size}\n".encode())
        digest.update(
            shard.data[: min((e.offset for e in shard.tensors.values()), default=0)].tobytes()
        )
        for entry in shard.tensors.values():
            digest.update(entry.sample(shard.data))
    return digest.hexdigest()
