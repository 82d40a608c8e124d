"""Mutual proof of a shared key on a connection, without sending the key.

Each end answers the other's random challenge with an HMAC (RFC 2104, SHA-256). The role is part of
what is signed, so that a challenge sent back to its sender proves nothing. Nothing is encrypted:
an attacker on the network can read and change the messages after the handshake.
"""

from __future__ import annotations

import hmac
import os
import socket
import time

from twinphase.errors import TwinphaseError

HANDSHAKE_SECONDS = 5.0
# A timeout of 0 would mean not to block at all.
MIN_TIMEOUT_SECONDS = 1e-3
GREETING = b"twinphase worker 1\n"
NONCE_BYTES = DIGEST_BYTES = 32


class WrongKeyError(TwinphaseError):
    """The other end has another key, or is not a worker."""


def authenticate(link: socket.socket, key: bytes, *, listening: bool) -> None:
    """Prove to each other that both have `key`; the socket is blocking and has no timeout.

    Raises:
        WrongKeyError: the other end has another key, or is not a worker.
        OSError: the other end did not answer in time, or is gone.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    own = os.urandom(NONCE_BYTES)
    roles = (b"listens", b"connects") if listening else (b"connects", b"listens")
    link.settimeout(HANDSHAKE_SECONDS)
    try:
        link.sendall(GREETING + own)
        if receive_exactly(link, len(GREETING), deadline) != GREETING:
            raise WrongKeyError(
                "What answers there is not a twinphase worker.",
                "Check the address and the version.",
            )
        other = bytes(receive_exactly(link, NONCE_BYTES, deadline))
        link.sendall(_proof(key, roles[0], own, other))
        if not hmac.compare_digest(
            receive_exactly(link, DIGEST_BYTES, deadline), _proof(key, roles[1], other, own)
        ):
            raise WrongKeyError(
                "The other worker has another key.", "Start all workers with the same key."
            )
    finally:
        link.settimeout(None)


def receive_exactly(link: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """The next `size` bytes, until `deadline` on `time.monotonic`, which sets the link's timeout.

    Raises:
        ConnectionError: the other end has closed before.
        TimeoutError: they did not come in time.
    """
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if deadline is not None:
            # A timeout alone begins again with each byte, so that slow bytes could hold a thread.
            link.settimeout(max(deadline - time.monotonic(), MIN_TIMEOUT_SECONDS))
        count = link.recv_into(view)
        if not count:
            raise ConnectionError("the connection was closed")
        view = view[count:]
    return data


def _proof(key: bytes, role: bytes, own: bytes, other: bytes) -> bytes:
    return hmac.digest(key, role + own + other, "sha256")
