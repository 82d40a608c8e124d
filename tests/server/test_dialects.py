"""Anthropic's and Ollama's APIs: OpenAI's answers in their own shapes; the rest is refused."""

import json
from contextlib import closing

import pytest

from dialects import (
    ANTHROPIC,
    ENDLESS,
    OLLAMA,
    OPENAI,
    PATHS,
    Said,
    ask,
    form,
    function,
    joined,
    parts,
    text_part,
    turn,
    user,
    whole,
)
from raw_client import ONE, connect, read_reply, request, send

REASONS = {
    OPENAI: ("length", "stop"),
    ANTHROPIC: ("max_tokens", "stop_sequence"),
    OLLAMA: ("length", "stop"),
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}
OFFER = {
    ANTHROPIC: [
        {
            "name": "pick",
            "description": "Picks one.",
            "input_schema": SCHEMA,
            "cache_control": {"type": "e"},
        }
    ],
    **dict.fromkeys(
        (OPENAI, OLLAMA),
        [function({"name": "pick", "description": "Picks one.", "parameters": SCHEMA})],
    ),
}
OTHERS = [ANTHROPIC, OLLAMA]


def answers(server, dialect, *, path=None, **fields):
    """The content of the complete answer and of the streamed one."""
    path = path or PATHS[dialect]
    status, body = server.post(path, ask(dialect, server.model, **fields))
    assert status == 200, body
    with closing(send(server, path, ask(dialect, server.model, **fields, stream=True))) as client:
        events = list(parts(client))
    return whole(dialect, body), whole(dialect, joined(dialect, events))


@pytest.mark.parametrize("dialect", OTHERS)
def test_answers_are_those_of_openais_api(server, dialect):
    expected, streamed = answers(server, OPENAI, max_tokens=12)
    assert expected.num_output == 12 and expected.text and streamed == expected
    for said in answers(server, dialect, max_tokens=12):
        assert said == Said(expected.text, "", (), REASONS[dialect][0], expected.num_prompt, 12)


@pytest.mark.parametrize("dialect", OTHERS)
def test_stops_and_the_contexts_end(server, dialect):
    text = answers(server, OPENAI, max_tokens=12)[0].text
    stop = text[len(text) // 2 :][:3]
    more = {"options": {"stop": [stop]}} if dialect == OLLAMA else {"stop_sequences": [stop]}
    for said in answers(server, dialect, max_tokens=12, **more):
        assert (said.text, said.reason) == (text[: text.index(stop)], REASONS[dialect][1])
    long = {"text": "hello " * 2000, "max_tokens": 10**6}  # more than the context holds
    reason = {ANTHROPIC: "model_context_window_exceeded", OLLAMA: "length"}[dialect]
    for said in answers(server, dialect, **long):
        assert said.reason == reason and said.num_prompt + said.num_output == 4096


def test_tools_and_their_results(server):
    """Ollama's API has no `tool_choice`, and a random model calls no tool by itself."""
    choice = {"tool_choice": function({"name": "pick"})}
    expected = answers(server, OPENAI, max_tokens=200, tools=OFFER[OPENAI], **choice)[0]
    assert expected.reason == "tool_calls" and expected.calls
    for said in answers(
        server,
        ANTHROPIC,
        max_tokens=200,
        tools=OFFER[ANTHROPIC],
        tool_choice={"type": "tool", "name": "pick"},
    ):
        assert (said.calls, said.reason) == (expected.calls, "tool_use")
    given = expected.calls[0][1]
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "pick", "arguments": json.dumps(given)},
    }
    hello = user("hello")
    past = {
        OPENAI: [
            hello,
            {"role": "assistant", "content": "so", "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "c"},
            user("go on"),
        ],
        ANTHROPIC: [
            hello,
            turn(
                "assistant",
                [
                    text_part("so"),
                    {"type": "tool_use", "id": "c", "name": "pick", "input": given},
                ],
            ),
            user(
                [
                    {"type": "tool_result", "tool_use_id": "c", "content": "3"},
                    text_part("go on"),
                ]
            ),
        ],
        OLLAMA: [
            hello,
            {
                "role": "assistant",
                "content": "so",
                "tool_calls": [{"function": {"name": "pick", "arguments": given}}],
            },
            {"role": "tool", "content": "3", "tool_name": "pick"},
            user("go on"),
        ],
    }
    said = [
        answers(server, one, max_tokens=9, messages=past[one], tools=OFFER[one]) for one in PATHS
    ]
    assert len({(one.text, one.num_prompt) for pair in said for one in pair}) == 1


def test_anthropic_tells_what_was_cached_and_counts_tokens(server):
    system = [{"type": "text", "text": "cached " * 20, "cache_control": {"type": "ephemeral"}}]
    body = ask(ANTHROPIC, server.model, max_tokens=2) | {"system": system}
    first, second = (server.post("/v1/messages", body)[1]["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] == 0 < first["cache_creation_input_tokens"]
    assert second["cache_read_input_tokens"] >= first["cache_creation_input_tokens"] - 16
    count = {"model": server.model, "messages": body["messages"], "system": system}
    total = server.post("/v1/messages/count_tokens", count)[1]["input_tokens"]
    for usage in (first, second):
        assert (
            usage["input_tokens"]
            + usage["cache_read_input_tokens"]
            + usage["cache_creation_input_tokens"]
            == total
        )


def test_an_answers_beginning_is_gone_on_with(server):
    turns = [user("hello"), turn("assistant", "So")]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    expected = answers(server, OPENAI, max_tokens=8, messages=turns, **more)[0]
    for said in answers(server, ANTHROPIC, max_tokens=8, messages=turns):
        assert (said.text, said.num_prompt) == (expected.text, expected.num_prompt)


def test_ollama_tells_the_two_phases_and_their_sum(server):
    body = server.post("/api/chat", ask(OLLAMA, server.model, max_tokens=8))[1]
    timings = body["timings"]
    phases = ("prompt_eval_duration", "eval_duration", "load_duration")
    assert all(isinstance(body[name], int) for name in phases)
    assert body["prompt_eval_duration"] == pytest.approx(1e6 * timings["prompt_ms"], abs=1e4)
    assert body["eval_duration"] == pytest.approx(1e6 * timings["predicted_ms"], abs=1e4)
    assert sum(body[name] for name in phases) <= body["total_duration"]


def test_ollama_generates_from_prompts(server):
    options = {"num_predict": 8, "temperature": 0}
    asked = {
        "model": f"{server.model}:latest",
        "prompt": "hello",
        "options": options,
        "stream": False,
        "format": ENDLESS,
    }
    chat = server.post("/api/chat", ask(OLLAMA, server.model, max_tokens=8))[1]
    assert server.post("/api/generate", asked)[1]["response"] == chat["message"]["content"]
    prompt = {"prompt": "hello", "max_tokens": 8, "temperature": 0, **form(OPENAI, ENDLESS)}
    plain = server.post("/v1/completions", prompt)[1]
    raw = server.post("/api/generate", {**asked, "raw": True})[1]
    assert (raw["response"], raw["done_reason"]) == (plain["choices"][0]["text"], "length")
    for path in ("/api/generate", "/api/chat"):  # how clients have a model loaded
        assert (
            server.post(path, {"model": server.model, "stream": False})[1]["done_reason"] == "load"
        )


def test_ollama_lists_and_shows_the_model(server):
    (tags,), (loaded,) = (server.get(path)[1]["models"] for path in ("/api/tags", "/api/ps"))
    shown = server.post("/api/show", {"model": server.model})[1]
    assert tags["model"] == loaded["model"] == server.model and loaded["context_length"] == 4096
    assert shown["details"] == tags["details"] and shown["details"]["family"] == "llama"
    assert (
        shown["model_info"]["llama.context_length"] == 4096
        and "completion" in shown["capabilities"]
    )
    assert server.get("/api/version")[1]["version"]


@pytest.mark.parametrize("dialect, path", [(OLLAMA, "/api/chat"), (OPENAI, PATHS[OPENAI])])
def test_json_is_read_as_curl_sends_it_but_not_from_a_page(server, dialect, path):
    body = ask(dialect, server.model, max_tokens=1)
    form = "application/x-www-form-urlencoded"
    for kind, origin, expected in (
        (form, "", 200),
        ("", "", 200),
        (form, "https://page.example", 403),
    ):
        with connect(server) as client:
            client.sendall(request(path, body, Content_Type=kind, Origin=origin))
            assert read_reply(client)[0] == expected


def test_a_key_may_come_in_anthropics_header(limited):
    body = ask(ANTHROPIC, "a", max_tokens=1)
    known = ({"x-api-key": "two"}, ONE, ONE | {"x-api-key": "nobody's"})
    assert all(limited.post("/v1/messages", body, **headers)[0] == 200 for headers in known)
    for headers in ({}, {"x-api-key": "three"}, {"x-api-key": ""}):
        status, reply = limited.post("/v1/messages", body, **headers)
        assert (status, reply["error"]["type"]) == (401, "authentication_error")
