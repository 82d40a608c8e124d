import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.errors import CacheFullError
from twinphase.request import Request, SamplingParams


def make_request(prompt, output=(), request_id="r"):
    return Request(request_id, list(prompt), SamplingParams(), output_token_ids=list(output))


def test_blocks_grow_with_tokens():
    manager = KVCacheManager(num_blocks=4, block_size=16)
    request = make_request(range(40))
    manager.allocate(request, 16)
    assert request.block_ids == [0]
    request.num_computed_tokens = 16
    manager.allocate(request, 1)
    assert request.block_ids == [0, 1]
    manager.allocate(request, 16)  # 32 tokens fit already
    assert request.block_ids == [0, 1]
    manager.check_integrity([request])


def test_a_full_cache_says_the_numbers_and_takes_nothing():
    manager = KVCacheManager(num_blocks=2, block_size=16)
    request = make_request(range(40))
    manager.allocate(request, 16)
    with pytest.raises(CacheFullError, match="needs 2 more KV cache blocks for its 40 tokens; 1 of 2"):
        manager.allocate(request, 40)
    assert request.block_ids == [0]


def test_free_gives_all_back():
    manager = KVCacheManager(num_blocks=2, block_size=4)
    request = make_request(range(8))
    manager.allocate(request, 8)
    request.num_computed_tokens = 8
    manager.free(request)
    assert (manager.pool.num_free, request.block_ids, request.num_computed_tokens) == (2, [], 0)


def finished(manager, prompt, output):
    """A request whose tokens are all computed but the last sampled one."""
    request = make_request(prompt, output, "old")
    manager.allocate(request, request.num_tokens - 1)
    request.num_computed_tokens = request.num_tokens - 1
    return request


def test_the_next_turn_takes_over_the_common_prefix():
    manager = KVCacheManager(num_blocks=8, block_size=4)
    old = finished(manager, range(10), [20, 21, 22])  # 12 tokens computed, 3 blocks
    new = make_request([*range(10), 20, 21, 22, 30, 31], request_id="new")
    assert manager.hand_over(old, new) == 12
    assert (new.num_computed_tokens, new.num_cached_tokens, new.block_ids) == (12, 12, [0, 1, 2])
    assert (old.block_ids, old.num_computed_tokens) == ([], 0)
    manager.check_integrity([old, new])


def test_a_diverging_turn_frees_the_rest():
    manager = KVCacheManager(num_blocks=8, block_size=4)
    old = finished(manager, range(10), [20, 21, 22])
    new = make_request([0, 1, 2, 3, 4, 99, 6], request_id="new")
    assert manager.hand_over(old, new) == 5
    assert len(new.block_ids) == 2
    assert manager.pool.num_free == 6
    manager.check_integrity([old, new])


def test_one_token_is_left_to_compute():
    manager = KVCacheManager(num_blocks=8, block_size=4)
    old = finished(manager, range(10), [20])
    new = make_request(range(10), request_id="new")
    assert manager.hand_over(old, new) == 9


def test_a_begun_request_takes_nothing_over():
    manager = KVCacheManager(num_blocks=8, block_size=4)
    old, new = finished(manager, range(10), [20]), finished(manager, range(10), [20])
    with pytest.raises(ValueError, match="has begun already"):
        manager.hand_over(old, new)


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=20)


@given(tokens, tokens, tokens, st.integers(1, 5))
def test_hand_over_is_the_longest_prefix_and_leaks_nothing(prompt, output, new_prompt, block_size):
    manager = KVCacheManager(num_blocks=64, block_size=block_size)
    old, new = finished(manager, prompt, output), make_request(new_prompt, request_id="new")
    computed = old.token_ids(0, old.num_computed_tokens)
    length = manager.hand_over(old, new)
    assert computed[:length] == new_prompt[:length]
    bound = min(len(computed), len(new_prompt) - 1)
    assert length == bound or computed[length] != new_prompt[length]
    assert len(new.block_ids) == manager.blocks_for(length)
    manager.check_integrity([old, new])
