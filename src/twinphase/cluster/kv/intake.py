"""The receiving end of KV blocks: verifies blocks, and caches them between two steps.

A block is used only if its fingerprint, checksum and chain hash are right and its values are
finite. Any other block is dropped and counted; this worker then computes that part of the prompt
itself, with the same bits. `cache/` decides what a cache holds.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import queue
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from twinphase.cache.prefix_cache import CachedBlock
from twinphase.cluster.encryption import TlsSocket
from twinphase.cluster.handshake import HANDSHAKE_SECONDS, ClusterKey, authenticate
from twinphase.cluster.kv.frames import (
    Ack,
    Frame,
    Hello,
    Message,
    Offer,
    ProtocolError,
    Wanted,
    checksum,
    encode_message,
    frame_bytes,
    frame_head,
)
from twinphase.cluster.kv.transport import NO_SHRINKING, read_message, unix_names
from twinphase.engine.engine import Engine
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.errors import TwinphaseError

# Storing this number of blocks takes about 20 ms of the engine's thread.
MAX_WAITING_BLOCKS = 64
# Connections, each with a thread, whose other end has not proved the key yet.
MAX_UNPROVEN_CONNECTIONS = 32
LOG = logging.getLogger("twinphase.cluster")


@dataclass(frozen=True)
class _Arrived:
    block: CachedBlock
    payload: bytearray
    reply: Callable[[list[tuple[int, str]]], None]
    number: int


class BlockIntake:
    """Checks received blocks and stores them in an engine's prefix cache.

    Attributes:
        fingerprint: identifies the block format of this engine.
        nbytes: bytes per block, as `Backend.read_blocks` returns it.
        counts: number of received blocks, by verdict.
    """

    def __init__(
        self, loaded: LoadedEngine, call: Callable[[Callable[[Engine], None]], None]
    ) -> None:
        """`call` runs a function on the engine's thread between two steps (`between_steps`)."""
        self._backend = loaded.backend
        self._call = call
        self._prefix_cache = loaded.engine.scheduler.kv_cache.prefix_cache
        self.fingerprint = self._backend.kv_fingerprint
        self.head = frame_head(self.fingerprint)
        self.nbytes = frame_bytes(loaded)
        self.counts: Counter[str] = Counter()
        self._waiting: list[_Arrived] = []
        self._room = threading.Condition()
        self._called = self._closed = False

    def close(self) -> None:
        """Stop storing blocks in the engine."""
        with self._room:
            self._closed = True
            self._room.notify_all()

    def wanted(self, hashes: Sequence[bytes]) -> list[bool]:
        """Whether each block is missing here; a hint, callable from any thread."""
        return [self._prefix_cache.find(block_hash) is None for block_hash in hashes]

    def put(
        self, frame: Frame, payload: bytearray, reply: Callable[[list[tuple[int, str]]], None]
    ) -> None:
        """Check a block and queue it for storing; `reply` gets each block's (number, verdict).

        Waits while `MAX_WAITING_BLOCKS` blocks are queued.
        """
        verdict = self._check(frame, payload)
        if verdict:
            self._count([verdict])
            reply([(frame.number, verdict)])
            return
        with self._room:
            self._room.wait_for(lambda: self._closed or len(self._waiting) < MAX_WAITING_BLOCKS)
            if self._closed:
                return
            self._waiting.append(_Arrived(frame.block, payload, reply, frame.number))
            if not self._called:
                self._called = True
                self._call(self._store)

    def _check(self, frame: Frame, payload: bytearray) -> str:
        if frame.length != self.nbytes or len(payload) != self.nbytes:
            return "length"
        if checksum(frame.block, payload) != frame.checksum:
            return "damaged"
        if not payload.startswith(self.head):
            return "fingerprint"
        return "" if self._backend.has_finite_numbers(payload) else "not_finite"

    def _store(self, engine: Engine) -> None:
        with self._room:
            arrived = list(self._waiting)
            self._waiting.clear()
            self._called = False
            self._room.notify_all()

        def write(block_ids: list[int], numbers: list[int]) -> None:
            self._backend.write_blocks(
                block_ids, [memoryview(arrived[number].payload) for number in numbers]
            )

        try:
            blocks = [arrival.block for arrival in arrived]
            verdicts = [str(verdict) for verdict in engine.accept(blocks, write)]
        except Exception as error:  # Blocks that cannot be stored must not fail any request.
            LOG.warning("KV blocks from another worker could not be stored: %s", error)
            verdicts = ["failed"] * len(arrived)
        self._count(verdicts)
        replies: dict[Callable[[list[tuple[int, str]]], None], list[tuple[int, str]]] = {}
        for arrival, verdict in zip(arrived, verdicts, strict=True):
            replies.setdefault(arrival.reply, []).append((arrival.number, verdict))
        for reply, results in replies.items():
            reply(results)

    def _count(self, verdicts: list[str]) -> None:
        with self._room:
            self.counts.update(verdicts)


class BlockListener:
    """Accepts connections from other workers, and passes their blocks to an intake.

    Attributes:
        addresses: addresses that it listens on, the fastest first.
    """

    def __init__(
        self,
        intake: BlockIntake,
        key: ClusterKey,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        shared_memory: bool = True,
    ) -> None:
        """Listen on `port` of `host` (0: any free port), and on an abstract Unix socket.

        Raises:
            OSError: the address is in use or not available.
        """
        self._intake = intake
        self._key = key
        self._links: set[socket.socket] = set()
        self._unproven = threading.BoundedSemaphore(MAX_UNPROVEN_CONNECTIONS)
        self._closed = False
        tcp = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
        self.addresses = [f"tcp:{host}:{tcp.getsockname()[1]}"]
        self._servers = [tcp]
        if shared_memory:
            name = f"{unix_names()}{secrets.token_hex(8)}"
            unix = socket.socket(socket.AF_UNIX)
            unix.bind("\0" + name)
            unix.listen()
            self.addresses.insert(0, f"unix:{name}")
            self._servers.append(unix)
        for server in self._servers:
            threading.Thread(
                target=self._listen, args=(server,), name="twinphase-kv-listen", daemon=True
            ).start()

    def close(self) -> None:
        """Stop accepting blocks."""
        self._closed = True
        for link in [*self._servers, *self._links]:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _listen(self, server: socket.socket) -> None:
        while not self._closed:
            try:
                link, _ = server.accept()
            except OSError:
                return
            if not self._unproven.acquire(blocking=False):
                link.close()
                LOG.warning("A connection for KV blocks was closed: too many have no proof yet.")
                continue
            self._links.add(link)
            name = "twinphase-kv-receive"
            threading.Thread(
                target=self._serve, args=(link, server.family), name=name, daemon=True
            ).start()

    def _serve(self, link: socket.socket, family: int) -> None:
        try:
            with link:
                try:
                    stream = authenticate(link, self._key, listening=True)
                finally:
                    self._unproven.release()
                _Receiver(link, stream, self._intake, shared=family == socket.AF_UNIX).run()
        except TwinphaseError as error:
            LOG.warning("A worker's connection for KV blocks was refused: %s", error)
        except OSError:
            pass  # The sender is gone; the blocks received so far are a shorter prefix.
        finally:
            self._links.discard(link)


class _Receiver:
    """The receiving end of one connection."""

    def __init__(
        self,
        link: socket.socket,
        stream: socket.socket | TlsSocket,
        intake: BlockIntake,
        *,
        shared: bool,
    ) -> None:
        self._link = link
        self._stream = stream
        self._intake = intake
        self._shared = shared
        self._memory: mmap.mmap | None = None
        self._slot_bytes = 0
        # A queue, since the engine's thread must not wait for a socket.
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Serve until the other end, which has proved its key, closes the connection."""
        self._greet()
        threading.Thread(target=self._answer, name="twinphase-kv-answer", daemon=True).start()
        try:
            self._receive()
        finally:
            self._outbox.put(None)
            if self._memory is not None:
                self._memory.close()  # Unmap at once: this keeps the sender's shared memory alive.

    def _receive(self) -> None:
        while True:
            message, payload = read_message(self._stream, 2 * self._intake.nbytes)
            if isinstance(message, Offer):
                self._outbox.put(Wanted(message.number, self._intake.wanted(message.hashes)))
            elif isinstance(message, Frame):
                self._intake.put(message, self._bits(message, payload), self._reply)
            else:
                raise ProtocolError(
                    "A worker sent a message that belongs to the other end.", "Start it again."
                )

    def _greet(self) -> None:
        self._link.settimeout(HANDSHAKE_SECONDS)
        descriptors = socket.recv_fds(self._link, 1, 1)[1] if self._shared else []
        try:
            hello, _ = read_message(self._stream)
            if isinstance(hello, Hello):
                self._stream.sendall(encode_message(Hello(self._intake.fingerprint)))
            if not isinstance(hello, Hello) or hello.fingerprint != self._intake.fingerprint:
                raise ProtocolError(
                    "Its KV blocks are of another kind.",
                    "Run the same model and version everywhere.",
                )
            if descriptors:
                self._map(descriptors[0], hello.slot_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._link.settimeout(None)

    def _map(self, descriptor: int, slot_bytes: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & NO_SHRINKING != NO_SHRINKING:
            raise ProtocolError(
                "Its shared memory could shrink while it is read.", "Run one version everywhere."
            )
        self._slot_bytes = slot_bytes
        self._memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)

    def _bits(self, frame: Frame, payload: bytearray) -> bytearray:
        """Copy a block, so that the sender cannot change it; a slot out of range has no bytes."""
        if self._memory is None or frame.slot is None:
            return payload
        start = frame.slot * self._slot_bytes
        end = start + min(frame.length, self._slot_bytes)
        with memoryview(self._memory) as memory, memory[start:end] as bits:
            return bytearray(bits)

    def _reply(self, results: list[tuple[int, str]]) -> None:
        numbers = [number for number, _ in results]
        self._outbox.put(Ack(numbers, [verdict for _, verdict in results]))

    def _answer(self) -> None:
        with suppress(OSError):  # A worker that is gone needs no answer.
            while (message := self._outbox.get()) is not None:
                self._stream.sendall(encode_message(message))
