"""How a worker joins a running server: it sends its address, and the server connects to it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from twinphase import __version__
from twinphase.cluster.address import connect, listen
from twinphase.cluster.encryption import TlsSocket
from twinphase.cluster.handshake import (
    HANDSHAKE_SECONDS,
    ClusterKey,
    authenticate,
    receive_exactly,
)
from twinphase.cluster.remote import CalledHost
from twinphase.cluster.worker_view import WorkerView
from twinphase.engine.process.wire import encode
from twinphase.errors import InvalidRequestError, TwinphaseError

LOG = logging.getLogger("twinphase.cluster")
MAX_JOIN_BYTES = 1 << 12


class _Join(msgspec.Struct):
    """A worker's request to join; the server returns it, with the reason for a refusal."""

    address: str
    version: str = __version__
    problem: str = ""


class Door:
    """Listens for workers that want to join.

    Attributes:
        address: the address it listens on, with the actual port.
        make: makes a host from a name and an address.
    """

    def __init__(
        self, address: str, key: ClusterKey, make: Callable[[str, str], CalledHost]
    ) -> None:
        """Listen; each worker has to prove that it has the key.

        Raises:
            TwinphaseError: the address is in use or not available.
        """
        self._listener, self.address = listen(address)
        self._key = key
        self.make = make
        self._is_closed = False

    def open(self, views: Mapping[str, WorkerView], add: Callable[[str, CalledHost], None]) -> None:
        """Call `add` with a new name and host for each worker that asks, on the running loop."""
        loop = asyncio.get_running_loop()

        def call(address: str) -> None:
            hosts = [view.host for view in views.values() if view.host.where == address]
            for host in hosts:
                if isinstance(host, CalledHost):
                    host.call()
            if not hosts and not self._is_closed:
                name = f"worker-{len(views)}"
                add(name, self.make(name, address))

        name = "twinphase-join"
        threading.Thread(target=self._serve, args=(loop, call), name=name, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self, loop: asyncio.AbstractEventLoop, call: Callable[[str], None]) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            with link:
                try:
                    stream = authenticate(link, self._key, listening=True)
                    request = _receive(stream)
                    if request.version != __version__:
                        request.problem = (
                            f"The worker is twinphase {request.version}, and the "
                            f"server {__version__}."
                        )
                    stream.sendall(encode(request))
                    if not request.problem:
                        loop.call_soon_threadsafe(call, request.address)
                except (TwinphaseError, OSError, msgspec.MsgspecError) as error:
                    LOG.warning("A worker that wants to join was refused: %s", error)
                except RuntimeError:  # The event loop is closed.
                    return


def ask_to_join(server: str, address: str, key: ClusterKey) -> None:
    """Ask the server at `server` (its `--cluster-listen`) to connect to a worker at `address`.

    Raises:
        TwinphaseError: the server has another key or version, or cannot reach `address`.
        OSError: nothing listens there.
    """
    with connect(server) as link:
        stream = authenticate(link, key, listening=False)
        stream.sendall(encode(_Join(_reachable(address, link))))
        answer = _receive(stream)
    if answer.problem:
        raise InvalidRequestError(answer.problem, "Install the same version on both.")


def _reachable(address: str, link: socket.socket) -> str:
    """The address at which the other end of `link` can reach this machine."""
    host, _, port = address.rpartition(":")
    if link.family == socket.AF_UNIX or address.startswith("unix:"):
        return address
    own = str(link.getsockname()[0])
    with suppress(ValueError):  # The host is a name, not an IP address.
        listens = ipaddress.ip_address(host.strip("[]"))
        if listens.is_unspecified:
            return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"
        if listens.is_loopback and not ipaddress.ip_address(own).is_loopback:
            raise InvalidRequestError(
                f"The server cannot reach a worker that listens on {address}.",
                f"Use --listen {own}:PORT.",
            )
    return address


def _receive(link: socket.socket | TlsSocket) -> _Join:
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    size = min(int.from_bytes(receive_exactly(link, 4, deadline), "little"), MAX_JOIN_BYTES)
    return msgspec.msgpack.decode(receive_exactly(link, size, deadline), type=_Join)
