"""The shape of a model by name: from `known_models.toml`, a file, or the model cache."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from twinphase.errors import ModelNotFoundError
from twinphase.estimate.shapes import DecoderShape, from_hf_config, from_model, read_config
from twinphase.weights.catalogue import find, near
from twinphase.weights.hub import cached_model
from twinphase.weights.safetensors import is_model_folder

FILE = Path(__file__).with_name("known_models.toml")


@dataclass(frozen=True)
class KnownModel:
    """A repository at https://huggingface.co, and fields of its config.json for the formulas."""

    repo: str
    config: Mapping[str, Any]

    @property
    def source(self) -> str:
        """The title and the address of the document."""
        return (
            f"config.json of {self.repo}, https://huggingface.co/{self.repo}/blob/main/config.json"
        )


KNOWN_MODELS = msgspec.convert(
    tomllib.loads(FILE.read_text(encoding="utf-8")), dict[str, KnownModel]
)


def read_shape(name: str) -> DecoderShape:
    """The shape of a known model, a GGUF file, a config.json or its folder, or a cached model.

    Nothing is downloaded. For a folder with weights, the bytes of the weights are counted.

    Raises:
        ModelNotFoundError: there is no model of that name; the message has close matches.
        CheckpointError: the file is damaged or lacks a field; the message names it.
        UnsupportedModelError: the architecture is not supported.
    """
    by_repo = {known.repo.lower(): key for key, known in KNOWN_MODELS.items()}
    key = by_repo.get(name.lower().removeprefix("hf:"), name.lower())
    if key in KNOWN_MODELS:
        known = KNOWN_MODELS[key]
        return from_hf_config(known.config, key, known.source)
    path = Path(name).expanduser()
    try:
        if name and path.is_dir() and (path / "config.json").is_file():
            return (
                from_model(path, name)
                if is_model_folder(path)
                else read_config(path / "config.json", name)
            )
        if name and path.is_file():
            return (
                read_config(path, name)
                if path.suffix.lower() == ".json"
                else from_model(path, name)
            )
    except (OSError, ValueError):  # The text is too long for a path, or contains a null byte.
        pass
    return _from_cache(name)


def _from_cache(name: str) -> DecoderShape:
    try:
        path = cached_model(name)
    except ModelNotFoundError as error:
        close = difflib.get_close_matches(name.lower(), KNOWN_MODELS, n=4, cutoff=0.5)
        close = close or near(name)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        raise ModelNotFoundError(
            error.cause,
            f"{hint}Give a name of `twinphase estimate --list-models`, a config.json or a .gguf "
            "file.",
        ) from None
    if path is None:
        entry = find(name)
        if entry is not None and entry.shape is not None:
            known = KNOWN_MODELS[entry.shape]
            return from_hf_config(known.config, name, known.source)
        raise ModelNotFoundError(
            f"{name} is not in the cache.", f"Fetch it with `twinphase pull {name}`."
        )
    return from_model(path, name)
