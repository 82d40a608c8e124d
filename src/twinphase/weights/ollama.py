"""Finds the files of models that Ollama has pulled, without changing Ollama's store.

A manifest, manifests/HOST/NAMESPACE/NAME/TAG, lists layers by digest; the model's is a GGUF file,
blobs/sha256-DIGEST.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from twinphase.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from twinphase.weights.safetensors_header import strict_json
from twinphase.weights.storage import read_limited

_NAME = re.compile(r"(?:(?:([\w.-]+)/)?([\w-][\w.-]*)/)?([\w-][\w.-]*)(?::([\w-][\w.-]*))?")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_KIND = "application/vnd.ollama.image."
_MAX_MANIFEST_BYTES = 4 << 20
_PULL = "Pull it again with Ollama."


def find_in_ollama(name: str) -> Path:
    """The GGUF file of `NAME[:TAG]`, `NAMESPACE/NAME[:TAG]` or `HOST/NAMESPACE/NAME[:TAG]`.

    Raises:
        ModelNotFoundError: there is no such model, or no store on this machine.
        CheckpointError: a manifest is damaged, or the file that it names is missing.
        UnsupportedModelError: the model has an adapter, or no GGUF file.
    """
    match = _NAME.fullmatch(name)
    if not match or ".." in name.split("/"):
        raise ModelNotFoundError(
            f"ollama:{name[:100]} is not the name of a model.", "Write ollama:NAME[:TAG]."
        )
    host, namespace, model, tag = match.groups()
    place = Path(host or "registry.ollama.ai", namespace or "library", model, tag or "latest")
    stores = [store for store in _stores() if (store / "manifests").is_dir()]
    if not stores:
        raise ModelNotFoundError(
            "Ollama has no models on this machine.", "Set OLLAMA_MODELS to its folder of models."
        )
    for store in stores:
        if (store / "manifests" / place).is_file():
            return _model_file(store, store / "manifests" / place, name)
    here = ", ".join(sorted(name for store in stores for name in _names(store))[:20])
    raise ModelNotFoundError(
        f"Ollama has no model {name[:100]} here.", f"It has: {here}." if here else _PULL
    )


def _stores() -> list[Path]:
    if chosen := os.environ.get("OLLAMA_MODELS"):
        return [Path(chosen).expanduser()]
    # Ollama's installer for Linux runs it as a separate user, whose store is the second folder.
    return [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]


def _names(store: Path) -> list[str]:
    names = []
    for path in (store / "manifests").glob("*/*/*/*"):
        name = "/".join(path.relative_to(store / "manifests").parts[:-1])
        name = name.removeprefix("registry.ollama.ai/").removeprefix("library/")
        names.append(f"{name}:{path.name}")
    return names


def _model_file(store: Path, manifest: Path, name: str) -> Path:
    text = read_limited(manifest, _MAX_MANIFEST_BYTES, "Check its permissions.")
    content = strict_json(text, f"Ollama's manifest of {name}", _PULL)
    layers = content.get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise CheckpointError(f"Ollama's manifest of {name} lists no layers.", _PULL)

    def of_kind(kind: str) -> list[dict[str, Any]]:
        return [layer for layer in layers if layer.get("mediaType") == _KIND + kind]

    if of_kind("adapter"):
        raise UnsupportedModelError(f"{name} has an adapter (LoRA).", "Use the model without it.")
    models = of_kind("model")
    if len(models) != 1:
        raise UnsupportedModelError(
            f"{name} has {len(models)} model files, not one GGUF file.", "Use another model."
        )
    digest = _DIGEST.fullmatch(str(models[0].get("digest")))
    if not digest:
        raise CheckpointError(f"Ollama's manifest of {name} names no file.", _PULL)
    path = store / "blobs" / f"sha256-{digest[1]}"
    size = models[0].get("size")
    if not path.is_file() or path.stat().st_size != size:
        raise CheckpointError(f"Ollama's file of {name} is incomplete: {path}.", _PULL)
    return path
