"""The free list of KV cache blocks. Ints only: which block holds what memory is the backend's business."""

from __future__ import annotations

from collections.abc import Iterable

from twinphase.errors import CacheFullError

__all__ = ["BlockPool"]


class BlockPool:
    """Block ids 0 .. num_blocks - 1, each either free or allocated to exactly one owner."""

    def __init__(self, num_blocks: int) -> None:
        """All blocks are free. The lowest id is handed out first, so that a lone request's blocks are contiguous."""
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: blocks freed last are the warmest in cache
        self._allocated = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks, all or none.

        Raises:
            CacheFullError: fewer are free; nothing was taken.
        """
        if num_blocks > len(self._free):
            raise CacheFullError(
                f"The KV cache has {len(self._free)} of {self.num_blocks} blocks free; {num_blocks} are needed.",
                "Raise num_kv_blocks, or run fewer or shorter requests.",
            )
        split = len(self._free) - num_blocks
        block_ids = self._free[split:][::-1]
        del self._free[split:]
        for block_id in block_ids:
            self._allocated[block_id] = 1
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Give blocks back.

        Raises:
            ValueError: a block was not allocated (a bug of the caller).
        """
        for block_id in reversed(list(block_ids)):
            if not self._allocated[block_id]:
                raise ValueError(f"block {block_id} is freed but was not allocated")
            self._allocated[block_id] = 0
            self._free.append(block_id)

    def check_integrity(self, owned: Iterable[Iterable[int]]) -> None:
        """Prove that free blocks and the owners' blocks are disjoint and make up the whole pool.

        Args:
            owned: the block ids of every owner.

        Raises:
            AssertionError: a block leaked or has two owners; the message names it.
        """
        count = [0] * self.num_blocks
        for block_id in self._free:
            count[block_id] += 1
        for block_ids in owned:
            for block_id in block_ids:
                count[block_id] += 1
                if not self._allocated[block_id]:
                    raise AssertionError(f"block {block_id} has an owner but is not allocated")
        wrong = [block_id for block_id, times in enumerate(count) if times != 1]
        if wrong:
            raise AssertionError(f"blocks {wrong[:8]} are in {[count[i] for i in wrong[:8]]} places instead of one")
