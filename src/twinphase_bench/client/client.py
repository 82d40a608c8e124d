"""A streaming HTTP client that records the arrival times of bytes, and parses them later.

A ready-made client would not do, because server and client often share a machine, and timestamps
must be early. Here the clock is read directly after the socket, and a token costs about 5
microseconds; a stream reader passes data on when its task is scheduled next, often with several
pieces joined.

Each request has its own connection, opened before the request is due. So connecting is never part
of a latency (`connect_seconds` has its time), no connection was closed by the server in the
meantime, and a load balancer distributes the requests like those of many users.

Redirects, proxies, compression and HTTP/2 are not supported. `sse.py` parses the streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import math
import os
import re
import resource
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

from twinphase import InvalidRequestError

# This value of `intended` sends once the connection is open, and latencies count from then.
SEND_NOW = math.nan
# Event loops sleep in milliseconds, so the last part of a wait is a busy loop.
SPIN_SECONDS = 0.0015
DONE = b"[DONE]"
# Kinds of failures: this machine could not send the request, or the client stopped waiting.
CLIENT_LIMIT = "client limit"
LEFT_BY_CLIENT = "left"
WENT_AWAY = f"{LEFT_BY_CLIENT}: the client went away"
TIMED_OUT = "timeout: the reply did not end in time"
OWN_ERRORS = {
    errno.EMFILE: "this process may have no more open files (ulimit -n)",
    errno.ENFILE: "this machine has no more open files",
    errno.EADDRNOTAVAIL: "no local port is free",
    errno.EAGAIN: "no local port is free",
    errno.ENOBUFS: "no memory for more sockets",
    errno.ENOMEM: "no memory for more sockets",
}
RESOLVE_SECONDS = 10.0
SPARE_OPEN_FILES = 64
Value = TypeVar("Value")


class ServerUnreachableError(InvalidRequestError):
    """No HTTP server answers at the address."""


@dataclass(frozen=True)
class Address:
    """The address of a server.

    `path` is the prefix of every route ("" or "/v1"); `resolve` looks up `ip` once.
    """

    scheme: str
    host: str
    port: int
    path: str
    ip: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse a URL, with or without its scheme.

        User, password and query are removed, because they may be secrets.

        Raises:
            InvalidRequestError: the text is not a server's URL.
        """
        shown = without_secrets(url)
        reason = ""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            if parts.scheme in ("http", "https") and parts.hostname:
                port = parts.port or (443 if parts.scheme == "https" else 80)
                return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))
        except ValueError as error:
            reason = f" ({str(error).replace(url, shown)})"
        raise InvalidRequestError(
            f"{shown!r} is not the URL of a server{reason}.", "Give http://HOST:PORT."
        )

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    async def resolve(self) -> Address:
        """Find the first address of the host that accepts a connection.

        Raises:
            ServerUnreachableError: no address accepts a connection.
        """
        opening = asyncio.get_running_loop().create_connection(
            asyncio.Protocol, self.host, self.port
        )
        try:
            transport, _ = await asyncio.wait_for(opening, RESOLVE_SECONDS)
        except socket.gaierror:
            raise ServerUnreachableError(
                f"No host has the name {self.host!r}.", "Check the URL."
            ) from None
        except OSError as error:
            reason = str(error) or f"no answer in {RESOLVE_SECONDS:.0f} seconds"
            raise ServerUnreachableError(
                f"Nothing answers at {self.url}: {reason}.", "Start the server, or check the port."
            ) from None
        ip = str(transport.get_extra_info("peername")[0])
        transport.close()
        return replace(self, ip=ip)

    def head(self, method: str, route: str, headers: Mapping[str, str], length: int) -> bytes:
        """Request line and headers for a route and a body of `length` bytes."""
        host = self.url.partition("://")[2]
        lines = [
            f"{method} {route} HTTP/1.1",
            f"host: {host}",
            "connection: close",
            "accept-encoding: identity",
        ]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if length or method == "POST":
            lines += ["content-type: application/json", f"content-length: {length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@dataclass
class Reply:
    """The reply to one request as received; times are seconds of `time.perf_counter`."""

    intended: float  # Scheduled send time.
    connect_began: float = math.nan
    connected: float = math.nan
    sent: float = math.nan  # Time when its bytes were written to the socket.
    ended: float = math.nan  # Time when the reply was complete, or broke off.
    status: int = 0  # HTTP status; 0 without a reply.
    headers: dict[str, str] = field(default_factory=dict)  # Names are in lower case.
    pieces: list[tuple[float, bytes]] = field(
        default_factory=list
    )  # Pieces of the body, with the time when each was read.
    connected_late: bool = (
        False  # The connection was requested in time, but was open only after `intended`.
    )
    # Whether the reply is complete: a stream up to its [DONE], unless `exchange` waits for more.
    whole: bool = False
    error: str = ""  # "KIND: details" if the reply is incomplete.
    asked_tokens: int = 0  # Requested output tokens, as noted by the sender; 0 if unknown.

    @property
    def connect_seconds(self) -> float:
        """NaN if there was no connection."""
        return self.connected - self.connect_began

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)

    def json(self) -> Any:
        """The body as JSON; None if it is not valid JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


class _Exchange(asyncio.Protocol):
    """The connection of one request, which records the arrival time of each piece."""

    def __init__(
        self,
        reply: Reply,
        done: asyncio.Future[None],
        leave: Callable[[Reply], bool] | None,
        to_the_end: bool,
    ) -> None:
        self._reply = reply
        self._done = done
        self._leave = leave
        self._to_the_end = to_the_end
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._has_length = False

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()  # The clock is read before anything else.
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
            reply.whole = True  # In HTTP/1.0, the reply ends with its connection.
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
                # Nothing follows, so do not wait for the server to close.
                self.on_message_complete()
        elif self._leave is not None and self._leave(self._reply):
            self.finish(WENT_AWAY)

    def on_message_complete(self) -> None:
        if 100 <= self._reply.status < 200:
            return
        self._reply.whole = True
        self.finish()

    def finish(self, error: str = "") -> None:
        if not self._done.done():
            self._reply.ended = self._now or time.perf_counter()
            self._reply.error = error
            self._done.set_result(None)

    def give_up(self, error: str) -> None:
        self._now = time.perf_counter()
        self.finish(error)


async def wait_until(moment: float) -> None:
    """Sleep until `time.perf_counter()` is `moment`, within about 20 µs on an idle loop."""
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
    """Send a request when it is due, and receive its reply; failures are in its `error`.

    Args:
        address: resolved address.
        request: all bytes of the request.
        intended: time to send it; the connection is opened at once.
        timeout: seconds from sending to the end of the reply.
        leave: called after each part of the body, but not after a stream's [DONE]; True closes the
            connection.
        leave_after: seconds from sending after which the connection is closed.
        to_the_end: wait for the end of the HTTP message; otherwise a stream's [DONE] is enough.
    """
    loop = asyncio.get_running_loop()
    reply = Reply(intended, connect_began=time.perf_counter())
    done = loop.create_future()
    secure: dict[str, Any] = {}
    if address.scheme == "https":
        secure = {"ssl": _tls(), "server_hostname": address.host}
    opening = loop.create_connection(
        lambda: _Exchange(reply, done, leave, to_the_end),
        address.ip or address.host,
        address.port,
        **secure,
    )
    try:
        transport, protocol = await asyncio.wait_for(opening, min(timeout, 60.0))
    except OSError as error:
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
    return ssl.create_default_context()  # Loading reads all certificates, so it is done once.


def _connect_error(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"connection refused: {error}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"untrusted certificate: {error.verify_message}; SSL_CERT_FILE may name a PEM file "
            "with certificates to trust"
        )
    if isinstance(error, TimeoutError):
        return "timeout: the connection was not opened in time"
    if isinstance(error, OSError) and error.errno in OWN_ERRORS:
        return f"{CLIENT_LIMIT}: {OWN_ERRORS[error.errno]}: {error}"
    return f"connection failed: {type(error).__name__}: {error}"


def without_secrets(url: str) -> str:
    """A URL, even a malformed one, without user, password, query and fragment."""
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    user, at, after = rest.rpartition("@")
    # A password may contain any character, even unescaped. Only an @ after a host and a slash
    # belongs to a path.
    if at and (":" in user or not re.search(r"[/?#]", user)):
        host_and_port = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:/?#\[]+)(:\d+)?[/?#].*", user)
        rest = rest if host_and_port else after
    return f"{scheme}{mark}{re.split(r'[?#]', rest, maxsplit=1)[0]}"


def allow_connections(wanted: int) -> None:
    """Raise this process's limit of open files for `wanted` connections, as far as permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + len(os.listdir("/proc/self/fd")) + SPARE_OPEN_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        # If the limit cannot be raised, the failing connections report it.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def run(work: Coroutine[Any, Any, Value]) -> Value:
    """Run asyncio code on uvloop, the event loop with the lowest overhead."""
    return uvloop.run(work)
