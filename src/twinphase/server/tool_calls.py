"""Finds tool calls in a model's text while it streams.

It works with and without a grammar: text that is not a call is content, and no text is an error.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import from_json

from twinphase.server.tools import AROUND_CALLS, MISTRAL, TOOL_NAME_PATTERN, ToolFormat
from twinphase.tokenizer.detokenizer import overlap

# A call up to its arguments, with the keys in the usual order.
_HEAD = re.compile(
    rf'\{{\s*"name"\s*:\s*"({TOOL_NAME_PATTERN})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
# The start of an object that is not a call.
_OTHER_OBJECT = re.compile(r'\{\s*(?:[^\s"]|"(?!(?:name|arguments|parameters|type|id)")[^"]*")')
_REST_OF_CALL = re.compile(r"^[^{}<]+")


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call: the first has id and name, later ones only more of the arguments' JSON."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class ToolCall:
    """A complete call; `arguments` is JSON text, cut off if the answer was."""

    id: str
    name: str
    arguments: str

    @property
    def given(self) -> dict[str, Any]:
        """The arguments as an object, as far as they are complete."""
        try:
            found = from_json(self.arguments, allow_partial=True)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


def call_of(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in the shape of OpenAI's messages; `arguments` is JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def join_deltas(deltas: Iterable[ToolCallDelta]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.id is not None and delta.name is not None:
            calls.append(ToolCall(delta.id, delta.name, delta.arguments))
        else:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + delta.arguments)
    return calls


class CallParser:
    """Divides the text of one answer into content and calls; subclasses know the formats.

    The joined output does not depend on how the text is cut into pieces. White space around calls
    is dropped.

    Attributes:
        new_id: makes the ids of calls.
        is_beside_call: whether there was a call, and no content since.
    """

    # Processes as much of the text as it can; returns whether to call it again.
    _next: Callable[[], bool]

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.new_id = new_id
        self.is_beside_call = False
        self._text = ""  # Unprocessed text.
        self._num_calls = 0
        self._space = ""  # White space that is content only if more content follows.
        self._content = ""
        self._deltas: list[ToolCallDelta] = []

    def feed(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Take the next piece of the answer; return new content, and a delta per call."""
        self._text += text
        while self._next():
            pass
        return self._take_new()

    def flush(self) -> tuple[str, list[ToolCallDelta]]:
        """End the answer; return the held text."""
        raise NotImplementedError

    def _take_new(self) -> tuple[str, list[ToolCallDelta]]:
        new = self._content, self._deltas
        self._content = ""
        self._deltas = []
        return new

    def _begin_call(self, name: str, arguments: str = "") -> None:
        self._space = ""
        self.is_beside_call = True
        self._deltas.append(ToolCallDelta(self._num_calls, self.new_id(), name, arguments))
        self._num_calls += 1

    def _skip_to(self, begin: str) -> bool:
        """Take content up to the start of a call; return whether it was found and skipped."""
        at = self._text.find(begin)
        if at < 0:
            at = len(self._text) - overlap(self._text, begin)
            self._add_content(self._text[:at])
            self._text = self._text[at:]
            return False
        self._add_content(self._text[:at])
        self._text = self._text[at + len(begin) :]
        return True

    def _end_answer(self) -> tuple[str, list[ToolCallDelta]]:
        """End the answer without its unprocessed text."""
        self._text = ""
        if not self.is_beside_call:
            self._content += self._space
            self._space = ""
        return self._take_new()

    def _add_content(self, text: str) -> None:
        if self.is_beside_call:
            text = text.lstrip()
            self.is_beside_call = not text
        text = self._space + text
        content = text.rstrip()
        self._content += content
        self._space = text[len(content) :]


class ToolCallParser(CallParser):
    """Divides the text of one answer into content and calls.

    The joined output does not depend on how the text is cut into pieces. White space around calls
    is dropped.
    """

    def __init__(self, format: ToolFormat, new_id: Callable[[], str] | None = None) -> None:
        """`new_id` makes the ids of calls; random ones if None."""
        # Mistral's templates only accept ids of nine letters and digits.
        random = (lambda: secrets.token_hex(5)[:9]) if format == MISTRAL else random_id
        super().__init__(new_id or random)
        self._format = format
        self._end = format.close.strip()
        self._next: Callable[[], bool] = self._expect_call if format.bare else self._take_content
        self._before_call: str | None = (
            ""  # Text since the end of the content; None once there was a call.
        )
        self._brackets = Brackets()
        self._scanned = 0

    def flush(self) -> tuple[str, list[ToolCallDelta]]:
        """End the answer and return the held text; an unfinished call without arguments is content.

        After a complete call the held text is dropped, because it is the start of a call that was
        cut off.
        """
        if self._num_calls and self._next != self._take_content:
            self._text = ""
            self._before_call = None
        if self.is_beside_call and self._format.begin.startswith(self._text.strip()):
            self._text = ""
        if self._next in (self._expect_call, self._take_call):
            self._stop_expecting()
        if self._next == self._take_content:
            self._add_content(self._text)
            self._content += self._space
        return self._take_new()

    def _take_content(self) -> bool:
        found = self._skip_to(self._format.begin)
        if found:
            self._before_call = self._format.begin
            self._next = self._expect_call
        return found

    def _expect_call(self) -> bool:
        """Skip separators before, between and after calls."""
        rest = self._text.lstrip(AROUND_CALLS)
        ended = bool(self._end) and rest.startswith(self._end)
        if ended:
            rest = rest[len(self._end) :]
        if self._before_call is not None:
            self._before_call += self._text[: len(self._text) - len(rest)]
        self._text = rest
        if not ended and rest.startswith("{"):
            self._brackets = Brackets()
            self._scanned = 0
            self._next = self._take_call
        elif not ended and self._end.startswith(rest):
            return False
        else:
            self._stop_expecting()
        return True

    def _stop_expecting(self) -> None:
        self._add_content(self._before_call or "")
        self._next = self._take_content

    def _take_call(self) -> bool:
        """Wait for the name of a call and the start of its arguments."""
        if head := _HEAD.match(self._text):
            self._begin_call(head[1])
            self._text = self._text[head.end() :]
            self._brackets = Brackets()
            self._next = self._take_arguments
            return True
        if _OTHER_OBJECT.match(self._text):
            self._stop_expecting()
            return True
        end = self._brackets.end(self._text, self._scanned)
        self._scanned = len(self._text)
        if end is None:
            return False
        whole = self._text[:end]
        self._text = self._text[end:]
        if call := _read_call(whole):
            self._begin_call(call[0])
            self._add_arguments(call[1])
            self._next = self._expect_call
        else:
            self._stop_expecting()
            self._add_content(whole)
        return True

    def _take_arguments(self) -> bool:
        end = self._brackets.end(self._text)
        self._add_arguments(self._text[:end])
        self._text = self._text[len(self._text) if end is None else end :]
        if end is not None:
            self._next = self._end_call
        return end is not None

    def _end_call(self) -> bool:
        """Skip further keys, and the closing brace if it is there: small models omit it."""
        self._text = _REST_OF_CALL.sub("", self._text)
        if self._text:
            self._next = self._expect_call
        return bool(self._text)

    def _begin_call(self, name: str, arguments: str = "") -> None:
        super()._begin_call(name, arguments)
        self._before_call = None

    def _add_arguments(self, text: str) -> None:
        index = self._num_calls - 1
        if self._deltas and self._deltas[-1].index == index:
            self._deltas[-1] = replace(
                self._deltas[-1], arguments=self._deltas[-1].arguments + text
            )
        elif text:
            self._deltas.append(ToolCallDelta(index, None, None, text))


class Brackets:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end(self, text: str, start: int = 0) -> int | None:
        """The index after the object in `text`, scanning from `start`; None if it is not closed."""
        for at in range(start, len(text)):
            character = text[at]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a complete call, with keys in any order; None if it is not a call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if (
        not isinstance(name, str)
        or not re.fullmatch(TOOL_NAME_PATTERN, name)
        or not isinstance(arguments, dict)
    ):
        return None
    return name, json.dumps(arguments)


def random_id() -> str:
    return f"call_{secrets.token_hex(12)}"
