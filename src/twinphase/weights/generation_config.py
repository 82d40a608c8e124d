"""The sampling values that a model recommends, in its generation config or catalogue entry.

`engine/frontends/text.py` decides which of them are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinphase.errors import CheckpointError, InvalidRequestError
from twinphase.request import SAMPLING_DEFAULTS, SamplingParams
from twinphase.weights.catalogue import of_file
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.storage import read_limited

FILE_NAME = "generation_config.json"
_MAX_JSON_BYTES = 1 << 20
# Names below llama.cpp's `general.sampling.` and in generation_config.json that differ from
# `SamplingParams`.
_OTHER_NAMES = {
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def recommended(checkpoint: Checkpoint) -> tuple[dict[str, float], str]:
    """The values that a model recommends, by their names in `SamplingParams`, and their source.

    Values that `SamplingParams` does not allow are omitted.

    Raises:
        CheckpointError: a folder's generation_config.json is not valid.
    """
    prefix = "general.sampling."
    own = {
        name.removeprefix(prefix): value
        for name, value in checkpoint.metadata.items()
        if name.startswith(prefix)
    }
    if values := _usable(own):
        return values, "the model's file"
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    if checkpoint.config is not None and (folder / FILE_NAME).is_file():
        values = read_generation_config(folder)
        if values:
            return values, FILE_NAME
    return catalogued(checkpoint.path)


def catalogued(path: Path) -> tuple[dict[str, float], str]:
    """The values of the catalogue for a model's file or folder, and their source."""
    entry = of_file(path)
    return (dict(entry.sampling), "the catalogue") if entry and entry.sampling else ({}, "")


def read_generation_config(path: Path) -> dict[str, float]:
    """The values of a generation_config.json, or of the one in a folder.

    Raises:
        CheckpointError: the file is missing, or not a JSON object.
    """
    file = path / FILE_NAME if path.is_dir() else path
    fix = f"Give the path of a {FILE_NAME} or its folder, auto, vllm or none."
    if not file.is_file():
        raise CheckpointError(f"There is no file {file}.", fix)
    try:
        content = json.loads(read_limited(file, _MAX_JSON_BYTES, fix).decode())
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file} is not valid JSON.", fix) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not hold a JSON object.", fix)
    return _usable(content)


def _usable(given: Mapping[str, Any]) -> dict[str, float]:
    values = {}
    for key, value in given.items():
        name = _OTHER_NAMES.get(key, key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name not in SAMPLING_DEFAULTS or not number:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError:
            continue
        # GGUF stores 32-bit numbers, so that 0.2 is read as 0.20000000298.
        values[name] = float(f"{value:.6g}") if isinstance(value, float) else value
    return values
