import pytest

from twinphase.cache.block_pool import BlockPool
from twinphase.errors import CacheFullError


def keep(block_id):
    return True


def test_a_lone_owner_gets_contiguous_blocks_and_released_ones_come_back_in_order():
    pool = BlockPool(8)
    blocks = pool.allocate(3)
    assert (blocks, pool.allocate(2)) == ([0, 1, 2], [3, 4])
    assert (pool.num_free, pool.num_held, pool.num_available) == (3, 5, 3)
    pool.allocate(3)
    pool.release(blocks[:2])
    assert pool.allocate(2) == [0, 1]


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(CacheFullError, match="1 of 4 blocks to give; 2 are needed"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_shared_block_is_free_when_its_last_owner_leaves():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.is_held(0) and pool.num_free == 1
    pool.release(blocks)
    assert not pool.is_held(0) and pool.num_free == 2


def test_what_nobody_holds_cannot_be_released_or_shared():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="block 0 is released, but it has no owner"):
        pool.release(blocks)
    with pytest.raises(ValueError, match="block 0 is shared but has no content"):
        pool.share(blocks)


def test_cached_blocks_are_given_out_last_and_the_longest_unused_first():
    evicted = []
    pool = BlockPool(6, on_evict=evicted.append)
    first = pool.allocate(2)
    second = pool.allocate(2)
    pool.release(first, cached=keep)
    pool.release(second, cached=keep)
    assert (pool.num_free, pool.num_cached, pool.num_available, pool.num_held) == (2, 4, 6, 0)
    assert pool.allocate(2) == [4, 5] and evicted == []
    # The end of a prefix goes before its beginning, which others may share.
    assert pool.allocate(3) == evicted == [1, 0, 3]


def test_use_makes_a_cached_block_young_again():
    evicted = []
    pool = BlockPool(2, on_evict=evicted.append)
    a = pool.allocate(1)
    b = pool.allocate(1)
    pool.release(a, cached=keep)
    pool.release(b, cached=keep)
    pool.share(a)
    assert (pool.num_cached, pool.num_held) == (1, 1)
    pool.release(a, cached=keep)
    pool.allocate(1)
    assert evicted == b


def test_integrity_names_a_leak_and_a_second_owner():
    pool = BlockPool(4)
    mine = pool.allocate(2)
    pool.share([0])
    pool.check_integrity([mine, [0]])
    with pytest.raises(
        AssertionError, match="block 1 is 0 times free, 0 times cached, has 0 owners and counts 1"
    ):
        pool.check_integrity([[0], [0]])
    with pytest.raises(AssertionError, match="block 0 .* has 1 owners and counts 2"):
        pool.check_integrity([mine])
    with pytest.raises(
        AssertionError, match="block 3 is 1 times free, 0 times cached, has 1 owners"
    ):
        pool.check_integrity([mine, [0, 3]])
