"""Calls in tags, as Qwen3.5 writes them: found however the text is cut, and forced by a grammar."""

from __future__ import annotations

import json
from itertools import count

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinphase.server.tool_calls import join_deltas
from twinphase.server.tools import XML, tool_format, tool_grammar
from twinphase.server.xml_calls import XmlCallParser, xml_call_rules

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
                },
                "required": ["path"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = (
    "<tool_call>\n<function=write>\n<parameter=path>\n12\n</parameter>\n"
    "<parameter=lines>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
)
NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


def divided(*pieces: str) -> tuple[str, list[tuple[str, object]]]:
    parser = XmlCallParser(TOOLS, map("id{}".format, count()).__next__)
    parts = [parser.feed(piece) for piece in pieces] + [parser.flush()]
    calls = join_deltas(delta for _, deltas in parts for delta in deltas)
    content = "".join(content for content, _ in parts)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Well.\n{CALL}", "Well.", [("write", {"path": "12", "lines": [1, 2]})]),
        (f"{NOW}\n{NOW}", "", [("now", {}), ("now", {})]),
        (f"{NOW} and so on", "and so on", [("now", {})]),
        ("<tool_call>\n<function=now>\n</function>\n<tool", "", [("now", {})]),
        ("<tool_call> is a tag ", "<tool_call> is a tag ", []),
        ("<tool_call>\n<function=now>\n", "<tool_call>\n<function=now>\n", []),
        (
            CALL.replace("12", "<b>\n\n</b>\n"),
            "",
            [("write", {"path": "<b>\n\n</b>\n", "lines": [1, 2]})],
        ),
    ],
)
def test_calls_are_found_wherever_the_text_is_cut(text, content, calls):
    assert divided(text) == (content, calls)
    assert divided(*text) == (content, calls)


@given(
    st.lists(st.sampled_from([CALL, NOW, "a", " ", "\n", "<tool_call>", "<function="])), st.data()
)
def test_pieces_do_not_matter(parts, data):
    text = "".join(parts)
    at = data.draw(st.integers(0, len(text)))
    assert divided(text[:at], text[at:]) == divided(text)


def test_the_template_names_the_format():
    assert tool_format("<tool_call>\n<function=example>") is XML


@pytest.mark.parametrize("choice", ["required", None])
@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (CALL, True),
        (NOW, True),
        (CALL.replace("[1, 2]", "[1, x]"), False),
        (CALL.replace("path", "file"), False),
        (CALL.replace("<parameter=path>\n12\n</parameter>\n", ""), False),
    ],
)
def test_a_grammar_holds_calls_to_their_parameters(text, fits, choice):
    params = tool_grammar(TOOLS, choice, None, XML, lambda text: None, xml_call_rules)
    grammar = llguidance.LLMatcher.grammar_from_lark(params.grammar)
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    assert (matcher.validate_tokens(tokens) == len(tokens)) == fits
