"""Tools of a request: the formats of calls, and the grammar of an answer with calls.

`tool_prompt.py` writes the prompt, and `tool_calls.py` parses the answer. The types in a request's
JSON are checked before this file is called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twinphase.constraint import StructuredOutputsParams, plain_json
from twinphase.errors import InvalidRequestError
from twinphase.server.forms import OPEN, closed

# {"type": "function", "function": {"name", "description", "parameters", "strict"}}
Tool = Mapping[str, Any]
# None means "auto".
ToolChoice = str | Mapping[str, Any] | None
# Returns the id of a text that is one control token, and None for ordinary text.
SpecialToken = Callable[[str], int | None]

TOOL_NAME_PATTERN = "[a-zA-Z0-9_.-]{1,64}"
_POSSIBLE_CONTROL_TOKEN = re.compile(r"(<[^<>\s]+>|\[[A-Z_/]+\])")
# Models write JSON in this style. With free white space, a small model might write nothing else.
CALL_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_CALL_HEAD = '{"name": "'
_ANY = "(?s:.*)"
# Separators of calls in any format, and the brace that small models write twice.
AROUND_CALLS = " \t\r\n,;[]}"


@dataclass(frozen=True)
class ToolFormat:
    """How a model family writes calls: `begin` `open` call (`between` call)* `close`.

    A call is {"name": ..., `arguments`: {...}}.

    Attributes:
        bare: whether an answer that begins with a call needs no `begin`.
        xml: whether calls are written in tags instead (xml_calls.py).
        quote: token around texts in Gemma 4's format (quoted_calls.py); empty for other formats.
    """

    begin: str
    open: str
    between: str
    close: str
    bare: bool = False
    arguments: str = "arguments"
    xml: bool = False
    quote: str = ""


HERMES = ToolFormat("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
XML = replace(HERMES, xml=True)
LLAMA3_JSON = ToolFormat("<|python_tag|>", "", "; ", "", bare=True, arguments="parameters")
GEMMA = ToolFormat("<|tool_call>", "", "<tool_call|><|tool_call>", "<tool_call|>", quote='<|"|>')
MISTRAL = ToolFormat("[TOOL_CALLS]", " [", ", ", "]")


def tool_format(template_source: str) -> ToolFormat:
    """The format that a model was trained on, judged by its chat template; default: Hermes."""
    if HERMES.begin in template_source:
        return XML if "<function=" in template_source else HERMES
    if GEMMA.begin in template_source:
        return GEMMA
    if MISTRAL.begin in template_source:
        return MISTRAL
    return LLAMA3_JSON if '"parameters"' in template_source else HERMES


def check_tools(tools: Sequence[Tool], tool_choice: ToolChoice) -> None:
    """Refuse tools that cannot be offered, and a choice that cannot be fulfilled."""
    names = set()
    for tool in tools:
        name = tool["function"]["name"]
        if name in names:
            raise InvalidRequestError(f"Two tools are named {name!r}.", "Give each its own name.")
        names.add(name)
        parameters = plain_json(
            f"The parameters of tool {name!r}", tool["function"].get("parameters") or {}
        )
        if parameters.get("type", "object") != "object":
            raise InvalidRequestError(
                f"The parameters of tool {name!r} are not an object.", 'Use "type": "object".'
            )
    if (
        isinstance(tool_choice, Mapping)
        and (chosen := tool_choice["function"]["name"]) not in names
    ):
        raise InvalidRequestError(
            f"tool_choice names {chosen!r}, which is not in tools.", "Name one of the tools."
        )


def tool_grammar(
    tools: Sequence[Tool],
    tool_choice: ToolChoice,
    parallel_tool_calls: bool | None,
    format: ToolFormat,
    special_token: SpecialToken,
    call_rules: Callable[[int, Mapping[str, Any]], list[str]] | None = None,
) -> StructuredOutputsParams | None:
    """The grammar that makes every call name a tool of the request and obey its parameters.

    With "auto" the text is free until a call begins; the answer ends after the calls.

    Args:
        tools: tools that passed `check_tools`, as did `tool_choice`.
        tool_choice: None for "auto".
        parallel_tool_calls: whether an answer may have several calls; None means yes. A named tool
            is called once.
        format: call format of the model.
        call_rules: makes the Lark rules of a function's call, given its number; None for calls in
            JSON.
        special_token: returns the id of a control token, because a grammar does not match those as
            text.

    Returns:
        None without tools, or if the choice is "none".
    """
    if not tools or tool_choice == "none":
        return None
    if isinstance(tool_choice, Mapping):
        tools = [
            tool for tool in tools if tool["function"]["name"] == tool_choice["function"]["name"]
        ]

    def lark(text: str) -> str:
        return lark_symbols(text, special_token)

    call_rules = call_rules or (lambda i, function: [f"call_{i}: {_call(function, format)}"])
    forced = tool_choice not in (None, "auto")
    several = parallel_tool_calls is not False and not isinstance(tool_choice, Mapping)
    special_begin = special_token(format.begin) is not None
    rules = []
    for i, tool in enumerate(tools):
        rules += call_rules(i, tool["function"])
    rules = list(dict.fromkeys(rules))  # Several tools may share a rule.
    rules += ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    rules += [
        f"calls: {lark(format.open)} call {f'({lark(format.between)} call)*' if several else ''} "
        f"{lark(format.close)}"
    ]
    if forced:
        rules += [f"start: {'' if format.bare else lark(format.begin)} calls"]
    elif format.bare:
        rules += [f"start: OTHER | {lark(format.begin) + '?' if special_begin else ''} calls"]
        rules += [f"OTHER: /{_other_than(_CALL_HEAD)}/"]
    else:
        # A lazy lexeme ends the text at the first start of a call; a control token is never part of
        # a text.
        rules += [
            "start: TEXT | begin calls",
            f"begin{'' if special_begin else '[lazy]'}: TEXT {lark(format.begin)}",
        ]
        rules += [f"TEXT: /{_ANY}/"]
    return StructuredOutputsParams(grammar="\n".join(rules))


def _call(function: Mapping[str, Any], format: ToolFormat) -> str:
    # The parameters are a separate schema instead of part of a call's, because their "$ref"s are
    # relative to their root.
    schema = {**arguments_schema(function), "x-guidance": CALL_JSON_STYLE}
    head = f'{_CALL_HEAD}{function["name"]}", "{format.arguments}": '
    return f'{json.dumps(head)} %json {json.dumps(schema)} "}}"'


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a function's arguments."""
    parameters = _without_prose(function.get("parameters") or {"properties": {}})
    if function.get("strict"):
        parameters = closed(parameters)
    schema = {"type": "object", **parameters}
    if "properties" in schema and not schema.keys() & OPEN:
        # Undeclared properties are forbidden unless allowed, because small models invent some.
        schema.setdefault("additionalProperties", False)
    return schema


def _without_prose(schema: Any) -> Any:
    """A schema without titles and descriptions, which only the prompt needs."""
    if isinstance(schema, list):
        return [_without_prose(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value if key in ("const", "enum", "default") else _without_prose(value)
        for key, value in schema.items()
        if key not in ("title", "description") or not isinstance(value, str)
    }


def _other_than(beginning: str) -> str:
    """A regular expression for texts that begin neither with `beginning` nor with separators."""
    pattern = ""
    for character in map(re.escape, reversed(beginning)):
        pattern = f"([^{character}]{_ANY}{pattern and f'|{character}{pattern}'})?"
    around = r" \t\r\n,;\[\]}"  # This is AROUND_CALLS as a regular expression.
    return f"[{around}]*" + pattern.replace("([^", f"([^{around}", 1)


def lark_symbols(text: str, special_token: SpecialToken) -> str:
    """A text as symbols of a Lark rule: control tokens as ids, the rest as strings."""
    symbols = []
    for piece in filter(None, _POSSIBLE_CONTROL_TOKEN.split(text)):
        token_id = special_token(piece)
        symbols.append(json.dumps(piece) if token_id is None else f"<[{token_id}]>")
    return " ".join(symbols)
