"""Answers that are one JSON object and mean a call, without the marks of the model's format."""

from __future__ import annotations

import json

import pytest

from dialects import function
from twinphase.server.answers import AnswerDivider
from twinphase.server.jobs import Reader
from twinphase.server.tool_calls import join_deltas
from twinphase.server.tools import HERMES, LLAMA3_JSON, MISTRAL

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "where": {"type": "object", "properties": {"x": {}, "y": {"type": "null"}}},
    },
    "required": ["city"],
}
TOOLS = [function({"name": "weather", "parameters": PARAMETERS}), function({"name": "now"})]
CALL = '{"name": "weather", "arguments": {"days": 2, "city": "Zürich {\\"}"}}'
NOW = '{"name": "now", "parameters": {}}'


def read(
    text: str, format=HERMES, size: int = 1
) -> tuple[str, list[tuple[str, object]], list[str]]:
    """Content, calls and labels of an answer that comes `size` characters at a time."""
    divider = AnswerDivider(Reader(tool_format=format, plain_tools=TOOLS))
    content = ""
    deltas = []
    for start in range(0, max(len(text), 1), size):
        piece = text[start : start + size]
        pieces = divider.take(piece, [start + len(piece)], start + size >= len(text))
        content += pieces.content
        deltas += pieces.calls
    calls = [(call.name, json.loads(call.arguments)) for call in join_deltas(deltas)]
    return content, calls, divider.labels


@pytest.mark.parametrize("format", [HERMES, MISTRAL], ids=["hermes", "mistral"])
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"\n {CALL}\n",
        f"```json\n{CALL}\n```",
        f"```\n{CALL}```\n",
        CALL.replace('"arguments"', '"parameters"'),
        CALL.replace('{"name": "weather", ', '{"type": "function", ')[:-1] + ', "name": "weather"}',
    ],
)
def test_an_answer_that_is_one_object_is_a_call(format, size, text):
    content, calls, labels = read(text, format, size)
    assert (content, calls) == ("", [("weather", {"days": 2, "city": 'Zürich {"}'})])
    assert set(labels) == {"call"} and len(labels) == -(-len(text) // size)
    assert read(NOW, format, size)[1] == [("now", {})]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "text",
    [
        f"Sure: {CALL}",
        f"{CALL} So.",
        f"{CALL}\n{CALL}",
        f"[{CALL}]",
        f"```json\n{CALL}\n``` Done.",
        f"```json\n{CALL}",
        f"{CALL}```",
        CALL[:-1],
        CALL.replace("weather", "wetter"),
        CALL.replace("2", "0"),
        CALL.replace("days", "hours"),
        CALL.replace('"city"', '"where": {"y": 1}, "city"'),
        CALL.replace('{"name"', '{"ok": true, "name"'),
        CALL[:-1] + ', "ok": true}',
        '{"name": "weather"}',
        '{"name": "weather", "arguments": "Rome"}',
        '{"name": ["weather"], "arguments": {}}',
        '{"type": "object", "properties": {}}',
        '{"arguments": {"city": "a"}}',
        "``` {",
        "``",
        "   ",
        "",
        '{"name": "now", "arguments": ' + '{"a":' * 3000,
    ],
)
def test_all_else_stays_content_to_the_letter(size, text):
    content, calls, labels = read(text, size=size)
    assert (content, calls) == (text, [])
    assert "call" not in labels


def test_content_is_held_back_only_while_it_may_be_a_call():
    for text in ("H", '{"nah"', '{"name": "Bo', '{"type": "object"', "```json\n["):
        divider = AnswerDivider(Reader(tool_format=HERMES, plain_tools=TOOLS))
        assert divider.take(text, [], False).content == text
    assert divider.take("x", [], False).content == "x"


def test_the_models_own_format_comes_first():
    tagged = f"<tool_call>\n{CALL}\n</tool_call>"
    for format, text in ((HERMES, tagged), (LLAMA3_JSON, CALL), (LLAMA3_JSON, f"{CALL}; {NOW}")):
        content, calls, _ = read(text, format)
        assert content == "" and [name for name, _ in calls] == ["weather", "now"][: len(calls)]
    content, calls, _ = read(f"```json\n{NOW}\n```", LLAMA3_JSON)
    assert (content, calls) == ("", [("now", {})])
    assert read(f"{CALL}\n{tagged}")[:2] == (CALL, [("weather", {"days": 2, "city": 'Zürich {"}'})])
