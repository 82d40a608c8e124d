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
# Agents send what is so anyway.
DEFAULTS = {
    "n": 1,
    "top_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "tools": [],
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "response_format": {"type": "text"},
}
TALK = [turn("developer", "Be brief."), turn("assistant", "hi"), *USER]
NOTHING = {"refusal": None, "audio": None, "annotations": [1], "tool_calls": None}


@pytest.mark.parametrize("stream", [False, True])
def test_what_changes_no_answer_is_taken_and_named(server, stream):
    asked = {"messages": TALK, "temperature": 0, "max_tokens": 4, "return_token_ids": True}
    nothing = [
        *UNREAD,
        *DEFAULTS,
        "min_tokens",
        "stream_options",
        "ignore_eos",
        "audio",
        "functions",
    ]
    (expected,) = server.post(CHAT, asked | dict.fromkeys(nothing))[1]["choices"]
    messages = [TALK[0] | {"name": "x"}, TALK[1] | NOTHING, *USER]
    sent = asked | UNREAD | DEFAULTS | {"messages": messages, "stream": stream}
    reply = httpx.post(server.url + CHAT, json=sent, timeout=60)
    assert reply.headers["x-ignored-fields"] == ", ".join(sorted(["messages.annotations", *UNREAD]))
    lines = reply.text.splitlines()
    found = [json.loads(line[6:]) for line in lines if line.startswith("data: {")] or [reply.json()]
    ids = [token for chunk in found for token in chunk["choices"][0]["token_ids"]]
    assert ids == expected["token_ids"]


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
        with pytest.raises(openai.NotFoundError) as refused:
            client.models.retrieve("gpt-4")
        assert refused.value.code == "model_not_found"


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
