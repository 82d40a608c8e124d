"""Untrusted values in requests and model files: out of range, endless, huge, expanding."""

import itertools
import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from dialects import (
    ANTHROPIC,
    OLLAMA,
    PATHS,
    ask,
    dialect_of,
    function,
    turn,
    user,
)
from dialects import message as error_message
from raw_client import (
    LONG,
    ONE,
    PROBE,
    connect,
    events,
    read_reply,
    request,
    send,
    surviving,
    until,
)
from sound_requests import with_texts
from tiny_gguf import write_tiny_gguf
from twinphase import LLM, SamplingParams
from twinphase.errors import UnsupportedModelError

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [user("hello")]
PROMPT = {COMPLETION: {"prompt": "hello"}, CHAT: {"messages": MESSAGES}}


@contextmanager
def at_once(server, seconds=5):
    """A bound for requests that took other servers half a minute or more of processor time."""
    begin = server.cpu_seconds()
    yield
    assert server.cpu_seconds() - begin < seconds


# Out of range.

OUT_OF_RANGE = {
    "n": [0, -1, 17, 10**9, 10**400, 1.5, "2", True, [1]],
    "max_tokens": [0, -1, 10**6, 10**30, 1.5, "2"],
    "min_tokens": [-1, 10**30],
    "temperature": [-1, 101, 10**400, "1", [1]],
    "top_p": [-0.0, 1.1, -1],
    "top_k": [-2, 2**70],
    "min_p": [-1, 2],
    "presence_penalty": [3],
    "frequency_penalty": [-3],
    "repetition_penalty": [0, -1, 1e-300, 1e308],
    "logit_bias": [{"1": 101}, {"a": 1}, {"320": 1}, {"1": None}, {"-1": 1}, {"9" * 5000: 1}],
    "seed": [2**64, -(2**63) - 1, "a"],
    "stop": ["", [""], ["a"] * 17, "a" * 1000, [1], {}],
    "stop_token_ids": [[320], [-1], [2**40], ["a"], "a"],
    "priority": [1, 2**40],
    "cache_salt": ["", "a" * 257, 1],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}, {}],
    "best_of": [0, 17, "2", -1],
    "bad_words": ["a", [""], [1], {}],
    "allowed_token_ids": [[], [-1], [320], [2**40], 5],
    "truncate_prompt_tokens": [0, -2, "1", 2**40],
    "no_such_field": [1],
}
MORE = {
    COMPLETION: {
        "logprobs": [21, -1, True, 2**40],
        "prompt": [
            "",
            [],
            [[]],
            [-1],
            [320],
            [2**40],
            [None],
            [["a"]],
            ["a", 1],
            {},
            None,
            [1] * 5000,
            [True],
        ],
    },
    CHAT: {
        "top_logprobs": [21, -1, 5],
        "max_completion_tokens": [0, 2**40],
        "messages": [
            [],
            [{}],
            [{"role": "user"}],
            [turn("king", "a")],
            "a",
            [None],
            {},
        ],
        "chat_template_kwargs": [
            {"messages": []},
            {"tools": []},
            {"add_generation_prompt": False},
            {"eos_token": ""},
            [1],
        ],
        "thinking_token_budget": [-1, 5],
        "tools": [[{}], [function({"name": "a b"})]],
        "tool_choice": ["required", function({"name": "f"})],
    },
}


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_what_is_out_of_range_is_refused_by_name(server, path):
    with surviving(server):
        for field, values in (OUT_OF_RANGE | MORE[path]).items():
            for value in values:
                status, body = server.post(path, {**PROMPT[path], field: value})
                assert status == 400, (field, value)
                error = body["error"]
                named = (
                    field in error["message"]
                    or error["param"] == field
                    or "Token id" in error["message"]
                )
                assert named or field == "prompt" and "The prompt" in error["message"], (
                    field,
                    value,
                    error,
                )


def test_query_parameters_that_are_not_honoured_are_refused_or_named(server):
    def replied(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(server.url + path, data) as reply:
            return reply.headers["x-ignored-fields"]

    ask = PROMPT[COMPLETION]
    for path, body in (("/v1/models", None), (COMPLETION, ask), ("/v1/messages", ask)):
        send = server.get if body is None else lambda path, body=body: server.post(path, body)
        status, reply = send(f"{path}?limit=1")
        assert status == 400 and "query parameter 'limit'" in reply["error"]["message"]
    assert replied(f"{COMPLETION}?api-version=2024-10-21", ask) == "api-version"
    assert replied(f"{COMPLETION}?beta=true&beta=false", {**ask, "store": True}) == "store, beta"
    assert replied("/health?a%0Ab=1") == "a%0Ab"
    assert replied("/health") is None


def test_limits_of_a_request_are_the_servers(limited):
    with surviving(limited, **ONE):
        for body in ({"n": 3}, {"prompt": ["a"] * 4}, {"prompt": ["a"] * 2, "n": 2}):
            assert limited.post(COMPLETION, {"prompt": "a", **body}, **ONE)[0] == 400
        assert limited.post(COMPLETION, {"prompt": ["a"] * 3, "max_tokens": 2}, **ONE)[0] == 200
        assert limited.post(COMPLETION, {"prompt": "a", "n": 2, "max_tokens": 2}, **ONE)[0] == 200


# Numbers, characters and JSON.

HOSTILE = [
    b"",
    b"null",
    b"[]",
    b'"a"',
    b"hello",
    b"{",
    b'{"prompt":"a"',
    b'{"prompt":"a"}}',
    b"\xff\xfe{}",
    b"\x00",
    b'{"prompt":"\xff\xfe"}',
    b'{"prompt":"\xed\xa0\x80"}',
    b'{"prompt":"a","temperature":NaN}',
    b'{"prompt":"a","temperature":Infinity}',
    b'{"prompt":"a","temperature":-Infinity}',
    b'{"prompt":"a","temperature":1e999}',
    b'{"prompt":"a","top_p":-1e999}',
    b'{"prompt":"a","logit_bias":{"1":NaN}}',
    b'{"prompt":"a","max_tokens":NaN}',
    b'{"prompt":"a","max_tokens":1e999}',
    b'{"prompt":"a","max_tokens":1' + b"0" * 400 + b"}",
    b'{"prompt":"a","max_tokens":' + b"9" * 100_000 + b"}",
    b'{"prompt":[NaN]}',
    b'{"prompt":[1e999]}',
    b'{"prompt":"a","guided_json":{"minimum":NaN}}',
    b'{"prompt":"a","guided_json":{"minimum":1e999}}',
    b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b"[" * 1_000_000,
    b'{"prompt":"a","guided_json":' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001,
    b'{"prompt":"a",' + b'"x":1,' * 100_000 + b'"y":1}',
    b'{"' + b"x" * 1_000_000 + b'":1}',
]


def test_json_that_means_nothing_good_is_refused(server):
    with surviving(server):
        for data in HOSTILE:
            with at_once(server):
                status, body = server.post(COMPLETION, data)
            assert status == 400 and 0 < len(body["error"]["message"]) < 1000, (
                data[:50],
                len(data),
            )
        for (dialect, path), data in itertools.product(PATHS.items(), HOSTILE):
            status, body = server.post(path, data.replace(b'"prompt"', b'"messages"'))
            assert status == 400 and 0 < len(error_message(dialect, body)) < 1000, (
                path,
                data[:50],
                len(data),
            )


def test_other_content_types_are_refused(server):
    with surviving(server):
        for kind in (
            "text/plain",
            "multipart/form-data",
            "\x7f",
        ):
            with connect(server) as client:
                client.sendall(request(COMPLETION, PROBE, Content_Type=kind))
                assert read_reply(client)[0] == 400, kind


def test_of_a_key_given_twice_the_last_counts(server):
    with surviving(server):
        status, body = server.post(
            COMPLETION, b'{"prompt":"a","max_tokens":1,"max_tokens":3,"ignore_eos":true}'
        )
        assert status == 200 and body["usage"]["completion_tokens"] == 3


def test_any_text_anywhere_is_answered_or_refused(limited):
    texts = ["\ud800", "\x00", "a\x00b", "\udfff\ud800", "\ufffe\uffff", "\u202e\x1b[2J\r\n", ""]
    with surviving(limited, **ONE):
        for path, body in with_texts(texts):
            status, reply = limited.post(path, body, **ONE)
            assert status in (200, 400, 404), (body, reply)
            assert status == 200 or error_message(dialect_of(path), reply), body


# Huge.

MANY = 4 << 20  # bytes of a body that is just allowed
# Where it is sent, the text around many items, and an item.
LISTS = [
    (COMPLETION, '{"prompt":[%s1]}', "null,"),
    (COMPLETION, '{"prompt":[%s1]}', "1,"),
    (COMPLETION, '{"prompt":[%s""]}', '"",'),
    (COMPLETION, '{"prompt":[%s[]]}', "[],"),
    (COMPLETION, '{"prompt":["a",%s1]}', "1,"),
    (COMPLETION, '{"prompt":"a","stop":[%s""]}', '"",'),
    (COMPLETION, '{"prompt":"a","guided_choice":[%s1]}', "null,"),
    (CHAT, '{"messages":[%s{}]}', "{},"),
    (CHAT, '{"messages":[{"role":"user","content":[%s{}]}]}', "{},"),
    (CHAT, '{"messages":[{"role":"user","content":"a"}],"tools":[%s{}]}', "{},"),
    (PATHS[ANTHROPIC], '{"model":"a","max_tokens":1,"system":[%s{}]}', "{},"),
    (
        PATHS[ANTHROPIC],
        '{"model":"a","max_tokens":1,"messages":[{"role":"user","content":[%s{}]}]}',
        "{},",
    ),
    (
        PATHS[OLLAMA],
        '{"model":"a","messages":[{"role":"user","tool_calls":[%s{}]}]}',
        "{},",
    ),
    ("/detokenize", '{"tokens":[%snull]}', "null,"),
]


def huge_bodies():
    for path, around, item in LISTS:
        yield path, around % (item * ((MANY - len(around)) // len(item)))
    fields = {f"x{i}": 1 for i in range(250_000)}
    yield COMPLETION, json.dumps(fields)
    yield COMPLETION, json.dumps({"prompt": "a", "logit_bias": fields})


def test_a_huge_list_is_refused_before_it_holds_up_others(server):
    with surviving(server):
        for path, text in huge_bodies():
            assert len(text) <= MANY
            with at_once(server):
                status, body = server.post(path, text.encode())
            assert status == 400 and len(str(body["error"])) < 1000, text[:80]


def test_a_million_characters_are_refused_before_they_are_encoded(server):
    text = "A" * 1_000_000
    with surviving(server):
        for path, body in (
            (COMPLETION, {"prompt": text}),
            (COMPLETION, {"prompt": [text] * 3}),
            *((path, ask(dialect, server.model, text)) for dialect, path in PATHS.items()),
            ("/tokenize", {"prompt": text}),
            ("/tokenize", {"messages": [user(text)]}),
        ):
            with at_once(server):
                status, reply = server.post(path, body)
            assert status == 400 and "characters" in str(reply["error"]), (path, body.keys())


# Schemas and grammars.


def doubling(depth):
    """A schema in which each definition has the next one twice."""
    schema = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": {**schema, f"a{depth}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def product(factors, width):
    def one(i):
        return {"anyOf": [{"properties": {f"k{i} {j}": {"type": "string"}}} for j in range(width)]}

    return {"type": "object", "allOf": [one(i) for i in range(factors)]}


REFUSED = {
    "no regex": {"guided_regex": "(("},
    "no grammar": {"guided_grammar": "start: ("},
    "no schema": {"guided_json": {"type": "king"}},
    "no JSON": {"guided_json": "{"},
    "not known": {"guided_json": {"type": "object", "unevaluatedProperties": {"not": {}}}},
    "nothing fits": {"guided_json": {"enum": []}},
    "empty": {"guided_grammar": "start: start"},
    "huge schema": {"guided_json": {"enum": ["x" * 70_000]}},
    "huge regex": {"guided_regex": "a" * 70_000},
    "huge grammar": {"guided_grammar": 'start: "a"\n' + "// a\n" * 20_000},
    "huge choice": {"guided_choice": ["a" * 1000] * 100},
    "deep schema": {"guided_json": nested(200)},
    "deep regex": {"guided_regex": "(" * 5000 + "a" + ")" * 5000},
    "deep grammar": {"guided_grammar": "start: " + "(" * 1000 + '"a"' + ")" * 1000},
    "product": {"guided_json": product(8, 10)},
    "two": {"guided_regex": "a", "guided_json": {"type": "object"}},
}
EXPENSIVE = {
    "doubling": {"guided_json": doubling(60)},
    "wide": {"guided_json": {"enum": [f"value {i}" for i in range(4000)]}},
    "long": {
        "guided_json": {
            "type": "array",
            "minItems": 10**6,
            "items": {"type": "string", "minLength": 10**6},
        }
    },
    "counted": {"guided_regex": "((a{1,1000}){1,1000}){1,1000}"},
    "automaton": {"guided_regex": "(a|b)*a(a|b){400}"},
    "options": {"guided_regex": "(?i)" + "".join(f"({chr(97 + i % 26)})?" for i in range(3000))},
    "ambiguous": {"guided_grammar": 'start: start start start | "a" | ""'},
    "alternatives": {
        "guided_grammar": "start: x\nx: "
        + " | ".join(f'"a" x "{i}"' for i in range(500))
        + ' | "a"',
    },
    "doubling rules": {
        "guided_grammar": "start: a0\n"
        + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(200))
        + 'a200: "x"'
    },
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_form_that_cannot_be_is_refused(server, kind):
    with surviving(server), at_once(server):
        status, body = server.post(COMPLETION, {"prompt": "a", "max_tokens": 9, **REFUSED[kind]})
        assert status == 400 and len(body["error"]["message"]) < 1000, body


def test_expensive_forms_do_not_hold_up_others(server):
    """While a form is compiled, another stream's tokens take most of the processor."""
    over = threading.Event()
    pieces = []
    statuses = {}

    def read():
        while not over.is_set():
            with send(server, COMPLETION, {**LONG, "stream": True}) as client:
                for _ in events(client):
                    pieces.append(1)
                    if over.is_set():
                        return

    def progress():
        return server.metric("generation_tokens_total"), server.cpu_seconds()

    with surviving(server), ThreadPoolExecutor(1) as pool:
        other = pool.submit(read)
        try:
            until(lambda: pieces)
            begin = progress()
            until(lambda: len(pieces) > 300)
            end = progress()
            usual = (end[1] - begin[1]) / (end[0] - begin[0])  # processor time per token
            for kind, body in EXPENSIVE.items():
                before = progress()
                status, reply = server.post(
                    COMPLETION, {"prompt": "a", "max_tokens": 9, "temperature": 0, **body}
                )
                after = progress()
                own = after[1] - before[1] - 3 * usual * (after[0] - before[0])
                statuses[kind] = status, round(own, 2), after[0] - before[0], str(reply)[:300]
            num_pieces = len(pieces)
            until(lambda: len(pieces) > num_pieces + 10)  # the other's stream goes on
        finally:
            over.set()
        assert other.result() is None
        assert not {kind: found for kind, found in statuses.items() if found[0] not in (200, 400)}
        assert not {
            kind: found for kind, found in statuses.items() if found[1] > 2
        }  # the careless: half a minute
        for number in range(80):  # more than are kept
            body = {
                "prompt": "a",
                "max_tokens": 1,
                "guided_choice": [f"{number} {i}" for i in range(99)],
            }
            assert server.post(COMPLETION, body)[0] == 200


# Templates.

TEMPLATE = """{% set what = messages[-1].content %}{% if what == 'endless' -%}
{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}
{%- elif what == 'expanding' -%}
{% set n = namespace(x='aaaaaaaa') %}
{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}
{%- elif what == 'product' %}{{ 'a' * 10 ** 12 }}
{%- elif what == 'power' %}{{ 9 ** 9999999 }}
{%- elif what == 'recursive' %}{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}
{%- elif what == 'classes' %}{{ messages.__class__.__mro__[1].__subclasses__() }}
{%- elif what == 'globals' %}{{ raise_exception.__globals__['os'] }}
{%- elif what == 'import' %}
{{ self.__init__.__globals__.__builtins__.__import__('os').system('touch BROKEN') }}
{%- elif what == 'change' %}{{ messages.append(messages[0]) }}
{%- elif what == 'file' %}{% include '/etc/passwd' %}
{%- elif what == 'format' %}{{ '%999999999d' | format(1) }}
{%- else %}{{ what }}{% endif %}"""


@pytest.fixture(scope="module")
def evil(start, tmp_path_factory):
    """A model file with a template that was written to do harm."""
    path = tmp_path_factory.mktemp("evil") / "tiny.gguf"
    with start(model=write_tiny_gguf(path, context=4096, chat_template=TEMPLATE)) as server:
        yield server


def test_a_template_that_does_harm_fails_its_request(evil):
    kinds = "endless expanding product power recursive classes globals import change file format"
    with surviving(evil):
        for what in kinds.split():
            body = {"messages": [user(what)]}
            for path in (CHAT, "/tokenize"):
                with at_once(evil):
                    status, reply = evil.post(path, body)
                assert status == 400 and "template" in reply["error"]["message"], what
        assert evil.post(CHAT, {"messages": MESSAGES, "max_tokens": 4})[0] == 200


def test_a_file_whose_template_is_none_still_completes(tmp_path):
    llm = LLM(write_tiny_gguf(tmp_path / "tiny.gguf", chat_template="{% for %}"))
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with pytest.raises(UnsupportedModelError, match="template"):
        llm.chat(MESSAGES, params, use_tqdm=False)
    (output,) = llm.generate("hello", params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


def test_template_variables_replace_nothing(server):
    body = {"messages": MESSAGES, "max_tokens": 2, "return_token_ids": True}
    with surviving(server):
        plain = server.post(CHAT, body)[1]["choices"][0]["prompt_token_ids"]
        for name in ("raise_exception", "self", "loop", "namespace", "message"):
            status, reply = server.post(CHAT, {**body, "chat_template_kwargs": {name: "x"}})
            assert status == 400 or reply["choices"][0]["prompt_token_ids"] == plain
