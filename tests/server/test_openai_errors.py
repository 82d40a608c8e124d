"""Refusals as OpenAI's client raises them, with what was wrong and what to do."""

import json
from contextlib import ExitStack

import httpx
import openai
import pytest

from dialects import bearer, turn, user
from raw_client import ONE, PATH, PROBE, connect, read_reply, send, surviving, tokens, until

CHAT = "/v1/chat/completions"
USER = [user("hello")]
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}


@pytest.mark.parametrize(
    "fields, param, part",
    [
        ({"temperature": -1}, None, "temperature is -1"),
        ({"temperature": "hot"}, "temperature", "`temperature`: Input should be a valid number."),
        ({"max_tokens": True}, "max_tokens", "`max_tokens`: Input should be a valid integer."),
        ({"max_tokens": 10**6}, None, "the context holds 4096"),
        ({"n": 99}, None, "n is 99; 16 answers are allowed"),
        ({"top_logprobs": 2}, None, "`top_logprobs` needs `logprobs`: true"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages", "needs content"),
        (
            {"messages": [{"role": "boss"}]},
            "messages",
            "`messages.0.role`: only this is supported: 'system', ",
        ),
        ({"messages": [user([IMAGE])]}, "messages", "'text'"),
        ({"messages": [user([AUDIO])]}, "messages", "'text'"),
        ({"logit_bias": {"99999": 1}}, None, "Token id 99999 in logit_bias"),
        ({"tool_choice": "required"}, None, "`tool_choice` needs `tools`"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "`json_schema` goes with",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, None, "regex and choice"),
        ({"structured_outputs": {"regex": "("}}, None, "structured_outputs.regex is refused"),
        (
            {"guided_regex": "a", "guided_choice": ["b"]},
            None,
            "guided_regex and guided_choice both say",
        ),
        ({"thinking_token_budget": 5}, None, "the model does not think"),
        ({"priority": 5}, None, "priority"),
        (
            {"chat_template_kwargs": {"template": 1}},
            None,
            "chat_template_kwargs has the key 'template'",
        ),
        ({"stream_options": {"include_usage": True}}, None, "`stream_options` needs `stream`"),
        ({"nonsense": 5}, "nonsense", "The field `nonsense` is not supported. Leave it out."),
        ({"body": 1}, "body", "The field `body` is not supported. Leave it out."),
        ({"repeat_penalty": 1}, "repeat_penalty", "Did you mean `repetition_penalty`?"),
        ({"x" * 999: 1}, "x" * 100, f"The field `{'x' * 100}` is not supported. Leave it out."),
        ({f"field {i}": i for i in range(1000)}, None, "fields; 128 are allowed."),
        ({"store": "yes"}, "store", "`store`"),
        ({"reasoning_effort": 3}, "reasoning_effort", "`reasoning_effort`"),
        ({"service_tier": "best"}, "service_tier", "`service_tier`"),
        ({"stop": ""}, "stop", "`stop`: String should have at least 1 character."),
        ({"stop": ["a", 1]}, "stop", "`stop.1`: Input should be a valid string."),
        ({"modalities": ["audio"]}, "modalities", "`modalities"),
        ({"prediction": "a"}, "prediction", "`prediction`"),
        ({"prediction": {"type": "file", "content": "a"}}, "prediction", "`prediction"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction", "`prediction"),
        (
            {"prediction": {"type": "content", "content": "a" * (2 << 20)}},
            "prediction",
            "`prediction",
        ),
        ({"web_search_options": {}}, "web_search_options", "`web_search_options`"),
    ],
)
def test_a_bad_request_says_what_is_wrong(server, fields, param, part):
    status, body = server.post(CHAT, {"messages": USER, "max_tokens": 4, **fields})
    error = body["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert part in error["message"] and server.is_idle()


def test_a_body_that_is_no_object_and_one_of_many_errors_are_refused_in_short(server):
    message = server.post(CHAT, [])[1]["error"]["message"]
    assert (
        message == "The body is not a JSON object. Send one, with `Content-Type: application/json`."
    )
    many = server.post(CHAT, {"messages": USER, **{f"f{i}": 1 for i in range(50)}})[1]["error"][
        "message"
    ]
    assert many.count("not supported") == 3


UNREAD = {
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "flex",
    "safety_identifier": "x",
    "user": "y",
    "prompt_cache_key": "z",
    "reasoning_effort": "high",
    "verbosity": "low",
}
SAID = [
    {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "audio": None,
        "annotations": [1],
        "tool_calls": None,
    }
]


@pytest.mark.parametrize("stream", [False, True])
def test_what_changes_no_answer_is_taken_and_named(server, stream):
    asked = {
        "messages": [*SAID, *USER],
        "temperature": 0,
        "max_tokens": 4,
        "return_token_ids": True,
    }
    nothing = dict.fromkeys(
        [*UNREAD, "n", "min_tokens", "stream_options", "tools", "ignore_eos", "logit_bias"]
    )
    plain = [turn("assistant", "hi"), *USER]
    expected = server.post(CHAT, {**asked, **nothing, "messages": plain})[1]["choices"][0][
        "token_ids"
    ]
    reply = httpx.post(server.url + CHAT, json={**asked, **UNREAD, "stream": stream}, timeout=60)
    assert reply.headers["x-ignored-fields"] == ", ".join(sorted(["messages.annotations", *UNREAD]))
    lines = reply.text.splitlines()
    found = [json.loads(line[6:]) for line in lines if line.startswith("data: {")] or [reply.json()]
    assert [i for chunk in found for i in chunk["choices"][0]["token_ids"]] == expected


def test_bodies_and_heads_as_clients_and_proxies_send_them(shared):
    key = "Authorization: Bearer alice"
    host = "Host: test"
    body = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()

    def ask(method, path, *heads, body=b""):
        with connect(shared) as client:
            lines = [f"{method} {path} HTTP/1.1", *heads, f"Content-Length: {len(body)}"]
            client.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            return read_reply(client)

    assert ask("POST", PATH, host, key, body=body)[0] == 200
    assert (
        ask("POST", PATH, host, key, "Origin: https://page.example", body=body)[0] == 400
    )  # it asked nobody
    for heads, part in (
        ((key,), "0 `Host`"),
        ((host, host, key), "2 `Host`"),
        ((host, key, key), "`Authorization`"),
    ):
        status, _, refused = ask("POST", PATH, *heads, body=body)
        assert status == 400 and part in refused["error"]["message"]
    for path in ("/health", "/v1/models", "/metrics"):
        reply = httpx.head(shared.url + path, headers=bearer("alice"))
        assert (reply.status_code, reply.content) == (200, b"") and int(
            reply.headers["content-length"]
        ) > 0
    assert httpx.head(shared.url + "/v1/models").status_code == 401


def test_openais_client_knows_each_refusal(server):
    with server.client() as client:
        with pytest.raises(openai.BadRequestError, match="temperature is -1") as refused:
            client.chat.completions.create(model=server.model, messages=USER, temperature=-1)
        assert refused.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here. Use one of: "):
            client.chat.completions.create(model="gpt-4", messages=USER)
        with pytest.raises(openai.NotFoundError) as refused:
            client.models.retrieve("gpt-4")
        assert refused.value.code == "model_not_found"


@pytest.mark.parametrize("key", ["wrong", "one2", "one two"])
def test_a_wrong_key_is_refused_before_anything_else(limited, key):
    with limited.client("none", default_headers=bearer(key)) as client:
        with pytest.raises(openai.AuthenticationError, match="The API key is not known") as refused:
            client.chat.completions.create(model="nonsense", messages=[])
        assert refused.value.code == "invalid_api_key"
        assert refused.value.response.headers["www-authenticate"] == "Bearer"
    with limited.client("two") as client:
        assert [model.id for model in client.models.list()] == ["a", "b"]


def test_overload_is_a_rate_limit_that_says_when_to_come_back_and_what_waits_is_served(limited):
    refused_before = limited.metric("requests_refused_total", status="429")
    with surviving(limited, **ONE), ExitStack() as stack, limited.client("one") as other:
        with limited.paused():  # the refusals wait for no answer
            accepted = [
                stack.enter_context(send(limited, PATH, {**PROBE, "max_tokens": 50}, **ONE))
                for _ in range(3)
            ]
            until(lambda: limited.get("/health")[1]["running"] == 3)
            for stream in (True, False):
                with pytest.raises(
                    openai.RateLimitError, match="overloaded: 3 requests"
                ) as refused:
                    other.completions.create(model="a", prompt="a", stream=stream)
                assert (refused.value.code, refused.value.type) == (
                    "rate_limit_exceeded",
                    "rate_limit_error",
                )
                assert int(refused.value.response.headers["retry-after"]) >= 1
        assert [len(tokens(read_reply(client)[2])) for client in accepted] == [50] * 3
    assert limited.metric("requests_refused_total", status="429") == refused_before + 2
