"""Constraints that are not supported, or that would cost too much, are refused by name."""

import json

import pytest

from twinphase.constraint import MAX_JSON_DEPTH, StructuredOutputsParams
from twinphase.errors import InvalidRequestError
from twinphase.request import SamplingParams


def refusal(compiler, **constraint):
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutputsParams(**constraint))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)


TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}
NESTED = {}
for _ in range(MAX_JSON_DEPTH + 1):
    NESTED = {"properties": {"a": NESTED}}
CIRCLE = {}
CIRCLE["items"] = CIRCLE
CHAIN = {
    "$ref": "#/$defs/0",
    "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(1499)},
}
PATTERNS = [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijkl"]


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({}, "no constraint"),
        ({"json": {}, "regex": "a"}, "json and regex"),
        ({"json": NESTED}, "json is nested"),
        ({"json": '{"a":' * 9000}, "json cannot be used"),
        ({"json": "[" * 60000}, "json cannot be used"),
        ({"json": CIRCLE}, "Circular"),
        ({"json": {"a": "x" * 70000}}, "characters"),
        ({"json": {"const": float("nan")}}, "json"),
        ({"json": '{"const": 1e999}'}, "json"),
        ({"json": {"const": 2**64}}, "64 bits"),
        ({"json": '{"const": "\\ud800"}'}, "surrogates"),
        ({"json": {1: 2}}, "json"),
        ({"json": "true"}, "bool"),
        ({"json": {"type": "strng"}}, "strng"),
        ({"json": {"type": "string", "minLength": 2, "maxLength": 1}}, "minLength"),
        ({"json": {"$ref": "#"}}, "no token can follow"),
        ({"json": {"$ref": "http://127.0.0.1:9/x.json"}}, "127.0.0.1"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "passwd"),
        ({"json": {"not": {}}}, '"not"'),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "string", "format": "foo"}}, "foo"),
        ({"json": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "oneOf"),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "x-guidance"),
        (
            {"json": {"type": "string", "pattern": f"^{'a?' * 2100}$"}},
            "a pattern of more than 4096 bytes: '^a?a?",
        ),
        ({"json": {"patternProperties": {"a" * 5000: {}}}}, "a pattern of more"),
        ({"json": {}, "whitespace_pattern": " ?" * 2100}, "whitespace_pattern of more"),
        (
            {"json": {"type": "object", "properties": {str(i): {} for i in range(1001)}}},
            "1001 properties",
        ),
        ({"json": {"multipleOf": True}}, "true for multipleOf"),
        ({"json": {"multipleOf": 99999989}}, "multipleOf"),
        ({"json": {"multipleOf": -978511}}, "multipleOf"),
        ({"json": {"enum": [[-(2**63)]]}}, "-9223372036854775808"),
        ({"json": {"type": "integer", "minimum": -1e300, "maximum": -1e19}}, "-1e+"),
        ({"json": CHAIN}, "refers to 1500"),
        ({"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}}, "multipleOf"),
        ({"json": {"allOf": PATTERNS}}, "12 different patterns"),
        ({"regex": "["}, "unclosed"),
        ({"regex": "(?=a)"}, "look-around"),
        ({"regex": "\ud800"}, "Unicode"),
        ({"regex": "(" * 20000}, "regex"),
        ({"regex": "a" * 70000}, "bytes"),
        ({"regex": r"\w?" * 400}, "more than 4096 bytes: '[0-9a-zA-Z_]?"),
        ({"regex": "a", "disable_any_whitespace": True}, "whitespace"),
        ({"choice": []}, "choice"),
        ({"choice": ["a"] * 2000}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": 'start: "a\0b"'}, "lexer"),
        ({"grammar": '{"grammars": [{"lark_grammar": "start: /a/"}]}'}, "grammar"),
        ({"grammar": "start: " + "(" * 20000}, "nested"),
        ({"grammar": "root ::= " + "(" * 20000}, "recursion"),
        ({"grammar": "\n".join(f"r{i} ::= r{i + 1}" for i in range(400))}, "rules"),
        ({"grammar": 'top ::= "a"'}, "root"),
        ({"grammar": "start: A\nA: /.*a/ & /.*b/"}, "operator &"),
        (
            {"grammar": f"start: x\nx: %json {json.dumps({'allOf': PATTERNS})}"},
            "12 different patterns",
        ),
        ({"grammar": 'start: x\nx: %json {"x-guidance": {"lenient": true}, "not": {}}'}, "not"),
        ({"grammar": "start: %json {"}, "%json"),
        ({"grammar": 'start: %json {"const": -9223372036854775808}'}, "-9223372036854775808"),
        (
            {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3000))},
            "1000 rules",
        ),
        ({"grammar": "start: " + '"\\' * 30000}, "no end"),
        ({"grammar": "start: " + "/\\" * 30000}, "no end"),
        ({"grammar": f"start: /{'a?' * 2100}/"}, "a regular expression of more"),
        ({"grammar": "start: T\nT: " + '"a"?' * 2100}, "terminal T"),
        ({"grammar": f"start: T\nT: A A | B\nA: B /b/\nB: /{'a?' * 1500}/"}, "terminal T"),
        ({"grammar": f"start: t\nt[lazy]: A A\nA: /{'a?' * 1500}/"}, "terminal t[lazy]"),
        ({"grammar": "start: <|no_such_token|>"}, "no_such_token"),
        ({"structural_tag": "[]"}, "list"),
        ({"structural_tag": TAG | {"type": "tag"}}, "form"),
        ({"structural_tag": TAG | {"triggers": []}}, "form"),
        (
            {"structural_tag": TAG | {"structures": [{"begin": "x", "schema": {}, "end": ""}]}},
            "trigger that 'x'",
        ),
        ({"structural_tag": TAG | {"structures": [{"begin": "<f="}]}}, "structure 0"),
    ],
)
def test_what_is_refused(compiler, constraint, words):
    assert words in refusal(compiler, **constraint)


def test_schemas_that_only_look_like_the_refused_ones(compiler):
    described = {"$ref": "#/$defs/a", "description": "fine", "$defs": {"a": {"type": "integer"}}}
    fields = {f"f{i}": part for i, part in enumerate(PATTERNS)}
    for schema in (
        {
            "type": "object",
            "properties": fields | {"x": described["$defs"]["a"]},
            "required": list(fields),
        },
        {
            "type": "object",
            "properties": {"a": described | {"allOf": [{}]}},
            "$defs": described["$defs"],
        },
        {"allOf": [{"multipleOf": 0.25}, {"multipleOf": 3}]},
    ):
        compiler.compile(StructuredOutputsParams(json=schema))
    compiler.compile(StructuredOutputsParams(grammar='start: "a & b" // & \n# &\n'))


def test_what_goes_wrong_unforeseen_is_the_requests_fault(compiler, monkeypatch):
    def fail(*_):
        raise TypeError("a bug")

    monkeypatch.setattr("twinphase.sampling.lark._check_schema", fail)
    assert "json cannot be used: a bug" in refusal(compiler, json={})


@pytest.mark.parametrize(
    "params",
    [
        {"structured_outputs": StructuredOutputsParams(regex="a"), "min_tokens": 1},
        {"structured_outputs": StructuredOutputsParams(regex="a"), "ignore_eos": True},
        {"structured_outputs": {"regex": ""}},
        {"structured_outputs": "a"},
        {"thinking_token_budget": -1},
    ],
)
def test_parameters_that_cannot_be_honoured(params):
    with pytest.raises(InvalidRequestError, match=list(params)[-1]):
        SamplingParams(**params)
