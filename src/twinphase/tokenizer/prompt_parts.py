"""Encodes messages to token ids, and assigns each token to a part of the prompt.

A chat template is a program, so its output alone does not show the parts. It is run a second time
with marks around the client's texts (`template_marks.py`). If both outputs are equal except for the
marks, these show the positions of all texts. Some templates inspect contents and then write
something else, so they get fewer marks.

The marks also distinguish control tokens: "<|im_end|>" is a control token only if the template
wrote it, and ten plain characters in a message or in a tool's description, so that a client cannot
end a turn and begin another. vLLM, transformers and llama.cpp's server (as of 2026) do not
distinguish them. This concerns only the vocabulary's control tokens; user-defined tokens, such as
"</think>" and "<tool_call>" in many models, are recognized anywhere.

`explain/prompt_costs.py` computes the costs of the parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twinphase.errors import InvalidRequestError
from twinphase.tokenizer.chat_template import ChatTemplate
from twinphase.tokenizer.template_marks import (
    Content,
    Mark,
    MarkedRequest,
    all_strings,
    free_characters,
)
from twinphase.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptPart:
    """A part of a prompt.

    Attributes:
        kind: "system", "tools" (text that exists only because of tools), "history", "question" (the
            last user message), "tool_result" (of tools called by the last assistant message),
            "marked" (by the client) or "template" (added by the template).
        name: description, such as "turn 2 (assistant)"; the client's own name for a marked part.
        turn: number of a turn in the history, from 1; each user message begins a turn.
    """

    kind: str
    name: str
    turn: int | None = None


SYSTEM = PromptPart("system", "system")
TOOLS = PromptPart("tools", "tools")
QUESTION = PromptPart("question", "question")
TOOL_RESULT = PromptPart("tool_result", "tool result")
TEMPLATE = PromptPart("template", "template")
SYSTEM_ROLES = {"system", "developer"}
TOOL_ROLES = {"tool", "function", "ipython"}

Run = tuple[PromptPart, int, int]  # A part, its first character or token, and its end.
Range = tuple[int, int]  # The first character and the end.
_Place = tuple[Content, int, int]  # Elements as in a run.


@dataclass(frozen=True)
class _Conversation:
    """The inputs of a template."""

    template: ChatTemplate
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]

    def render(self) -> str:
        return self.template.render(self.messages, tools=self.tools, **self.variables)

    def strings(self) -> str:
        return "\n".join(all_strings([self.messages, self.tools, self.variables]))


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered and encoded conversation.

    Attributes:
        text: rendered text.
        token_ids: tokens of the text, with control tokens only where the template wrote them.
        runs: runs of tokens by part, in order and without gaps; a part may have several.
    """

    text: str
    token_ids: list[int]
    runs: list[Run]


def chat_prompt(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    max_tokens: int | None = None,
    continue_final_message: bool = False,
    **variables: Any,
) -> ChatPrompt:
    """Render and encode a conversation.

    If the request contains no control tokens, the ids are those of the whole text.

    `messages`, `tools` and `variables` are as for `ChatTemplate.render`, `max_tokens` as for
    `Tokenizer.encode`. With `continue_final_message` the prompt ends with the last message's
    content, as in transformers.

    Raises:
        InvalidRequestError: as for `ChatTemplate.render`, `find_parts` and `Tokenizer.encode`.
        ContextLengthError: as for `Tokenizer.encode`.
    """
    if continue_final_message:
        variables["add_generation_prompt"] = False
    conversation = _Conversation(template, messages, tools, variables)
    text = whole = conversation.render()
    if continue_final_message:
        text = whole[: _end_of_last(conversation, whole)]
    token_ids, starts = tokenizer.encode_with_starts(text, max_tokens=max_tokens)
    names = {
        i: tokenizer.token_bytes(i).decode() for i in set(token_ids) if tokenizer.is_special(i)
    }
    # A character that the vocabulary lacks becomes a control token without being written as one.
    control = [
        (starts[k], i)
        for k, i in enumerate(token_ids)
        if i in names and text.startswith(names[i], starts[k])
    ]
    spans, foreign = find_parts(
        template, whole, messages, tools=tools, control={names[i] for _, i in control}, **variables
    )
    own = [(at, i) for at, i in control if not _overlaps(foreign, at, at + len(names[i]))]
    if len(own) < len(control):
        token_ids, starts = tokenizer.encode_with_starts(text, control=own)
    return ChatPrompt(text, token_ids, token_runs(spans, starts))


def _end_of_last(conversation: _Conversation, whole: str) -> int:
    """The end of the last message's content in the rendered text."""
    mark = free_characters(whole + conversation.strings())[0]
    *others, last = conversation.messages
    content = last.get("content")
    if isinstance(content, list) and content:
        content = [*content[:-1], {**content[-1], "text": f"{content[-1].get('text') or ''}{mark}"}]
    else:
        content = f"{content or ''}{mark}"
    marked = replace(conversation, messages=[*others, {**last, "content": content}]).render()
    begin, found, _ = marked.rpartition(mark)
    if not whole.startswith(begin):
        begin = begin.rstrip()  # The template strips contents.
    if not found or not whole.startswith(begin):
        raise InvalidRequestError(
            "The model's chat template does not let its last message be continued.",
            "Leave out continue_final_message.",
        )
    return len(begin)


def token_runs(spans: Sequence[Run], starts: Sequence[int]) -> list[Run]:
    """Runs of tokens by part, from the spans that `find_parts` returned.

    A token belongs to the part of its first character; `starts` are the starts of the tokens.
    """
    runs: list[Run] = []
    first = 0
    for part, _, end in spans:
        stop = bisect_left(starts, end, first)
        _append(runs, part, first, stop)
        first = stop
    return runs


def find_parts(
    template: ChatTemplate,
    text: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    control: Collection[str] = (),
    **variables: Any,
) -> tuple[list[Run], list[Range]]:
    """Locate the parts of a prompt in its text.

    This runs the template once more, or twice if there are tools.

    `text` is the template's output for messages, tools and variables; `control` are the control
    tokens in it.

    Returns:
        Spans of characters by part, in order and without gaps; and ranges of characters, ascending:
        a control token that overlaps one of them was not written by the template.

    Raises:
        InvalidRequestError: the request contains control tokens that the template itself searches
            for.
    """
    conversation = _Conversation(template, messages, tools, variables)
    request, marks = _find_marks(conversation, text, control)
    places: list[_Place]
    ranges = [(mark.at - 1, mark.at) for mark in marks if mark.kind == "cut"]
    if request.sides == "none":
        places = _by_search(text, request.contents)
    else:
        places, enclosed = _by_marks(text, request.contents, marks)
        ranges += enclosed
    parts = list(_parts(messages))
    spans = [
        (_marked(c.name) if c.name else parts[c.message], start, end) for c, start, end in places
    ]
    return _without_gaps(text, spans, _only_with_tools(conversation, text)), _merged(ranges)


def _marked(name: str) -> PromptPart:
    """A marked part with that name, or a tool if the template has no place for tools."""
    return {TOOLS.name: TOOLS, TOOL_RESULT.name: TOOL_RESULT}.get(name, PromptPart("marked", name))


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[PromptPart]:
    """The part of each message."""
    roles = [str(message.get("role"))[:20] for message in messages]
    last = {role: i for i, role in enumerate(roles)}
    turn = 0
    for i, role in enumerate(roles):
        turn += role == "user"
        if role in SYSTEM_ROLES:
            yield SYSTEM
        elif role == "user" and i == last[role]:
            yield QUESTION
        elif role in TOOL_ROLES and i > last.get("assistant", -1):
            yield TOOL_RESULT
        else:
            yield PromptPart("history", f"turn {max(1, turn)} ({role})", max(1, turn))


def _find_marks(
    conversation: _Conversation, text: str, control: Collection[str]
) -> tuple[MarkedRequest, list[Mark]]:
    """The request with the most marks that the template tolerates, and the marks in its output."""
    given = conversation.strings()
    written = sorted((name for name in control if name in given), key=len, reverse=True)
    marks = free_characters(given)
    for sides in ("both", "begin", "none"):
        request = MarkedRequest(*marks, sides, written)
        try:
            marked = _Conversation(
                conversation.template,
                request.messages(conversation.messages),
                request.with_cuts(conversation.tools),
                request.with_cuts(conversation.variables),
            )
            plain, seen = request.read(marked.render())
        except (InvalidRequestError, RecursionError):
            continue
        if plain == text:
            return request, seen
    if written:
        raise InvalidRequestError(
            f"The messages contain {written[0]!r}, a control token, where the chat template "
            "looks for it.",
            "Take it out of the messages.",
        )
    return request, []


def _by_marks(
    text: str, contents: Sequence[Content], seen: Sequence[Mark]
) -> tuple[list[_Place], list[Range]]:
    """Places of contents, and the ranges with both marks.

    If a template split a content and dropped one mark, the content is matched from the other mark
    as far as the text agrees.
    """
    marks = [mark for mark in seen if mark.kind != "cut" and mark.content < len(contents)]
    limits = [*(mark.at for mark in marks[1:]), len(text)]
    found: list[_Place] = []
    whole: list[Range] = []
    k = done = 0
    while k < len(marks):
        kind, number, start = marks[k]
        content = contents[number]
        end = start
        limit = limits[k]
        if kind == "begin" and marks[k + 1 : k + 2] and marks[k + 1][:2] == ("end", number):
            end = limit
            limit = limits[k + 1]
            k = k + 1
            whole.append((start, end))
        elif kind == "begin":
            end += _shared(content.core, text[start : min(limit, start + len(content.core))])
        else:
            start -= _shared(
                content.core[::-1], text[max(done, start - len(content.core)) : start][::-1]
            )
        if text.endswith(content.before, done, start):
            start -= len(content.before)
        if text.startswith(content.after, end, limit):
            end += len(content.after)
        found.append((content, start, end))
        k = k + 1
        done = end
    return found, whole


def _by_search(text: str, contents: Sequence[Content]) -> list[_Place]:
    """Places of contents in a text without marks, as far as they are found in order."""
    found: list[_Place] = []
    done = 0
    for content in contents:
        start = text.find(content.core, done)
        if start >= 0:
            done = start + len(content.core)
            found.append((content, start, done))
    return found


def _only_with_tools(conversation: _Conversation, text: str) -> Range:
    """The range that differs from the text rendered without tools."""
    if not conversation.tools:
        return (0, 0)
    try:
        without = replace(conversation, tools=None).render()
    except InvalidRequestError:
        return (0, 0)
    start = _shared(text, without)
    return start, len(text) - _shared(text[start:][::-1], without[start:][::-1])


def _without_gaps(text: str, spans: Sequence[Run], tools: Range) -> list[Run]:
    """The whole text as runs; gaps between spans belong to the template or to the tools."""
    whole: list[Run] = []
    done = 0
    for part, start, end in [*spans, (TEMPLATE, len(text), len(text))]:
        first, last = (min(max(at, done), start) for at in tools)
        _append(whole, TEMPLATE, done, first)
        _append(whole, TOOLS, first, last)
        _append(whole, TEMPLATE, last, start)
        _append(whole, part, start, end)
        done = end
    return whole


def _append(runs: list[Run], part: PromptPart, start: int, end: int) -> None:
    if start == end:
        return
    if runs and runs[-1][0] == part:
        start = runs.pop()[1]
    runs.append((part, start, end))


def _merged(ranges: Sequence[Range]) -> list[Range]:
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            start = merged[-1][0]
            end = max(end, merged.pop()[1])
        merged.append((start, end))
    return merged


def _overlaps(ranges: Sequence[Range], start: int, end: int) -> bool:
    before = bisect_left(ranges, (end, 0))
    return before > 0 and ranges[before - 1][1] > start


def _shared(one: str, other: str) -> int:
    """Length of the common prefix."""
    lengths = range(1, min(len(one), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda n: one[:n] != other[:n])
