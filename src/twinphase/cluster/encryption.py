"""TLS 1.3 for connections between members of a cluster, by OpenSSL.

The listening end shows a certificate that its process has made and signed for itself. A self-signed
certificate proves nothing by itself: `handshake.py` binds it to the cluster's key. The server's own
HTTPS does not use this file.
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

# Bytes encrypted per call: enough to keep the other end busy until the next call.
CHUNK_BYTES = 1 << 18
RECEIVE_BYTES = 1 << 18
MAX_MESSAGE_BYTES = 1 << 14


class TlsSession:
    """The TLS state of one connection: encrypts and decrypts bytes, without a socket.

    One thread may encrypt while another one decrypts, but no two threads may do the same.

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
        # OpenSSL allows only one thread at a time to use a connection.
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
        """Encrypt bytes; the results must be sent in the order of the calls."""
        view = memoryview(data)
        with self._lock:
            while view:
                view = view[self._object.write(view) :]
            return self._outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        """Decrypt received bytes; returns the plain bytes that are complete.

        Raises:
            OSError: the bytes were changed on the way.
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
        """Read decrypted bytes into `view`; return their number, or None if input is missing."""
        with self._lock:
            try:
                return self._object.read(len(view), view)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                return None

    def feed(self, data: bytes) -> None:
        """Add received bytes for `read_into`."""
        with self._lock:
            self._incoming.write(data)


class TlsSocket:
    """Wraps a blocking socket in TLS; one thread may send while another receives."""

    def __init__(self, link: socket.socket, session: TlsSession) -> None:
        """The caller keeps the ownership of `link`, and closes it."""
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
    # These certificates are self-signed: the proof of the key covers the certificate shown.
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
