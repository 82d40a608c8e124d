"""Calls in the format of Qwen3.5 and Qwen3-Coder: their grammar, and a parser.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value that may be text is written as it is; any other value is JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinphase.constraint import StructuredOutputsParams
from twinphase.server.quoted_calls import quoted_call_rules
from twinphase.server.tool_calls import CallParser, ToolCallDelta, random_id
from twinphase.server.tools import (
    CALL_JSON_STYLE,
    TOOL_NAME_PATTERN,
    XML,
    SpecialToken,
    Tool,
    ToolChoice,
    ToolFormat,
    arguments_schema,
    tool_grammar,
)

_BEGIN = XML.begin
_END = XML.close.strip()
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_VALUE_END = "\n</parameter>\n"
_HEAD = re.compile(rf"\s*<function=({TOOL_NAME_PATTERN})>")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def xml_call_rules(number: int, function: Mapping[str, Any]) -> list[str]:
    """Lark rules of a function's call, by its number: the declared parameters in order."""
    schema = arguments_schema(function)
    required = schema.get("required") or ()
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    end = json.dumps(_VALUE_END)
    call = [json.dumps(f"{_FUNCTION}{function['name']}>\n")]
    rules = []
    for index, (name, wanted) in enumerate((schema.get("properties") or {}).items()):
        rule = f"call_{number}_{index}"
        call.append(rule if name in required else f"{rule}?")
        texts = wanted.get("enum") if isinstance(wanted, Mapping) else None
        if texts and all(isinstance(text, str) for text in texts):
            value = f"({' | '.join(map(json.dumps, texts))}) {end}"
        elif _may_be_text(wanted):
            value = "text_value"
        else:
            inner = {**wanted, **definitions, "x-guidance": CALL_JSON_STYLE}
            value = f"%json {json.dumps(inner)} {end}"
        rules.append(f"{rule}: {json.dumps(f'<parameter={name}>' + chr(10))} {value}")
    # The lazy lexeme ends a text at the first end of a parameter.
    shared = [f"text_value[lazy]: ANY_TEXT {end}", "ANY_TEXT: /(?s:.*)/"]
    return [f"call_{number}: {' '.join(call)} {json.dumps(_FUNCTION_END)}", *rules, *shared]


def call_grammar(
    tools: Sequence[Tool],
    tool_choice: ToolChoice,
    parallel_tool_calls: bool | None,
    format: ToolFormat,
    special_token: SpecialToken,
) -> StructuredOutputsParams | None:
    """The grammar of calls in any format; see `tool_grammar`."""
    rules = quoted_call_rules(special_token) if format.quote else None
    rules = xml_call_rules if format.xml else rules
    return tool_grammar(tools, tool_choice, parallel_tool_calls, format, special_token, rules)


class XmlCallParser(CallParser):
    """Finds complete calls in tags."""

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str] | None = None) -> None:
        """`tools` define which values are text; `new_id` makes the ids of calls."""
        self._properties = {
            tool["function"]["name"]: arguments_schema(tool["function"]).get("properties") or {}
            for tool in tools
        }
        super().__init__(new_id or random_id)
        self._next: Callable[[], bool] = self._take_content

    def flush(self) -> tuple[str, list[ToolCallDelta]]:
        """End the answer and return the held text; an unfinished call is content.

        After a complete call the held text is dropped, because it is the start of a call that was
        cut off.
        """
        if self._next == self._take_call and not self._num_calls:
            self._add_content(_BEGIN + self._text)
        elif self._next == self._take_content and not (
            self.is_beside_call and _BEGIN.startswith(self._text.strip())
        ):
            self._add_content(self._text)
        return self._end_answer()

    def _take_content(self) -> bool:
        found = self._skip_to(_BEGIN)
        if found:
            self._next = self._take_call
        return found

    def _take_call(self) -> bool:
        """Wait for the end of a function, as long as there may be one."""
        beginning = self._text.lstrip()
        end = self._text.find(_FUNCTION_END)
        if not beginning.startswith(_FUNCTION):
            if _FUNCTION.startswith(beginning):
                return False
            end = 0
        elif end < 0:
            return False
        call = self._read(self._text[:end])
        if call is None:
            self._add_content(_BEGIN)
            self._next = self._take_content
            return True
        self._begin_call(*call)
        self._text = self._text[end + len(_FUNCTION_END) :]
        self._next = self._end_call
        return True

    def _end_call(self) -> bool:
        """Skip the end of a call, or go to the next function in it."""
        rest = self._text.lstrip()
        if rest.startswith(_FUNCTION):
            self._next = self._take_call
            return True
        if rest.startswith(_END):
            self._text = rest[len(_END) :]
        elif _END.startswith(rest) or _FUNCTION.startswith(rest):
            return False
        self._next = self._take_content
        return True

    def _read(self, text: str) -> tuple[str, str] | None:
        """Name and arguments of a call; None if it is not one."""
        head = _HEAD.match(text)
        if head is None:
            return None
        wanted = self._properties.get(head[1], {})
        given = {name: _value(value, wanted.get(name)) for name, value in _PARAMETER.findall(text)}
        return head[1], json.dumps(given, ensure_ascii=False)


def _may_be_text(schema: Any) -> bool:
    """Whether a value of that schema may be a string."""
    if not isinstance(schema, Mapping):
        return True
    types = schema.get("type")
    if types is not None:
        return types == "string" or isinstance(types, list) and "string" in types
    if "enum" in schema or "const" in schema:
        return any(isinstance(one, str) for one in schema.get("enum", [schema.get("const")]))
    choices = schema.get("anyOf") or schema.get("oneOf")
    return any(map(_may_be_text, choices)) if choices else "$ref" not in schema


def _value(text: str, schema: Any) -> Any:
    if _may_be_text(schema) and schema is not None:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
