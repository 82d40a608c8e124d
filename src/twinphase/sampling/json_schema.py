"""Whether a JSON value obeys a schema, by the same grammar that structured output is held to."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from twinphase.sampling.structured import SCHEMA_LIMITS


@functools.cache
def _bytes_vocabulary() -> LLTokenizer:
    return LLTokenizer("byte")


def obeys_schema(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether `value` obeys `schema`; not where the schema cannot be compiled."""
    grammar = LLMatcher.grammar_from_json_schema(dict(schema))
    matcher = LLMatcher(_bytes_vocabulary(), grammar, log_level=0, limits=SCHEMA_LIMITS)
    try:
        text = json.dumps(_in_order(value, schema), ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    if matcher.is_error():
        return False
    accepted: int = matcher.try_consume_tokens(list(text))
    return accepted == len(text) and bool(matcher.is_accepting())


def _in_order(value: Any, schema: Any) -> Any:
    """The value with the properties of its objects in the schema's order, as the grammar has it."""
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, list):
        return [_in_order(item, schema.get("items")) for item in value]
    properties = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(properties, Mapping):
        return value
    names = [*(name for name in properties if name in value), *value]
    return {name: _in_order(value[name], properties.get(name)) for name in names}
