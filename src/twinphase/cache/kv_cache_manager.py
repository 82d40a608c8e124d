"""Which blocks belong to which request: growth, release, and sharing of equal beginnings.

It handles integers only, and has no policy: the scheduler decides which requests get blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import takewhile

from twinphase.cache.block_pool import BlockPool
from twinphase.cache.prefix_cache import Acceptance, CachedBlock, PrefixCache
from twinphase.cache.state_cache import MAX_OUTPUT_INTERVAL, StateCache
from twinphase.errors import CacheFullError
from twinphase.outcome import MissReason, PrefixMiss
from twinphase.request import Request


class KVCacheManager:
    """Gives each request the blocks that its tokens need (`Request.block_ids`).

    Attributes:
        block_size: tokens of a block.
        enable_prefix_caching: whether equal beginnings are shared.
        pool: the blocks.
        prefix_cache: finds blocks by their content.
        states: slots for the states of recurrent layers; None for a model without such layers.
        num_queried_tokens, num_hit_tokens: prompt tokens looked up so far, and found.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        fingerprint: bytes = b"",
        states: StateCache | None = None,
        explains_misses: bool = True,
    ) -> None:
        """Manage `num_blocks` blocks; `fingerprint` identifies the model and the KV format.

        Without `explains_misses`, no request learns why the cache did not hold more of its prefix.
        """
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_cache = PrefixCache(
            num_blocks, block_size, fingerprint, explains_misses=explains_misses
        )
        self.pool = BlockPool(num_blocks, on_evict=self._evict)
        self.states = states
        self.num_queried_tokens = self.num_hit_tokens = 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, request: Request) -> list[int]:
        """Cached blocks that continue what `request` has computed, without taking them.

        At least one known token is left to compute, since its logits are needed. In a model with
        recurrent layers the last block is one with a snapshot.
        """
        found: list[int] = []
        usable = 0
        for block_hash in self._following(request, request.num_computed_tokens):
            block_id = self.prefix_cache.find(block_hash)
            if block_id is None:
                break
            found.append(block_id)
            if self.states is None or self.states.has(block_hash):
                usable = len(found)
        return found[:usable]

    def has_state_slots(self, prefix: list[int]) -> bool:
        """Whether a request that shares `prefix` finds slots for its state."""
        return self.states is None or self.states.can_start(self._last_hash(prefix))

    def plan_snapshots(self, request: Request, num_tokens: int) -> None:
        """Choose where the next `num_tokens` tokens of `request` (no drafts) leave snapshots."""
        if self.states is not None and request.state is not None:
            self.states.plan(request.state, self._snapshots_due(request, num_tokens))

    def _snapshots_due(self, request: Request, num_tokens: int) -> list[int]:
        """Positions in the next `num_tokens` tokens that should leave a snapshot, best first.

        The end of the last full block of a prompt, from which a chat continues; the end of a cached
        prefix without a snapshot, which others share; and one in each interval.
        """
        if self.states is None or not self.enable_prefix_caching:
            return []
        start = request.num_computed_tokens
        end = start + num_tokens
        interval = self.states.interval
        last = (request.num_tokens - 1) // self.block_size * self.block_size
        positions = [last]
        if request.output_token_ids:
            interval = min(interval, MAX_OUTPUT_INTERVAL)
        if request.state is not None:
            positions.append(request.state.branch)
        positions += range(end // interval * interval, start, -interval)
        due = dict.fromkeys(at for at in positions if start < at <= end)
        return [at for at in due if not self.states.has(self._hash_before(request, at))]

    def _hash_before(self, request: Request, position: int) -> bytes:
        """Hash of the block that ends at `position`."""
        return self.prefix_cache.block_hash(request, position // self.block_size - 1)

    def _last_hash(self, prefix: list[int]) -> bytes | None:
        return self.prefix_cache.content(prefix[-1]).block_hash if prefix else None

    def blocks_of_chunk(self, request: Request, num_tokens: int) -> list[bytes]:
        """Hashes of the blocks that the next `num_tokens` tokens of `request` complete.

        In a model with recurrent layers only those with a snapshot at their end.
        """
        if not self.enable_prefix_caching:
            return []
        if request.state is not None:
            return [self._hash_before(request, at) for at in request.state.snapshots]
        first = request.num_computed_tokens // self.block_size
        end = (request.num_computed_tokens + num_tokens) // self.block_size
        return [self.prefix_cache.block_hash(request, index) for index in range(first, end)]

    def tokens_in(self, request: Request, computed: int, blocks: Collection[bytes]) -> int:
        """Tokens after the first `computed` ones that lie in full blocks with these hashes.

        A hash names all blocks before it too: of those with snapshots the last one counts.
        """
        if self.states is not None:
            following = enumerate(self._following(request, computed), 1)
            number = max((number for number, one in following if one in blocks), default=0)
            return number * self.block_size
        shared = takewhile(blocks.__contains__, self._following(request, computed))
        return sum(1 for _ in shared) * self.block_size

    def _following(self, request: Request, computed: int) -> Iterator[bytes]:
        """Hashes of the shareable full blocks after the first `computed` tokens, one by one.

        There are none off a block boundary, and none for a prompt whose log probabilities are
        wanted, since blocks do not hold them; the last known token is never shared.
        """
        index, rest = divmod(computed, self.block_size)
        if self.enable_prefix_caching and not rest and not request.scores_prompt:
            for following in range(index, (request.num_tokens - 1) // self.block_size):
                yield self.prefix_cache.block_hash(request, following)

    def free_blocks_needed(self, request: Request, num_tokens: int, prefix: list[int]) -> int:
        """Available blocks needed for `num_tokens` tokens of `request`, which shares `prefix`."""
        own = (
            self.blocks_for(num_tokens) - self.blocks_for(request.num_computed_tokens) - len(prefix)
        )
        return own + sum(not self.pool.is_held(block_id) for block_id in prefix)

    def start(self, request: Request, prefix: list[int]) -> None:
        """Admit a request without blocks: share `prefix`, take blocks for all other known tokens.

        Raises:
            CacheFullError: not enough blocks; nothing was taken.
        """
        needed = self.free_blocks_needed(request, request.num_tokens, prefix)
        if needed > self.pool.num_available:
            raise CacheFullError(
                f"Request {request.request_id} needs {needed} more KV cache blocks for its "
                f"{request.num_tokens} "
                f"tokens; {self.pool.num_available} of {self.pool.num_blocks} are available.",
                "Raise num_kv_blocks, or run fewer or shorter requests.",
            )
        self.pool.share(prefix)
        rest = self.blocks_for(request.num_tokens) - len(prefix)
        request.block_ids = [*prefix, *self.pool.allocate(rest)]
        self._start_state(request, prefix)
        self._skip(request, len(prefix))
        if request.counts.num_preemptions == 0:
            self.num_queried_tokens += len(request.prompt_token_ids)
            request.counts.prefix_miss = self._miss(request, len(prefix))

    def share_new_prefix(self, request: Request) -> None:
        """Between chunks, let a request skip tokens that others have computed meanwhile."""
        prefix = self.find_prefix(request)
        if not prefix:
            return
        first = request.num_computed_tokens // self.block_size
        own = request.block_ids[first : first + len(prefix)]
        self.pool.share(prefix)
        self.pool.release(own)
        request.block_ids[first : first + len(prefix)] = prefix
        self._start_state(request, prefix)
        self._skip(request, len(prefix))
        if request.counts.num_preemptions == 0:
            request.counts.prefix_miss = self._miss(request, first + len(prefix))

    def _start_state(self, request: Request, prefix: list[int]) -> None:
        """Begin at the end of `prefix`, before the request counts it as computed."""
        if self.states is None:
            return
        computed = request.num_computed_tokens
        self.states.start(
            request, computed + len(prefix) * self.block_size, self._last_hash(prefix)
        )
        assert request.state is not None
        following = self._following(request, computed)
        cached = sum(
            1 for _ in takewhile(lambda h: self.prefix_cache.find(h) is not None, following)
        )
        branch = computed + cached * self.block_size
        request.state.branch = branch if cached > len(prefix) else 0

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in total; False and no change if blocks are missing."""
        missing = self.blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        if missing > self.pool.num_available:
            return False
        request.block_ids += self.pool.allocate(missing)
        return True

    def give_back(self, request: Request) -> None:
        """Free the blocks after those of the computed tokens, which rejected drafts used."""
        kept = self.blocks_for(request.num_computed_tokens)
        self.pool.release(request.block_ids[kept:])
        del request.block_ids[kept:]

    def keep_computed(
        self, request: Request, before: int, num_accepted: int = 0, *, logged: bool = False
    ) -> None:
        """Make blocks findable that became full since `before` tokens were computed.

        `num_accepted` of them are drafts, whose rows the state has yet to take up; or all are such
        rows (`logged`), in the slot that the step has read.
        """
        if self.enable_prefix_caching:
            for index in range(
                before // self.block_size, request.num_computed_tokens // self.block_size
            ):
                self.prefix_cache.insert(request, index)
        if self.states is not None and request.state is not None:
            names = {at: self._hash_before(request, at) for at in request.state.snapshots}
            rows = request.num_computed_tokens - before if logged else num_accepted
            self.states.advance(request.state, rows, names, logged)

    def accept(
        self, blocks: Sequence[CachedBlock], write: Callable[[list[int], list[int]], None]
    ) -> list[Acceptance]:
        """Make blocks that were computed elsewhere findable here.

        They have no owner and may be evicted at once. They take free blocks, then cached ones,
        oldest use first; never a block that a request holds, and never their own ancestor.

        Args:
            blocks: a parent before its children.
            write: called with block ids and the indices in `blocks` to store there; if it raises,
                nothing changes.

        Returns:
            The outcome for each block.
        """
        if not self.enable_prefix_caching:
            return [Acceptance.NO_ROOM] * len(blocks)
        verdicts = self.prefix_cache.judge(blocks)
        wanted = [number for number, verdict in enumerate(verdicts) if verdict is Acceptance.STORED]
        before = self.prefix_cache.beginnings([blocks[number] for number in wanted])
        self.pool.share(before)
        block_ids: list[int] = []
        try:
            room = min(len(wanted), self.pool.num_available)
            for number in wanted[room:]:
                verdicts[number] = Acceptance.NO_ROOM
            if room:
                block_ids = self.pool.allocate(room)
                write(block_ids, wanted[:room])
                for block_id, number in zip(block_ids, wanted, strict=False):
                    self.prefix_cache.put(block_id, blocks[number])
        finally:
            self.pool.release([*before, *block_ids], cached=self.prefix_cache.holds)
        return verdicts

    def hot_blocks(self) -> list[CachedBlock]:
        """The cached blocks, a parent before its children."""
        found = (self.prefix_cache.content(block_id) for block_id in self.pool.cached)
        return sorted(found, key=lambda block: block.index)

    def forget(self, request: Request) -> set[int]:
        """Evict a prompt and everything that begins with its first block; returns those blocks.

        They cannot be found any more; requests that hold some keep them.
        """
        if not self.enable_prefix_caching or len(request.prompt_token_ids) < self.block_size:
            return set()
        block_ids = self.prefix_cache.branch(self.prefix_cache.block_hash(request, 0))
        for block_id in block_ids:
            self._evict(block_id)
            self.pool.empty(block_id)
        return set(block_ids)

    def lost_tokens(self, request: Request) -> int:
        """Computed tokens that `request` has to compute again if it loses its seat alone."""
        if not self.enable_prefix_caching:
            return request.num_computed_tokens
        if request.state is not None:
            return request.num_computed_tokens - request.state.last_snapshot
        return request.num_computed_tokens % self.block_size

    def _evict(self, block_id: int) -> None:
        """Drop the block's content, and the snapshot at its end."""
        if self.states is not None:
            self.states.drop(self.prefix_cache.content(block_id).block_hash)
        self.prefix_cache.evict(block_id)

    def free(self, request: Request) -> None:
        """Take all blocks of `request`; cached ones can still be found until they are evicted."""
        self.pool.release(request.block_ids, cached=self.prefix_cache.holds)
        if self.states is not None:
            self.states.free(request)
        request.block_ids = []
        request.num_computed_tokens = 0

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Prove that free + held + cached = all, given every request that may hold blocks."""
        requests = list(requests)
        self.pool.check_integrity(request.block_ids for request in requests)
        if self.states is not None:
            self.states.check_integrity(requests)
        self.prefix_cache.check_integrity()

    def _skip(self, request: Request, num_blocks: int) -> None:
        before = request.num_computed_tokens
        request.num_computed_tokens += num_blocks * self.block_size
        if (
            request.counts.num_preemptions == 0
        ):  # Cached tokens of an output that the request came with are not part of its prompt.
            prompt = len(request.prompt_token_ids)
            hits = min(request.num_computed_tokens, prompt) - min(before, prompt)
            request.counts.num_cached_tokens += hits
            self.num_hit_tokens += hits

    def _miss(self, request: Request, num_hits: int) -> PrefixMiss | None:
        if not self.enable_prefix_caching:
            return PrefixMiss(MissReason.DISABLED, 0)
        if request.scores_prompt:
            return PrefixMiss(MissReason.PROMPT_LOGPROBS, 0)
        if request.state is not None and request.state.branch:
            start = num_hits * self.block_size
            return PrefixMiss(MissReason.NO_SNAPSHOT, start, num_known=request.state.branch - start)
        return self.prefix_cache.miss(request, num_hits)
