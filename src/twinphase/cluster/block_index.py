"""Tracks which worker's prefix cache holds which blocks, from the events that workers send.

Hashes are the chain hashes of `cache/prefix_cache.py`: a worker can use a block only if it also
holds the block before it. The index does not know where a worker stores a block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import compress


class BlockIndex:
    """Maps each block hash to the workers that hold the block.

    Each worker numbers its events from 0 (`BlockChanges`). After a gap in the numbers, the index of
    that worker is stale: `apply` returns False, and the caller requests the full list (`replace`).
    """

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}  # Bit of each worker in the masks.
        self._names: list[str] = []  # Worker of each bit, the lowest bit first; "" for free bits.
        self._next_event: dict[str, int] = {}
        self._held: dict[bytes, int] = {}
        self._coming: dict[
            bytes, int
        ] = {}  # Blocks that a worker is computing for a request that was sent there.

    def apply(
        self, worker: str, number: int, stored: Collection[bytes], evicted: Collection[bytes]
    ) -> bool:
        """Apply a worker's event; return False, and change nothing, if an earlier event is missing.

        An event that was applied before is ignored.
        """
        expected = self._next_event.get(worker, 0)
        if number != expected:
            return number < expected
        self._next_event[worker] = number + bool(
            stored or evicted
        )  # as `BlockChanges.take` numbers them
        bit = self._bit(worker)
        held = self._held
        _remove(held, evicted, bit)
        for block in stored:
            held[block] = held.get(block, 0) | bit
        _remove(self._coming, stored, bit)
        return True

    def replace(self, worker: str, next_event: int, stored: Collection[bytes]) -> None:
        """Replace a worker's blocks by its full list; its next event is number `next_event`."""
        self.forget(worker)
        self._next_event[worker] = 0
        self.apply(worker, 0, stored, ())
        self._next_event[worker] = next_event

    def forget(self, worker: str) -> None:
        """Remove a worker that died or left; its events begin at 0 again."""
        self._next_event.pop(worker, None)
        bit = self._bits.pop(worker, 0)
        if bit:
            self._names[bit.bit_length() - 1] = ""
        for table in (self._held, self._coming):
            _remove(table, [block for block, mask in table.items() if mask & bit], bit)

    def expect(self, worker: str, blocks: Iterable[bytes]) -> None:
        """Note that a worker got a request with these blocks, so that the next one hits there."""
        bit = self._bit(worker)
        held = self._held
        coming = self._coming
        for block in blocks:
            if not held.get(block, 0) & bit:
                coming[block] = coming.get(block, 0) | bit

    def give_up(self, worker: str, blocks: Iterable[bytes]) -> None:
        """Stop expecting the blocks of a request that has ended."""
        _remove(self._coming, blocks, self._bit(worker))

    def hits(self, chain: Sequence[bytes]) -> dict[str, int]:
        """Leading blocks of a chain that each worker holds or expects; only workers with some."""
        held = self._held
        coming = self._coming
        mask = -1
        ends = list[tuple[int, int]]()
        for depth, block in enumerate(chain):
            still = mask & (held.get(block, 0) | coming.get(block, 0))
            if still != mask:
                if depth:
                    ends.append((mask & ~still, depth))
                mask = still
                if not mask:
                    break
        if mask and chain:
            ends.append((mask, len(chain)))
        found = dict[str, int]()
        for workers, depth in ends:
            found.update(dict.fromkeys(self._workers(workers), depth))
        return found

    def holders(self, blocks: Iterable[bytes]) -> list[str]:
        """Workers that hold or expect any of these blocks."""
        held = self._held
        coming = self._coming
        mask = 0
        for block in blocks:
            mask |= held.get(block, 0) | coming.get(block, 0)
        return self._workers(mask)

    def _workers(self, mask: int) -> list[str]:
        return list(compress(self._names, map(int, f"{mask:b}"[::-1]))) if mask else []

    def num_held(self, worker: str) -> int:
        """Blocks that a worker holds."""
        bit = self._bits.get(worker, 0)
        return sum(1 for mask in self._held.values() if mask & bit)

    def __len__(self) -> int:
        return len(self._held)

    def _bit(self, worker: str) -> int:
        if worker not in self._bits:
            if "" not in self._names:
                self._names.append("")
            place = self._names.index("")
            self._names[place] = worker
            self._bits[worker] = 1 << place
        return self._bits[worker]


def _remove(table: dict[bytes, int], blocks: Iterable[bytes], bit: int) -> None:
    for block in blocks:
        mask = table.get(block)
        if mask is None:
            continue
        if left := mask & ~bit:
            table[block] = left
        else:
            del table[block]
