"""The engine's own process: `python -m twinphase.engine.child FD`, started by `host.ProcessHost`.

Speaks messages over the socket it was given. It ends when told to, or when the other end is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from twinphase.engine.messages import FromEngine, Load, Loading, ToEngine
from twinphase.engine.wire import SEND_BUFFER, Decoder, encode
from twinphase.errors import TwinphaseError

if TYPE_CHECKING:
    from twinphase.engine.embedding import LoadedEmbedder
    from twinphase.engine.loading import LoadedEngine

__all__ = ["main"]

RECEIVE_BYTES = 1 << 18
WARM_UP_PROMPT, WARM_UP_TOKENS = 600, 16
PROGRESS_SECONDS = 0.1


def main(descriptor: int) -> int:
    """Load the model that the first message names, then serve; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the front end decides when the engine ends
    link = socket.socket(fileno=descriptor)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    decoder: Decoder[ToEngine] = Decoder(ToEngine)

    def send(message: FromEngine) -> None:
        try:
            link.sendall(encode(message))
        except OSError:
            os._exit(0)  # nobody is there any more

    backlog: list[ToEngine] = []
    while not backlog:
        data = link.recv(RECEIVE_BYTES)
        if not data:
            return 0
        backlog += decoder.feed(data)
    first, *rest = backlog
    if not isinstance(first, Load):
        return 2

    send(Loading("importing"))
    from twinphase.engine.embedding_loop import make_loop
    from twinphase.engine.loop import refusal

    try:
        loaded = _load(first, send)
    except TwinphaseError as error:
        send(refusal(None, error))
        return error.exit_code
    loop, facts = make_loop(loaded, send)
    send(facts)
    for message in rest:
        loop.put(message)

    def receive() -> None:
        while data := link.recv(RECEIVE_BYTES):
            for message in decoder.feed(data):
                loop.put(message)
        os._exit(0)

    threading.Thread(target=receive, name="twinphase-receive", daemon=True).start()
    loop.run()
    return 0


def _load(wanted: Load, send: Callable[[FromEngine], None]) -> LoadedEngine | LoadedEmbedder:
    from twinphase.engine.ceilings import device_of, learn_ceilings, measured_ceilings
    from twinphase.engine.embedding import LoadedEmbedder, load
    from twinphase.phases.hardware import must_measure

    last = 0.0

    def report(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PROGRESS_SECONDS:
            last = now
            send(Loading(stage, done, total))

    loaded = load(
        wanted.model,
        compile_progress=lambda done, total, kernel: report("compiling kernels", done, total),
        load_progress=lambda done, total: report("reading weights", done, total),
        **wanted.config,
    )
    if isinstance(loaded, LoadedEmbedder):
        send(Loading("warming up"))
        loaded.embed([1] * min(WARM_UP_TOKENS, loaded.config.max_model_len or 1))
        return loaded
    if device_of(loaded.config).has_ceilings and must_measure(measured_ceilings(loaded.config)):
        send(Loading("measuring this machine"))
        learn_ceilings(loaded.config)
    send(Loading("warming up"))
    loaded.warm_up(WARM_UP_PROMPT, WARM_UP_TOKENS)
    _ = loaded.text.grammar_compiler  # made now, not by the first grammar while others decode
    return loaded


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
