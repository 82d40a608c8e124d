"""Heads that do not end; heads in pieces; answers that the client does not read."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest
import uvicorn

from twinphase.server import connection
from twinphase.server.connection import Connection

LARGE = b"a" * (64 << 20)  # more than all buffers on the way


async def app(scope, receive, send):
    if scope["path"] == "/large":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": LARGE})
        return
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"ok"})


def run(talk, keep_alive=20):
    async def main():
        config = uvicorn.Config(
            app, http=Connection, ws="none", lifespan="off", timeout_keep_alive=keep_alive
        )
        config.load()
        state = uvicorn.server.ServerState()
        server = await asyncio.get_running_loop().create_server(
            lambda: Connection(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                client = SimpleNamespace(
                    read=reader.read, writer=writer, connections=state.connections
                )
                await asyncio.wait_for(talk(client), 90)
            finally:
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()

    asyncio.run(main())


def test_a_head_that_takes_too_long_is_cut(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_SECONDS", 0.2)

    async def talk(client):
        client.writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ")
        with suppress(ConnectionResetError):
            assert await client.read(100) == b""

    run(talk)


def test_a_head_that_never_ends_is_answered_and_cut():
    async def talk(client):
        client.writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n")
        with pytest.raises(ConnectionError):
            while True:
                client.writer.write(b"X-Much: " + b"a" * 8000 + b"\r\n")
                await client.writer.drain()
                await asyncio.sleep(0)

    run(talk)


@pytest.mark.parametrize("size, status", [(60 << 10, b"HTTP/1.1 200"), (80 << 10, b"HTTP/1.1 431")])
def test_a_head_that_comes_at_once_has_the_same_limit(size, status):
    async def talk(client):
        client.writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX-Much: " + b"a" * size + b"\r\n\r\n")
        assert (await client.read(12)) == status

    run(talk)


async def read_answer(client):
    """Read an answer, whose head and body may arrive separately."""
    data = b""
    while not data.endswith(b"\r\n\r\nok"):
        assert (piece := await client.read(1000))
        data += piece
    return data


def test_requests_in_pieces_and_one_after_the_other_are_served():
    async def talk(client):
        request = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 200000\r\n\r\n"
        for _ in range(2):
            for at in range(0, len(request), 7):
                client.writer.write(request[at : at + 7])
                await client.writer.drain()
            client.writer.write(b"b" * 200_000)
            assert (await read_answer(client)).startswith(b"HTTP/1.1 200")
        client.writer.write(request + b"b" * 200_000)  # head and body at once
        assert (await read_answer(client)).startswith(b"HTTP/1.1 200")

    run(talk)


@pytest.mark.parametrize("kept", ["close", "keep-alive"])
def test_a_client_that_does_not_take_the_end_of_its_answer_is_cut(monkeypatch, kept):
    monkeypatch.setattr(connection, "CLOSE_TIMEOUT_SECONDS", 0.2)

    async def talk(client):
        client.writer.write(
            f"GET /large HTTP/1.1\r\nHost: a\r\nConnection: {kept}\r\n\r\n".encode()
        )
        while not client.connections:
            await asyncio.sleep(0.01)
        while client.connections:  # the one connection
            await asyncio.sleep(0.01)

    run(talk, keep_alive=1)
