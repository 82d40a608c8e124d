"""Which blocks hold which tokens, by hash, so that equal beginnings of prompts are computed once; and why one missed.

A block's hash covers everything before it: SHA-256 over the parent's hash and the block's tokens, starting from the
model's fingerprint and the request's salt. Only full blocks have one. Ints and bytes only; not for who owns a block.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from itertools import islice

from twinphase.request import MissReason, PrefixMiss, Request

__all__ = ["PrefixCache"]

MOST_EVICTED = 1 << 16  # hashes of evicted blocks to remember, at most
MOST_SIBLINGS = 64  # cached blocks to compare with, where a prompt leaves the cached ones


@dataclass(frozen=True)
class CachedBlock:
    """A block whose content is known."""

    block_hash: bytes
    parent: bytes
    token_ids: tuple[int, ...]


class PrefixCache:
    """Hash to block, block to hash, and a bounded memory of what was evicted."""

    def __init__(self, num_blocks: int, block_size: int, fingerprint: bytes = b"") -> None:
        """Start empty.

        Args:
            num_blocks: of the pool.
            block_size: tokens of a block.
            fingerprint: of model and KV format: KV of another one must never match.
        """
        self.block_size = block_size
        self._fingerprint = fingerprint
        self._block_of: dict[bytes, int] = {}
        self._content: dict[int, CachedBlock] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}  # hashes of cached blocks, by parent
        self._evicted: dict[bytes, None] = {}  # in order of eviction
        self._most_evicted = min(MOST_EVICTED, 4 * num_blocks)

    def __len__(self) -> int:
        return len(self._content)

    def holds(self, block_id: int) -> bool:
        """Whether the block's content can be found by hash."""
        return block_id in self._content

    def root(self, salt: str | None) -> bytes:
        """The parent of a first block."""
        salted = b"" if salt is None else salt.encode(errors="surrogatepass")
        return hashlib.sha256(
            b"twinphase %d %d " % (self.block_size, len(salted)) + salted + self._fingerprint
        ).digest()

    def block_hash(self, request: Request, index: int) -> bytes:
        """Hash of the request's block number `index`, which must be full; kept with the request."""
        known, size = request.block_hashes, self.block_size
        while len(known) <= index:
            parent = known[-1] if known else self.root(request.cache_salt)
            start = len(known) * size
            tokens = array("i", request.token_ids(start, start + size)).tobytes()
            known.append(hashlib.sha256(parent + tokens).digest())
        return known[index]

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def insert(self, request: Request, index: int) -> None:
        """Make the request's computed block number `index` findable, unless an equal one is already."""
        block_hash = self.block_hash(request, index)
        block_id = request.block_ids[index]
        if block_hash in self._block_of or block_id in self._content:
            return
        parent = request.block_hashes[index - 1] if index else self.root(request.cache_salt)
        start = index * self.block_size
        tokens = tuple(request.token_ids(start, start + self.block_size))
        self._block_of[block_hash] = block_id
        self._content[block_id] = CachedBlock(block_hash, parent, tokens)
        self._children.setdefault(parent, {})[block_hash] = None
        self._evicted.pop(block_hash, None)

    def evict(self, block_id: int) -> None:
        """The block's content is given up; its hash is remembered for a while."""
        content = self._content.pop(block_id)
        del self._block_of[content.block_hash]
        siblings = self._children[content.parent]
        del siblings[content.block_hash]
        if not siblings:
            del self._children[content.parent]
        self._evicted[content.block_hash] = None
        if len(self._evicted) > self._most_evicted:
            del self._evicted[next(iter(self._evicted))]

    def miss(self, request: Request, num_hits: int) -> PrefixMiss | None:
        """Why only the first `num_hits` blocks of the request were found; None if all that could be were.

        The last known token is always computed, since its logits are wanted, so it is not missed.
        """
        size, known = self.block_size, request.num_tokens - 1
        start = num_hits * size
        if known - start < size:
            return PrefixMiss(MissReason.BLOCK_GRANULARITY, start) if known > start else None
        block_hash = self.block_hash(request, num_hits)
        parent = request.block_hashes[num_hits - 1] if num_hits else self.root(request.cache_salt)
        if block_hash in self._evicted:
            end = num_hits + 1
            while (end + 1) * size <= known and self._is_known(self.block_hash(request, end)):
                end += 1
            return PrefixMiss(MissReason.EVICTED, start, num_known=end * size - start)
        tokens = request.token_ids(start, start + size)
        siblings = islice(reversed(self._children.get(parent, {})), MOST_SIBLINGS)
        common = max((self._common(tokens, block_hash) for block_hash in siblings), default=0)
        if common or (num_hits and parent in self._children):
            return PrefixMiss(MissReason.DIVERGED, start + common)
        if request.cache_salt is not None and num_hits == 0 and parent not in self._children:
            return PrefixMiss(MissReason.SALT, 0)
        return PrefixMiss(MissReason.NEVER_SEEN, start)

    def _is_known(self, block_hash: bytes) -> bool:
        return block_hash in self._evicted or block_hash in self._block_of

    def _common(self, tokens: list[int], block_hash: bytes) -> int:
        other = self._content[self._block_of[block_hash]].token_ids
        return next((i for i, (a, b) in enumerate(zip(tokens, other, strict=True)) if a != b), len(tokens))

    def check_integrity(self) -> None:
        """Prove that the indices agree (AssertionError otherwise)."""
        if {content.block_hash: block for block, content in self._content.items()} != self._block_of:
            raise AssertionError("the prefix cache's two indices differ")
        children = {h for hashes in self._children.values() for h in hashes}
        if children != set(self._block_of) or not all(self._children.values()):
            raise AssertionError("the prefix cache's tree differs from its blocks")
