"""What the client reports against what a stub server did and stamped."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time

import pytest

from bench.attempts import check_errors, moment_errors
from bench.load.made_load import delta, opened, requests, stream, text, usage
from bench.stub_server import RunningStub
from twinphase.errors import InvalidRequestError
from twinphase.server.event_stream import EventReader, read_events
from twinphase.workload.distributions import Closed
from twinphase_bench.client.client import (
    LEFT_BY_CLIENT,
    Address,
    ServerUnreachableError,
    exchange,
    run,
    without_secrets,
)
from twinphase_bench.client.sse import failure_kind, observe
from twinphase_bench.load.report import load_data, load_sections
from twinphase_bench.load.run import run_load
from twinphase_bench.targets.openai import OpenAITarget, TargetFailedError
from twinphase_bench.targets.target import Prompt

PROMPT = Prompt("one two three")
EVENTS = (
    b'\xef\xbb\xbf: comment\r\ndata: {"a":1}\r\n\r\nevent: x\ndata:two\ndata: lines\nid: '
    b"7\n\n:\n\ndata: [DONE]\n\n"
)
READ = [b'{"a":1}', b"two\nlines", b"[DONE]"]


def ask(stub, script, **options):
    """The observation of a request, and what the stub logged of it."""
    target = opened(stub, script, **options)
    seen = run(target.send(PROMPT, 4))
    return seen, stub.log()[0]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r", None], ids=str)
def test_events_cut_anywhere(newline):
    """With None the line ends are mixed, as they stand above."""
    data = EVENTS if newline is None else EVENTS.replace(b"\r\n", b"\n").replace(b"\n", newline)
    for first, second in itertools.combinations(range(len(data)), 2):
        reader = EventReader()
        parts = [data[:first], data[first:second], data[second:]]
        assert [event for part in parts for event in reader.feed(part)] == READ
    reader = EventReader()
    assert [event for byte in data for event in reader.feed(bytes([byte]))] == READ


def test_an_event_has_the_time_of_its_last_bytes():
    pieces = [
        (1.0, b"data: a"),
        (2.0, b"\n"),
        (3.0, b"\ndata: b\n\ndata: c\n\nda"),
        (4.0, b"ta: never ended\n"),
    ]
    assert list(read_events(pieces)) == [(3.0, b"a"), (3.0, b"b"), (3.0, b"c")]


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"newline": "\r\n", "comments": True},
        {"multiline": True, "split": 7},
        {"split": 1},
        {"join": True},
        {"role": True},
        {"merged_end": True},
        {"newline": "\r", "multiline": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_every_form_of_stream_is_read(stub, form, endpoint):
    seen, _ = ask(stub, {"gaps": [0.002, 0.002], "tokens": [1, 3, 2], **form}, endpoint=endpoint)
    assert seen.error == "" and seen.succeeded
    assert seen.text == " word" * 6
    assert (seen.num_prompt_tokens, seen.num_output_tokens, seen.num_cached_tokens) == (3, 6, None)
    assert (seen.request_id, seen.finish_reason, seen.status) == ("stub-0", "length", 200)
    number = 4 if form == {"role": True} and endpoint == "completions" else 3
    assert len(seen.token_times) == number, "pieces with a token; a role and the end have none"


@pytest.mark.parametrize(
    ("events", "pieces"),
    [
        # Ten tokens of 10 ms, the last five without text.
        ([text(" a")] * 5 + [text("")] * 4 + [text("", "length")], 9),  # as vLLM sends them
        ([delta(content=" a")] * 5 + [delta(content="")] * 4 + [delta("length", content="")], 9),
        ([text(" a")] * 3 + [text("")] * 2 + [text(" a")] * 4 + [text(" a", "length")], 10),
        ([text(" a")] * 9 + [text("", "length")], 9),
    ],
)
def test_tokens_without_text_are_tokens(events, pieces):
    seen = observe(stream(*events, usage(10)))
    assert (
        seen.tpot == pytest.approx(0.01, rel=1e-9)
        and seen.e2e == pytest.approx(0.1)
        and seen.ttft == 0.01
    )
    assert len(seen.token_times) == pieces and seen.succeeded


def test_tokens_that_a_server_does_not_send_end_with_the_output():
    words = [text(" a")] * 5
    moments = [0.01, 0.02, 0.03, 0.04, 0.05, 0.1, 0.1]
    seen = observe(stream(*words, text("", "length"), usage(10), moments=moments))
    assert seen.tpot == pytest.approx(0.01, rel=1e-9) and seen.e2e == pytest.approx(0.1), (
        "not 4.44 ms"
    )
    seen = observe(stream(*words, usage(10), moments=moments[:6]))
    assert seen.tpot is None and failure_kind(seen.error) == "broken off", (
        "nothing says when it was complete"
    )


def test_more_pieces_than_tokens_have_no_token_at_their_beginning():
    seen = observe(stream(text(""), text(" a"), text(" b", "length"), usage(2)))
    assert seen.token_times == [0.02, 0.03] and seen.tpot == pytest.approx(0.01)
    seen = observe(
        stream(delta(role="assistant", content=""), delta(content=" a"), delta("stop"), usage(1))
    )
    assert seen.token_times == [0.02] and seen.ttft == 0.02
    only = observe(stream(text("", "length"), usage(1)))
    assert only.succeeded and only.ttft == 0.01, "the only token had no text"


def test_thinking_is_told_from_the_answer():
    events = [
        delta(role="assistant", content=""),
        *[delta(reasoning_content="hm")] * 3,
        delta(content="so"),
    ]
    seen = observe(
        stream(
            *events,
            delta("stop", content="."),
            usage(5, completion_tokens_details={"reasoning_tokens": 3}),
        )
    )
    assert seen.ttft == 0.02 and seen.ttfo == pytest.approx(0.05) and seen.num_reasoning_tokens == 3
    assert seen.tpot == pytest.approx(0.01) and seen.text == "so."
    seen = observe(stream(delta(content="so"), delta("stop"), usage(1)))
    assert seen.ttfo is None and seen.num_reasoning_tokens is None, "it does not think"


def test_every_moment_is_right_within_a_millisecond(stub):
    draw = random.Random(1)
    scripts = [
        {
            "queue": draw.uniform(0, 0.02),
            "first": draw.uniform(0.005, 0.03),
            "gaps": [draw.choice([0.002, 0.005, 0.01, 0.04]) for _ in range(12)],
            "tokens": [draw.choice([1, 1, 1, 4]) for _ in range(13)],
        }
        for _ in range(6)
    ]

    def errors(number):
        script = scripts[number % len(scripts)]
        seen, log = ask(stub, script)
        assert seen.num_output_tokens == sum(script["tokens"]) > len(seen.token_times)
        assert seen.ttft >= script["queue"] + script["first"], (
            "the stub's delays are no shorter than told"
        )
        return moment_errors(seen, log)

    check_errors(errors, stub.process.pid)


def test_opening_the_connection_is_no_part_of_a_latency(stub):
    target = opened(stub)
    # It was open before the request was due, if the machine let the client send it when it was.
    early = []
    while not any(early) and len(early) < 100:
        due = time.perf_counter() + target.lead
        seen = run(target.send(PROMPT, 4, due))
        assert seen.intended == due <= seen.sent
        assert seen.claims["client_connect_seconds"] > 0
        early.append(seen.sent - seen.claims["client_connect_seconds"] - due < 0)
    assert any(early)


@pytest.mark.parametrize(
    ("script", "kind", "detail"),
    [
        ({"status": 429, "message": "slow down"}, "http 429", "slow down"),
        ({"status": 500}, "http 500", "script"),
        ({"end": "truncated", "gaps": [0.001]}, "truncated", "before the reply's end"),
        ({"end": "no_done"}, "truncated", "[DONE]"),
        ({"end": "error", "message": "out of memory"}, "error in stream", "out of memory"),
        ({"end": "garbage"}, "bad event", "{not json"),
        ({"end": "hang"}, "timeout", ""),
        ({"end": "reset"}, "no reply", ""),
        ({"end": "message", "message": "no"}, "http 200 with an error", "no"),
        ({"content_type": "text/html"}, "not a stream", "text/html"),
        ({"tokens": [0]}, "no output", ""),
        ({"finish": "abort", "gaps": [0.001]}, "broken off", "'abort'"),
        ({"finish": "error", "gaps": [0.001]}, "broken off", "'error'"),
        ({"finish": None, "gaps": [0.001]}, "broken off", "no finish_reason"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_failures_are_told_apart(stub, script, kind, detail):
    seen, _ = ask(stub, script, timeout=0.5 if kind == "timeout" else 60)
    kinds = {kind, "connection broken"} if kind == "no reply" else {kind}  # a reset comes as either
    assert failure_kind(seen.error) in kinds and detail in seen.error
    assert not seen.succeeded and seen.ended >= seen.sent


def test_a_server_that_is_gone_is_a_refused_connection():
    stub = RunningStub()
    target = opened(stub)
    stub.stop()
    seen = run(target.send(PROMPT, 4, time.perf_counter() + 0.01))
    assert failure_kind(seen.error) == "connection refused" and seen.status == 0


def test_bytes_that_are_no_http():
    async def work():
        async def shout(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"220 ready\r\n")
            writer.close()

        server = await asyncio.start_server(shout, "127.0.0.1", 0)
        address = Address("http", "127.0.0.1", server.sockets[0].getsockname()[1], "", "127.0.0.1")
        reply = await exchange(address, address.head("GET", "/", {}, 0))
        with pytest.raises(ServerUnreachableError, match="no HTTP reply"):
            await OpenAITarget.open(address.url)
        server.close()
        return reply

    assert failure_kind(run(work()).error) == "bad reply"


def post(stub, **options):
    """A reply of the client itself, without a target in between."""
    address = Address.parse(stub.url)
    body = b'{"prompt": "one", "stream": true}'
    return run(
        exchange(address, address.head("POST", "/v1/completions", {}, len(body)) + body, **options)
    )


def test_a_client_leaves_when_it_wants_to(stub):
    stub.script({"gaps": [0.0, 0.0], "end": "hang"})
    reply = post(stub, leave=lambda reply: reply.body.count(b"data: ") == 3)
    assert failure_kind(reply.error) == LEFT_BY_CLIENT and not reply.whole and reply.status == 200
    assert reply.body.count(b"data: ") == 3, "what had come is kept"


def test_a_client_that_leaves_after_a_time_has_sent_its_request(stub):
    stub.script({"queue": 5.0})
    reply = post(stub, leave_after=0.0)
    assert (
        failure_kind(reply.error) == LEFT_BY_CLIENT
        and not reply.pieces
        and reply.ended >= reply.sent >= reply.connected
    )
    late = time.perf_counter() + 30
    while not stub.log() and time.perf_counter() < late:
        time.sleep(0.01)
    assert len(stub.log()) == 1


def test_a_stream_may_have_to_end_as_http_too(stub):
    for end, kind in (
        ("done", ""),
        ("error", "truncated"),
    ):  # the stub cuts the second one off after its [DONE]
        stub.script({"end": end})
        reply = post(stub, to_the_end=True)
        assert (reply.whole, failure_kind(reply.error)) == (
            not kind,
            kind,
        ) and b"[DONE]" in reply.body
        assert post(stub).whole


def test_fields_that_a_server_refuses_are_left_out_and_told(stub):
    def agreed(*refuse, **options):
        stub.script(refuse=refuse)
        target = run(OpenAITarget.open(stub.url, **options))
        assert not run(target.send(PROMPT, 4)).error
        return target, stub.log()[-1]["body"]

    target, body = agreed("ignore_eos")
    assert "ignore_eos" not in body and "refuses `ignore_eos`" in " ".join(target.notes)
    target, body = agreed("ignore_eos", "stream_options")
    assert "stream_options" not in body and not target.dialect.include_usage
    target, body = agreed("/v1/completions")
    assert (
        target.dialect.endpoint == "chat"
        and "messages" in body
        and "/v1/chat" in " ".join(target.notes)
    )
    target, body = agreed("ignore_eos", "max_tokens", endpoint="chat")
    assert body["max_completion_tokens"] == 4
    with pytest.raises(TargetFailedError, match="unknown prompt"):
        agreed("prompt", endpoint="completions")


def test_a_stream_without_usage_has_the_count_that_its_end_tells(stub):
    def counted(**script):
        stub.script({"usage": False, "gaps": [0.001], **script})
        target = run(OpenAITarget.open(stub.url))
        return target, run(target.send(PROMPT, 9)), run(target.sizing())

    target, seen, sizing = counted()
    assert seen.num_output_tokens == 9 and seen.tpot is not None, "it ended by its length"
    assert "no `usage`" in " ".join(target.notes) and sizing.counted, (
        "an answer that is not streamed has the count"
    )
    _, seen, sizing = counted(finish="stop", whole_usage=False)
    assert (
        seen.succeeded
        and seen.num_output_tokens is None
        and seen.tpot is None
        and not sizing.counted
    )


def test_urls():
    for url in ("ftp://x", "http://", "http://localhost:99999", "http://[::1"):
        with pytest.raises(InvalidRequestError, match="not the URL"):
            Address.parse(url)
    assert Address.parse("localhost:8000").url == "http://localhost:8000"
    assert Address.parse("https://api.example.com/v1/").path == "/v1"
    head = Address.parse("http://[::1]:80").head("GET", "/x", {}, 0)
    assert head.startswith(b"GET /x HTTP/1.1\r\nhost: [::1]:80\r\n")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:pw@host:8/v1?api_key=k#f", "http://host:8/v1"),
        ("user:p@w@host:8", "host:8"),
        ("host?api_key=k", "host"),
        ("https://u:p?w@host/v1", "https://host/v1"),
        ("http://u:p/w@host/v1", "http://host/v1"),
        ("http://host/a@b", "http://host/a@b"),
        ("http://[::1]:80/v1", "http://[::1]:80/v1"),
    ],
)
def test_what_may_be_shown_of_a_url(url, shown):
    assert without_secrets(url) == shown


def test_no_secret_of_a_url_or_a_key_is_in_a_result(stub):
    secret = "sEcReT"
    key = "k-12345678"

    stub.script()
    url = stub.url.replace("http://", f"http://user:{secret}@") + f"/v1?api_key={secret}"
    target = run(OpenAITarget.open(url, api_key=key))
    stub.script(
        {}, {"status": 401, "message": f"wrong key {key}"}, {"end": "error", "message": f"{key}?"}
    )
    result = run(run_load(target, requests(3), Closed(1)))
    assert result.facts.name == f"{stub.url}/v1" and result.failures == {
        "http 401": 1,
        "error in stream": 1,
    }
    told = json.dumps(load_data(result)) + repr(load_sections(result)) + repr(result.facts)
    assert secret not in told and key not in told and "(the API key)" in told
    for url in (
        f"ftp://user:{secret}@x",
        f"http://user:{secret}@[::1",
        f"http://u:{secret}@127.0.0.1:9?k={secret}",
    ):
        with pytest.raises(InvalidRequestError) as error:
            run(OpenAITarget.open(url))
        assert secret not in str(error.value)


@pytest.mark.parametrize(
    ("url", "told"), [("127.0.0.1:9", "Nothing answers"), ("no.such.host.invalid", "No host")]
)
def test_nothing_listens(url, told):
    with pytest.raises(ServerUnreachableError, match=told):
        run(OpenAITarget.open(f"http://{url}"))


def models(owner, **more):
    return {"v1__models": {"data": [{"id": "m", "owned_by": owner, **more}]}}


PROPS = {
    "default_generation_settings": {"n_ctx": 2048},
    "build_info": "b6500-abc",
    "total_slots": 4,
}
API = {"info": {"title": "🦙 llama.cpp Python API", "version": "0.3.16"}}


@pytest.mark.parametrize(
    ("kind", "engine", "context", "pages"),
    [
        (
            "vllm",
            "vLLM 0.11.0",
            4096,
            {**models("vllm", max_model_len=4096), "version": {"version": "0.11.0"}},
        ),
        (
            "sglang",
            "SGLang 0.5.3",
            None,
            {**models("sglang"), "get_server_info": {"version": "0.5.3"}},
        ),
        ("llama.cpp", "llama.cpp b6500-abc", 2048, {**models("llamacpp"), "props": PROPS}),
        (
            "ollama",
            "Ollama 0.12.1",
            None,
            {**models("library"), "api__version": {"version": "0.12.1"}},
        ),
        (
            "llama-cpp-python",
            "llama-cpp-python 0.3.16",
            None,
            {**models("me"), "openapi.json": API},
        ),
        (
            "twinphase",
            "twinphase 0.1.0",
            None,
            {**models("twinphase"), "version": {"version": "0.1.0"}},
        ),
        ("vllm", "vLLM", None, {**models("x"), "metrics": "vllm:num_requests_running 0\n"}),
        ("unknown", "unknown", None, models("someone")),
    ],
)
def test_servers_are_known_by_what_they_say(stub, kind, engine, context, pages):
    stub.script({}, **pages)
    target = run(OpenAITarget.open(stub.url))
    assert (target.server.kind, target.facts.engine, target.facts.context_length) == (
        kind,
        engine,
        context,
    )
    assert target.facts.precision == "unknown"
