import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.errors import CacheFullError
from twinphase.outcome import MissReason, PrefixMiss
from twinphase.request import Request, SamplingParams

SIZE = 4
TEN = list(range(10))


def make_request(prompt, output=(), request_id="r", salt=None):
    return Request(
        request_id, list(prompt), SamplingParams(), output_token_ids=list(output), cache_salt=salt
    )


def start(manager, request):
    """Admit a request; the blocks it shares."""
    prefix = manager.find_prefix(request)
    manager.start(request, prefix)
    return prefix


def compute(manager, request, num_tokens):
    before = request.num_computed_tokens
    request.num_computed_tokens = num_tokens
    manager.keep_computed(request, before)


def finished(manager, prompt, output=(7,), salt=None):
    """A request that was admitted, computed all but its last token, and finished."""
    request = make_request(prompt, output, "old", salt)
    start(manager, request)
    compute(manager, request, request.num_tokens - 1)
    manager.free(request)
    return request


def test_a_request_gets_blocks_for_its_tokens_and_grows():
    manager = KVCacheManager(num_blocks=4, block_size=16)
    request = make_request(range(20))
    assert start(manager, request) == []
    assert request.block_ids == [0, 1]
    assert manager.grow(request, 32) and request.block_ids == [0, 1]
    assert manager.grow(request, 33) and request.block_ids == [0, 1, 2]
    manager.check_integrity([request])


def test_a_full_cache_changes_nothing():
    manager = KVCacheManager(num_blocks=2, block_size=16)
    request = make_request(range(20))
    start(manager, request)
    assert not manager.grow(request, 33)
    with pytest.raises(
        CacheFullError, match="needs 1 more KV cache blocks for its 5 tokens; 0 of 2 are available"
    ):
        manager.start(make_request(range(5)), [])
    assert request.block_ids == [0, 1]
    manager.check_integrity([request])


def test_free_gives_all_back():
    manager = KVCacheManager(num_blocks=4, block_size=4)
    request = finished(manager, TEN)
    assert (request.block_ids, request.num_computed_tokens) == ([], 0)
    assert (manager.pool.num_free, manager.pool.num_cached) == (
        2,
        2,
    )  # the full blocks stay findable


def test_the_next_turn_shares_the_full_blocks_of_the_last():
    manager = KVCacheManager(num_blocks=8, block_size=4)
    finished(manager, TEN, [20, 21, 22])  # 12 tokens computed: 3 full blocks, output included
    turn = make_request([*TEN, 20, 21, 22, 30, 31])
    assert start(manager, turn) == [0, 1, 2]
    assert (turn.num_computed_tokens, turn.counts.num_cached_tokens, len(turn.block_ids)) == (
        12,
        12,
        4,
    )
    assert turn.counts.prefix_miss == PrefixMiss(MissReason.BLOCK_GRANULARITY, 12)
    assert (manager.num_queried_tokens, manager.num_hit_tokens) == (10 + 15, 12)
    manager.check_integrity([turn])


def test_blocks_are_shared_while_their_first_owner_still_runs():
    manager = KVCacheManager(num_blocks=8, block_size=4)
    one = make_request(TEN)
    two = make_request(TEN)
    start(manager, one)
    compute(manager, one, 10)
    assert start(manager, two) == one.block_ids[:2]
    manager.check_integrity([one, two])
    manager.free(one)
    manager.check_integrity([two])
    assert manager.pool.num_held == 3


def test_one_token_is_left_to_compute():
    manager = KVCacheManager(num_blocks=8, block_size=5)
    finished(manager, TEN)
    request = make_request(TEN)
    start(manager, request)
    assert (request.num_computed_tokens, request.counts.prefix_miss) == (
        5,
        PrefixMiss(MissReason.BLOCK_GRANULARITY, 5),
    )


def test_between_chunks_a_request_skips_what_others_computed_meanwhile():
    manager = KVCacheManager(num_blocks=12, block_size=2)
    early = make_request(TEN)
    late = make_request(TEN)
    for request in (early, late):
        start(manager, request)
    compute(manager, late, 2)
    manager.share_new_prefix(late)
    assert late.num_computed_tokens == 2
    compute(manager, early, 8)
    own = late.block_ids
    manager.share_new_prefix(late)
    assert late.num_computed_tokens == late.counts.num_cached_tokens + 2 == 8
    assert late.block_ids == [own[0], *early.block_ids[1:4], own[4]]
    manager.check_integrity([early, late])
    compute(manager, early, 9)
    late.num_computed_tokens = 9  # in the middle of a block there is nothing to skip to
    assert manager.find_prefix(late) == []


def test_free_blocks_needed_counts_cached_ones_that_a_prefix_takes():
    manager = KVCacheManager(num_blocks=8, block_size=4)
    finished(manager, TEN)
    request = make_request(TEN)
    prefix = manager.find_prefix(request)
    assert manager.free_blocks_needed(request, 10, prefix) == 3
    start(manager, request)
    assert manager.free_blocks_needed(make_request(TEN), 10, prefix) == 1


def test_switched_off():
    manager = KVCacheManager(num_blocks=8, block_size=4, enable_prefix_caching=False)
    finished(manager, TEN)
    request = make_request(TEN)
    assert start(manager, request) == []
    assert request.counts.prefix_miss == PrefixMiss(MissReason.DISABLED, 0)
    assert manager.pool.num_cached == 0


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=20)
salts = st.sampled_from([None, "a"])


@given(tokens, tokens, tokens, st.integers(1, 5), salts, salts)
def test_what_is_shared_is_the_longest_prefix_in_full_blocks(
    prompt, output, new_prompt, size, old_salt, salt
):
    manager = KVCacheManager(num_blocks=64, block_size=size)
    old = finished(manager, prompt, output, old_salt)
    new = make_request(new_prompt, salt=salt)
    computed = old.token_ids(0, old.num_tokens - 1)
    most = min(len(computed), len(new_prompt) - 1) // size
    equal = [computed[: n * size] == new_prompt[: n * size] for n in range(most + 1)]
    assert len(start(manager, new)) == (sum(equal) - 1 if salt == old_salt else 0)
    manager.check_integrity([new])
    if salt != old_salt and salt is not None and len(new_prompt) > size:
        assert new.counts.prefix_miss == PrefixMiss(MissReason.SALT, 0)


def test_what_is_forgotten_is_found_by_nobody_with_all_that_continues_it():
    manager = KVCacheManager(16, SIZE)
    prompt = list(range(2 * SIZE + 1))
    finished(
        manager, [*prompt, *range(50, 50 + 2 * SIZE)]
    )  # a longer one, cached and held by nobody
    other = [99] * (2 * SIZE)
    holder = make_request([*prompt, 7], request_id="holder")
    finished(manager, other)
    start(manager, holder)
    wrong = manager.forget(make_request(prompt))
    assert set(holder.block_ids[:2]) < wrong and len(wrong) == 4
    manager.check_integrity([holder])
    assert manager.find_prefix(make_request([*prompt, *range(50, 90)])) == []
    assert len(manager.find_prefix(make_request([*other, 1]))) == 2
    manager.free(holder)
    manager.check_integrity([])
    assert manager.forget(make_request(prompt)) == set() and manager.pool.num_cached == 2
