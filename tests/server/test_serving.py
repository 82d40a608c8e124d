"""The server as a whole: what each route gives, what it prints, how it becomes ready."""

import json
import re
import socket

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from dialects import bearer, function, user
from raw_client import LONG, events, reset, send, until
from twinphase import __version__

CHAT = {
    "messages": [user("hello world")],
    "max_tokens": 5,
    "temperature": 0,
    "ignore_eos": True,
}
KEY = bearer("one")
ORIGIN = "https://page.example"
PAGE = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def streamed(server, path, body):
    """The reply's headers, and its events but for the last."""
    reply = httpx.post(server.url + path, json={**body, "stream": True})
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(
        event.startswith("data: ") for event in events[:-1]
    )
    return reply.headers, [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_an_answer_says_where_its_time_went(server):
    status, body = server.post("/v1/chat/completions", CHAT)
    assert status == 200
    timings = body["timings"]
    assert sum(timings["ledger_ms"].values()) == pytest.approx(timings["e2e_ms"], abs=0.02)
    parts = timings["prompt_parts"]
    assert sum(part["tokens"] for part in parts) == body["usage"]["prompt_tokens"]
    assert {part["kind"] for part in parts} == {"template", "question"}
    assert timings["predicted_n"] == body["usage"]["completion_tokens"] == 5
    _, events = streamed(server, "/v1/chat/completions", CHAT)
    last = events[-1]["timings"]
    assert last.keys() == timings.keys() and not any("timings" in event for event in events[:-1])
    assert (last["cache_n"], last["prompt_n"]) == (16, body["usage"]["prompt_tokens"] - 16)
    assert last["prefix_miss"]["reason"] == "block_granularity"


def test_each_of_several_answers_has_its_own_timings(server):
    _, body = server.post(
        "/v1/completions", {"prompt": ["the", "hello"], "max_tokens": 3, "n": 2, "ignore_eos": True}
    )
    assert [choice["timings"]["predicted_n"] for choice in body["choices"]] == [3] * 4
    assert body["usage"]["completion_tokens"] == 12
    for index in range(4):
        assert server.get(f"/v1/requests/{body['id']}-{index}/timeline")[1]["finished"]


def test_headers_name_the_request_and_its_times(server):
    reply = httpx.post(server.url + "/v1/chat/completions", json=CHAT)
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"] == reply.json()["id"]
    spent = dict(entry.split(";dur=") for entry in reply.headers["server-timing"].split(", "))
    ledger = reply.json()["timings"]["ledger_ms"]
    assert {kind: float(time) for kind, time in spent.items()} == {
        kind: time for kind, time in ledger.items() if time
    }
    headers, events = streamed(server, "/v1/chat/completions", CHAT)
    assert (
        headers["content-type"] == "text/event-stream; charset=utf-8"
        and headers["cache-control"] == "no-cache"
    )
    assert {event["id"] for event in events} == {headers["x-request-id"]}


def test_texts_and_conversations_become_tokens_and_texts_again(server, llm):
    text = "hello\x00 the world é€<|im_end|>"
    for special in (True, False):
        _, found = server.post(
            "/tokenize", {"prompt": text, "add_special_tokens": special, "return_token_strs": True}
        )
        assert found["tokens"] == llm.tokenizer.encode(text, add_special_tokens=special)
        assert (
            found["count"] == len(found["tokens"]) == len(found["token_strs"])
            and found["max_model_len"] == 4096
        )
        assert server.post("/detokenize", {"tokens": found["tokens"]})[1]["prompt"] == text
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "b"}'}}
    called = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "c", "tool_call_id": "1"},
    ]
    tools = [function({"name": "look"})]
    for body in (
        {},
        {"tools": tools},
        {"messages": CHAT["messages"] + called, "chat_template_kwargs": {"x": 1}},
    ):
        body = {"messages": CHAT["messages"], **body}
        _, chat = server.post(
            "/v1/chat/completions", {**body, "max_tokens": 2, "return_token_ids": True}
        )
        assert server.post("/tokenize", body)[1]["tokens"] == chat["choices"][0]["prompt_token_ids"]


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("PUT", "/health", 405),
    ],
)
def test_a_wrong_turn_is_an_error_in_openais_shape(server, method, path, status):
    reply = httpx.request(method, server.url + path)
    assert reply.status_code == status and reply.json()["error"]["message"]
    assert ("allow" in reply.headers) == (status == 405)


def test_a_model_a_version_and_the_state(server):
    _, models = server.get("/v1/models")
    (model,) = models["data"]
    assert model["id"] == model["root"] == server.model and model["owned_by"] == "twinphase"
    assert server.get(f"/v1/models/{server.model}")[1] == model  # a name with slashes
    assert server.get("/version")[1] == {"version": __version__}
    for path in ("/health", "/health/live", "/health/ready"):
        assert server.get(path) == (200, {"status": "ready", "running": 0})


def test_metrics_count_what_was_served(server):
    before = {
        name: server.metric(name) for name in ("prompt_tokens_total", "generation_tokens_total")
    }
    finished = server.metric("request_success_total", finished_reason="length")
    _, body = server.post(
        "/v1/completions", {"prompt": "the", "max_tokens": 4, "n": 2, "ignore_eos": True}
    )
    refused = server.metric("requests_refused_total", status="400", reason="InvalidRequestError")
    for temperature in (-1, "hot"):  # found by the engine's parameters, and by the types
        server.post("/v1/completions", {"prompt": "the", "temperature": temperature})
    assert server.metric("generation_tokens_total") - before["generation_tokens_total"] == 8
    assert (
        server.metric("prompt_tokens_total") - before["prompt_tokens_total"]
        == 2 * body["usage"]["prompt_tokens"]
    )
    assert server.metric("request_success_total", finished_reason="length") - finished == 2
    assert (
        server.metric("requests_refused_total", status="400", reason="InvalidRequestError")
        - refused
        == 2
    )
    server.wait_until_idle()


def test_metrics_come_in_the_format_that_is_asked_for(server, limited):
    plain = httpx.get(server.url + "/metrics")
    assert plain.headers["content-type"].startswith("text/plain") and "vllm:" not in plain.text
    openmetrics = httpx.get(
        server.url + "/metrics", headers={"Accept": "application/openmetrics-text"}
    )
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert any(
        family.name == "twinphase:engine_up" for family in parse_openmetrics(openmetrics.text)
    )
    assert "\nvllm:num_requests_running{" in limited.get("/metrics")[1]


def test_a_page_that_is_allowed_may_ask_from_a_browser(server, limited):
    url = limited.url + "/v1/chat/completions"
    allowed = "access-control-allow-origin"
    asked = httpx.options(url, headers=PAGE)
    assert (
        asked.status_code == 200
        and "authorization" in asked.headers["access-control-allow-headers"]
    )
    answered = httpx.post(url, json=CHAT, headers={**KEY, "Origin": ORIGIN})
    assert (
        answered.status_code == 200
        and "server-timing" in answered.headers["access-control-expose-headers"]
    )
    refused = httpx.post(url, json={}, headers={**KEY, "Origin": ORIGIN})
    unknown = httpx.get(limited.url + "/v1/models", headers={"Origin": ORIGIN})
    assert (refused.status_code, unknown.status_code) == (400, 401)
    assert {reply.headers[allowed] for reply in (asked, answered, refused, unknown)} == {ORIGIN}
    for base, origin in ((limited.url, "https://other.example"), (server.url, ORIGIN)):
        page = {**PAGE, "Origin": origin}
        assert allowed not in httpx.options(base + "/v1/models", headers=page).headers
        assert (
            allowed
            not in httpx.post(
                base + "/v1/chat/completions", json=CHAT, headers={**KEY, **page}
            ).headers
        )


OPEN = {"/health", "/health/live", "/health/ready", "/metrics", "/version"}  # without a key


def test_the_openapi_document_is_complete(server, limited):
    status, document = limited.get("/openapi.json")  # without the key, as is its page
    assert status == limited.get("/docs")[0] == 200
    operations = {
        (path, method): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    names = [operation["operationId"] for operation in operations.values()]
    assert len(set(names)) == len(names) == len(operations) and "create_chat_completion" in names
    (scheme,) = document["components"]["securitySchemes"].values()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    others = {"/v1/messages": "AnthropicErrorResponse", "/api/": "OllamaErrorResponse"}
    for (path, _), operation in operations.items():
        assert operation["description"]
        assert bool(operation.get("security")) == (path not in OPEN)
        assert "422" not in operation["responses"]
        for errors in ("4XX", "5XX"):
            (content,) = operation["responses"][errors]["content"].values()
            shape = next(
                (name for start, name in others.items() if path.startswith(start)), "ErrorResponse"
            )
            assert content["schema"] == {"$ref": f"#/components/schemas/{shape}"}
    for path in ("/v1/chat/completions", "/v1/completions"):
        kinds = operations[path, "post"]["responses"]["200"]["content"]
        assert set(kinds) == {"application/json", "text/event-stream"}
    assert "securitySchemes" not in server.get("/openapi.json")[1]["components"]


def test_what_a_server_says_when_it_is_ready(limited):
    lines = limited.log.read_text().splitlines()[1:7]
    words = ["model", "KV", "measured", "pace", "sampling", "listening"]
    assert [line.split()[0] for line in lines] == words
    assert lines[0].startswith("model      a, b (tiny.gguf, Q4_0, ")
    assert "4,096 tokens: 1.0 requests of the full 4,096, 1 run at once" in lines[1]
    assert (
        "TTFT" in lines[2] and "TPOT" in lines[2] and f"{limited.url}/v1 (OpenAI's API)" in lines[5]
    )


def test_health_follows_loading(start):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with start("--port", str(port), wait=False) as server:
        server.url = f"http://127.0.0.1:{port}"
        while (state := server.get("/health"))[0] == 0:
            assert server.process.poll() is None
        seen = [state]
        while seen[-1][0] != 200:
            assert server.get("/version")[0] == 200
            if seen[-1][1]["status"] == "starting":
                status, error = server.post("/v1/chat/completions", CHAT)
                assert status == 200 or error["error"]["code"] == "unavailable"
            seen.append(server.get("/health/ready"))
    stages = {state["status"].split(" (")[0] for status, state in seen if status == 503}
    # "starting" may be over before it is asked for.
    assert "importing" in stages and seen[-1][1] == {"status": "ready", "running": 0}


def test_requests_are_logged_when_they_are_accepted_end_or_are_cut_off(limited, server):
    def wait_for_line(pattern):
        until(lambda: re.search(pattern, limited.log.read_text()), 30)

    body = {"prompt": "hello world", "max_tokens": 3, "ignore_eos": True}
    name = limited.post("/v1/completions", body, **KEY)[1]["id"]
    counts = r"tenant \w+, \d+ prompt tokens \(\d+ cached\)"
    # The line is written after the engine took the request, which may have ended by then.
    wait_for_line(rf"Request accepted: {name} [\w ()]+, {counts}, \d output tokens")
    wait_for_line(
        rf"Request ended: {name} ended \(length\), {counts}, 3 output tokens: "
        r".*prefill .*, decode .* ms"
    )
    client = send(limited, "/v1/completions", {**LONG, "stream": True}, **KEY)
    name = next(events(client))["id"]
    reset(client)
    wait_for_line(f"Request cut off: {name} decoding, {counts}")
    assert "hello world" not in limited.log.read_text()
    server.post("/v1/completions", body)
    assert "Request " not in server.log.read_text()
