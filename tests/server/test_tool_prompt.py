from __future__ import annotations

import json
from typing import Any

import pytest

from dialects import function, text_part, turn, user
from twinphase.errors import InvalidRequestError
from twinphase.server.tool_prompt import with_argument_objects, with_tool_prompt
from twinphase.tokenizer.chat_template import ChatTemplate
from twinphase.tokenizer.family_templates import CHATML

TOOLS = [function({"name": "f", "description": "Grüße", "parameters": {"type": "object"}})]


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


HISTORY: list[dict[str, Any]] = [
    user("q"),
    {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}'), call("")]},
    {"role": "tool", "tool_call_id": "1", "content": "r1"},
    {"role": "tool", "tool_call_id": "2", "content": [text_part("r2")]},
    {"role": "assistant", "content": "Hm.", "tool_calls": [call({"b": 2})]},
    {"role": "tool", "tool_call_id": "3", "content": ""},
]


def test_history_reads_as_chatml():
    block = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert ChatTemplate(None).render(
        with_tool_prompt(HISTORY, []), add_generation_prompt=False
    ) == (
        "<|im_start|>user\nq<|im_end|>\n"
        f"<|im_start|>assistant\n{block % json.dumps({'a': 1})}\n{block % '{}'}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nr1\n</tool_response>\n"
        "<tool_response>\nr2\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\nHm.\n{block % json.dumps({'b': 2})}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize("system", [[], [turn("system", "Be kind.")]])
def test_tools_stand_at_the_end_of_the_one_system_message(system):
    rendered = ChatTemplate(None).render(with_tool_prompt([*system, HISTORY[0]], TOOLS))
    assert rendered.count("<|im_start|>system\n") == 1 and rendered.startswith(
        "<|im_start|>system\n"
    )
    assert rendered.startswith("<|im_start|>system\nBe kind.\n\n") is bool(system)
    written = rendered.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert json.loads(written) == TOOLS[0] and "Grüße" in written
    assert '\n{"name": <function name>, "arguments": <object of arguments>}\n' in rendered


def test_templates_with_tools_get_arguments_as_objects():
    messages = with_argument_objects(
        [*HISTORY, {"role": "assistant", "content": "a", "tool_calls": None}]
    )
    found = [
        each["function"]["arguments"]
        for message in messages
        for each in message.get("tool_calls", [])
    ]
    assert found == [{"a": 1}, {}, {"b": 2}]
    assert "tool_calls" not in messages[-1]  # Llama's template takes the key itself for calls
    assert HISTORY[1]["tool_calls"][0] == call('{"a": 1}')


@pytest.mark.parametrize("arguments", ["{", "[1]", "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(arguments):
    messages = [{"role": "assistant", "content": None, "tool_calls": [call(arguments)]}]
    for write in (with_argument_objects, lambda messages: with_tool_prompt(messages, [])):
        with pytest.raises(InvalidRequestError, match="'f' are not a JSON object"):
            write(messages)


def test_templates_tell_whether_they_take_tools():
    assert ChatTemplate("{%- if tools %}{{ tools | tojson }}{% endif %}").supports_tools
    unset = "{%- if not tools is defined %}{%- set tools = none %}{% endif %}"
    assert ChatTemplate(unset).supports_tools
    only_words = "Your tools: {{ 'tools' }}{# tools #}{{ message.content }}"
    assert not ChatTemplate(only_words).supports_tools
    assert not ChatTemplate(CHATML).supports_tools
