"""Which blocks belong to which request: growth, release, and hand-over between the turns of a conversation.

Ints only. Not a policy: who may have blocks, and when, is the scheduler's decision.
"""

from __future__ import annotations

from collections.abc import Iterable

from twinphase.cache.block_pool import BlockPool
from twinphase.errors import CacheFullError
from twinphase.request import Request

__all__ = ["KVCacheManager"]


class KVCacheManager:
    """Keeps `Request.block_ids` in step with the tokens that must fit."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Manage `num_blocks` blocks of `block_size` tokens."""
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, request: Request, num_tokens: int) -> None:
        """Grow `request.block_ids` so that `num_computed_tokens + num_tokens` tokens fit.

        Raises:
            CacheFullError: not enough free blocks; the request keeps the blocks it had.
        """
        total = request.num_computed_tokens + num_tokens
        missing = self.blocks_for(total) - len(request.block_ids)
        if missing <= 0:
            return
        if missing > self.pool.num_free:
            raise CacheFullError(
                f"Request {request.request_id} needs {missing} more KV cache blocks for its {total} tokens; "
                f"{self.pool.num_free} of {self.pool.num_blocks} blocks of {self.block_size} tokens are free.",
                "Raise num_kv_blocks, or run fewer or shorter requests.",
            )
        request.block_ids.extend(self.pool.allocate(missing))

    def free(self, request: Request) -> None:
        """Give back all blocks of `request`; its tokens are no longer computed."""
        self.pool.free(request.block_ids)
        request.block_ids.clear()
        request.num_computed_tokens = 0

    def hand_over(self, old: Request, new: Request) -> int:
        """Let `new` start from the KV that the finished `old` left: the next turn of a conversation.

        `new` takes over the blocks of the longest common token prefix and the rest is freed. The prefix is bounded by
        what `old` computed and by `len(new.prompt_token_ids) - 1`, since logits need at least one computed token. The
        last block may be shared in part: `old` is finished, so `new` may overwrite what follows.

        Returns:
            Tokens taken over, also in `new.num_computed_tokens` and `new.num_cached_tokens`.
        """
        if new.block_ids or new.num_computed_tokens:
            raise ValueError(f"request {new.request_id} has begun already")
        bound = min(old.num_computed_tokens, len(new.prompt_token_ids) - 1)
        length = common_prefix_length(old.token_ids(0, bound), new.prompt_token_ids)
        kept = self.blocks_for(length)
        new.block_ids = old.block_ids[:kept]
        self.pool.free(old.block_ids[kept:])
        old.block_ids.clear()
        old.num_computed_tokens = 0
        new.num_computed_tokens = new.num_cached_tokens = length
        return length

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Prove that no block leaked, given every request that may hold blocks (AssertionError otherwise)."""
        self.pool.check_integrity(request.block_ids for request in requests)


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix of two lists of token ids."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
