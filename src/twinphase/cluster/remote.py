"""The host of an engine that was started elsewhere, here or on another machine (`worker.py`)."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace as replace_fields
from pathlib import Path
from time import perf_counter

from msgspec.structs import replace

from twinphase import __version__
from twinphase.cluster.address import connect
from twinphase.cluster.encryption import TlsSession, TlsSocket
from twinphase.cluster.handshake import ClusterKey, authenticate
from twinphase.cluster.timelines import shifted
from twinphase.config import EngineConfig
from twinphase.engine.process.host import LinkHost, running_loop
from twinphase.engine.process.messages import (
    FromEngine,
    Inspect,
    Inspected,
    Load,
    Pong,
    StepUpdates,
    ToEngine,
)
from twinphase.engine.process.wire import SEND_BUFFER_BYTES
from twinphase.phases.record import RequestRecord

CLOSE_SECONDS = 2.0


class RemoteHost(LinkHost):
    """An engine at an address; the connection is made again when it breaks.

    Times in its messages are converted to this machine's clock. The offset comes from the shortest
    round trip so far, so that its error is at most half of that trip. Durations stay as measured.
    """

    def __init__(
        self,
        address: str | Callable[[], str],
        key: ClusterKey,
        model: str | Path,
        config: EngineConfig,
        silence: float | None = 1.5,
    ) -> None:
        """Arguments and errors as `LinkHost`; an `address` function is called per connection."""
        super().__init__(model, config, silence)
        self._address = address
        self._key = key
        self.where = address if isinstance(address, str) else "elsewhere"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: TlsSession | None = None
        self._offset = 0.0  # Seconds by which the other clock is ahead of ours.
        self._shortest_trip = float("inf")

    def put(self, message: ToEngine) -> None:
        if isinstance(message, Inspect) and (record := message.record) is not None:
            timeline = shifted(record.timeline, self._offset)
            message = replace(message, record=replace_fields(record, timeline=timeline))
        super().put(message)

    def take(self, message: FromEngine) -> None:
        if isinstance(message, Pong):
            now = perf_counter()
            if now - message.sent <= self._shortest_trip:
                self._shortest_trip = now - message.sent
                self._offset = message.clock - (now + message.sent) / 2
        super().take(self._on_our_clock(message))

    def _on_our_clock(self, message: FromEngine) -> FromEngine:
        back = -self._offset
        records: list[RequestRecord | None] = []
        if isinstance(message, Inspected):
            records = [message.record]
        elif isinstance(message, StepUpdates):
            records = [update.ended for update in message.updates]
            if (stats := message.stats) is not None:
                stats = replace(stats, start=stats.start + back, end=stats.end + back)
                message = replace(message, stats=stats)
        for record in records:
            if record is not None:
                record.timeline = shifted(record.timeline, back)
        return message

    def close(self) -> None:
        """Disconnect; the worker aborts our requests and waits for the next server."""
        super().close()
        writer = self._writer
        loop = self._loop
        if writer is None or loop is None or loop.is_closed():
            return
        if loop is running_loop():
            writer.close()
            return
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._writer is not None and time.monotonic() < deadline:
            time.sleep(0.01)  # The worker closes the connection after its step.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(writer.abort)

    async def _open(self) -> socket.socket:
        self._loop = asyncio.get_running_loop()
        return await asyncio.to_thread(self._connected)

    def _connected(self) -> socket.socket:
        address = self._address if isinstance(self._address, str) else self._address()
        self.where = address
        link = connect(address)
        try:
            stream = authenticate(link, self._key, listening=False)
            self._session = stream.session if isinstance(stream, TlsSocket) else None
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            link.setblocking(False)
        except BaseException:
            link.close()
            raise
        self._shortest_trip = float("inf")  # Another process may answer now.
        return link

    def _seal(self, data: bytes) -> bytes:
        return self._session.encrypt(data) if self._session is not None else data

    def unseal(self, data: bytes) -> bytes:
        return self._session.decrypt(data) if self._session is not None else data

    def _end(self) -> str:
        return f"The connection to the worker at {self.where} broke"

    def _load_message(self) -> Load:
        """The message names the model, whose files the worker finds on its own machine."""
        return Load(self._model, self._config, __version__, self.text.checkpoint.fingerprint)


class CalledHost(RemoteHost):
    """A worker that asks the server to connect; the server does not try before that."""

    is_sought = False

    def call(self) -> None:
        """Connect to the worker, if it is not connected already."""
        if self._writer is None and not self._tasks and not self._closing:
            self.failure = None
            self._run(self._connect(0.0))
