"""The host of an engine that somebody else started, on this machine or another: `worker.py` at the other end."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter

from msgspec.structs import replace

from twinphase import __version__
from twinphase.cluster.address import connect
from twinphase.cluster.handshake import authenticate
from twinphase.cluster.timelines import shifted
from twinphase.config import EngineConfig
from twinphase.engine.process.host import LinkHost
from twinphase.engine.process.messages import (
    Finished,
    FromEngine,
    Load,
    LookAt,
    News,
    Pong,
    Seen,
    StepNews,
    ToEngine,
)
from twinphase.engine.process.wire import SEND_BUFFER

CLOSE_SECONDS = 2.0  # that a worker has to finish its step when the server leaves


class RemoteHost(LinkHost):
    """An engine at an address, connected to again whenever the connection breaks.

    Its clock is another one. Messages are put on ours by an offset that is taken from the shortest
    round trip so far, and that half of that trip may be wrong; durations stay as they were
    measured.
    """

    def __init__(
        self,
        address: str | Callable[[], str],
        key: bytes,
        model: str | Path,
        config: EngineConfig,
        silence: float | None = 1.5,
    ) -> None:
        """`address` is asked for again at each connection if it is a function; arguments and errors as `LinkHost`."""
        super().__init__(model, config, silence)
        self._address = address
        self._key = key
        self.where = address if isinstance(address, str) else "elsewhere"
        self._loop: asyncio.AbstractEventLoop | None = None
        # the other clock - ours; seconds
        self._offset = 0.0
        self._shortest = float("inf")

    def put(self, message: ToEngine) -> None:
        if isinstance(message, LookAt) and message.timeline is not None:
            message = replace(message, timeline=shifted(message.timeline, self._offset))
        super().put(message)

    def take(self, message: FromEngine) -> None:
        if isinstance(message, Pong):
            now = perf_counter()
            if now - message.sent <= self._shortest:
                self._shortest = now - message.sent
                self._offset = message.clock - (now + message.sent) / 2
        super().take(self._on_our_clock(message))

    def _on_our_clock(self, message: FromEngine) -> FromEngine:
        back = -self._offset
        if isinstance(message, Seen) and message.timeline is not None:
            return replace(message, timeline=shifted(message.timeline, back))
        if not isinstance(message, StepNews):
            return message
        stats = message.stats
        if stats is not None:
            stats = replace(stats, start=stats.start + back, end=stats.end + back)
        return StepNews([_moved(news, back) for news in message.news], stats)

    def close(self) -> None:
        """Have the worker give up what it computes for us, and leave; it waits for the next server then."""
        super().close()
        writer = self._writer
        loop = self._loop
        if writer is None or loop is None or loop.is_closed():
            return
        if loop is _running_loop():
            writer.close()
            return
        deadline = time.monotonic() + CLOSE_SECONDS
        while (
            self._writer is not None and time.monotonic() < deadline
        ):  # until the worker has closed it
            time.sleep(0.01)
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
            authenticate(link, self._key, listening=False)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            link.setblocking(False)
        except BaseException:
            link.close()
            raise
        self._shortest = float("inf")  # another process may answer now
        return link

    def _end(self) -> str:
        return f"The connection to the worker at {self.where} broke"

    def _load_message(self) -> Load:
        """The model by its name: where its files are, the worker knows."""
        return Load(self._model, self._config, __version__, self.text.checkpoint.fingerprint)


class CalledHost(RemoteHost):
    """A worker that says when it is there, and is not sought before."""

    is_sought = False

    def call(self) -> None:
        """It is there; nothing to do where it is connected to already."""
        if self._writer is None and not self._tasks and not self._closing:
            self.failure = None
            self._run(self._connect(0.0))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _moved(news: News, seconds: float) -> News:
    if news.finished is None:
        return news
    finished: Finished = replace(news.finished, timeline=shifted(news.finished.timeline, seconds))
    return replace(news, finished=finished)
