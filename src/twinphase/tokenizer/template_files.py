"""Finds the chat templates in a model's files; `chat_template.py` compiles and renders them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinphase.errors import CheckpointError, UnsupportedModelError
from twinphase.tokenizer.folder import read_json
from twinphase.weights.checkpoint import Checkpoint
from twinphase.weights.storage import read_limited

_MAX_TEMPLATE_BYTES = 4 << 20
_FIX = "Use the model without its template."


def template_texts(checkpoint: Checkpoint) -> dict[str, str]:
    """The Jinja texts of a model's chat templates by name; may be empty.

    "default" is the general one; "tool_use", which few models have, is for requests with tools. In
    a folder, chat_template.jinja and additional_chat_templates/NAME.jinja take precedence over
    tokenizer_config.json, as in transformers.

    Raises:
        UnsupportedModelError: a template is not text.
        CheckpointError: a file cannot be read.
    """
    if checkpoint.config is not None:
        found = _files(checkpoint.path) or _named(
            read_json(checkpoint.path / "tokenizer_config.json")
        )
    else:
        keys = {
            "default": "tokenizer.chat_template",
            "tool_use": "tokenizer.chat_template.tool_use",
        }
        found = {name: checkpoint.metadata.get(key) for name, key in keys.items()}
    found = {name: text for name, text in found.items() if text is not None and text != ""}
    if not all(isinstance(text, str) for text in found.values()):
        raise UnsupportedModelError("The model's chat template is not text.", _FIX)
    return found


def _files(folder: Path) -> dict[str, Any]:
    paths = {"default": folder / "chat_template.jinja"}
    paths |= {
        path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    return {name: _read(path) for name, path in paths.items() if path.is_file()}


def _read(path: Path) -> str:
    try:
        return read_limited(path, _MAX_TEMPLATE_BYTES, _FIX).decode()
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not UTF-8 text.", _FIX) from None


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The templates in tokenizer_config.json, which has one text or a list with names."""
    templates = settings.get("chat_template")
    if isinstance(templates, list):
        entries = [entry for entry in templates if isinstance(entry, dict)]
        templates = {str(entry.get("name")): entry.get("template") for entry in entries}
    return templates if isinstance(templates, dict) else {"default": templates}
