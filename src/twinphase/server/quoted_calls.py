"""Calls in Gemma 4's format: their grammar, and a parser that finds them in text.

    <|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:1,KEY:[true,{KEY:null}]}<tool_call|>

Keys are bare, and texts stand between two tokens as they are. Values beside texts are JSON's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from twinphase.server.tool_calls import CallParser, ToolCallDelta, random_id
from twinphase.server.tools import (
    GEMMA,
    TOOL_NAME_PATTERN,
    SpecialToken,
    arguments_schema,
    lark_symbols,
)

_BEGIN = GEMMA.begin
_END = GEMMA.close
_QUOTE = GEMMA.quote
_HEAD = re.compile(rf"\s*call:({TOOL_NAME_PATTERN})\s*(?=\{{)")
_KEY = re.compile(r"[^\s:,{}\[\]]+")
_BARE = re.compile(r"[^,{}\[\]]*")
_SPACE = re.compile(r"\s*")
_TYPES = {
    "string": "text_value",
    "integer": "INTEGER",
    "number": "NUMBER",
    "boolean": '("true" | "false")',
    "null": '"null"',
}
_ANY_VALUE = (
    'any_value: text_value | NUMBER | "true" | "false" | "null" | any_object | any_array',
    'any_object: "{" (any_pair ("," any_pair)*)? "}"',
    'any_pair: KEY ":" any_value',
    'any_array: "[" (any_value ("," any_value)*)? "]"',
    "KEY: /[A-Za-z_][A-Za-z0-9_.-]*/",
    "INTEGER: /-?(0|[1-9][0-9]*)/",
    r"NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    "ANY_TEXT: /(?s:.*)/",
)


def quoted_call_rules(
    special_token: SpecialToken,
) -> Callable[[int, Mapping[str, Any]], list[str]]:
    """Make the Lark rules of a function's call, given the function's number, for `tool_grammar`.

    The grammar enforces names, types, alternatives and required parameters, in alphabetical order
    as in the model's template, but no limits on numbers, lengths or patterns.
    """
    quote = lark_symbols(_QUOTE, special_token)
    if special_token(_QUOTE) is None:
        # The lazy lexeme ends a text at the first quote.
        texts = [f"text_value: {quote} text_end", f"text_end[lazy]: ANY_TEXT {quote}"]
    else:
        texts = [f"text_value: {quote} ANY_TEXT {quote}"]

    def rules(number: int, function: Mapping[str, Any]) -> list[str]:
        made: list[str] = []
        value = _Rules(f"call_{number}", quote, made).object(arguments_schema(function))
        head = json.dumps(f"call:{function['name']}")
        return [f"call_{number}: {head} {value}", *made, *texts, *_ANY_VALUE]

    return rules


class _Rules:
    """Adds rules named after one call to `made`."""

    def __init__(self, prefix: str, quote: str, made: list[str]) -> None:
        self._prefix = prefix
        self._quote = quote
        self._made = made

    def value(self, schema: Any) -> str:
        """An expression that matches at least everything that a schema allows."""
        if not isinstance(schema, Mapping):
            return "any_value"
        options = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
        if options and not any(isinstance(option, (list, Mapping)) for option in options):
            return f"({' | '.join(map(self._literal, options))})"
        types = schema.get("type")
        if isinstance(types, list):
            return f"({' | '.join(self.value({**schema, 'type': one}) for one in types)})"
        if types == "array":
            item = self.value(schema.get("items"))
            return f'"[" ({item} ("," {item})*)? "]"'
        if types == "object":
            return self.object(schema)
        return _TYPES.get(str(types), "any_value")

    def object(self, schema: Mapping[str, Any]) -> str:
        """An expression for an object with the declared properties, or with any if none are."""
        properties = schema.get("properties")
        if properties is None:
            return "any_object"
        required = schema.get("required") or ()
        names = sorted(properties)
        prefix = f"{self._prefix}_{len(self._made)}"
        rest = {True: '""', False: '""'}  # What may follow, by whether a comma must come first.
        for index, name in reversed(list(enumerate(names))):
            value = self.value(properties[name])
            after = dict(rest)
            for comma in (True, False):
                key = json.dumps(f"{',' if comma else ''}{name}:")
                pair = f"{key} {value} {after[True]}"
                rule = f"{prefix}_{index}_{int(comma)}"
                self._made.append(
                    f"{rule}: {pair}" if name in required else f"{rule}: {pair} | {after[comma]}"
                )
                rest[comma] = rule
        return f'"{{" {rest[False]} "}}"'

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value)} {self._quote}"
        return json.dumps(json.dumps(value))


class _UnfinishedError(Exception):
    pass


class _Reader:
    """Reads a call at the start of a text; raises ValueError if there is none."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.at = 0

    def call(self) -> tuple[str, str]:
        """The name of the call, and its arguments as JSON."""
        head = _HEAD.match(self._text)
        if head is None:
            raise ValueError
        self.at = head.end()
        given = self._object()
        return head[1], json.dumps(given, ensure_ascii=False)

    def _next(self) -> str:
        self.at = _SPACE.match(self._text, self.at).end()  # type: ignore[union-attr]
        if self.at == len(self._text):
            raise _UnfinishedError
        return self._text[self.at]

    def _takes(self, text: str) -> bool:
        self._next()
        found = self._text.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def _quoted(self) -> str:
        end = self._text.find(_QUOTE, self.at)
        if end < 0:
            raise _UnfinishedError
        text = self._text[self.at : end]
        self.at = end + len(_QUOTE)
        return text

    def _object(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._expect("{")
        while not self._takes("}"):
            if found:
                self._expect(",")
            if self._takes(_QUOTE):
                key = self._quoted()
            else:
                match = _KEY.match(self._text, self.at)
                if match is None:
                    raise ValueError
                key = match[0]
                self.at = match.end()
            self._expect(":")
            found[key] = self._value()
        return found

    def _array(self) -> list[Any]:
        found: list[Any] = []
        while not self._takes("]"):
            if found:
                self._expect(",")
            found.append(self._value())
        return found

    def _value(self) -> Any:
        if self._takes(_QUOTE):
            return self._quoted()
        if self._next() == "{":
            return self._object()
        if self._takes("["):
            return self._array()
        match = _BARE.match(self._text, self.at)
        assert match is not None
        self.at = match.end()
        self._next()
        try:
            return json.loads(match[0])
        except ValueError:
            return match[0].strip()

    def _expect(self, text: str) -> None:
        if not self._takes(text):
            raise ValueError


class QuotedCallParser(CallParser):
    """Finds complete calls in text."""

    def __init__(self, new_id: Callable[[], str] | None = None) -> None:
        """`new_id` makes the ids of calls."""
        super().__init__(new_id or random_id)
        self._next: Callable[[], bool] = self._take_content
        self._scanned = 0

    def flush(self) -> tuple[str, list[ToolCallDelta]]:
        """End the answer and return the held text; an unfinished call is content.

        After a complete call the held text is dropped, because it is the start of a call that was
        cut off.
        """
        if self._next == self._take_call:
            call = self._read()
            if call:
                self._begin_call(*call[:2])
            elif not self._num_calls:
                self._add_content(_BEGIN + self._text)
        elif not (self.is_beside_call and _BEGIN.startswith(self._text.strip())):
            self._add_content(self._text)
        return self._end_answer()

    def _take_content(self) -> bool:
        found = self._skip_to(_BEGIN)
        if found:
            self._scanned = 0
            self._next = self._take_call
        return found

    def _take_call(self) -> bool:
        """Wait for the end of a call; the end mark may also occur in a text of the call."""
        end = self._text.find(_END, self._scanned)
        if end < 0:
            self._scanned = max(0, len(self._text) - len(_END))
            return False
        call = self._read()
        if call:
            self._begin_call(*call[:2])
            rest = self._text[call[2] :].lstrip()
            self._text = rest.removeprefix(_END)
        elif self._is_unfinished:
            self._scanned = end + len(_END)
            return True
        else:
            self._add_content(_BEGIN)
        self._next = self._take_content
        return True

    def _read(self) -> tuple[str, str, int] | None:
        """Name, arguments and end of the call at the start of the text; None if there is none."""
        reader = _Reader(self._text)
        self._is_unfinished = False
        try:
            name, arguments = reader.call()
        except _UnfinishedError:
            self._is_unfinished = True
            return None
        except (ValueError, RecursionError):
            return None
        return name, arguments, reader.at
