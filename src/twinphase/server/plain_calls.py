"""Interprets an answer that is nothing but one JSON object as a tool call.

Some models omit the marks of their own format. Calls with those marks (tool_calls.py) take
precedence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from twinphase.server.tool_calls import Brackets, CallParser, ToolCallDelta
from twinphase.server.tools import Tool, arguments_schema

_FENCE = re.compile(r"```[\w-]{0,20}\s*")
# The start of an object that is not a call.
_OTHER_OBJECT = re.compile(
    r'\{\s*(?:[^\s"]|"(?!(?:name|arguments|parameters|type)")[^"]*"'
    r'|"type"\s*:\s*(?:[^\s"]|"(?!function")[^"]*"))'
)
_KEYS = {"name", "arguments", "parameters", "type", "id"}
_NAME = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)("?)')


class PlainCallParser:
    """A `CallParser` that holds content back as long as it may be a single call.

    The call is a JSON object, bare or in a Markdown fence, that names a tool and obeys its
    parameters. The answer must not contain anything else.
    """

    def __init__(self, parser: CallParser, tools: Sequence[Tool]) -> None:
        self._parser = parser
        self._functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._held: str | None = ""  # None once the answer is known to be something else.
        self._object = ""  # The text from the opening brace on.
        self._end: int | None = None  # End of the object.
        self._brackets = Brackets()
        self._called = False

    @property
    def is_beside_call(self) -> bool:
        return self._called or self._parser.is_beside_call

    def feed(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        content, calls = self._parser.feed(text)
        return self._sift(content, bool(calls)), calls

    def flush(self) -> tuple[str, list[ToolCallDelta]]:
        content, calls = self._parser.flush()
        content = self._sift(content, bool(calls))
        if self._held and (call := self._call()):
            self._called = True
            return content, [ToolCallDelta(0, self._parser.new_id(), *call)]
        return content + (self._held or ""), calls

    def _sift(self, content: str, has_calls: bool) -> str:
        """The text that is certain to be content."""
        if self._held is None:
            return content
        self._held += content
        if not has_calls and self._may_be_call(content):
            return ""
        content = self._held
        self._held = None
        return content

    def _may_be_call(self, new: str) -> bool:
        assert self._held is not None
        scanned = len(self._object)
        if scanned:
            self._object += new
        else:
            text = self._held.lstrip()
            fence = _FENCE.match(text)
            if fence is None and "```".startswith(text):
                return True
            self._object = text[fence.end() :] if fence else text
        if not self._object:
            return True
        if not self._object.startswith("{") or _OTHER_OBJECT.match(self._object):
            return False
        if (name := _NAME.match(self._object)) and not self._is_name(name[1], bool(name[2])):
            return False
        if self._end is None:
            self._end = self._brackets.end(self._object, scanned)
        behind = "" if self._end is None else self._object[self._end :].strip()
        return "```".startswith(behind)

    def _is_name(self, text: str, is_whole: bool) -> bool:
        if is_whole:
            return text in self._functions
        return any(name.startswith(text) for name in self._functions)

    def _call(self) -> tuple[str, str] | None:
        """Name and arguments of the call that the whole answer is; None if it is not one."""
        assert self._held is not None
        text = self._held.strip()
        if self._end is None or not text.endswith("```" if text.startswith("```") else "}"):
            return None
        try:
            call = json.loads(self._object[: self._end])
        except (ValueError, RecursionError):
            return None
        function = self._functions.get(str(call.get("name")))
        arguments = call.get("arguments", call.get("parameters"))
        if function is None or not isinstance(arguments, dict) or call.keys() - _KEYS:
            return None
        # The grammar library takes a while to load.
        from twinphase.sampling.json_schema import obeys_schema

        if not obeys_schema(arguments, arguments_schema(function)):
            return None
        return function["name"], json.dumps(arguments)
