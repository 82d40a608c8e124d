"""The form that an answer must have; `tools.py` handles calls of tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinphase.constraint import StructuredOutputsParams, plain_json
from twinphase.errors import InvalidRequestError
from twinphase.server.openai_types import GenerationRequest

OPEN = {
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "patternProperties",
    "unevaluatedProperties",
}  # may declare more
# Keys whose value maps names to schemas, and keys whose value is not a schema or must stay open for
# what is beside it.
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_AS_IT_IS = {"const", "enum", "default", "examples", "allOf", "not", "if", "then", "else"}


def one_constraint(
    body: GenerationRequest, tools: StructuredOutputsParams | None = None
) -> StructuredOutputsParams | None:
    """The required form of the answer, under any of its names; two different forms are refused."""
    found: dict[str, StructuredOutputsParams] = {}
    if tools is not None:
        found["tools"] = tools
    if body.structured_outputs is not None:
        fields = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        found["structured_outputs"] = StructuredOutputsParams(**fields)
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{name}")
        if value is not None:
            found[f"guided_{name}"] = StructuredOutputsParams(**{name: value})
    wanted = body.response_format
    if wanted is not None and wanted.type != "text":
        if wanted.json_schema is not None:
            schema = plain_json("response_format.json_schema.schema", wanted.json_schema.schema_)
            found["response_format"] = StructuredOutputsParams(
                json=closed(schema) if wanted.json_schema.strict else schema
            )
        elif wanted.type == "json_object":
            found["response_format"] = StructuredOutputsParams(json_object=True)
        else:
            tag = {
                "type": wanted.type,
                "structures": wanted.structures,
                "triggers": wanted.triggers,
            }
            found["response_format"] = StructuredOutputsParams(structural_tag=tag)
    if len(found) > 1:
        raise InvalidRequestError(
            f"{' and '.join(found)} both say what form the answer must have.", "Give one."
        )
    return next(iter(found.values()), None)


def closed(schema: Any) -> Any:
    """The schema with all objects closed to other properties, as OpenAI's `strict` means it.

    `schema` must have passed `plain_json`. Objects that mention additional properties are not
    changed.
    """
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {
        key: {name: closed(each) for name, each in value.items()}
        if key in _BY_NAME and isinstance(value, Mapping)
        else value
        if key in _AS_IT_IS
        else closed(value)
        for key, value in schema.items()
    }
    if "properties" in found and not found.keys() & OPEN:
        found.setdefault("additionalProperties", False)
    return found
