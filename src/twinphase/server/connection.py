"""uvicorn's connection, with a bound on time and size of a request's head; the body's are the gate's business."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["Connection"]

HEAD_SECONDS = 30.0
HEAD_BYTES = 64 << 10


class Connection(HttpToolsProtocol):
    """Cut when a head does not come to its end."""

    _timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected, and may keep silent no longer than a head may take."""
        super().connection_made(transport)
        self._begin_head()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._timer is not None and self._num_head_bytes > HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """The parser found a request's first byte."""
        super().on_message_begin()
        if self._timer is None:
            self._begin_head()

    def on_headers_complete(self) -> None:
        """The parser found a head's end."""
        self._end_head()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._end_head()
        super().connection_lost(exc)

    def _begin_head(self) -> None:
        self._num_head_bytes = 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _end_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
