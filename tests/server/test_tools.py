from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dialects import function
from twinphase.constraint import StructuredOutputsParams
from twinphase.errors import InvalidRequestError
from twinphase.sampling.structured import GrammarCompiler
from twinphase.server.forms import closed
from twinphase.server.tools import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    ToolFormat,
    check_tools,
    tool_format,
    tool_grammar,
)


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return function({"name": name, "parameters": parameters})


CITY = {"$ref": "#/$defs/city"}
TOOLS = [
    tool(
        "get",
        type="object",
        properties={"city": CITY},
        required=["city"],
        **{"$defs": {"city": {"type": "string"}}},
    ),
    tool("get_all"),  # a name that continues another; no parameters
]
NAMED = function({"name": "get"})
CONTROL = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]")


class Bytes:
    """A vocabulary of the bytes, an end, and perhaps control tokens."""

    def __init__(self, control: tuple[str, ...]) -> None:
        self.control = {token: 257 + i for i, token in enumerate(control)}
        tokens = [bytes([byte]) for byte in range(256)] + [
            b"<eos>",
            *(token.encode() for token in control),
        ]
        self._grammars = GrammarCompiler(tokens, self.control.values(), [256], len(tokens))

    def ids(self, text: str) -> list[int]:
        for token, token_id in self.control.items():
            before, found, behind = text.partition(token)
            if found:
                return [*self.ids(before), token_id, *self.ids(behind)]
        return list(text.encode())

    def allow(self, params: StructuredOutputsParams | None, text: str) -> bool:
        """Whether a text is a whole answer under a grammar, token by token."""
        assert params is not None
        constraint = self._grammars.compile(params)
        ids = [*self.ids(text), 256]
        logits = np.zeros(257 + len(self.control), np.float32)
        return all(
            constraint.restrict(logits, ids[:i])[token_id] == 0 for i, token_id in enumerate(ids)
        )


def calls(format: ToolFormat, *names: str, forced: bool = True) -> str:
    key = format.arguments
    arguments = {"get": '{"city": "P{\\"}"}', "get_all": "{}", "got": "{}"}
    written = format.between.join(
        f'{{"name": "{name}", "{key}": {arguments[name]}}}' for name in names
    )
    return ("" if format.bare and forced else format.begin) + format.open + written + format.close


@pytest.fixture(params=[(), CONTROL], ids=["text", "control"])
def vocabulary(request) -> Bytes:
    """Tags as text, and as control tokens, which a grammar sees by their ids only."""
    return Bytes(request.param)


@pytest.mark.parametrize(
    "format", [HERMES, LLAMA3_JSON, MISTRAL], ids=["hermes", "llama3", "mistral"]
)
def test_grammar_holds_every_call_to_its_schema(format, vocabulary):
    def allowed(
        text: str, choice: str | Mapping[str, Any] | None, parallel: bool | None = None
    ) -> bool:
        return vocabulary.allow(
            tool_grammar(TOOLS, choice, parallel, format, vocabulary.control.get), text
        )

    one = calls(format, "get")
    two = calls(format, "get", "get_all")
    for choice in (None, "auto"):
        assert (
            allowed("", choice)
            and allowed("hi { [", choice)
            and allowed(one, choice)
            and allowed(two, choice)
        )
        assert allowed(one, choice, False) and not allowed(two, choice, False)
    assert (
        allowed(one, "required")
        and allowed(two, "required")
        and not allowed(two, "required", False)
    )
    assert (
        allowed(one, NAMED)
        and not allowed(two, NAMED)
        and not allowed(calls(format, "get_all"), NAMED)
    )
    for choice in ("required", NAMED):
        assert (
            not allowed("", choice)
            and not allowed("hi", choice)
            and not allowed("hi " + one, choice)
        )
    for choice in ("auto", "required", NAMED):
        wrong = [
            calls(format, "got"),
            one.replace('"city": "P{\\"}"', ""),
            one.replace('"P{\\"}"', "1"),
            one + "x",
        ]
        assert not any(allowed(text, choice) for text in wrong)


def test_free_text_goes_on_to_calls_where_they_are_announced(vocabulary):
    params = tool_grammar(TOOLS, "auto", None, HERMES, vocabulary.control.get)
    assert vocabulary.allow(params, "Let me see.\n" + calls(HERMES, "get"))
    assert not vocabulary.allow(params, "Let me see.\n<tool_call>Paris")
    params = tool_grammar(TOOLS, "auto", None, LLAMA3_JSON, vocabulary.control.get)
    assert vocabulary.allow(params, calls(LLAMA3_JSON, "get", forced=False))
    assert vocabulary.allow(params, '{"city": "Paris"}')  # an answer in JSON is no call
    for space in (" ", "\n", "[ ", "};"):  # what the parser would find a call behind
        assert vocabulary.allow(params, space) and vocabulary.allow(
            params, space + '{"city": 1} [so]'
        )
        assert not vocabulary.allow(params, space + calls(LLAMA3_JSON, "got"))


def test_descriptions_stay_out_of_the_grammar_but_not_properties_of_that_name():
    title = {"type": "string", "description": "Of the book.", "enum": ["a"]}
    tools = [
        tool(
            "get",
            type="object",
            properties={"title": title},
            required=["title"],
            description="Gets it.",
        )
    ]
    params = tool_grammar(tools, "required", None, HERMES, {}.get)
    assert params is not None and params.grammar is not None
    assert "Of the book" not in params.grammar and "Gets it" not in params.grammar
    assert Bytes(()).allow(params, calls(HERMES, "get").replace('"city": "P{\\"}"', '"title": "a"'))


def test_no_grammar_where_no_call_is_asked_for():
    assert tool_grammar(TOOLS, "none", None, HERMES, {}.get) is None
    assert tool_grammar([], None, None, HERMES, {}.get) is None


def test_format_comes_from_the_template():
    assert tool_format("{{ '<tool_call>' }}") == HERMES
    assert tool_format("{{ '[TOOL_CALLS] [' }}") == MISTRAL
    assert (
        tool_format("""{{ '{"name": function name, "parameters": ...}' }}{{ '"parameters": ' }}""")
        == LLAMA3_JSON
    )
    assert tool_format("{{ message.content }}") == HERMES


@pytest.mark.parametrize(
    ("tools", "choice", "cause"),
    [
        ([tool("a"), tool("a")], None, "Two tools are named 'a'"),
        ([tool("a", type="string")], None, "parameters of tool 'a'"),
        ([tool("a", type="object", maximum=float("nan"))], None, "parameters of tool 'a'"),
        (TOOLS, function({"name": "got"}), "'got'"),
    ],
)
def test_what_cannot_be_called_is_refused(tools, choice, cause):
    with pytest.raises(InvalidRequestError) as refused:
        check_tools(tools, choice)
    assert cause in refused.value.cause and refused.value.fix


def test_sound_tools_pass():
    for choice in (None, "none", "auto", "required", NAMED):
        check_tools(TOOLS, choice)
    check_tools([], None)
    check_tools([], "none")


def test_strict_closes_what_a_schema_does_not_name():
    inner = {"properties": {"properties": {"type": "string"}}, "enum": [{"properties": {}}]}
    schema = {
        "properties": {
            "a": {"items": inner},
            "b": {"properties": {}, "additionalProperties": True},
        },
        "$defs": {"c": {"anyOf": [{"properties": {}}, {"allOf": [{"properties": {}}]}]}},
    }
    shut = {"additionalProperties": False}
    assert closed(schema) == {
        "properties": {
            "a": {"items": inner | shut},
            "b": {"properties": {}, "additionalProperties": True},
        },
        "$defs": {"c": {"anyOf": [{"properties": {}} | shut, {"allOf": [{"properties": {}}]}]}},
        **shut,
    }
