"""Parts of OpenAI requests that several dialects build."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def content_of(parts: Sequence[Any]) -> str | list[dict[str, Any]]:
    """A message's content from parts that have a `text`."""
    if len(parts) < 2:
        return "".join(part.text for part in parts)
    return [{"type": "text", "text": part.text} for part in parts]


def tool_named(name: str) -> dict[str, Any]:
    """The `tool_choice` for a tool."""
    return {"type": "function", "function": {"name": name}}


def json_form(schema: Any, **more: Any) -> dict[str, Any]:
    """The `response_format` for a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}
