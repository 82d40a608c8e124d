"""The KV cache's blocks: free, held by requests, or cached.

It handles integers only; the backend maps blocks to memory.

A *held* block has one owner or several (requests that share a prefix). A *cached* block has none,
but its content may be used again; cached blocks are evicted, oldest use first, when no free block
is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import islice

from twinphase.errors import CacheFullError


class BlockPool:
    """Block ids 0 .. num_blocks - 1 and their owners.

    Attributes:
        num_blocks: size of the pool.
        num_shared: number of blocks with several owners.
        left: a list that gets the blocks that lost their last owner or their content, or None.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[int], None] = lambda block_id: None
    ) -> None:
        """Begin with all blocks free.

        The lowest id is handed out first, so that a lone request's blocks are contiguous.

        Args:
            num_blocks: size of the pool.
            on_evict: called with the id of each evicted block.
        """
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = list(
            range(num_blocks - 1, -1, -1)
        )  # A stack: the blocks freed last are the warmest in the processor's caches.
        self._cached: dict[int, None] = {}  # In order of last use.
        self._owners = [0] * num_blocks
        self.num_shared = 0
        self.left: list[int] | None = None

    @property
    def num_free(self) -> int:
        """Blocks without owner or content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without owner whose content is kept."""
        return len(self._cached)

    @property
    def cached(self) -> Collection[int]:
        """The cached blocks, in order of last use."""
        return self._cached.keys()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - self.num_available

    def is_held(self, block_id: int) -> bool:
        """Whether a request holds the block."""
        return self._owners[block_id] > 0

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks, all or none; evict cached ones only when no free one is left.

        Raises:
            CacheFullError: fewer are available; nothing was taken.
        """
        if num_blocks > self.num_available:
            raise CacheFullError(
                f"The KV cache has {self.num_available} of {self.num_blocks} blocks to give; "
                f"{num_blocks} are needed.",
                "Raise num_kv_blocks, or run fewer or shorter requests.",
            )
        split = max(0, len(self._free) - num_blocks)
        block_ids = self._free[split:][::-1]
        del self._free[split:]
        # All at once: a dict searches for its first key behind all that were deleted before it.
        for oldest in list(islice(self._cached, num_blocks - len(block_ids))):
            del self._cached[oldest]
            self._on_evict(oldest)
            block_ids.append(oldest)
        for block_id in block_ids:
            self._owners[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one owner to each of these blocks, which have content."""
        for block_id in block_ids:
            if self._owners[block_id] == 0:
                if block_id not in self._cached:
                    raise ValueError(f"block {block_id} is shared but has no content")
                del self._cached[block_id]
            self._owners[block_id] += 1
            self.num_shared += self._owners[block_id] == 2

    def release(
        self, block_ids: Collection[int], cached: Callable[[int], bool] = lambda block_id: False
    ) -> None:
        """Take one owner from each block, the last first: the end of a prefix is evicted first.

        Args:
            block_ids: in order of position.
            cached: whether a block's content is kept when the block has no owner.

        Raises:
            ValueError: a block has no owner (a bug of the caller).
        """
        for block_id in reversed(list(block_ids)):
            if self._owners[block_id] == 0:
                raise ValueError(f"block {block_id} is released, but it has no owner")
            self._owners[block_id] -= 1
            self.num_shared -= self._owners[block_id] == 1
            if self._owners[block_id] == 0:
                if cached(block_id):
                    self._cached[block_id] = None
                else:
                    self._free.append(block_id)
                if self.left is not None:
                    self.left.append(block_id)

    def empty(self, block_id: int) -> None:
        """Stop keeping the block's content; its owners keep the block."""
        if block_id in self._cached:
            del self._cached[block_id]
            self._free.append(block_id)
            if self.left is not None:
                self.left.append(block_id)

    def check_integrity(self, owned: Iterable[Iterable[int]]) -> None:
        """Prove that free + held + cached = all, and that every block has the right owners.

        Args:
            owned: the block ids of every owner.

        Raises:
            AssertionError: a block leaked, or is in two places; the message names it.
        """
        owners = Counter(block_id for block_ids in owned for block_id in block_ids)
        free = Counter(self._free)
        shared = 0
        for block_id in range(self.num_blocks):
            places = (free[block_id], int(block_id in self._cached), int(owners[block_id] > 0))
            shared += owners[block_id] > 1
            if sum(places) != 1 or owners[block_id] != self._owners[block_id]:
                raise AssertionError(
                    f"block {block_id} is {places[0]} times free, {places[1]} times cached, has "
                    f"{owners[block_id]} "
                    f"owners and counts {self._owners[block_id]}"
                )
        if shared != self.num_shared:
            raise AssertionError(f"{shared} blocks are shared, but {self.num_shared} are counted")
