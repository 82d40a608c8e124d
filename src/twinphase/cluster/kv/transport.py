"""The seam `KVTransport`: KV blocks between workers, over TCP and through shared memory.

A transport offers hashes, and sends the blocks that the receiver wants. Both calls return at
once; threads do the work and report results to `TransportEvents`. A slow receiver fills the
sender's slots, but does not slow the steps of any engine. The receiving end is `intake.py`;
`pushes.py` chooses the blocks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import queue
import socket
import struct
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from twinphase.cache.prefix_cache import CachedBlock
from twinphase.cluster.encryption import TlsSocket
from twinphase.cluster.handshake import (
    HANDSHAKE_SECONDS,
    ClusterKey,
    authenticate,
    receive_exactly,
)
from twinphase.cluster.kv.frames import (
    ENVELOPE,
    Ack,
    Frame,
    Hello,
    Message,
    Offer,
    ProtocolError,
    Wanted,
    checksum,
    decode_header,
    encode_message,
    open_envelope,
)
from twinphase.errors import TwinphaseError

SEND_TIMEOUT_SECONDS = 10.0
NO_SHRINKING = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class TransportEvents(Protocol):
    """Callbacks of a transport; its threads call them."""

    def wanted(self, number: int, wanted: list[bool]) -> None:
        """The answer to an offer."""

    def acknowledged(self, numbers: list[int], verdicts: list[str]) -> None:
        """The receiver's verdict on each frame."""

    def room(self) -> None:
        """A slot is free again."""

    def lost(self, transport: KVTransport, reason: str) -> None:
        """The other end is unreachable or gone; this is the transport's last event."""


@dataclass(frozen=True)
class Outgoing:
    """A block of `length` bytes in a slot."""

    number: int
    block: CachedBlock
    slot: int
    length: int


class KVTransport(Protocol):
    """A connection to one other worker."""

    def offer(self, number: int, hashes: list[bytes]) -> None:
        """Ask which of these blocks the other end wants."""

    def send(self, outgoing: list[Outgoing]) -> None:
        """Send blocks; a slot becomes free when its block was sent."""

    def close(self) -> None:
        """Drop the connection."""


class SharedSlots:
    """Memory for blocks in transfer; workers on this machine may map it and copy blocks from it."""

    def __init__(self, count: int, nbytes: int) -> None:
        """`count` slots of `nbytes` bytes."""
        self.nbytes = -(-nbytes // 64) * 64
        self.descriptor = os.memfd_create("twinphase-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # A transport's thread may outlive its owner.
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, count * self.nbytes)
        # Reading mapped memory that was truncated would raise SIGBUS.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, NO_SHRINKING)
        self._memory = memoryview(mmap.mmap(self.descriptor, count * self.nbytes))
        self._free = list(range(count))
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """A free slot, or None."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        """Free a slot; a receiver that still reads the old block sees a wrong checksum."""
        with self._lock:
            self._free.append(slot)

    def view(self, slot: int, length: int) -> memoryview:
        return self._memory[slot * self.nbytes :][:length]


class SocketTransport:
    """A socket transport: blocks follow their headers, or lie in shared memory on one machine."""

    def __init__(
        self,
        address: str,
        key: ClusterKey,
        fingerprint: str,
        slots: SharedSlots,
        events: TransportEvents,
    ) -> None:
        """Connect in a thread."""
        self.address = address
        self._key = key
        self._fingerprint = fingerprint
        self._slots = slots
        self._events = events
        self._shared = address.startswith("unix:")
        self._jobs: queue.SimpleQueue[Offer | Outgoing | None] = queue.SimpleQueue()
        self._away: dict[int, int] = {}  # Slots that the receiver may still read, by frame number.
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        self._gone = False
        threading.Thread(target=self._run, name="twinphase-kv-send", daemon=True).start()

    def offer(self, number: int, hashes: list[bytes]) -> None:
        self._jobs.put(Offer(number, hashes))

    def send(self, outgoing: list[Outgoing]) -> None:
        with self._lock:
            gone = self._gone
            if not gone:
                self._away.update({one.number: one.slot for one in outgoing})
        for one in outgoing:
            if gone:
                self._slots.give(one.slot)
            else:
                self._jobs.put(one)

    def close(self) -> None:
        self._jobs.put(None)
        if self._link is not None:
            with suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        reason = "it was closed"
        try:
            with connect(self.address) as link:
                self._link = link
                stream = self._greet(link)
                threading.Thread(
                    target=self._read, args=(stream,), name="twinphase-kv-acks", daemon=True
                ).start()
                try:
                    self._work(stream)
                finally:
                    with suppress(OSError):
                        link.shutdown(socket.SHUT_RDWR)  # This wakes the reading thread.
        except TwinphaseError as error:
            reason = error.cause
        except OSError as error:
            reason = f"{error.strerror or error}"
        self._lose(reason)

    def _work(self, link: socket.socket | TlsSocket) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Offer):
                link.sendall(encode_message(job))
            else:
                self._send(link, job)

    def _greet(self, link: socket.socket) -> socket.socket | TlsSocket:
        stream = authenticate(link, self._key, listening=False)
        link.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_TIMEOUT_SECONDS), 0)
        )
        if self._shared:
            socket.send_fds(link, [b"M"], [self._slots.descriptor])
        stream.sendall(
            encode_message(Hello(self._fingerprint, self._slots.nbytes if self._shared else 0))
        )
        link.settimeout(HANDSHAKE_SECONDS)
        answer, _ = read_message(stream)
        link.settimeout(None)
        if not isinstance(answer, Hello) or answer.fingerprint != self._fingerprint:
            raise ProtocolError(
                "The other worker's KV blocks are of another kind.",
                "Run the same model and version.",
            )
        return stream

    def _send(self, link: socket.socket | TlsSocket, outgoing: Outgoing) -> None:
        view = self._slots.view(outgoing.slot, outgoing.length)
        block = outgoing.block
        frame = Frame(
            outgoing.number,
            block.block_hash,
            block.parent,
            block.index,
            list(block.token_ids),
            outgoing.length,
            checksum=checksum(block, view),
            slot=outgoing.slot if self._shared else None,
        )
        if self._shared:
            link.sendall(encode_message(frame))
        else:
            link.sendall(encode_message(frame, outgoing.length))
            link.sendall(view)
            self._free([outgoing.number])

    def _read(self, link: socket.socket | TlsSocket) -> None:
        reason = "the connection was closed"
        try:
            while True:
                message, _ = read_message(link)
                if isinstance(message, Wanted):
                    self._events.wanted(message.number, message.wanted)
                elif isinstance(message, Ack) and len(message.numbers) == len(message.verdicts):
                    self._free(message.numbers)
                    self._events.acknowledged(message.numbers, message.verdicts)
        except TwinphaseError as error:
            reason = error.cause
        except OSError as error:
            reason = f"{error.strerror or error}"
        self._lose(reason)
        self.close()

    def _free(self, numbers: list[int]) -> None:
        with self._lock:
            slots = [self._away.pop(number) for number in numbers if number in self._away]
        for slot in slots:
            self._slots.give(slot)
        if slots:
            self._events.room()

    def _lose(self, reason: str) -> None:
        with self._lock:
            known = self._gone
            self._gone = True
            numbers = list(self._away)
        self._free(numbers)
        if not known:
            self._events.lost(self, reason)


def unix_names() -> str:
    """Prefix of the abstract sockets' names (unix(7)) of workers here; they leave no files.

    The prefix is unique per machine and network namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"twinphase-kv-{boot}-{Path('/proc/self/ns/net').stat().st_ino}-"


def connect(address: str) -> socket.socket:
    """Connect to "tcp:HOST:PORT", or to the abstract socket "unix:NAME".

    Raises:
        OSError: nothing listens there.
    """
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect("\0" + rest)
        except OSError:
            link.close()
            raise
        return link
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not port.isdecimal():
        raise OSError(f"{address!r} is not an address of a worker's port for KV blocks")
    link = socket.create_connection((host, int(port)), HANDSHAKE_SECONDS)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def read_message(
    link: socket.socket | TlsSocket, max_payload_bytes: int = 0
) -> tuple[Message, bytearray]:
    """The next message and its payload.

    Raises:
        ProtocolError: the data is not a KV message, or its payload exceeds `max_payload_bytes`.
        OSError: the other end is gone.
    """
    header_bytes, payload_bytes = open_envelope(receive_exactly(link, ENVELOPE.size))
    if payload_bytes > max_payload_bytes:
        raise ProtocolError(
            f"A KV message has {payload_bytes} bytes, more than a block.",
            "Run one version everywhere.",
        )
    return decode_header(receive_exactly(link, header_bytes)), receive_exactly(link, payload_bytes)
