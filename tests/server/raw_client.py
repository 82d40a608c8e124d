"""A client that does what no HTTP library would, and the check that a server came through it.

Half requests, sockets that nobody reads, bytes that are no HTTP. Not for talking to a server
properly: `running.py`.
"""

from __future__ import annotations

import http.client
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dialects import bearer
from running import PATIENCE, RunningServer

# a key of the server `limited`
PATH = "/v1/completions"
ONE = bearer("one")
LONG = {
    "prompt": "hello",
    "max_tokens": 4000,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
PROBE = LONG | {"prompt": "hello world", "max_tokens": 8}


@contextmanager
def surviving(server: RunningServer, *, restarts: bool = False, **headers: str) -> Iterator[None]:
    """Afterwards the idle server holds nothing, and serves the same tokens as before.

    `restarts`: whether the engine is to be started again; `headers`: of the requests that look.
    """

    def probe() -> list[int]:
        status, body = server.post("/v1/completions", PROBE, **headers)
        assert status == 200, body
        return tokens(body)

    before = probe()
    num_restarts = server.metric("engine_restarts_total")
    yield
    server.wait_until_ready()
    server.wait_until_idle()
    assert probe() == before
    server.wait_until_idle()
    assert server.get("/health/live")[0] == server.get("/health/ready")[0] == 200
    assert (server.metric("engine_restarts_total") > num_restarts) == restarts
    assert "Traceback" not in server.log.read_text()


def tokens(body: Any) -> list[int]:
    """Of a whole reply's only answer; it has to be asked for `return_token_ids`."""
    (choice,) = body["choices"]
    return list(choice["token_ids"])


def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Wait for something that the server tells only when asked; fails if it does not come.

    The pause between questions grows, since each one takes processor time from the server.
    """
    deadline = time.monotonic() + seconds
    pause = 0.005
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(pause)
        pause = min(1.5 * pause, 0.1)


def connect(server: RunningServer, receive_buffer: int | None = None) -> socket.socket:
    """A connection; `receive_buffer` bytes make a reader that is soon full."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    client = socket.socket()
    client.settimeout(PATIENCE)
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect((host, int(port)))
    return client


def request(path: str, body: Any, **headers: str) -> bytes:
    """A POST request; a header given as "" is left out."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
    }
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [
        f"POST {path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in fields.items() if value),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def send(
    server: RunningServer, path: str, body: Any, receive_buffer: int | None = None, **headers: str
) -> socket.socket:
    """A connection on which a request was sent and nothing is read yet."""
    client = connect(server, receive_buffer)
    client.sendall(request(path, body, **headers))
    return client


def read_reply(client: socket.socket) -> tuple[int, dict[str, str], Any]:
    """Status, headers in lower case and body, decoded if it is JSON; the connection stays open."""
    response = http.client.HTTPResponse(client)
    response.begin()
    data = response.read()
    headers = {name.lower(): value for name, value in response.getheaders()}
    is_json = headers.get("content-type", "").startswith("application/json")
    return response.status, headers, json.loads(data) if is_json else data


def events(client: socket.socket) -> Iterator[Any]:
    """The events of a streamed reply; the last is "[DONE]" if the stream was not cut."""
    response = http.client.HTTPResponse(client)
    response.begin()
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            yield "[DONE]" if data == b"[DONE]" else json.loads(data)


def reset(client: socket.socket) -> None:
    """Leave without a goodbye."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def is_cut(client: socket.socket) -> int:
    """Bytes left to read until the server closes the connection; fails if it stays open."""
    count = 0
    try:
        while data := client.recv(1 << 16):
            count += len(data)
    except ConnectionError:
        pass
    return count
