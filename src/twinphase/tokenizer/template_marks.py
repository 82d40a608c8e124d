"""Puts marks into a request, which show the client's texts in a chat template's output.

Marks are characters that do not occur in the request. A numbered pair encloses each content, and
another mark splits each control token that the client wrote. `prompt_parts.py` interprets the
marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

from twinphase.errors import InvalidRequestError
from twinphase.tokenizer.chat_template import content_texts


class Content(NamedTuple):
    """A text in a message: the message's index, the client's name, and the text with its spaces."""

    message: int
    name: str | None
    before: str
    core: str
    after: str


class Mark(NamedTuple):
    """A mark in the output: "begin" or "end" of a content, or "cut" within a control token.

    `at` is its position in the text without marks.
    """

    kind: str
    content: int
    at: int


@dataclass
class MarkedRequest:
    """Puts marks into a request, and finds them in the template's output.

    Attributes:
        begin, end, cut: characters of the marks.
        sides: marks of a content: "both", "begin" or "none".
        control: control tokens to split, longest first.
        contents: contents of the messages, by the number of their marks.
    """

    begin: str
    end: str
    cut: str
    sides: str
    control: Sequence[str]
    contents: list[Content] = field(default_factory=list)

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Messages with marks in contents, reasoning, and arguments of tool calls."""
        marked = []
        for i, message in enumerate(messages):
            new = dict(message)
            texts = content_texts(message, i)
            if texts:
                last = len(texts) - 1
                lines = [
                    (text + "\n" if k < last else text, name)
                    for k, (text, name) in enumerate(texts)
                ]
                new["content"] = "".join(self._marked(text, i, name) for text, name in lines)
            if "reasoning_content" in message:
                new["reasoning_content"] = self._marked_leaves(message["reasoning_content"], i)
            if isinstance(message.get("tool_calls"), (list, tuple)):
                new["tool_calls"] = [self._marked_call(call, i) for call in message["tool_calls"]]
            marked.append(self.with_cuts(new))
        return marked

    def with_cuts(self, value: Any) -> Any:
        """The value with a mark in each control token, at any depth."""
        if not self.control:
            return value
        if isinstance(value, str):
            for name in self.control:
                value = value.replace(name, name[0] + self.cut + name[1:])
            return value
        if isinstance(value, Mapping):
            return {self.with_cuts(key): self.with_cuts(inner) for key, inner in value.items()}
        return (
            [self.with_cuts(inner) for inner in value]
            if isinstance(value, (list, tuple))
            else value
        )

    def read(self, rendered: str) -> tuple[str, list[Mark]]:
        """The text without marks, and the marks in it."""
        kinds = {self.begin: "begin", self.end: "end", None: "cut"}
        pieces = []
        marks = []
        done = at = 0
        for match in re.finditer(
            f"([{self.begin}{self.end}])([0-9]{{1,9}})\\1|{self.cut}", rendered
        ):
            pieces.append(rendered[done : match.start()])
            at += match.start() - done
            done = match.end()
            marks.append(Mark(kinds[match[1]], int(match[2] or 0), at))
        return "".join(pieces) + rendered[done:], marks

    def _marked(self, text: str, message: int, name: str | None = None) -> str:
        """Add marks inside the outer spaces, because a template may strip these."""
        core = text.strip()
        if not core:
            return text
        number = len(self.contents)
        at = text.index(core)
        content = Content(message, name, text[:at], core, text[at + len(core) :])
        self.contents.append(content)
        begin = f"{self.begin}{number}{self.begin}" if self.sides != "none" else ""
        end = f"{self.end}{number}{self.end}" if self.sides == "both" else ""
        return f"{content.before}{begin}{core}{end}{content.after}"

    def _marked_call(self, call: Any, message: int) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        arguments = self._marked_leaves(function["arguments"], message)
        return {**call, "function": {**function, "arguments": arguments}}

    def _marked_leaves(self, value: Any, message: int) -> Any:
        if isinstance(value, str):
            return self._marked(value, message)
        if isinstance(value, Mapping):
            return {key: self._marked_leaves(inner, message) for key, inner in value.items()}
        return (
            [self._marked_leaves(inner, message) for inner in value]
            if isinstance(value, (list, tuple))
            else value
        )


def all_strings(value: Any) -> Iterator[str]:
    """All strings in a nested value, including keys."""
    inner = [value]
    while inner:
        value = inner.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            inner.extend(chain(value.keys(), value.values()))
        elif isinstance(value, (list, tuple)):
            inner.extend(value)


def free_characters(text: str) -> tuple[str, str, str]:
    """Three private-use characters that do not occur in a text.

    Raises:
        InvalidRequestError: the text contains all of them.
    """
    used = set(text)
    private = chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
    free = list(islice((mark for mark in map(chr, private) if mark not in used), 3))
    if len(free) < 3:
        raise InvalidRequestError(
            "The messages use every character for private use.", "Leave some of them out."
        )
    return free[0], free[1], free[2]
