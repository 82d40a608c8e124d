"""uvicorn's connection with limits on the time and the size of a request's head.

Data that a client sends before the end of its answer (a second request, garbage) is ignored, and
the connection is closed after the answer: uvicorn would no longer notice that the client leaves,
and would write the error into the answer. A client that only closes its sending half gets its
answer. `Gate` limits bodies.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_SECONDS = 30.0
MAX_HEAD_BYTES = 64 << 10
# A client that is still sending may not read its answer yet, so up to this many bytes are
# discarded.
MAX_DISCARDED_BYTES = 32 << 20
# Interval for checking whether a client that closed its sending half has closed the connection.
LEFT_CHECK_SECONDS = 0.05
# TCP state of such a connection, from Linux's include/net/tcp_states.h.
CLOSE_WAIT = 8
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"connection: close\r\n\r\nThe request's headers are longer than 64 KiB. Send less in them.\n"
)
# Time that a closing connection waits for its client to read the end of the answer.
CLOSE_TIMEOUT_SECONDS = 30.0


class Connection(HttpToolsProtocol):
    """A connection with one request at a time; it is cut if a request's head does not end."""

    _timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0
    _cut: asyncio.TimerHandle | None = None
    _num_discarded_bytes: int | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def data_received(self, data: bytes) -> None:
        if self._num_discarded_bytes is not None:
            self._num_discarded_bytes += len(data)
            if self._num_discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        if self._is_answering():
            self.cycle.keep_alive = False
            return
        if self._reads_body():
            super().data_received(data)
            return
        room = MAX_HEAD_BYTES - self._num_head_bytes
        self._num_head_bytes += len(data)
        super().data_received(data[:room])
        if self._num_head_bytes > MAX_HEAD_BYTES:  # The end of the head would have reset it to 0.
            self._refuse_head()
        elif len(data) > room and not self.transport.is_closing():
            self.data_received(data[room:])

    def on_message_begin(self) -> None:
        if self._is_answering():
            raise ValueError("a request before the answer to the last")
        super().on_message_begin()
        if self._timer is None:
            self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        plain = codings == [b"chunked"] and self.parser.get_http_version() == "1.1"
        if codings and not plain:  # A proxy could see the body's end elsewhere (RFC 9112, 6.1).
            raise ValueError("a transfer coding that is not known")
        super().on_headers_complete()
        self.cycle.transport = _Closing(self)  # type: ignore[assignment]

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a half-closed connection until its answer ends, while its client may still read."""
        # TLS connections cannot be half-closed.
        is_watched = sys.platform == "linux" and self.transport.can_write_eof()
        if not is_watched or not self._is_answering() or self.scope["http_version"] == "1.0":
            return False
        self.cycle.keep_alive = False
        if not self.cycle.response_started:
            # Any client must ignore this, and a closed connection answers it with a reset.
            self.transport.write(CONTINUE)
        self._check_left()
        return True

    def _check_left(self) -> None:
        if self.transport.is_closing():
            return
        link = self.transport.get_extra_info("socket")
        if link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != CLOSE_WAIT:
            self.transport.abort()
        elif self._is_answering():
            self.loop.call_later(LEFT_CHECK_SECONDS, self._check_left)

    def close_after_body(self) -> None:
        """Close the connection once the client has had time to send its request and to read."""
        if self._reads_body():
            self._discard()
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self._is_answering():
            self.cycle.keep_alive = False
        else:
            super().send_400_response(msg)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._cut_if_unread()
        elif self._reads_body() and self._num_discarded_bytes is None:
            self._discard()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._cut_if_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        if self._cut is not None:
            self._cut.cancel()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def _reads_body(self) -> bool:
        return self.cycle is not None and self.cycle.more_body

    def _refuse_head(self) -> None:
        self._end_head()
        self.transport.write(TOO_LARGE)
        self._discard()

    def _discard(self) -> None:
        # If the connection closed at once, the system would answer further data with a reset, which
        # can overtake the answer.
        self._num_discarded_bytes = 0
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:  # TLS reports it by itself, and continues to read.
            self.transport.close()
        self._cut_if_unread()

    def _cut_if_unread(self) -> None:
        # Otherwise closing would wait for a client that does not read.
        self._cut = self.loop.call_later(CLOSE_TIMEOUT_SECONDS, self.transport.abort)

    def _begin_head(self) -> None:
        self._timer = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self.transport.abort)

    def _end_head(self) -> None:
        self._num_head_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Closing:
    """The transport of a connection, as its answer sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.close = connection.close_after_body

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection.transport, name)
