import pytest

from twinphase.cache.block_pool import BlockPool
from twinphase.errors import CacheFullError


def test_a_lone_owner_gets_contiguous_blocks():
    pool = BlockPool(8)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) == [3, 4]
    assert pool.num_free == 3


def test_freed_blocks_come_back_in_order():
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.free(blocks[:2])
    assert pool.allocate(2) == [0, 1]


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(CacheFullError, match="1 of 4 blocks free; 2 are needed"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_double_free_is_a_bug():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(ValueError, match="block 0"):
        pool.free(blocks)


def test_integrity_names_a_leak_and_a_second_owner():
    pool = BlockPool(4)
    mine = pool.allocate(2)
    pool.check_integrity([mine])
    with pytest.raises(AssertionError, match=r"blocks \[1\] are in \[0\] places"):
        pool.check_integrity([[0]])
    with pytest.raises(AssertionError, match=r"blocks \[0\] are in \[2\] places"):
        pool.check_integrity([mine, [0]])
    with pytest.raises(AssertionError, match="block 3 has an owner but is not allocated"):
        pool.check_integrity([mine, [3]])
