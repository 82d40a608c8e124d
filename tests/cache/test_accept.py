"""Blocks from elsewhere: into the prefix cache without an owner, or not at all."""

import random
import subprocess
import sys

import pytest

from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.cache.prefix_cache import Acceptance, CachedBlock, PrefixCache
from twinphase.request import Request, SamplingParams

SIZE = 4
STORED, KNOWN, WRONG, ORPHAN, NO_ROOM = Acceptance


def make_request(prompt, salt=None):
    return Request("r", list(prompt), SamplingParams(), cache_salt=salt)


def chain(num_blocks, first=0, salt=None):
    """Blocks with the hashes that another process would compute."""
    request = make_request(range(first, first + num_blocks * SIZE), salt)
    other = PrefixCache(64, SIZE)
    return [other.block(request, index) for index in range(num_blocks)]


class Memory:
    """What was written where."""

    def __init__(self, num_blocks):
        self.manager = KVCacheManager(num_blocks, SIZE)
        self.blocks = {}

    def accept(self, blocks):
        def write(block_ids, which):
            assert not any(self.manager.prefix_cache.holds(block_id) for block_id in block_ids)
            self.blocks.update(
                {
                    block_id: blocks[n].block_hash
                    for block_id, n in zip(block_ids, which, strict=True)
                }
            )

        verdicts = self.manager.accept(blocks, write)
        self.check()
        return verdicts

    def check(self, requests=()):
        self.manager.check_integrity(requests)

    def found(self, blocks):
        """Number of leading blocks that can be found, each with the bits that were written."""
        for number, block in enumerate(blocks):
            block_id = self.manager.prefix_cache.find(block.block_hash)
            if block_id is None:
                return number
            assert self.blocks[block_id] == block.block_hash
        return len(blocks)

    def hold(self, prompt):
        request = make_request(prompt)
        self.manager.start(request, self.manager.find_prefix(request))
        self.check([request])
        return request


def test_accepted_blocks_are_a_prefix_without_an_owner():
    memory = Memory(8)
    blocks = chain(3)
    assert memory.accept(blocks) == [STORED] * 3
    assert (memory.manager.pool.num_cached, memory.manager.pool.num_held) == (3, 0)
    request = memory.hold(range(13))
    assert (request.num_computed_tokens, memory.manager.num_hit_tokens) == (12, 12)


def test_blocks_come_in_parts_and_again():
    memory = Memory(8)
    blocks = chain(4)
    assert memory.accept(blocks[:2]) == [STORED] * 2
    assert memory.accept(blocks[1:4]) == [KNOWN, STORED, STORED]
    assert memory.accept([*blocks, *chain(1, 100), *chain(1, 100)]) == [KNOWN] * 4 + [STORED, KNOWN]
    assert memory.found(blocks) == 4


def test_what_nobody_could_find_is_dropped():
    memory = Memory(8)
    blocks = chain(3)
    assert memory.accept([blocks[1], blocks[2], blocks[0]]) == [ORPHAN, ORPHAN, STORED]
    assert memory.accept([blocks[2], blocks[1]]) == [ORPHAN, STORED]
    assert memory.found(blocks) == 2


def test_a_block_that_is_not_what_it_says_is_dropped():
    memory = Memory(8)
    (first, second) = chain(2)
    memory.accept([first])
    tokens = (*second.token_ids[:-1], 99)
    for wrong in (
        CachedBlock(second.block_hash, second.parent, tokens, 1),
        CachedBlock(second.block_hash, b"x" * 32, second.token_ids, 1),
        CachedBlock(b"x" * 32, second.parent, second.token_ids, 1),
        CachedBlock(second.block_hash, second.parent, second.token_ids, 0),
        CachedBlock(second.block_hash, second.parent, second.token_ids, 2),
        CachedBlock(second.block_hash, second.parent, second.token_ids[:-1], 1),
    ):
        assert memory.accept([wrong]) == [WRONG]
    assert memory.accept([second]) == [STORED]


def test_too_many_blocks_keep_the_beginning_and_take_nobodys():
    memory = Memory(4)
    blocks = chain(6)
    assert memory.accept(blocks) == [STORED] * 4 + [NO_ROOM] * 2
    assert memory.accept(blocks[4:]) == [NO_ROOM] * 2  # its own beginning does not go for it
    request = memory.hold(range(1000, 1009))  # takes three of them, the last ones first
    assert memory.found(blocks) == 1
    verdicts = memory.manager.accept(blocks[1:], lambda block_ids, which: None)
    assert verdicts[0] is NO_ROOM
    memory.check([request])
    assert (
        KVCacheManager(4, SIZE, enable_prefix_caching=False).accept(blocks, lambda *_: None)
        == [NO_ROOM] * 6
    )


def test_old_cached_blocks_make_room_and_the_end_of_a_prefix_goes_first():
    memory = Memory(4)
    old = chain(3, 100)
    new = chain(3)
    memory.accept(old)
    memory.accept(new[:1])
    memory.accept(new[1:])
    assert memory.found(new) == 3 and memory.found(old) == 1
    memory.accept(chain(1, 200))
    memory.accept(chain(1, 300))
    assert memory.found(new) == 2 and memory.found(old) == 0


def test_a_write_that_fails_leaves_nothing_behind():
    memory = Memory(4)
    blocks = chain(3)
    memory.accept(blocks[:1])

    def write(block_ids, which):
        raise OSError

    with pytest.raises(OSError):
        memory.manager.accept(blocks, write)
    memory.check()
    assert memory.found(blocks) == 1 and memory.manager.pool.num_free == 3
    assert memory.accept(blocks) == [KNOWN, STORED, STORED]


def test_a_salts_blocks_are_found_by_that_salt_alone():
    memory = Memory(8)
    assert memory.accept(chain(2, salt="mine")) == [STORED] * 2
    assert memory.manager.find_prefix(make_request(range(9))) == []
    assert len(memory.manager.find_prefix(make_request(range(9), "mine"))) == 2


def test_a_hash_is_the_same_in_every_process():
    code = (
        "from twinphase.cache.prefix_cache import PrefixCache; from twinphase.request import "
        "Request, SamplingParams; "
        "r = Request('x', list(range(9)), SamplingParams(), cache_salt='s'); "
        "print(PrefixCache(9, 4, b'model').block_hash(r, 1).hex())"
    )
    here = PrefixCache(64, 4, b"model").block_hash(
        Request("y", list(range(9)), SamplingParams(), cache_salt="s"), 1
    )
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        there = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, check=True
        ).stdout
        assert there.decode().strip() == here.hex()


def test_changes_add_up_to_the_index():
    """The reported changes always add up to the blocks that can be found."""
    choose = random.Random(0)
    memory = Memory(12)
    memory.accept(chain(2))
    expected_id, hashes = memory.manager.prefix_cache.watch()
    known = set(hashes)
    requests = []
    told = 0
    for step in range(300):
        if choose.random() < 0.5:
            blocks = chain(choose.randint(1, 5), choose.choice([0, 100, 200, 300]))
            memory.manager.accept(blocks, lambda block_ids, which: None)
        elif requests and choose.random() < 0.6:
            memory.manager.free(requests.pop(choose.randrange(len(requests))))
        elif len(requests) < 3:
            prompt = range(start := choose.choice([0, 500, 600]), start + choose.randint(1, 12))
            request = make_request(prompt)
            prefix = memory.manager.find_prefix(request)
            needed = memory.manager.free_blocks_needed(request, request.num_tokens, prefix)
            if needed <= memory.manager.pool.num_available:
                memory.manager.start(request, prefix)
                before = request.num_computed_tokens
                request.num_computed_tokens = request.num_tokens
                memory.manager.keep_computed(request, before)
                requests.append(request)
        if step % 3 == 0:
            number, stored, evicted = memory.manager.prefix_cache.changes.take()
            assert number == expected_id and not set(stored) & set(evicted)
            expected_id += bool(stored or evicted)
            known = (known | set(stored)) - set(evicted)
            told += len(evicted)
            assert known == set(memory.manager.prefix_cache.watch()[1])
        memory.manager.check_integrity(requests)
    assert told > 20
