"""Finds blocks by the hash of their tokens: equal prompt beginnings are computed once.

A block's hash covers everything before it: SHA-256 over the parent's hash and the block's tokens,
starting from the model's fingerprint and the request's salt. Only full blocks have one. Ints and
bytes only; `block_pool.py` has the owners of blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from twinphase.outcome import MissReason, PrefixMiss
from twinphase.request import Request

MAX_REMEMBERED_EVICTIONS = 1 << 16
MAX_COMPARED_SIBLINGS = 64


# Many are made: `frozen` would take twice as long.
@dataclass(slots=True)
class CachedBlock:
    """A block with known content, here or elsewhere: its hash identifies its bits.

    Attributes:
        parent: hash of the block before it, or the root.
        index: number of the block in its sequence.
    """

    block_hash: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    index: int


class Acceptance(StrEnum):
    """Outcome for a block from another worker."""

    STORED = "stored"
    # The content is cached already.
    KNOWN = "known"
    # The hash is not that of the tokens, or the index is not the parent's plus one.
    WRONG = "wrong"
    # The parent is not cached, so that the block could not be found.
    ORPHAN = "orphan"
    # Requests hold all blocks, or the block's own ancestors would have to be evicted.
    NO_ROOM = "no_room"


class BlockChanges:
    """Blocks stored and evicted since the last event; events are numbered."""

    def __init__(self) -> None:
        self.next_id = 0
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    def stored(self, block_hash: bytes) -> None:
        if block_hash in self._evicted:
            del self._evicted[block_hash]
        else:
            self._stored[block_hash] = None

    def evicted(self, block_hash: bytes) -> None:
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._evicted[block_hash] = None

    def take(self) -> tuple[int, list[bytes], list[bytes]]:
        """The event's number, stored and evicted hashes; without any, the number is kept."""
        number = self.next_id
        stored = list(self._stored)
        evicted = list(self._evicted)
        self.next_id += bool(stored or evicted)
        self._stored.clear()
        self._evicted.clear()
        return number, stored, evicted


class PrefixCache:
    """Hash to block, block to hash, and a bounded memory of what was evicted."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        fingerprint: bytes = b"",
        *,
        explains_misses: bool = True,
    ) -> None:
        """Start empty.

        Args:
            num_blocks: size of the pool.
            block_size: tokens of a block.
            fingerprint: identifies model and KV format; KV of another one must never match.
            explains_misses: whether `miss` and `branch` are used; what they need takes half of the
                memory.
        """
        self.block_size = block_size
        self.fingerprint = fingerprint
        self.changes: BlockChanges | None = None  # Recorded once `watch` was called.
        self._block_of: dict[bytes, int] = {}
        self._content: dict[int, CachedBlock] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}  # Hashes of cached blocks by parent.
        self._evicted: dict[bytes, None] = {}  # In order of eviction.
        self._explains_misses = explains_misses
        self._most_evicted = min(MAX_REMEMBERED_EVICTIONS, 4 * num_blocks)

    def __len__(self) -> int:
        return len(self._content)

    def holds(self, block_id: int) -> bool:
        """Whether the block's content can be found by hash."""
        return block_id in self._content

    def content(self, block_id: int) -> CachedBlock:
        """The content of a block that can be found by hash."""
        return self._content[block_id]

    def root(self, salt: str | None) -> bytes:
        """The parent of a first block."""
        salted = b"" if salt is None else salt.encode(errors="surrogatepass")
        return hashlib.sha256(
            b"twinphase %d %d " % (self.block_size, len(salted)) + salted + self.fingerprint
        ).digest()

    def block_hash(self, request: Request, index: int) -> bytes:
        """Hash of the request's block number `index`, which must be full; kept with the request."""
        known = request.block_hashes
        if len(known) <= index:
            parent = known[-1] if known else self.root(request.cache_salt)
            missing = request.token_ids(len(known) * self.block_size, (index + 1) * self.block_size)
            for tokens in _bytes_of_blocks(missing, self.block_size):
                parent = hashlib.sha256(parent + tokens).digest()
                known.append(parent)
        return known[index]

    def block(self, request: Request, index: int) -> CachedBlock:
        """The request's block number `index`, which must be full, by its content."""
        block_hash = self.block_hash(request, index)
        start = index * self.block_size
        parent = request.block_hashes[index - 1] if index else self.root(request.cache_salt)
        return CachedBlock(
            block_hash, parent, tuple(request.token_ids(start, start + self.block_size)), index
        )

    def watch(self) -> tuple[int, list[bytes]]:
        """Record `changes` from now on; returns the next event's number and all cached hashes."""
        self.changes = self.changes or BlockChanges()
        self.changes.take()
        return self.changes.next_id, list(self._block_of)

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def insert(self, request: Request, index: int) -> None:
        """Cache the request's computed block number `index`, unless an equal one is cached."""
        block_id = request.block_ids[index]
        if self.block_hash(request, index) not in self._block_of and block_id not in self._content:
            self.put(block_id, self.block(request, index))

    def put(self, block_id: int, block: CachedBlock) -> None:
        """Make `block` findable in `block_id`, which holds its bits; neither is cached yet."""
        self._block_of[block.block_hash] = block_id
        self._content[block_id] = block
        if self._explains_misses:
            self._children.setdefault(block.parent, {})[block.block_hash] = None
            self._evicted.pop(block.block_hash, None)
        if self.changes is not None:
            self.changes.stored(block.block_hash)

    def judge(self, blocks: Sequence[CachedBlock]) -> list[Acceptance]:
        """Judge blocks of another engine in order; STORED means that there is room."""
        coming: dict[bytes, int] = {}
        verdicts = []
        for block in blocks:
            verdicts.append(self._judge(block, coming))
            if verdicts[-1] is Acceptance.STORED:
                coming[block.block_hash] = block.index
        return verdicts

    def _judge(self, block: CachedBlock, coming: dict[bytes, int]) -> Acceptance:
        size_is_right = len(block.token_ids) == self.block_size
        if not size_is_right or _hash(block.parent, block.token_ids) != block.block_hash:
            return Acceptance.WRONG
        if block.block_hash in coming or block.block_hash in self._block_of:
            return Acceptance.KNOWN
        before = coming.get(block.parent)
        if before is None and (block_id := self.find(block.parent)) is not None:
            before = self._content[block_id].index
        if before is None and block.index:
            return Acceptance.ORPHAN
        return (
            Acceptance.STORED
            if block.index == (0 if before is None else before + 1)
            else Acceptance.WRONG
        )

    def beginnings(self, blocks: Collection[CachedBlock]) -> list[int]:
        """Ids of the cached ancestors of these blocks, a parent before its children."""
        found: dict[int, int] = {}
        for block in blocks:
            block_id = self.find(block.parent)
            while block_id is not None and block_id not in found:
                found[block_id] = self._content[block_id].index
                block_id = self.find(self._content[block_id].parent)
        return sorted(found, key=lambda block_id: found[block_id])

    def branch(self, block_hash: bytes) -> list[int]:
        """Ids of the cached block of that hash and of all that continue it, parents first."""
        found = list[int]()
        hashes = [block_hash]
        for one in hashes:
            if (block_id := self.find(one)) is not None:
                found.append(block_id)
            hashes += self._children.get(one, ())
        return found

    def evict(self, block_id: int) -> None:
        """Drop the block's content, and remember its hash for a while."""
        content = self._content.pop(block_id)
        del self._block_of[content.block_hash]
        if self.changes is not None:
            self.changes.evicted(content.block_hash)
        if not self._explains_misses:
            return
        siblings = self._children[content.parent]
        del siblings[content.block_hash]
        if not siblings:
            del self._children[content.parent]
        self._evicted[content.block_hash] = None
        if len(self._evicted) > self._most_evicted:
            del self._evicted[next(iter(self._evicted))]

    def miss(self, request: Request, num_hits: int) -> PrefixMiss | None:
        """Why only the first `num_hits` blocks were found; None if all possible ones were.

        The last known token is always computed for its logits, so it does not count as missed.
        Without `explains_misses` it is None.
        """
        if not self._explains_misses:
            return None
        size = self.block_size
        known = request.num_tokens - 1
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
        siblings = islice(reversed(self._children.get(parent, {})), MAX_COMPARED_SIBLINGS)
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
        return next(
            (i for i, (a, b) in enumerate(zip(tokens, other, strict=True)) if a != b), len(tokens)
        )

    def check_integrity(self) -> None:
        """Prove that the indices agree (AssertionError otherwise)."""
        if {
            content.block_hash: block for block, content in self._content.items()
        } != self._block_of:
            raise AssertionError("the prefix cache's two indices differ")
        if not self._explains_misses:
            return
        children = {h for hashes in self._children.values() for h in hashes}
        if children != set(self._block_of) or not all(self._children.values()):
            raise AssertionError("the prefix cache's tree differs from its blocks")


def _hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()


def _bytes_of_blocks(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The tokens of each block, as `_hash` reads them."""
    values = array("i", token_ids)
    whole = values.tobytes()
    step = block_size * values.itemsize
    return [whole[start : start + step] for start in range(0, len(whole), step)]
