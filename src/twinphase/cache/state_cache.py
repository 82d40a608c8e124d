"""Slots for the states of recurrent layers: of running requests, and snapshots to begin from.

It handles integers only; the backend maps slots to memory. A running request has two slots of its
own: a step reads one and writes the other, so that a failed step can be computed again. Steps with
few rows leave these rows beside the state that they read, and a later step applies them. A
*snapshot* is a slot whose name is the hash of the block that ends at the state's position; the hash
identifies the bits of the state as it does those of the block. It is written once, by a step that
passes its position, and is only read afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from twinphase.cache.block_pool import BlockPool
from twinphase.request import OWN_SLOTS, Request, StateSlots

# Holds the state before a first token, and is never written.
ZERO_SLOT = 0
# The most tokens of an answer between two snapshots.
MAX_OUTPUT_INTERVAL = 256


class StateCache:
    """The slots of requests, and snapshots.

    Attributes:
        pool: the slots; when one is needed, the least recently used snapshot that no request reads
            is evicted.
        interval: tokens of a prompt between snapshots; one more is kept at its end.
    """

    def __init__(self, num_slots: int, interval: int) -> None:
        """Manage `num_slots` slots; the first one holds zeros."""
        self.pool = BlockPool(num_slots, on_evict=self._evicted)
        self.pool.allocate(1)
        self.interval = interval
        self._slot_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    @property
    def num_snapshots(self) -> int:
        return len(self._slot_of)

    @property
    def usage(self) -> float:
        """Fraction of the slots that requests hold."""
        return (self.pool.num_held - 1) / (self.pool.num_blocks - 1)

    def has(self, block_hash: bytes) -> bool:
        """Whether there is a snapshot where that block ends."""
        return block_hash in self._slot_of

    def can_start(self, block_hash: bytes | None) -> bool:
        """Whether there are slots for a request that begins at that snapshot, or at 0."""
        taken = block_hash is not None and not self.pool.is_held(self._slot_of[block_hash])
        return self.pool.num_available >= OWN_SLOTS + taken

    def start(self, request: Request, position: int, block_hash: bytes | None) -> None:
        """Let a request begin, or continue, at a snapshot's `position`; at 0 without a hash.

        Raises:
            CacheFullError: there are not enough slots (`can_start`).
        """
        source = ZERO_SLOT if block_hash is None else self._slot_of[block_hash]
        if source != ZERO_SLOT:
            self.pool.share([source])
        if request.state is None:
            first, second = self.pool.allocate(OWN_SLOTS)
            request.state = StateSlots(source, (first, second))
        else:
            self._leave(request.state)
            request.state.source = source
            request.state.pending = 0
        request.state.last_snapshot = position

    def plan(self, state: StateSlots, positions: Iterable[int]) -> None:
        """Take a slot for a snapshot at each of these positions of the next step, if there is one.

        The first positions go first.
        """
        for position in positions:
            if self.pool.num_available:
                state.snapshots[position] = self.pool.allocate(1)[0]

    def advance(
        self, state: StateSlots, rows: int, names: Mapping[int, bytes], logged: bool
    ) -> None:
        """Note that a step has written the target, with `rows` accepted rows of drafts.

        With `logged`, it has left the source's state unchanged, and `rows` more beside it. `names`
        are the hashes of the blocks that end at the positions of the planned snapshots.
        """
        if logged:
            state.pending += rows
        else:
            self._leave(state)
            state.source = state.target
            state.pending = rows
        for position, slot in state.snapshots.items():
            if names[position] not in self._slot_of:
                self._slot_of[names[position]] = slot
                self._name_of[slot] = names[position]
            state.last_snapshot = position
        self._release(state.snapshots.values())
        state.snapshots = {}

    def free(self, request: Request) -> None:
        """Take a request's slots; its snapshots can still be found until they are evicted."""
        if request.state is not None:
            self._leave(request.state)
            self._release([*request.state.own, *request.state.snapshots.values()])
            request.state = None

    def drop(self, block_hash: bytes) -> None:
        """Drop the snapshot of a block that is no longer cached."""
        slot = self._slot_of.pop(block_hash, None)
        if slot is not None:
            del self._name_of[slot]
            self.pool.empty(slot)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Prove that no slot is lost, and that no snapshot is written (AssertionError if not)."""
        owned: list[Sequence[int]] = [[ZERO_SLOT]]
        written: list[int] = []
        for request in requests:
            if (state := request.state) is not None:
                shared = [] if state.source in (ZERO_SLOT, *state.own) else [state.source]
                written += [*state.own, *state.snapshots.values()]
                owned.append([*state.own, *state.snapshots.values(), *shared])
        self.pool.check_integrity(owned)
        if len(set(written)) < len(written) or self._name_of.keys() & set(written):
            raise AssertionError("a slot has two writers, or a snapshot is written")
        if {name: slot for slot, name in self._name_of.items()} != self._slot_of:
            raise AssertionError("the snapshots' two indices differ")

    def _leave(self, state: StateSlots) -> None:
        """Stop reading the snapshot that the request began from."""
        if state.source not in (ZERO_SLOT, *state.own):
            self._release([state.source])

    def _release(self, slots: Iterable[int]) -> None:
        self.pool.release(list(slots), cached=self._name_of.__contains__)

    def _evicted(self, slot: int) -> None:
        del self._slot_of[self._name_of.pop(slot)]
