"""The engine's own process: `python -m twinphase.engine.process.child FD` (`ProcessHost`).

It exchanges messages over the socket FD, and ends on `Stop` or when the connection breaks.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import structs

from twinphase.engine.process.messages import FromEngine, Load, Loading, Ping, Pong, Stop, ToEngine
from twinphase.engine.process.wire import SEND_BUFFER_BYTES, Decoder, Stream, encode
from twinphase.errors import EngineDeadError, TwinphaseError

if TYPE_CHECKING:
    from twinphase.engine.embedding.embedder import LoadedEmbedder
    from twinphase.engine.loading.loading import LoadedEngine
    from twinphase.engine.process.loop import EngineLoop

    OpenPort = Callable[[EngineLoop, Callable[[FromEngine], None]], list[str]]

RECEIVE_BYTES = 1 << 18
WARM_UP_PROMPT = 600
WARM_UP_TOKENS = 16
PROGRESS_SECONDS = 0.1


class Link:
    """The engine's end of a connection; any thread may send."""

    def __init__(self, link: Stream) -> None:
        self._socket = link
        self._decoder: Decoder[ToEngine] = Decoder(ToEngine)
        self._backlog: deque[ToEngine] = deque()
        self._sending = threading.Lock()
        self.is_broken = False

    def send(self, message: FromEngine) -> None:
        """Send a message; ignored once the connection is broken."""
        data = encode(message)
        with self._sending:
            if not self.is_broken:
                try:
                    self._socket.sendall(data)
                except OSError:
                    self.is_broken = True

    def next(self) -> ToEngine | None:
        """The next message; None once the connection is broken.

        Pings are answered here, even while the loop is in a step.
        """
        while True:
            while self._backlog:
                message = self._backlog.popleft()
                if not isinstance(message, Ping):
                    return message
                self.send(Pong(message.sent, time.perf_counter()))
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except OSError:
                data = b""
            if not data:
                self.is_broken = True
                return None
            self._backlog += self._decoder.feed(data)


def main(descriptor: int, open_port: OpenPort | None = None) -> int:
    """Load the model that the first message names, then `serve` it; returns the exit code."""
    # The front end decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    link = Link(connection)
    first = link.next()
    if not isinstance(first, Load):
        return 2 if first else 0

    def report(message: FromEngine) -> None:
        link.send(message)
        if link.is_broken:
            os._exit(0)

    report(Loading("importing"))
    from twinphase.engine.process.loop import refusal

    try:
        loaded = load(first, report)
    except TwinphaseError as error:
        link.send(refusal(None, error))
        return error.exit_code
    try:
        serve(loaded, link, lambda: os._exit(0), open_port)
    except EngineDeadError as error:  # One of the ranks has died.
        link.send(refusal(None, error))
        return error.exit_code
    return 0


def serve(
    loaded: LoadedEngine | LoadedEmbedder,
    link: Link,
    gone: Callable[[], None],
    open_port: OpenPort | None = None,
) -> None:
    """Run the engine's loop on the messages of a connection, until `Stop`.

    Args:
        loaded: the engine.
        link: the connection.
        gone: called when the connection breaks.
        open_port: opens a port for KV blocks to a loop, which sends messages with the given
            function; returns the port's addresses.
    """
    from twinphase.engine.embedding.loop import make_loop
    from twinphase.engine.loading.ceilings import IdleMeasurement
    from twinphase.engine.process.loop import EngineLoop

    loop, facts = make_loop(loaded, link.send)
    if isinstance(loop, EngineLoop):
        loop.idle = IdleMeasurement(loaded.config)
    # A block without a snapshot of the recurrent layers' state is useless to another engine.
    if open_port is not None and isinstance(loop, EngineLoop) and not loaded.config.num_state_slots:
        facts = structs.replace(facts, kv_addresses=open_port(loop, link.send))
    link.send(facts)

    def receive() -> None:
        while (message := link.next()) is not None:
            loop.put(message)
        loop.put(Stop())
        gone()

    threading.Thread(target=receive, name="twinphase-receive", daemon=True).start()
    loop.run()


def load(wanted: Load, send: Callable[[FromEngine], None]) -> LoadedEngine | LoadedEmbedder:
    """Load a model and warm it up; `send` gets the progress."""
    from twinphase.engine.embedding.embedder import LoadedEmbedder
    from twinphase.engine.embedding.embedder import load as load_model

    last = 0.0

    def report(stage: str, done: float, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_SECONDS:
            last = now
            send(Loading(stage, done, total))

    loaded = load_model(
        wanted.model,
        wanted.config,
        compile_progress=lambda done, total, kernel: report("compiling kernels", done, total),
        load_progress=lambda done, total: report("reading weights", done, total),
    )
    if isinstance(loaded, LoadedEmbedder):
        send(Loading("warming up"))
        loaded.embed([[1] * min(WARM_UP_TOKENS, loaded.config.max_model_len or 1)])
        return loaded
    send(Loading("warming up"))
    loaded.warm_up(WARM_UP_PROMPT, WARM_UP_TOKENS)
    # Compiling starts now, because the first grammar would delay other requests' decodes.
    _ = loaded.text.grammar_compiler
    return loaded


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
