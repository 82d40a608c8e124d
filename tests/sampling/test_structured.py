"""Structured output against judges of other make: jsonschema_rs, json, re, ast.

Tokens come from random logits, so that outputs go wherever a grammar lets them.
"""

import ast
import dataclasses
import itertools
import json
import re
import sys
import threading

import jsonschema_rs
import msgspec
import numpy as np
import pytest
from tests.sampling.byte_vocabulary import (
    CONTROL,
    EOS,
    NUM_LOGITS,
    SPECIAL,
    TOKENS,
    TOOL,
    make_compiler,
)

from tiny_gguf import tiny_vocabulary
from twinphase.batch import Batch, Phase, ScheduledRequest
from twinphase.constraint import StructuredOutputsParams
from twinphase.errors import InvalidRequestError
from twinphase.request import SamplingParams
from twinphase.sampling import structured
from twinphase.sampling.sampler import ConstraintError, sample_row
from twinphase.sampling.structured import GrammarCompiler
from twinphase.speculation.verify import sample

# Logits are raised for what ends strings, lists and outputs, and for common characters.
LIKELY = [i for i, token in enumerate(TOKENS) if i in EOS or token in (b'"', b"}", b"]", b'"}')]
COMMON = [
    i
    for i, token in enumerate(TOKENS)
    if i >= len(CONTROL) and token.isascii() and token.decode().isprintable()
]


def encode(text):
    return [len(CONTROL) + byte for byte in text.encode()]


def decode(token_ids):
    return b"".join(TOKENS[i] for i in token_ids).decode()


def make_share(constraint, output, request_id="r", **params):
    params = SamplingParams(**{"temperature": 0.0, **params})
    return ScheduledRequest(
        request_id,
        Phase.DECODE,
        [1],
        len(output),
        [0],
        True,
        params,
        [5, 6],
        output,
        constraint=constraint,
    )


def write(constraint, number=0, **params):
    """An output of random logits, as text; fails unless it comes to its end."""
    rng = np.random.default_rng(number)
    output = []
    for _ in range(1500):
        logits = rng.standard_normal(NUM_LOGITS).astype(np.float32)
        logits[LIKELY] += 2
        logits[COMMON] += 1
        token_id = sample_row(logits, make_share(constraint, output, **params), EOS)
        if token_id in EOS:
            return decode(output)
        output.append(token_id)
    raise AssertionError(f"no end: {decode(output)!r}")


def allowed(constraint, output=()):
    restricted = constraint.restrict(np.zeros(NUM_LOGITS, np.float32), list(output))
    return set(np.flatnonzero(np.isfinite(restricted)).tolist())


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["a", 1, None, '日本"\\']},
        "address": {
            "type": "object",
            "properties": {
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "x": {"anyOf": [{"type": "null"}, {}]},
            },
            "required": ["zip"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "age", "kind", "address", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number", "multipleOf": 0.5},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
ADDRESSES = {
    "type": "array",
    "items": {"type": "string", "format": "ipv4"},
    "minItems": 1,
    "maxItems": 2,
}


@pytest.mark.parametrize("schema", [PERSON, TREE, ADDRESSES, {"const": "\0\x7f\U0001f600"}])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.5, "seed": 3, "top_p": 0.95}])
def test_json_is_valid_by_the_schema(compiler, schema, params):
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    outputs = {
        write(compiler.compile(StructuredOutputsParams(json=schema)), seed, **params)
        for seed in range(8)
    }
    for output in outputs:
        assert validator.is_valid(json.loads(output)), output
    as_text = compiler.compile(StructuredOutputsParams(json=json.dumps(schema)))
    assert write(as_text, 0, **params) in outputs


def test_whitespace_of_json(compiler):
    def between_tokens(**options):
        constraint = StructuredOutputsParams(json=PERSON, **options)
        outputs = "".join(write(compiler.compile(constraint), seed) for seed in range(6))
        return re.sub(r'"(\\.|[^"\\])*"', "s", outputs)

    assert re.search(r"\s", between_tokens())
    assert not re.search(r"\s{41}", between_tokens())
    assert not re.search(r"\s", between_tokens(disable_any_whitespace=True))
    assert set(re.findall(r"\s+", between_tokens(whitespace_pattern=" {2}"))) == {"  "}


def test_a_choice(compiler):
    choices = ["a", "ab", "abc", 'q"\\/', "new\nline", "日本\x7f", "<|im_end|>", "\U0001f600"]
    constraint = StructuredOutputsParams(choice=choices)
    assert {write(compiler.compile(constraint), seed) for seed in range(20)} <= set(choices)
    for choice in choices:
        assert allowed(compiler.compile(constraint), encode(choice)) >= EOS


SUMS = (
    'start: sum\nsum: term ("+" term)*\nterm: NUMBER | "(" sum ")"\nNUMBER: /[1-9][0-9]{0,3}/ '
    "// no & here\n"
)
SUMS_GBNF = (
    'root ::= sum # "a comment"\nsum ::= term ("+" term)*\nterm ::= [1-9] [0-9]{0,3} | '
    '"(" sum ")"\n'
)
# As llama.cpp's json.gbnf is written.
JSON_GBNF = r"""root ::= object
value ::= object | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


REGEXES = [
    r"\d{3}-[a-f]+",
    "(yes|no)( maybe)?",
    r'[^"\n]{2,5}',
    "a/b\\/c",
    "^x*$",
    "(?i)HELLO",
    "a\0b",
    "日|é",
]


def is_object(output):
    return isinstance(json.loads(output), dict)


@pytest.mark.parametrize(
    ("constraint", "is_right"),
    [
        *(({"regex": regex}, re.compile(regex, re.ASCII).fullmatch) for regex in REGEXES),
        *(
            ({"grammar": text}, lambda output: ast.parse(output, mode="eval"))
            for text in (SUMS, SUMS_GBNF)
        ),
        ({"grammar": f"%llguidance {{}}\n{SUMS}"}, lambda output: ast.parse(output, mode="eval")),
        (
            {"grammar": r'root ::= "\u00e9\x41" [\u65e5\u672c] "\u0022\n"'},
            re.compile('éA[日本]"\n').fullmatch,
        ),
        ({"grammar": JSON_GBNF}, is_object),
        ({"json_object": True}, is_object),
    ],
)
def test_outputs_are_what_their_judge_accepts(compiler, constraint, is_right):
    for seed in range(8):
        assert is_right(write(compiler.compile(StructuredOutputsParams(**constraint)), seed))


class TestStructuralTag:
    TAG = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
            {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
            {"begin": "<tool>", "schema": {"const": None}, "end": "<|im_start|>"},
        ],
        "triggers": ["<f=", "<tool>"],
    }

    @pytest.mark.parametrize("form", [dict, json.dumps])
    def test_text_is_free_until_a_trigger(self, compiler, form):
        constraint = compiler.compile(StructuredOutputsParams(structural_tag=form(self.TAG)))
        assert {TOOL, *EOS} <= allowed(constraint, encode("f < 3 <f")) == allowed(constraint)
        assert allowed(constraint, encode("call <f=")) == set(encode("ab"))
        assert allowed(constraint, encode("call <f=b>")) == {*encode("tf"), TOKENS.index(b"tr")}
        assert allowed(constraint, encode("call <f=b>true</f> and <f=a>12</f> done")) >= EOS
        with pytest.raises(ConstraintError):
            allowed(constraint, encode("<f=b>12"))

    def test_names_of_control_tokens_stand_for_them(self, compiler):
        constraint = compiler.compile(StructuredOutputsParams(structural_tag=self.TAG))
        called = [*encode("so "), TOOL]
        assert allowed(constraint, called) == set(encode("n"))
        assert allowed(constraint, [*called, *encode("null")]) == {1}


def test_control_tokens_are_no_text(compiler):
    constraint = compiler.compile(StructuredOutputsParams(regex=r"(?s:.)*"))
    assert allowed(constraint) & SPECIAL == EOS
    assert allowed(constraint, encode("<|im_end|>")) == allowed(constraint)
    assert not allowed(constraint) & {*range(len(TOKENS), NUM_LOGITS), len(CONTROL) + 0xFF}


def test_the_end_comes_where_the_grammar_ends(compiler):
    constraint = compiler.compile(StructuredOutputsParams(regex="ab?"))
    assert allowed(constraint) == set(encode("a"))
    assert allowed(constraint, encode("a")) == {*encode("b"), *EOS}
    assert allowed(constraint, encode("ab")) == EOS
    assert allowed(constraint, [*encode("ab"), 2]) == EOS


def test_a_constraint_is_a_function_of_the_output(compiler):
    rng = np.random.default_rng(0)
    params = StructuredOutputsParams(json=PERSON)
    output = encode(write(compiler.compile(params), 1))
    outputs = [output[: rng.integers(len(output) + 1)] for _ in range(40)]
    other = encode(write(compiler.compile(params), 2))
    outputs += [other[:9], output[:9], [*output, 2], output, output[:-1], other, other[:1], []]
    one = compiler.compile(params)
    for known in outputs:
        assert allowed(one, known) == allowed(compiler.compile(params), known)
    for _ in range(2):
        with pytest.raises(ConstraintError, match="after 1 tokens"):
            allowed(one, encode("x"))
    assert allowed(one, other[:9]) == allowed(compiler.compile(params), other[:9])


def test_logits_stay_as_they_were_where_allowed(compiler):
    logits = np.random.default_rng(0).standard_normal(NUM_LOGITS).astype(np.float32)
    before = logits.copy()
    restricted = compiler.compile(StructuredOutputsParams(regex="[a-z]")).restrict(logits, [])
    assert np.array_equal(logits, before) and restricted.dtype == np.float32
    kept = np.isfinite(restricted)
    assert 0 < kept.sum() < 30 and np.array_equal(restricted[kept], logits[kept])


def test_it_fails_alone_and_neighbours_keep_their_bits(compiler):
    logits = np.random.default_rng(0).standard_normal((3, NUM_LOGITS)).astype(np.float32)
    free = make_share(None, [], "free", temperature=1.0, seed=1)
    bound = make_share(compiler.compile(StructuredOutputsParams(choice=["the"])), [], "bound")
    broken = make_share(
        compiler.compile(StructuredOutputsParams(choice=["the"])), encode("x"), "broken"
    )
    output = sample(logits, Batch([bound, free, broken], []), EOS)
    assert output.token_ids["free"] == sample(logits[1:2], Batch([free], []), EOS).token_ids["free"]
    assert decode(output.token_ids["bound"]) in ("t", "the")
    assert (
        list(output.errors) == ["broken"]
        and "doesn't satisfy the grammar" in output.errors["broken"]
    )
    assert output.errors["broken"].startswith("The structured output ends after 1 tokens")


@pytest.mark.parametrize(
    "regex",
    ["(.*a.{20}){30}", "((((a{1000}){1000}){1000}){1000})", r"(\w{1,50}\s?){1,50}[^a]{100}"],
)
def test_a_regex_that_explodes_costs_its_own_request_only(compiler, regex):
    constraint = compiler.compile(StructuredOutputsParams(regex=regex))
    rng = np.random.default_rng(0)
    output = []
    try:
        while len(output) < 300 and not EOS & set(output):
            logits = rng.standard_normal(NUM_LOGITS).astype(np.float32)
            output.append(sample_row(logits, make_share(constraint, output), EOS))
    except ConstraintError as error:
        assert "too many" in str(error)
    assert len(output) > 1


def test_compiled_grammars_are_kept_up_to_a_number(monkeypatch):
    monkeypatch.setattr(structured, "MAX_COMPILED_GRAMMARS", 3)
    compiler = make_compiler()
    compiled = []
    whole = GrammarCompiler._compile
    monkeypatch.setattr(
        GrammarCompiler, "_compile", lambda *args: compiled.append(args[1]) or whole(*args)
    )
    for text in "abcabcdabc":
        compiler.compile(StructuredOutputsParams(choice=[text]))
    assert len(compiler._compiled) == 3
    assert len(compiled) == 4 + 3


def test_a_grammar_that_failed_somebody_is_not_kept():
    compiler = make_compiler()
    params = StructuredOutputsParams(json={"type": "string", "pattern": f"^{'a?' * 2000}$"})
    constraint = compiler.compile(params)
    assert compiler._compiled
    with pytest.raises(ConstraintError, match=r"ends after 1 tokens: .*too many"):
        allowed(constraint, encode('"'))
    assert not compiler._compiled


def test_an_object_of_many_optional_properties(compiler):
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    constraint = compiler.compile(StructuredOutputsParams(json=schema))
    assert allowed(constraint, encode('{"p999": "a"')) >= set(encode("}"))


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_a_panic_fails_one_request_and_an_interrupt_is_none(interrupt):
    class Panic(BaseException):
        """As pyo3's, whose exceptions for Rust's panics are no Exception."""

    class Broken:
        def __init__(self, error):
            self.error = error

        def restrict(self, *_):
            raise self.error

    logits = np.zeros((2, NUM_LOGITS), np.float32)
    free = make_share(None, [], "free")
    broken = make_share(Broken(Panic("boom")), [], "broken")
    output = sample(logits, Batch([broken, free], []), EOS)
    assert (
        output.errors == {"broken": "Sampling failed: Panic: boom"} and "free" in output.token_ids
    )
    with pytest.raises(interrupt):
        sample(logits, Batch([make_share(Broken(interrupt()), []), free], []), EOS)


def test_several_threads_compile_and_write_at_once():
    interval = sys.getswitchinterval()
    compiler = make_compiler()
    results = {}
    texts = ["".join(p) for p in itertools.permutations("abc")]

    def work(number):
        for text in texts:
            results[number, text] = write(
                compiler.compile(StructuredOutputsParams(choice=[text])), number
            )

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert results == {(number, text): text for number in range(4) for text in texts}


def test_a_vocabulary_that_cannot_end_or_is_the_models_own():
    with pytest.raises(InvalidRequestError, match="ends a text"):
        GrammarCompiler(TOKENS, SPECIAL, [], NUM_LOGITS).compile(
            StructuredOutputsParams(choice=["a"])
        )
    names, _, _ = tiny_vocabulary(300)
    fewer = GrammarCompiler([name.encode() for name in names], [0, 1, 2], [2], 280)
    assert (
        len(
            fewer.compile(StructuredOutputsParams(regex=".")).restrict(
                np.zeros(280, np.float32), []
            )
        )
        == 280
    )


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": PERSON},
        {"json": json.dumps(TREE)},
        {"choice": ["a", "日"]},
        {"structural_tag": {"a": [1]}},
    ],
)
def test_parameters_travel_between_processes(constraint):
    params = SamplingParams(
        logit_bias={3: 1.5},
        stop=["a"],
        structured_outputs=StructuredOutputsParams(**constraint),
        thinking_token_budget=0,
    )
    sent = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(sent, type=SamplingParams) == params
    assert SamplingParams(**dataclasses.asdict(params)) == params  # as the step log has it
    spoilt = msgspec.msgpack.encode(msgspec.msgpack.decode(sent) | {"temperature": -1.0})
    with pytest.raises(InvalidRequestError, match="temperature"):
        msgspec.msgpack.decode(spoilt, type=SamplingParams)
