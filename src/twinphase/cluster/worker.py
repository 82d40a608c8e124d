"""An engine for a server elsewhere: `twinphase worker`.

A worker serves one server at a time. The server proves that it has the key, names the model, and
then sends the same messages as to any engine. When the connection breaks, the worker aborts its
requests, and keeps the model and the prefix cache for the next server.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from time import perf_counter
from typing import Any, cast, get_args

from msgspec.structs import replace

from twinphase import __version__
from twinphase.cluster.address import listen, prepare
from twinphase.cluster.encryption import TlsSocket
from twinphase.cluster.handshake import ClusterKey, authenticate
from twinphase.cluster.joining import ask_to_join
from twinphase.cluster.kv.port import opened_port
from twinphase.cluster.role import Role
from twinphase.engine.embedding.embedder import LoadedEmbedder
from twinphase.engine.frontends.checks import engine_config
from twinphase.engine.frontends.text import ModelText
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.process.child import Link, load, serve
from twinphase.engine.process.loop import refusal
from twinphase.engine.process.messages import (
    Add,
    EngineFacts,
    FromEngine,
    Leaving,
    Load,
    Loading,
    ToEngine,
)
from twinphase.engine.process.wire import SEND_BUFFER_BYTES
from twinphase.errors import InvalidRequestError, StorageError, TwinphaseError
from twinphase.outcome import FinishReason
from twinphase.phases.timeline import RequestTimeline

DRAIN_TIMEOUT_SECONDS = 60.0
JOIN_INTERVAL_SECONDS = 1.0
PING_TIMEOUT_SECONDS = 10.0


class _ServerLink(Link):
    """Restarts a request's timeline on this machine's clock, which differs from the server's."""

    role: Role = "both"
    leaving = False

    def send(self, message: FromEngine) -> None:
        if not isinstance(message, EngineFacts):
            super().send(message)
            return
        super().send(replace(message, role=self.role, pid=os.getpid()))
        # A request to leave may arrive while the model is loading.
        if self.leaving:
            super().send(Leaving())

    def leave(self) -> None:
        """Ask the server to move requests to other workers where it can."""
        self.leaving = True
        super().send(Leaving())

    def next(self) -> ToEngine | None:
        message = super().next()
        if isinstance(message, Add):
            message.record.timeline = RequestTimeline(perf_counter())
        return message


class Worker:
    """Keeps a model loaded and serves it to one connection after the other."""

    def __init__(
        self,
        key: ClusterKey,
        role: Role = "both",
        own: Mapping[str, Any] | None = None,
        kv_port: int = 0,
    ) -> None:
        """The server gets `role`; other workers send KV blocks to `kv_port` (0 is any port).

        `own` holds fields of `EngineConfig` that override the server's.
        """
        self._key = key
        self._role = role
        self._own = dict(own or {})
        self._kv_port = kv_port
        self.link: _ServerLink | None = None
        self.refusal: TwinphaseError | None = None
        self._wanted: Load | None = None
        self._loaded: LoadedEngine | LoadedEmbedder | None = None

    def serve(self, connection: socket.socket, stream: socket.socket | TlsSocket) -> None:
        """Serve an authenticated server until it disconnects; `stream` carries the replies."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        connection.settimeout(PING_TIMEOUT_SECONDS)
        self.link = link = _ServerLink(stream)
        link.role = self._role
        try:
            first = link.next()
            if not isinstance(first, Load):
                return
            loaded = self._load(first, link)
        except TwinphaseError as error:
            self._refuse(link, error)
            return
        if isinstance(loaded, LoadedEngine):
            engine = loaded.engine
            # Requests of the previous connection may be unfinished.
            for request_id in list(engine.timelines):
                engine.finish(request_id, FinishReason.ABORT)
        # Other machines can reach this worker at the address that the server used.
        host = "127.0.0.1" if connection.family == socket.AF_UNIX else connection.getsockname()[0]
        with opened_port(self._key, host, self._kv_port) as open_port:
            try:
                serve(loaded, link, lambda: None, open_port)
            except StorageError as error:  # Another process has the port.
                self._refuse(link, error)

    def _refuse(self, link: _ServerLink, error: TwinphaseError) -> None:
        self.refusal = error
        link.send(refusal(None, error))
        link.is_broken = True

    def _load(self, wanted: Load, link: Link) -> LoadedEngine | LoadedEmbedder:
        if wanted.version != __version__:
            raise InvalidRequestError(
                f"The worker is twinphase {__version__}, and the server "
                f"{wanted.version or 'unknown'}.",
                "Install the same version on both.",
            )
        if ModelText.of_model(wanted.model).checkpoint.fingerprint != wanted.fingerprint:
            raise InvalidRequestError(
                f"The worker's {wanted.model} is another model than the server's.",
                "Give both the same files.",
            )
        wanted = replace(wanted, config=engine_config(self._own, wanted.config))
        if self._loaded is None or self._wanted != wanted:
            # Free the old model's memory before the next one is loaded.
            self._loaded = None
            link.send(Loading("importing"))
            self._loaded = load(wanted, link.send)
            self._wanted = wanted
        return self._loaded


def run_worker(
    address: str,
    key: ClusterKey,
    role: str = "both",
    own: Mapping[str, Any] | None = None,
    *,
    join: str | None = None,
    drain_timeout: float = DRAIN_TIMEOUT_SECONDS,
    kv_port: int = 0,
    ends_with_stdin: bool = False,
) -> None:
    """Print the address, then serve one server after the other.

    With `ends_with_stdin`, the worker ends when stdin closes.

    `own` holds fields of `EngineConfig` for this worker alone. Other workers send KV blocks to
    `kv_port`; 0 is any free port. The worker asks the server at `join` to connect, and asks again
    while no server is connected.

    On SIGTERM, the server drains this worker, which ends after at most `drain_timeout` seconds; a
    second SIGTERM ends it at once. Other workers continue its unfinished requests.

    Raises:
        TwinphaseError: the address is not available, the role is unknown, or the server to join has
            another model.
    """
    if role not in get_args(Role):
        raise InvalidRequestError(
            f"A worker's role is not {role!r}.", f"Use one of: {', '.join(get_args(Role))}."
        )
    listener, address = listen(address)
    print(f"listening on {address}", flush=True)
    if ends_with_stdin:
        threading.Thread(target=_end_with_stdin, name="twinphase-parent", daemon=True).start()
    worker = Worker(key, cast(Role, role), own, kv_port)

    def leave(*_: object) -> None:
        link = worker.link
        if link is None or link.is_broken or link.leaving:
            os._exit(0)
        # This must not run on the main thread, which may hold the lock for sending.
        threading.Thread(target=link.leave, name="twinphase-leave", daemon=True).start()
        timer = threading.Timer(drain_timeout, os._exit, (0,))
        timer.daemon = True
        timer.start()

    if join is not None:
        name = "twinphase-join"
        arguments = (worker, join, address, key)
        threading.Thread(target=_keep_joining, args=arguments, name=name, daemon=True).start()
    before = signal.signal(signal.SIGTERM, leave)
    try:
        while worker.link is None or not worker.link.leaving:
            connection, _ = listener.accept()
            with connection:
                try:
                    prepare(connection)
                    stream = authenticate(connection, key, listening=True)
                except (TwinphaseError, OSError) as error:
                    print(f"Refused a connection: {error}", file=sys.stderr, flush=True)
                    continue
                worker.serve(connection, stream)
                if join is not None and worker.refusal is not None:
                    raise worker.refusal
    finally:
        signal.signal(signal.SIGTERM, before)


def _keep_joining(worker: Worker, server: str, address: str, key: ClusterKey) -> None:
    is_reported = False
    while worker.link is None or not worker.link.leaving:
        if worker.link is None or worker.link.is_broken:
            try:
                ask_to_join(server, address, key)
                is_reported = False
            except OSError as error:
                if not is_reported:
                    why = error.strerror or error
                    print(
                        f"Cannot reach {server}: {why}. It is tried again.",
                        file=sys.stderr,
                        flush=True,
                    )
                is_reported = True
            except TwinphaseError as error:
                print(error, file=sys.stderr, flush=True)
                os._exit(error.exit_code)
        time.sleep(JOIN_INTERVAL_SECONDS)


def _end_with_stdin() -> None:
    while os.read(0, 1 << 16):
        pass
    os._exit(0)
