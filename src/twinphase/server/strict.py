"""Rules for all request objects: unknown fields are errors, null is the default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

MAX_FIELDS = 128
MAX_PARTS = 4096
UNREAD = Field(exclude=True)  # The field is accepted, but has no effect.
Unread = Annotated[Any, UNREAD]
T = TypeVar("T")
# Validation of a list stops at its first error: a million errors would take seconds.
UpTo16 = Annotated[list[T], Field(fail_fast=True, max_length=16)]
UpTo128 = Annotated[list[T], Field(fail_fast=True, max_length=128)]
UpTo4096 = Annotated[list[T], Field(fail_fast=True, max_length=MAX_PARTS)]
UpTo65536 = Annotated[list[T], Field(fail_fast=True, max_length=65536)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
ModelName = Annotated[str, Field(max_length=1024)]


class Strict(BaseModel):
    """An object in a request."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False
    )  # Strict validation does not accept "1" and true as numbers.

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > MAX_FIELDS:
            raise ValueError(f"an object has {len(given)} fields; {MAX_FIELDS} are allowed")
        if None not in given.values():
            return given
        required = {
            field.alias or name for name, field in cls.model_fields.items() if field.is_required()
        }
        return {
            name: value for name, value in given.items() if value is not None or name in required
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core)
        found = handler.resolve_ref_schema(schema)
        found["additionalProperties"] = {"type": "null"}
        for name, given in found.get("properties", {}).items():
            forms = given.get("anyOf", [given])
            if (
                name not in found.get("required", ())
                and {"type": "null"} not in forms
                and given.get("type") != "null"
            ):
                kept = {key: given.pop(key) for key in ("default", "title") if key in given}
                forms = given.pop("anyOf", None) or [dict(given)]
                given.clear()
                given |= {"anyOf": [*forms, {"type": "null"}], **kept}
        return schema


def text_or_parts(text_type: str, refused: Sequence[str]) -> Callable[[Any], Any]:
    """A validator that treats a text as one part, and refuses parts of some types by name."""

    def read(given: Any) -> Any:
        if isinstance(given, str):
            return [{"type": text_type, "text": given}]
        for part in given[:MAX_PARTS] if isinstance(given, list) else ():
            if isinstance(part, dict) and (kind := part.get("type")) in refused:
                raise ValueError(f"a part of the type {kind} is not read here: send text")
        return given

    return read


def unread_fields(body: BaseModel) -> list[str]:
    """The given fields that have no effect, such as `metadata` or `messages.annotations`."""
    found: dict[str, None] = {}
    for name in body.model_fields_set:
        value = getattr(body, name)
        if type(body).model_fields[name].exclude:
            if value not in (None, False, [], {}):
                found[name] = None
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            found |= {f"{name}.{inner}": None for each in value for inner in unread_fields(each)}
    return sorted(found)
