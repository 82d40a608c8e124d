"""Clients that misbehave: they leave, do not read, do not end requests, send no HTTP."""

import select
import socket
import time
from contextlib import ExitStack

import pytest

from dialects import ANTHROPIC, OLLAMA, PATHS, ask, message, parts
from raw_client import (
    LONG,
    ONE,
    PATH,
    PROBE,
    connect,
    events,
    is_cut,
    read_reply,
    request,
    reset,
    send,
    surviving,
    tokens,
    until,
)
from tiny_gguf import write_tiny_gguf

CHUNK = 64
LARGE = {**LONG, "max_tokens": 1600, "logprobs": 20}  # an answer of 700 KB


@pytest.fixture(scope="module")
def slow(start, tmp_path_factory):
    """Steps take some ten milliseconds, so that clients can leave in the middle of a prompt."""
    path = tmp_path_factory.mktemp("slow") / "tiny.gguf"
    model = write_tiny_gguf(path, hidden=512, ffn=2048, context=8192)
    with start(
        "--backend", "reference", "--max-num-batched-tokens", str(CHUNK), model=model
    ) as server:
        yield server


@pytest.fixture(scope="module")
def strict(start):
    """A server with short timeouts."""
    flags = ("--slow-reader-timeout", "1.5", "--body-timeout", "1", "--max-body-bytes", "100000")
    with start(*flags) as server:
        yield server


def computed(server, phase):
    return server.metric("step_tokens_total", phase=phase)


@pytest.mark.parametrize("leave", [socket.socket.close, reset])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_gone_in_mid_prefill_is_let_go_of_within_a_step(slow, stream, leave):
    with surviving(slow):
        before = computed(slow, "prefill")
        salt = f"{stream} {leave.__name__}"
        client = send(
            slow, PATH, {**LONG, "prompt": [5] * 4000, "stream": stream, "cache_salt": salt}
        )
        until(lambda: computed(slow, "prefill") > before)
        with slow.paused():
            leave(client)
            until(lambda: slow.get("/health")[1]["running"] == 0)
            # News of the last step may still be on its way to the server.
            until(lambda: len({computed(slow, "prefill") for _ in range(10)}) == 1)
            at_leave = computed(slow, "prefill")
        slow.wait_until_idle()
        # The step that it stood still in, and the next if that one's news came first.
        assert computed(slow, "prefill") - at_leave <= 2 * CHUNK


@pytest.mark.parametrize(
    "dialect, fields, extra, most",
    [
        (None, {"stream": True}, b"", LONG["max_tokens"] / 4),
        (None, {"stream": False}, b"", LONG["max_tokens"] / 4),
        (None, {"stream": True, "prompt": ["hello", "world"], "n": 4}, b"", LONG["max_tokens"]),
        (None, {"stream": False}, request(PATH, LONG), LONG["max_tokens"] / 4),
        (ANTHROPIC, {"stream": True}, b"", LONG["max_tokens"] / 4),
        (OLLAMA, {"stream": True}, b"", LONG["max_tokens"] / 4),
    ],
    ids=["stream", "whole", "several answers", "two requests", ANTHROPIC, OLLAMA],
)
def test_a_client_gone_in_mid_decode_is_let_go_of(slow, dialect, fields, extra, most):
    with surviving(slow):
        before = computed(slow, "decode")
        body = ask(dialect, slow.model, **fields) if dialect else {**LONG, **fields}
        client = send(slow, PATHS.get(dialect, PATH), body)
        until(lambda: computed(slow, "decode") > before + 5)
        client.sendall(extra)
        client.close()
        slow.wait_until_idle()
        assert computed(slow, "decode") - before < most


@pytest.mark.parametrize("stream", [True, False])
def test_a_slow_reader_is_cut_and_others_are_served_meanwhile(strict, stream):
    with surviving(strict), ExitStack() as stack:
        cut = strict.metric("requests_refused_total", reason="slow_reader")
        large = ask(OLLAMA, strict.model, max_tokens=1600, logprobs=True, top_logprobs=20)
        bodies = [(PATH, LARGE), (PATHS[OLLAMA], large)]
        clients = [
            stack.enter_context(send(strict, path, {**body, "stream": stream}, receive_buffer=2048))
            for path, body in bodies
        ]
        assert strict.post(PATH, PROBE)[0] == 200
        running = strict.get("/health")[1]["running"]
        assert (
            running == len(bodies)
            or strict.metric("requests_refused_total", reason="slow_reader") > cut
        )
        until(
            lambda: (
                strict.metric("requests_refused_total", reason="slow_reader") == cut + len(bodies)
            )
        )
        strict.wait_until_idle()
        for client in clients:
            assert is_cut(client) < 500_000  # of 700 KB and more: the buffers are bounded


def test_a_reader_that_is_slow_but_reads_gets_everything(strict):
    with (
        surviving(strict),
        send(strict, PATH, {**LARGE, "stream": True}, receive_buffer=1 << 16) as client,
    ):
        received = []
        for event in events(client):
            if len(received) % 400 == 0:
                time.sleep(0.05)
            received.append(event)
        assert received[-1] == "[DONE]"
        assert (
            sum(len(event["choices"][0]["token_ids"]) for event in received[:-1])
            == LARGE["max_tokens"]
        )


def test_a_request_that_takes_too_long_ends_with_an_error(start):
    with start("--request-timeout", "1") as server:
        with send(server, PATH, {**LONG, "n": 8, "stream": True}) as client:
            *_, error, last = events(client)
            assert error["error"]["code"] == "request_timeout" and last == "[DONE]"
        with send(server, PATH, {**LONG, "n": 8}) as client:
            status, _, body = read_reply(client)
            assert status == 504 and body["error"]["code"] == "request_timeout"
        for dialect in (ANTHROPIC, OLLAMA):
            body = ask(dialect, server.model)
            with send(server, PATHS[dialect], {**body, "stream": True}) as client:
                *_, error = parts(client)
                assert "took longer" in message(dialect, error)
            status, reply = server.post(PATHS[dialect], body)
            assert status == 504 and "took longer" in message(dialect, reply)
        with send(
            server, PATH, {**LARGE, "stream": True}, receive_buffer=2048
        ) as client:  # no room for an error
            until(lambda: server.get("/health")[1]["running"] == 0)
            is_cut(client)
        server.wait_until_idle()
        until(
            lambda: server.post(PATH, PROBE)[0] == 200
        )  # in a second, on a machine that does other things too
        assert "Traceback" not in server.log.read_text()


NOISE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"\x00" * 1000,
    b"GARBAGE\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: "
    b"chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, "
    b"chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: "
    b"chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
]
LONG_HEADS = [
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (i, b"y" * 1000) for i in range(1000)),
]


def test_what_is_not_http_is_refused(strict):
    with surviving(strict):
        for data in NOISE + LONG_HEADS:
            with connect(strict) as client:
                client.sendall(data)
                status, headers, _ = read_reply(client)
                assert status == (431 if data in LONG_HEADS else 400), data[:90]
                assert headers["connection"] == "close"


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("extra", [request(PATH, PROBE), b"\x00\xff\r\n\r\n", b"x" * 300_000])
@pytest.mark.parametrize("stream", [True, False])
def test_what_comes_before_the_answer_is_over_does_not_get_into_it(server, stream, extra, together):
    body = {**LONG, "max_tokens": 300}
    with surviving(server):
        alone = tokens(server.post(PATH, body)[1])
        before = computed(server, "decode")
        with connect(server) as client:
            client.sendall(request(PATH, {**body, "stream": stream}) + (extra if together else b""))
            if not together:
                until(lambda: computed(server, "decode") > before)
                client.sendall(extra)
            if stream:
                *received, last = events(client)
                got = [token for event in received for token in event["choices"][0]["token_ids"]]
                assert last == "[DONE]"
            else:
                got = tokens(read_reply(client)[2])
            assert got == alone
            is_cut(client)


def test_a_body_that_does_not_come_to_its_end_is_refused(strict):
    whole = request(PATH, PROBE)
    with surviving(strict), connect(strict) as client, ExitStack() as stack:
        others = [stack.enter_context(connect(strict)) for _ in PATHS]
        for other, path in zip(others, PATHS.values(), strict=True):
            other.sendall(request(path, PROBE)[:-10])
        client.sendall(whole)  # on a connection that was used before
        assert read_reply(client)[0] == 200
        client.sendall(whole[:-10])
        for byte in whole[-10:-5]:  # so slowly that it will not be done in time
            time.sleep(0.05)
            client.sendall(bytes([byte]))
        status, headers, body = read_reply(client)
        assert (status, headers["connection"], body["error"]["type"]) == (
            408,
            "close",
            "timeout_error",
        )
        is_cut(client)
        for client, dialect in zip(others, PATHS, strict=True):
            status, _, body = read_reply(client)
            assert status == 408 and "too slowly" in message(dialect, body)


@pytest.mark.parametrize(
    "leave", [socket.socket.close, reset, lambda client: client.shutdown(socket.SHUT_WR)]
)
@pytest.mark.parametrize("end", [30, -5, None])  # in the head; in the body; behind it
def test_a_request_or_half_of_one_and_gone(strict, end, leave):
    with surviving(strict):
        client = connect(strict)
        client.sendall(request(PATH, LONG)[:end])
        leave(client)
        if client.fileno() >= 0:
            is_cut(client)
            client.close()


def chunked(size):
    piece = b"x" * 4096
    head = request(PATH, b"", Content_Length="", Transfer_Encoding="chunked")
    return head + (b"1000\r\n" + piece + b"\r\n") * (size // 4096)


@pytest.mark.parametrize(
    "data",
    [
        request(PATH, b"x" * 200_000),
        request(PATH, b"x" * 700_000, Connection="close"),
        request(PATH, b"", Content_Length="9000000000000"),
        request(PATH, b"", Content_Length="100001", Expect="100-continue"),
        chunked(200_000),  # and no end of it
        chunked(200_000) + b"0\r\n\r\n",
    ],
    ids=["length", "close", "huge", "expect", "chunked", "chunked whole"],
)
def test_a_body_that_is_too_large_is_refused(strict, data):
    with surviving(strict):
        for dialect, path in PATHS.items():
            with connect(strict) as client:
                client.sendall(data.replace(PATH.encode(), path.encode(), 1))
                status, _, body = read_reply(client)
                assert status == 413 and "100000 bytes" in message(dialect, body)
                is_cut(client)


@pytest.mark.parametrize("dialect, stream", [(None, True), (None, False), (OLLAMA, False)])
def test_a_client_that_closes_its_sending_half_gets_its_answer(server, dialect, stream):
    body = {**(ask(dialect, server.model) if dialect else PROBE), "stream": stream}
    path = PATHS.get(dialect, PATH)
    with surviving(server), send(server, path, body) as client:
        client.shutdown(socket.SHUT_WR)
        if stream:
            *_, last = events(client)
            assert last == "[DONE]"
        else:
            status, headers, reply = read_reply(client)
            assert (status, headers["connection"]) == (200, "close")
            assert dialect or tokens(reply) == tokens(server.post(PATH, PROBE)[1])
        assert is_cut(client) == 0


def test_a_body_without_end_is_cut(strict):
    with surviving(strict), connect(strict) as client, pytest.raises(ConnectionError):
        client.sendall(request(PATH, b"", Content_Length="", Transfer_Encoding="chunked"))
        while True:
            client.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")


@pytest.mark.parametrize("stream", [True, False])
def test_http_1_0_is_served(server, stream):
    with surviving(server), connect(server) as client:
        client.sendall(request(PATH, {**PROBE, "stream": stream}).replace(b"HTTP/1.1", b"HTTP/1.0"))
        if stream:
            assert list(events(client))[-1] == "[DONE]"
        else:
            assert read_reply(client)[0] == 200
        assert is_cut(client) == 0


def test_bodies_in_chunks_and_behind_a_question_are_served(server):
    body = request(PATH, PROBE).partition(b"\r\n\r\n")[2]
    with surviving(server), connect(server) as client:
        head = request(PATH, b"", Content_Length="", Transfer_Encoding="chunked")
        client.sendall(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert read_reply(client)[0] == 200
        client.sendall(request(PATH, PROBE, Expect="100-continue").removesuffix(body))
        assert client.recv(100).startswith(b"HTTP/1.1 100")
        client.sendall(body)
        assert read_reply(client)[0] == 200


def test_an_upgrade_is_not_made(strict):
    with surviving(strict), connect(strict) as client:
        head = (
            b"GET /health HTTP/1.1\r\nHost: [::]\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        )
        client.sendall(
            head
            + b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert read_reply(client)[0] == 200


def test_two_hundred_silent_connections_keep_nobody_from_being_served(server):
    with surviving(server):
        clients = [connect(server) for _ in range(200)]
        for client in clients[::2]:
            client.sendall(request(PATH, PROBE)[:30])
        assert server.post(PATH, PROBE)[0] == 200
        for client in clients:
            client.close()


def test_many_large_bodies_at_once_are_bounded_together(limited):
    head = request(PATH, b"", Content_Length="60000", **ONE)
    with surviving(limited, **ONE):
        clients = [connect(limited) for _ in range(34)]
        for client in clients:
            client.sendall(head + b" " * 59_000)
        until(lambda: select.select(clients, [], [], 0)[0])
        limited.get("/health")  # what was sent before was read before
        answered = select.select(clients, [], [], 0)[0]
        assert 1 <= len(answered) <= 3
        assert all(client.recv(100).startswith(b"HTTP/1.1 429") for client in answered)
        for client in clients:
            client.close()
