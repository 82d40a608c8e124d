"""The first bytes of each connection of a cluster: encryption, and mutual proof of the shared key.

    greeting    protocol and version | whether this end demands encryption, needs none, or has none
    TLS 1.3     if either end demands it (`encryption.py`); `auto` does off this machine
    challenge   32 random bytes each way
    proof       HMAC (RFC 2104, SHA-256) with the key over the role, both greetings, the listening
                end's certificate and both challenges

The key is never sent. The role is part of what is signed, so that a challenge sent back to its
sender proves nothing. The certificate is signed too (RFC 5929, tls-server-end-point): an attacker
between the ends can only show another certificate, and has no proof for it. The greetings are
signed too, so that an attacker cannot downgrade the connection to no encryption.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import time
from dataclasses import dataclass
from typing import Literal

from twinphase.cluster.encryption import TlsSession, TlsSocket
from twinphase.errors import TwinphaseError

HANDSHAKE_SECONDS = 5.0
# A timeout of 0 would make the socket non-blocking.
MIN_TIMEOUT_SECONDS = 1e-3
PROTOCOL = b"twinphase worker 2 "
DEMANDED = b"must"
NOT_NEEDED = b"may "
SWITCHED_OFF = b"none"
GREETING_BYTES = len(PROTOCOL) + len(DEMANDED) + 1
NONCE_BYTES = DIGEST_BYTES = 32

Encryption = Literal["auto", "on", "off"]


class WrongKeyError(TwinphaseError):
    """The other end has another key, or is not a worker."""


class EncryptionMismatchError(TwinphaseError):
    """One end demands encryption, and the other has it switched off."""


@dataclass(frozen=True)
class ClusterKey:
    """The secret and the settings that all members of a cluster share.

    Attributes:
        secret: the key, which proves membership.
        encryption: `auto` encrypts connections that leave the machine, `on` also those to its own
            addresses, `off` none. Unix sockets are never encrypted.
    """

    secret: bytes
    encryption: Encryption = "auto"

    def stance(self, link: socket.socket) -> bytes:
        """The byte of the greeting that states whether this end demands encryption."""
        if link.family == socket.AF_UNIX:
            return NOT_NEEDED
        if self.encryption != "auto":
            return DEMANDED if self.encryption == "on" else SWITCHED_OFF
        ends = (link.getsockname()[0], link.getpeername()[0])
        is_local = all(ipaddress.ip_address(end).is_loopback for end in ends)
        return NOT_NEEDED if is_local else DEMANDED


def authenticate(
    link: socket.socket, key: ClusterKey, *, listening: bool
) -> socket.socket | TlsSocket:
    """Prove to each other that both ends have `key`, and encrypt if either end demands it.

    Args:
        link: a blocking socket without a timeout; it still has to be closed by the caller.
        key: the cluster's key.
        listening: True at the end that accepted the connection.

    Returns:
        The socket to use from now on.

    Raises:
        WrongKeyError: the other end has another key, or is not a worker.
        EncryptionMismatchError: one end demands encryption, and the other has it switched off.
        OSError: the other end did not answer in time, or is gone; or TLS failed.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    link.settimeout(HANDSHAKE_SECONDS)
    try:
        own_stance = key.stance(link)
        other_stance = _greet(link, own_stance, deadline)
        stances = (own_stance, other_stance)
        stream: socket.socket | TlsSocket = link
        certificate = b""
        if DEMANDED in stances:
            session = TlsSession(listening=listening)
            session.handshake(link, lambda: _set_timeout(link, deadline))
            certificate = session.certificate
            stream = TlsSocket(link, session)
        context = b"".join((*(stances if listening else reversed(stances)), certificate))
        _prove(stream, key.secret, context, listening, deadline)
        return stream
    finally:
        link.settimeout(None)


def _greet(link: socket.socket, stance: bytes, deadline: float) -> bytes:
    """Exchange greetings; returns the other end's stance."""
    link.sendall(PROTOCOL + stance + b"\n")
    greeting = bytes(receive_exactly(link, GREETING_BYTES, deadline))
    other = greeting.removeprefix(PROTOCOL)[:-1]
    if not greeting.startswith(PROTOCOL) or other not in (DEMANDED, NOT_NEEDED, SWITCHED_OFF):
        raise WrongKeyError(
            f"The other end is not a twinphase worker of this version; it sent {greeting!r}.",
            "Check the address, and install the same version on both.",
        )
    if {stance, other} == {DEMANDED, SWITCHED_OFF}:
        off, demanding = ("this", "the other") if stance == SWITCHED_OFF else ("the other", "this")
        raise EncryptionMismatchError(
            f"Encryption is switched off at {off} end, and {demanding} end demands it.",
            "Give both the same --cluster-encryption.",
        )
    return other


def _prove(
    stream: socket.socket | TlsSocket,
    secret: bytes,
    context: bytes,
    listening: bool,
    deadline: float,
) -> None:
    roles = (b"listens", b"connects") if listening else (b"connects", b"listens")
    own = os.urandom(NONCE_BYTES)
    stream.sendall(own)
    other = bytes(receive_exactly(stream, NONCE_BYTES, deadline))
    stream.sendall(_proof(secret, roles[0] + context, own, other))
    expected = _proof(secret, roles[1] + context, other, own)
    if not hmac.compare_digest(receive_exactly(stream, DIGEST_BYTES, deadline), expected):
        encrypted = isinstance(stream, TlsSocket)
        between = ", or something between both ends decrypts the connection" if encrypted else ""
        raise WrongKeyError(
            f"The other worker has another key{between}.", "Start all workers with the same key."
        )


def receive_exactly(
    link: socket.socket | TlsSocket, size: int, deadline: float | None = None
) -> bytearray:
    """Receive `size` bytes; `deadline` is in `time.monotonic` seconds and sets the link's timeout.

    Raises:
        ConnectionError: the other end closed the connection first.
        TimeoutError: the bytes did not arrive in time.
    """
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if deadline is not None:
            _set_timeout(link, deadline)
        count = link.recv_into(view)
        if not count:
            raise ConnectionError("the connection was closed")
        view = view[count:]
    return data


def _set_timeout(link: socket.socket | TlsSocket, deadline: float) -> None:
    # A fixed timeout would restart with each byte, so that a slow sender could block a thread.
    link.settimeout(max(deadline - time.monotonic(), MIN_TIMEOUT_SECONDS))


def _proof(secret: bytes, context: bytes, own: bytes, other: bytes) -> bytes:
    return hmac.digest(secret, context + own + other, "sha256")
