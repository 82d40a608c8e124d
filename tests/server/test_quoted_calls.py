"""Calls as Gemma 4 writes them: found however the text is cut, and forced by a grammar."""

from __future__ import annotations

import json
from itertools import count

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinphase.server.quoted_calls import QuotedCallParser, quoted_call_rules
from twinphase.server.tool_calls import join_deltas
from twinphase.server.tools import GEMMA, tool_format, tool_grammar

PLACE = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "name": {"type": "string"}},
    "required": ["name"],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "mode": {"enum": ["a", "w"]},
                    "lines": {"type": "array", "items": {"type": "integer"}},
                    "at": PLACE,
                },
                "required": ["path"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = (
    '<|tool_call>call:write{at:{name:<|"|>a "b"<|"|>,x:-1.5},lines:[1,2],path:<|"|>12<|"|>}'
    "<tool_call|>"
)
ARGUMENTS = {"at": {"name": 'a "b"', "x": -1.5}, "lines": [1, 2], "path": "12"}
DEEP = "<|tool_call>call:f{a:" + "[" * 5000 + "<tool_call|>"
NOW = "<|tool_call>call:now{}<tool_call|>"


def divided(*pieces: str) -> tuple[str, list[tuple[str, object]]]:
    parser = QuotedCallParser(map("id{}".format, count()).__next__)
    parts = [parser.feed(piece) for piece in pieces] + [parser.flush()]
    calls = join_deltas(delta for _, deltas in parts for delta in deltas)
    content = "".join(content for content, _ in parts)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Well.\n{CALL}", "Well.", [("write", ARGUMENTS)]),
        (f"{NOW}{NOW}", "", [("now", {}), ("now", {})]),
        (f"{NOW} and so on", "and so on", [("now", {})]),
        (NOW.removesuffix("<tool_call|>"), "", [("now", {})]),
        (f"{NOW}<|tool_call>call:n", "", [("now", {})]),
        ("<|tool_call> is a tag ", "<|tool_call> is a tag ", []),
        ("<|tool_call>call:now{", "<|tool_call>call:now{", []),
        ("<|tool_call>call:now{]}<tool_call|>", "<|tool_call>call:now{]}<tool_call|>", []),
        (
            CALL.replace("12", "a<tool_call|>\n{b"),
            "",
            [("write", {**ARGUMENTS, "path": "a<tool_call|>\n{b"})],
        ),
        (
            '<|tool_call>call:f{a: true, <|"|>b<|"|>:[null,x]}<tool_call|>',
            "",
            [("f", {"a": True, "b": [None, "x"]})],
        ),
        (DEEP, DEEP, []),
    ],
)
def test_calls_are_found_wherever_the_text_is_cut(text, content, calls):
    assert divided(text) == (content, calls)
    if len(text) < 1000:
        assert divided(*text) == (content, calls)


@given(
    st.lists(st.sampled_from([CALL, NOW, "a", " ", "\n", "<|tool_call>", "call:", "{}"])), st.data()
)
def test_pieces_do_not_matter(parts, data):
    text = "".join(parts)
    at = data.draw(st.integers(0, len(text)))
    assert divided(text[:at], text[at:]) == divided(text)


def test_the_template_names_the_format():
    assert tool_format("{{ '<|tool_call>call:' + name }}") is GEMMA


@pytest.mark.parametrize("choice", ["required", None])
@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (CALL, True),
        (NOW, True),
        (NOW + CALL, True),
        (CALL.replace("at:{", "mode:{"), False),
        (CALL.replace("lines:[1,2],", 'lines:[],mode:<|"|>w<|"|>,'), True),
        (CALL.replace("[1,2]", "[1,x]"), False),
        (CALL.replace("path:", "file:"), False),
        (CALL.replace(',path:<|"|>12<|"|>', ""), False),
    ],
)
def test_a_grammar_holds_calls_to_their_parameters(text, fits, choice):
    rules = quoted_call_rules(lambda text: None)
    params = tool_grammar(TOOLS, choice, None, GEMMA, lambda text: None, rules)
    grammar = llguidance.LLMatcher.grammar_from_lark(params.grammar)
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    assert (matcher.validate_tokens(tokens) == len(tokens)) == fits
