"""A client for load, which shares its machine's cores with the server under test: it takes bytes and stamps, no more.

One connection a request; what came is kept as it came, each piece with the time of its arrival, and is read when the
measurement is over. Tokens are counted by the server's usage and token ids, never by events.

    python benchmarks/sse_client.py PORT < PLAN > REPLIES     # a load from a process of its own

Not for: keep-alive, TLS, retries, or any other server than one that chunks its streams.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import sys
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop

__all__ = ["Event", "Plan", "Reply", "ask", "load", "post"]

DONE = b"[DONE]"


@dataclass(frozen=True)
class Plan:
    """A request to send.

    Attributes:
        data: all its bytes.
        start: when to send it, seconds after the load begins.
        leave_after: seconds after sending at which the client goes away; never if None.
        leave_at_event: go away when that many events have come; never if 0.
    """

    data: bytes
    start: float = 0.0
    leave_after: float | None = None
    leave_at_event: int = 0


@dataclass(frozen=True)
class Event:
    """A server-sent event: when its last byte came, seconds, and its JSON."""

    time: float
    data: dict[str, Any]


@dataclass
class Reply:
    """What came back.

    Attributes:
        began: when the connection was asked for, seconds on the clock `time.perf_counter`.
        ended: when it was closed, by whichever side.
        left: the client went away.
        error: why there was no connection, or how it broke; empty otherwise.
        pieces: what was received, and when.
    """

    began: float
    ended: float = math.nan
    left: bool = False
    error: str = ""
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def status(self) -> int:
        """Of HTTP; 0 if nothing came."""
        head = self.pieces[0][1][:12] if self.pieces else b""
        return int(head[9:12]) if head.startswith(b"HTTP/1.1 ") else 0

    def body(self) -> bytes:
        """Of the reply, as far as it came."""
        return b"".join(data for _, data in self._content())

    def json(self) -> Any:
        """The body of a reply that is no stream."""
        return json.loads(self.body())

    def events(self) -> list[Event]:
        """Those of a stream, the last one (`[DONE]`) left out."""
        found, buffer = [], b""
        for moment, data in self._content():
            *whole, buffer = (buffer + data).split(b"\n\n")
            found += [Event(moment, json.loads(event[6:])) for event in whole if event[6:] != DONE]
        return found

    @property
    def is_whole(self) -> bool:
        """Whether the reply came to its end."""
        last = self.pieces[-1][1] if self.pieces else b""
        head, _, body = b"".join(data for _, data in self.pieces[:2]).partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head:
            return last.endswith(b"0\r\n\r\n")
        length = next((line[15:] for line in head.split(b"\r\n") if line.startswith(b"content-length:")), None)
        return length is not None and len(self.body()) == int(length)

    def _content(self) -> Iterable[tuple[float, bytes]]:
        """The body, each part with the time at which its last byte came."""
        raw = b"".join(data for _, data in self.pieces)
        head, found, body = raw.partition(b"\r\n\r\n")
        if not found:
            return
        ends, total = [], 0
        for _, data in self.pieces:
            total += len(data)
            ends.append(total)
        at = len(head) + 4
        if b"transfer-encoding: chunked" not in head:
            yield self.pieces[-1][0], body
            return
        while (line := raw.find(b"\r\n", at)) >= 0:
            size = int(raw[at:line], 16)
            at = line + 2 + size + 2
            if size == 0 or at > total:
                return
            yield self.pieces[bisect_left(ends, at)][0], raw[line + 2 : at - 2]


def post(path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


class _Exchange(asyncio.Protocol):
    def __init__(self, plan: Plan, reply: Reply, done: asyncio.Future[None]) -> None:
        self._plan, self._reply, self._done = plan, reply, done
        self._events = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._plan.data)
        if self._plan.leave_after is not None:
            asyncio.get_running_loop().call_later(self._plan.leave_after, self._leave)

    def data_received(self, data: bytes) -> None:
        self._reply.pieces.append((time.perf_counter(), data))
        if self._plan.leave_at_event:
            self._events += data.count(b"data: ")
            if self._events >= self._plan.leave_at_event:
                self._leave()

    def connection_lost(self, error: Exception | None) -> None:
        self._reply.ended = time.perf_counter()
        if error is not None:
            self._reply.error = f"{type(error).__name__}: {error}"
        if not self._done.done():
            self._done.set_result(None)

    def _leave(self) -> None:
        if not self._done.done():
            self._reply.left = True
            self._transport.abort()


async def ask(port: int, plan: Plan) -> Reply:
    """Send a request now, and take all that comes back."""
    loop = asyncio.get_running_loop()
    reply, done = Reply(time.perf_counter()), loop.create_future()
    try:
        await loop.create_connection(lambda: _Exchange(plan, reply, done), "127.0.0.1", port)
    except OSError as error:
        reply.ended, reply.error = time.perf_counter(), f"{type(error).__name__}: {error}"
        return reply
    await done
    return reply


async def load(port: int, plans: Sequence[Plan]) -> list[Reply]:
    """Send requests, each at its time whatever becomes of the others; a reply counts from the intended moment."""
    start = time.perf_counter()

    async def one(plan: Plan) -> Reply:
        due = start + plan.start
        if plan.start:
            await asyncio.sleep(due - time.perf_counter())
        reply = await ask(port, plan)
        if plan.start:
            reply.began = due
        return reply

    return await asyncio.gather(*map(one, plans))


async def _main(port: int, plans: Sequence[Plan]) -> dict[str, Any]:
    gc.disable()
    cpu = time.process_time()
    replies = await load(port, plans)
    cpu = time.process_time() - cpu
    shown = [
        {
            "began": reply.began,
            "ended": reply.ended,
            "status": reply.status,
            "error": reply.error,
            "whole": reply.is_whole,
            "events": [[event.time, event.data] for event in reply.events()],
        }
        for reply in replies
    ]
    return {"cpu_seconds": cpu, "replies": shown}


if __name__ == "__main__":
    wanted = [Plan(post(path, body), start) for path, body, start in json.load(sys.stdin)]
    json.dump(uvloop.run(_main(int(sys.argv[1]), wanted)), sys.stdout)
