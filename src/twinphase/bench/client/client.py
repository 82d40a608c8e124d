"""A streaming HTTP client that measures: it stamps bytes as they come, keeps them, and reads them afterwards.

Why not a ready-made client: server and client often share a machine, and a stamp is only as good as it is early. Here
a moment is taken in the first line after the socket was read, and a token costs about 5 microseconds; a stream reader
hands pieces on when its task is next scheduled, several joined into one.

Each request has a connection of its own, opened before the moment at which the request is due: opening one is never
part of a latency (it is kept apart, as `connect_seconds`), no connection is found closed by a server that was
tired of it, and a load balancer spreads requests as it would those of many users.

Not for: redirects, proxies, compression, HTTP/2. What a stream says is read by `sse.py`.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import math
import re
import resource
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

from twinphase.errors import InvalidRequestError

__all__ = [
    "CLIENT_LIMIT",
    "LEFT",
    "SEND_NOW",
    "Address",
    "Reply",
    "ServerUnreachableError",
    "allow_connections",
    "exchange",
    "run",
    "wait_until",
    "without_secrets",
]

SEND_NOW = math.nan  # for `intended`: as soon as the connection is there; that moment is then the intended one
SPIN_SECONDS = 0.0015  # event loops sleep by the millisecond; the rest is waited for in turns of the loop
DONE = b"[DONE]"
CLIENT_LIMIT = "client limit"  # the kind of failures that are this machine's: the server was never asked
LEFT = "left"  # the kind of replies whose client went away
WENT_AWAY = f"{LEFT}: the client went away"
TIMED_OUT = "timeout: the reply did not end in time"
OWN_ERRORS = {
    errno.EMFILE: "this process may have no more open files (ulimit -n)",
    errno.ENFILE: "this machine has no more open files",
    errno.EADDRNOTAVAIL: "no local port is free",
    errno.EAGAIN: "no local port is free",
    errno.ENOBUFS: "no memory for more sockets",
    errno.ENOMEM: "no memory for more sockets",
}
SPARE_FILES = 64  # that a process has open besides connections
Value = TypeVar("Value")


class ServerUnreachableError(InvalidRequestError):
    """The address given leads to no server, or to one that speaks something else."""


@dataclass(frozen=True)
class Address:
    """Where a server is.

    Attributes:
        scheme: "http" or "https".
        host, port: as given.
        path: before every route, without a slash at its end; "" or "/v1", for instance.
        ip: what the host's name means; looked up once, so that no request waits for it.
    """

    scheme: str
    host: str
    port: int
    path: str
    ip: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Of a URL, with or without its scheme. A user, a password and a query in it are dropped: they may be secrets.

        Raises:
            InvalidRequestError: it is none.
        """
        shown = without_secrets(url)
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            reason = str(error).replace(url, shown)
            raise InvalidRequestError(f"{shown!r} is no URL: {reason}.", "Give http://HOST:PORT.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequestError(f"{shown!r} is no URL of a server.", "Give http://HOST:PORT.")
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    @property
    def url(self) -> str:
        """Without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    async def resolve(self) -> Address:
        """With the first address of the host that takes a connection.

        Raises:
            ServerUnreachableError: there is none.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError:
            raise ServerUnreachableError(f"No host has the name {self.host!r}.", "Check the URL.") from None
        reason = ""
        for *_, sockaddr in found:
            ip = str(sockaddr[0])
            try:
                transport, _ = await asyncio.wait_for(loop.create_connection(asyncio.Protocol, ip, self.port), 10)
            except (TimeoutError, OSError) as error:
                reason = str(error) or "no answer in 10 seconds"
                continue
            transport.close()
            return Address(self.scheme, self.host, self.port, self.path, ip)
        raise ServerUnreachableError(
            f"Nothing answers at {self.url}: {reason}.", "Start the server, or check the port."
        )

    def head(self, method: str, route: str, headers: Mapping[str, str], length: int) -> bytes:
        """The first lines of a request; `route` goes behind the path."""
        host = self.url.partition("://")[2]
        lines = [f"{method} {route} HTTP/1.1", f"host: {host}", "connection: close", "accept-encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if length or method == "POST":
            lines += ["content-type: application/json", f"content-length: {length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@dataclass
class Reply:
    """What came back for one request, as it came.

    Attributes:
        intended: when the request was to be sent, seconds of `time.perf_counter`, as are all moments here.
        connect_began, connected: the connection was asked for, and was there.
        sent: its bytes were handed to the socket.
        ended: the reply was complete, or broke.
        status: of HTTP; 0 if nothing came.
        headers: names in lower case.
        pieces: parts of the body, each with the moment at which its bytes were read from the socket.
        connected_late: the connection was asked for in time and was there, or had failed, only after `intended`.
        whole: the reply came to its end: a stream to its [DONE], unless `exchange` was told to wait for more.
        error: "KIND: details" if it did not; "" otherwise.
        asked_tokens: of output, as the sender noted; 0 if it did not.
    """

    intended: float
    connect_began: float = math.nan
    connected: float = math.nan
    sent: float = math.nan
    ended: float = math.nan
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    connected_late: bool = False
    whole: bool = False
    error: str = ""
    asked_tokens: int = 0

    @property
    def connect_seconds(self) -> float:
        """What opening the connection took; no part of any latency."""
        return self.connected - self.connect_began

    @property
    def body(self) -> bytes:
        """As far as it came."""
        return b"".join(data for _, data in self.pieces)

    def json(self) -> Any:
        """The body as JSON; None if it is none."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


class _Exchange(asyncio.Protocol):
    """One request's connection: sends when told, stamps what comes."""

    def __init__(
        self, reply: Reply, done: asyncio.Future[None], leave: Callable[[Reply], bool] | None, to_the_end: bool
    ) -> None:
        self._reply, self._done, self._leave, self._to_the_end = reply, done, leave, to_the_end
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._has_length = False

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()  # before anything else
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.finish(f"bad reply: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._now = time.perf_counter()
        reply = self._reply
        if error is not None:
            self.finish(f"connection broken: {type(error).__name__}: {error}")
        elif not reply.status:
            self.finish("no reply: the server closed the connection")
        elif self._has_length:
            self.finish("truncated: the connection was closed before the reply's end")
        else:
            reply.whole = True  # HTTP/1.0: the reply ends with its connection
            self.finish()

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        self._reply.headers[key] = value.decode("latin-1")
        self._has_length |= key in ("content-length", "transfer-encoding")

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._reply.pieces.append((self._now, body))
        if DONE in body[-16:] and body.endswith(b"\n") and body.rstrip().endswith(b"data: [DONE]"):
            if not self._to_the_end:
                self.on_message_complete()  # nothing follows; whether the server closes now is not waited for
        elif self._leave is not None and self._leave(self._reply):
            self.finish(WENT_AWAY)

    def on_message_complete(self) -> None:
        if 100 <= self._reply.status < 200:
            return
        self._reply.whole = True
        self.finish()

    def finish(self, error: str = "") -> None:
        if not self._done.done():
            self._reply.error, self._reply.ended = error, self._now or time.perf_counter()
            self._done.set_result(None)

    def give_up(self, error: str) -> None:
        self._now = time.perf_counter()
        self.finish(error)


async def wait_until(moment: float) -> None:
    """Sleep until `time.perf_counter()` says so, within some 20 microseconds where the loop has nothing else to do."""
    rest = moment - time.perf_counter()
    if rest > SPIN_SECONDS:
        await asyncio.sleep(rest - SPIN_SECONDS)
    while time.perf_counter() < moment:
        await asyncio.sleep(0)


async def exchange(
    address: Address,
    request: bytes,
    *,
    intended: float = SEND_NOW,
    timeout: float = 600.0,
    leave: Callable[[Reply], bool] | None = None,
    leave_after: float = math.inf,
    to_the_end: bool = False,
) -> Reply:
    """Send a request when it is due, and take its whole reply.

    Args:
        address: resolved.
        request: all its bytes.
        intended: when to send it, if that is still to come. The connection is opened at once.
        timeout: seconds from sending to the end of the reply.
        leave: whether to go away; asked after each part of the body, but not after a stream's [DONE].
        leave_after: seconds from sending after which to go away.
        to_the_end: a stream is whole only with the end of its HTTP message; its [DONE] is enough otherwise.

    Returns:
        The reply; whatever went wrong is in its `error`.
    """
    loop = asyncio.get_running_loop()
    reply, done = Reply(intended, connect_began=time.perf_counter()), loop.create_future()
    secure: dict[str, Any] = {}
    if address.scheme == "https":
        secure = {"ssl": _tls(), "server_hostname": address.host}
    opening = loop.create_connection(
        lambda: _Exchange(reply, done, leave, to_the_end), address.ip or address.host, address.port, **secure
    )
    try:
        transport, protocol = await asyncio.wait_for(opening, min(timeout, 60.0))
    except (TimeoutError, OSError) as error:
        reply.error = _connect_error(error)
        reply.connected_late = reply.connect_began <= intended < time.perf_counter()
        await wait_until(intended)
        reply.sent = reply.ended = time.perf_counter()
        if math.isnan(intended):
            reply.intended = reply.sent
        return reply
    try:
        reply.connected = time.perf_counter()
        reply.connected_late = reply.connect_began <= intended < reply.connected
        await wait_until(intended)
        reply.sent = time.perf_counter()
        transport.write(request)
        if math.isnan(intended):
            reply.intended = reply.sent
        wait, why = (leave_after, WENT_AWAY) if leave_after < timeout else (timeout, TIMED_OUT)
        timer = loop.call_later(wait, protocol.give_up, why)
        await done
        timer.cancel()
    finally:
        transport.abort()
    return reply


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # reads all certificates: once


def _connect_error(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"connection refused: {error}"
    if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
        return "timeout: the connection was not opened in time"
    if isinstance(error, OSError) and error.errno in OWN_ERRORS:
        return f"{CLIENT_LIMIT}: {OWN_ERRORS[error.errno]}: {error}"
    return f"connection failed: {type(error).__name__}: {error}"


def without_secrets(url: str) -> str:
    """A URL as it may be shown: without user, password, query and fragment; also of what is no good URL."""
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    user, at, after = rest.rpartition("@")
    # A password may have any character, unescaped too. Only what follows a host and a slash can be an @ of a path.
    if at and (":" in user or not re.search(r"[/?#]", user)):
        host_and_port = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:/?#\[]+)(:\d+)?[/?#].*", user)
        rest = rest if host_and_port else after
    return f"{scheme}{mark}{re.split(r'[?#]', rest, maxsplit=1)[0]}"


def allow_connections(wanted: int) -> int:
    """How many connections this process may have at once, after raising its own limit as far as that many need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        except (OSError, ValueError):  # what a machine forbids, the error of a connection tells
            pass
    return wanted if soft == resource.RLIM_INFINITY else max(0, soft - SPARE_FILES)


def run(work: Coroutine[Any, Any, Value]) -> Value:
    """Run asyncio code on the event loop that costs least."""
    return uvloop.run(work)
