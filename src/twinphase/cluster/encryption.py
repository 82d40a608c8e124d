"""TLS 1.3 for connections between members of a cluster, by OpenSSL.

The listening end shows a certificate that its process has made and signed for itself. It vouches
for nothing by itself: `handshake.py` binds it to the cluster's key. Not for the server's own HTTPS.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import ssl
import threading
from collections.abc import Callable
from functools import cache

# What is encrypted before it is sent: enough to keep the other end busy meanwhile.
CHUNK_BYTES = 1 << 18
RECEIVE_BYTES = 1 << 18
MAX_MESSAGE_BYTES = 1 << 14


class TlsSession:
    """One connection's keys: plain bytes to encrypted ones and back, without a socket.

    One thread at a time may call it with what is sent, and another with what was received.

    Attributes:
        certificate: SHA-256 of the listening end's certificate, once the handshake is done.
    """

    def __init__(self, *, listening: bool) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        context, self.certificate = (
            _listening_context() if listening else (_connecting_context(), b"")
        )
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=listening)
        # OpenSSL allows a connection one thread at a time.
        self._lock = threading.Lock()

    def handshake(self, link: socket.socket, set_timeout: Callable[[], None]) -> None:
        """Agree on keys; `set_timeout` is called before each wait.

        Raises:
            OSError: the other end does not speak TLS 1.3, did not answer in time, or is gone.
        """
        done = False
        while not done:
            try:
                self._object.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            finally:
                if data := self._outgoing.read():
                    link.sendall(data)
            if not done:
                set_timeout()
                if not (data := link.recv(MAX_MESSAGE_BYTES)):
                    raise ConnectionError("the connection was closed")
                self.feed(data)
        if not self._object.server_side:
            self.certificate = hashlib.sha256(self._object.getpeercert(True) or b"").digest()

    def encrypt(self, data: bytes | memoryview) -> bytes:
        """What to send for these bytes, in this order."""
        view = memoryview(data)
        with self._lock:
            while view:
                view = view[self._object.write(view) :]
            return self._outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        """The bytes that are whole now.

        Raises:
            OSError: what came was changed on the way.
        """
        found = []
        with self._lock:
            self._incoming.write(data)
            try:
                while piece := self._object.read(MAX_MESSAGE_BYTES):
                    found.append(piece)
            except ssl.SSLWantReadError:
                pass
        return b"".join(found)

    def read_into(self, view: memoryview) -> int | None:
        """The number of bytes read of those that were received; None where more are needed."""
        with self._lock:
            try:
                return self._object.read(len(view), view)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                return None

    def feed(self, data: bytes) -> None:
        """Take what was received, for `read_into`."""
        with self._lock:
            self._incoming.write(data)


class TlsSocket:
    """A blocking socket's view that encrypts; sent from one thread, and read by another."""

    def __init__(self, link: socket.socket, session: TlsSession) -> None:
        """The link stays the caller's, to shut down and to close."""
        self.link = link
        self.session = session
        self.settimeout = link.settimeout
        self.shutdown = link.shutdown

    def sendall(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), CHUNK_BYTES):
            self.link.sendall(self.session.encrypt(view[start : start + CHUNK_BYTES]))

    def recv_into(self, view: memoryview) -> int:
        while (count := self.session.read_into(view)) is None:
            data = self.link.recv(RECEIVE_BYTES)
            if not data:
                return 0
            self.session.feed(data)
        return count

    def recv(self, size: int) -> bytes:
        data = bytearray(min(size, MAX_MESSAGE_BYTES))
        return bytes(data[: self.recv_into(memoryview(data))])


@cache
def _connecting_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # No authority signs these certificates: the proof of the key covers the one that was shown.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@cache
def _listening_context() -> tuple[ssl.SSLContext, bytes]:
    """A server's TLS context with this process's own certificate, and the certificate's SHA-256."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private_key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "twinphase worker")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, private_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .sign(private_key, hashes.SHA256())
    )
    pem = private_key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Sessions are not resumed, and an end that only sends would never read the tickets.
    context.num_tickets = 0
    # `ssl` reads keys from files only; this one is in memory.
    descriptor = os.memfd_create("twinphase-certificate", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context, hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()
