"""The sending end of KV blocks: sends each prompt block while the next chunk is computed.

The engine's thread copies blocks into slots between two steps. The transport's threads do
everything else, so that the end of a push is reported while the next prompt is computed. No block
is pinned: an unsent block may be evicted like any other, the most recently used last, and the
receiver then gets a shorter prefix. The router decides where blocks are pushed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from twinphase.cache.prefix_cache import CachedBlock
from twinphase.cluster.handshake import ClusterKey
from twinphase.cluster.kv.frames import frame_bytes
from twinphase.cluster.kv.transport import (
    KVTransport,
    Outgoing,
    SharedSlots,
    SocketTransport,
    unix_names,
)
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.process.messages import Pushed, PushTo
from twinphase.request import Request

TOTAL_SLOT_BYTES = 64 << 20
MAX_SLOTS = 256
MIN_SLOTS = 4
MAX_BLOCKS_PER_STEP = 64
# Buffers for more blocks would be allocated on each read, which takes longer than the copy.
MAX_BLOCKS_PER_READ = 4
# A connection that is idle for one to two times this long is closed. Otherwise, after changes of
# roles, each pair of workers would keep a connection, and each worker its slots.
IDLE_SECONDS = 15.0
STORED_VERDICTS = frozenset({"stored", "known"})


@dataclass
class _Push:
    """The blocks of one request, or, without a request, of a prefix cache.

    Attributes:
        wanted: whether the receiver lacks each block; None until it answers.
        next: index of the first block that was not passed to the transport yet.
        away: numbers of frames that are not acknowledged yet.
        finished: time at which the request finished, by the engine's clock.
    """

    request: Request | None
    to: PushTo
    transport: KVTransport
    blocks: list[CachedBlock]
    wanted: list[bool] | None = None
    next: int = 0
    away: set[int] = field(default_factory=set)
    num_stored: int = 0
    num_early: int = 0
    num_bytes: int = 0
    finished: float | None = None
    problem: str = ""
    timer: threading.Timer | None = None

    @property
    def is_done(self) -> bool:
        return bool(self.problem) or (
            self.wanted is not None and self.next == len(self.blocks) and not self.away
        )


class BlockPushes:
    """KV blocks that an engine sends to other workers."""

    def __init__(
        self,
        loaded: LoadedEngine,
        key: ClusterKey,
        wake: Callable[[], None],
        report: Callable[[Pushed], None],
    ) -> None:
        """`wake` makes the engine's thread call `progress` soon; any thread may call `report`."""
        self._backend = loaded.backend
        self._key = key
        self._wake = wake
        self._report = report
        self._kv_cache = loaded.engine.scheduler.kv_cache
        self._prefix_cache = self._kv_cache.prefix_cache
        self._clock = loaded.engine.clock
        self._nbytes = frame_bytes(loaded)
        self._slots: SharedSlots | None = None
        self._transports: dict[str, KVTransport] = {}
        self._used: set[str] = set()  # Addresses of transports used since the last `_close_idle`.
        self._sweep: threading.Timer | None = None
        self._pushes: dict[int, _Push] = {}  # By the number of their offer.
        self._frames: dict[int, _Push] = {}  # By the number of a frame that is not acknowledged.
        self._numbers = itertools.count()
        # Guards everything above.
        self._lock = threading.Lock()

    def begin(self, request: Request, to: PushTo) -> None:
        """Push the full blocks of a request's prompt; `Pushed` reports the result."""
        count = len(request.prompt_token_ids) // self._prefix_cache.block_size
        self._begin(
            request, to, [self._prefix_cache.block(request, index) for index in range(count)]
        )

    def hand_over(self, to: PushTo) -> None:
        """Push all cached blocks that no request holds."""
        self._begin(None, to, self._kv_cache.hot_blocks())
        self._wake()

    def _begin(self, request: Request | None, to: PushTo, blocks: list[CachedBlock]) -> None:
        with self._lock:
            number = next(self._numbers)
            transport = self._transport(to)
            push = self._pushes[number] = _Push(
                request, to, transport, blocks, wanted=None if blocks else []
            )
            if blocks:
                transport.offer(number, [block.block_hash for block in blocks])
            if request is None:
                self._finish(push)

    def progress(self) -> None:
        """Send newly computed blocks; called on the engine's thread between two steps."""
        if not self._pushes:
            return
        with self._lock:
            room = MAX_BLOCKS_PER_STEP
            for push in self._pushes.values():
                if (
                    push.finished is None
                    and push.request is not None
                    and push.request.finish_reason is not None
                ):
                    self._finish(push)
                if push.wanted is not None and not push.problem:
                    room -= self._send(push, room)
            self._end_done()

    def close(self) -> None:
        """Abandon all unfinished pushes."""
        for push in list(self._pushes.values()):
            if push.timer is not None:
                push.timer.cancel()
        if self._sweep is not None:
            self._sweep.cancel()
        for transport in list(self._transports.values()):
            transport.close()
        self._pushes.clear()

    # The transports' threads call the methods below.
    def wanted(self, number: int, wanted: list[bool]) -> None:
        with self._lock:
            push = self._pushes.get(number)
            if push is not None and push.wanted is None and len(wanted) == len(push.blocks):
                push.wanted = wanted
                push.num_stored += wanted.count(False)
        self._wake()

    def acknowledged(self, numbers: list[int], verdicts: list[str]) -> None:
        with self._lock:
            for number, verdict in zip(numbers, verdicts, strict=True):
                push = self._frames.pop(number, None)
                if push is not None:
                    push.away.discard(number)
                    push.num_stored += verdict in STORED_VERDICTS
                    push.num_early += verdict in STORED_VERDICTS and push.finished is None
            self._end_done()

    def room(self) -> None:
        if any(push.next < len(push.blocks) for push in list(self._pushes.values())):
            self._wake()

    def lost(self, transport: KVTransport, reason: str) -> None:
        with self._lock:
            for address in [
                address for address, known in self._transports.items() if known is transport
            ]:
                del self._transports[address]
            for push in self._pushes.values():
                if push.transport is transport:
                    push.problem = push.problem or reason
            self._end_done()

    # The caller of each method below holds the lock.
    def _transport(self, to: PushTo) -> KVTransport:
        near = (address for address in to.addresses if address.startswith("unix:" + unix_names()))
        address = next(near, None) or next(
            (address for address in to.addresses if address.startswith("tcp:")), ""
        )
        if address not in self._transports:
            if self._slots is None:
                count = min(MAX_SLOTS, max(MIN_SLOTS, TOTAL_SLOT_BYTES // self._nbytes))
                self._slots = SharedSlots(count, self._nbytes)
            fingerprint = self._backend.kv_fingerprint
            self._transports[address] = SocketTransport(
                address, self._key, fingerprint, self._slots, self
            )
        self._used.add(address)
        if self._sweep is None:
            self._sweep_later()
        return self._transports[address]

    def _sweep_later(self) -> None:
        self._sweep = threading.Timer(IDLE_SECONDS, self._close_idle)
        self._sweep.daemon = True
        self._sweep.start()

    def _close_idle(self) -> None:
        """Close the connections that no push has used since the last call."""
        with self._lock:
            self._sweep = None
            busy = {id(push.transport) for push in self._pushes.values()}
            for address, transport in list(self._transports.items()):
                if address not in self._used and id(transport) not in busy:
                    del self._transports[address]
                    transport.close()
            self._used.clear()
            if self._transports:
                self._sweep_later()
            else:
                self._slots = None

    def _finish(self, push: _Push) -> None:
        push.finished = self._clock()

        def end_lease() -> None:
            with self._lock:
                push.problem = push.problem or f"no answer in {push.to.lease:g} s"
                self._end_done()

        push.timer = threading.Timer(push.to.lease, end_lease)
        push.timer.daemon = True
        push.timer.start()

    def _send(self, push: _Push, most: int) -> int:
        """Send computed blocks that the receiver wants, in order; returns how many."""
        assert push.wanted is not None and self._slots is not None
        chosen: list[tuple[CachedBlock, int, int]] = []
        while push.next < len(push.blocks) and len(chosen) < most:
            block = push.blocks[push.next]
            if push.wanted[push.next]:
                block_id = self._prefix_cache.find(block.block_hash)
                if block_id is None:
                    # These blocks are not computed yet, or evicted: blocks after an evicted one are
                    # useless.
                    push.next = len(push.blocks) if push.finished is not None else push.next
                    break
                slot = self._slots.take()
                if slot is None:
                    break
                chosen.append((block, block_id, slot))
            push.next += 1
        if chosen:
            self._copy(push, chosen)
            if len(chosen) == most:
                self._wake()
        return len(chosen)

    def _copy(self, push: _Push, chosen: list[tuple[CachedBlock, int, int]]) -> None:
        assert self._slots is not None
        outgoing = []
        for (block, _, slot), bits in zip(
            chosen, self._read([block_id for _, block_id, _ in chosen]), strict=True
        ):
            self._slots.view(slot, len(bits))[:] = bits
            number = next(self._numbers)
            outgoing.append(Outgoing(number, block, slot, len(bits)))
            push.away.add(number)
            push.num_bytes += len(bits)
            self._frames[number] = push
        push.transport.send(outgoing)

    def _read(self, block_ids: list[int]) -> Iterator[bytes]:
        for start in range(0, len(block_ids), MAX_BLOCKS_PER_READ):
            yield from self._backend.read_blocks(block_ids[start : start + MAX_BLOCKS_PER_READ])

    def _end_done(self) -> None:
        for number, push in list(self._pushes.items()):
            if push.finished is not None and push.is_done:
                self._end(number, push)

    def _end(self, number: int, push: _Push) -> None:
        del self._pushes[number]
        for frame in push.away:
            self._frames.pop(frame, None)
        if push.timer is not None:
            push.timer.cancel()
            # The timer refers to the push, which would keep the memory of the slots.
            push.timer = None
        late = self._clock() - push.finished if push.finished is not None else 0.0
        name = push.request.request_id if push.request is not None else ""
        self._report(
            Pushed(
                name,
                num_blocks=len(push.blocks),
                num_stored=push.num_stored,
                num_early=push.num_early,
                num_bytes=push.num_bytes,
                seconds=late,
                problem=push.problem,
            )
        )
