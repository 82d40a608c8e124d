from itertools import takewhile

import pytest

from twinphase.cache.prefix_cache import PrefixCache
from twinphase.outcome import MissReason, PrefixMiss
from twinphase.request import Request, SamplingParams

SIZE = 4
A = [1, 2, 3, 4]
B = [5, 6, 7, 8]
C = [9, 10, 11, 12]


@pytest.fixture
def cache():
    return PrefixCache(num_blocks=16, block_size=SIZE)


def make_request(prompt, salt=None, block_ids=()):
    return Request("r", list(prompt), SamplingParams(), cache_salt=salt, block_ids=list(block_ids))


def keep(cache, prompt, block_ids, salt=None):
    """Let a request compute the full blocks of its prompt."""
    request = make_request(prompt, salt, block_ids)
    for index in range(len(block_ids)):
        cache.insert(request, index)
    cache.check_integrity()
    return request


def hits(cache, prompt, salt=None):
    request = make_request(prompt, salt)
    found = (cache.find(cache.block_hash(request, index)) for index in range(len(prompt) // SIZE))
    return list(takewhile(lambda block_id: block_id is not None, found))


def miss(cache, prompt, salt=None):
    return cache.miss(make_request(prompt, salt), len(hits(cache, prompt[:-1], salt)))


def test_the_longest_common_beginning_is_found(cache):
    keep(cache, A + B + C, [3, 1, 2])
    assert hits(cache, A + B + C) == [3, 1, 2]
    assert hits(cache, A + B + A) == [3, 1]
    assert hits(cache, B + C) == []  # the same tokens behind other ones are another block
    assert hits(cache, A[:3]) == []


def test_equal_content_is_kept_once(cache):
    keep(cache, A + B, [0, 1])
    keep(cache, A + C, [2, 3])
    assert hits(cache, A + C) == [0, 3]
    assert not cache.holds(2)
    assert len(cache) == 3


def test_another_salt_or_model_shares_nothing(cache):
    keep(cache, A, [0], salt="mine")
    assert hits(cache, A, "mine") == [0]
    assert hits(cache, A) == hits(cache, A, "yours") == []
    other = PrefixCache(16, SIZE, fingerprint=b"another model")
    assert other.root(None) != cache.root(None)
    # Length and content of a salt cannot be mistaken for a fingerprint's beginning.
    assert PrefixCache(16, SIZE, b"bc").root("a") != PrefixCache(16, SIZE, b"c").root("ab")


class TestMiss:
    def test_nothing_more_could_be_held(self, cache):
        keep(cache, A + B, [0, 1])
        assert miss(cache, [*A, 5]) is None

    def test_less_than_a_block_is_left(self, cache):
        keep(cache, A, [0])
        assert miss(cache, [*A, 5, 6, 7]) == PrefixMiss(MissReason.BLOCK_GRANULARITY, 4)
        assert miss(cache, [1, 2]) == PrefixMiss(MissReason.BLOCK_GRANULARITY, 0)
        assert miss(cache, [1]) is None

    def test_another_prompt_goes_on_differently(self, cache):
        keep(cache, A + B, [0, 1])
        assert miss(cache, [*A, 5, 6, 99, 99, 99]) == PrefixMiss(MissReason.DIVERGED, 6)
        assert miss(cache, [1, 2, 99, 99, 99]) == PrefixMiss(MissReason.DIVERGED, 2)
        assert miss(cache, [*A, 99, 6, 7, 8, 9]) == PrefixMiss(MissReason.DIVERGED, 4)

    def test_never_seen(self, cache):
        keep(cache, A, [0])
        assert miss(cache, B + C) == PrefixMiss(MissReason.NEVER_SEEN, 0)
        assert miss(cache, A + B + C) == PrefixMiss(MissReason.NEVER_SEEN, 4)

    def test_evicted(self, cache):
        keep(cache, A + B, [0, 1])
        cache.evict(1)
        cache.check_integrity()
        assert miss(cache, A + B + C) == PrefixMiss(MissReason.EVICTED, 4, num_known=4)
        cache.evict(0)
        assert miss(cache, A + B + C) == PrefixMiss(MissReason.EVICTED, 0, num_known=8)
        assert miss(cache, A + C) == PrefixMiss(
            MissReason.EVICTED, 0, num_known=4
        )  # of the rest nothing is known
        keep(cache, A + B, [5, 6])
        assert hits(cache, A + B) == [5, 6]

    def test_a_salt_of_which_nothing_is_cached(self, cache):
        keep(cache, A, [0])
        assert miss(cache, A + B, "mine") == PrefixMiss(MissReason.SALT, 0)

    @pytest.mark.parametrize("salt", [None, "mine"])
    @pytest.mark.parametrize("evicted", [False, True])
    def test_a_reason_says_nothing_of_another_salts_content(self, cache, salt, evicted):
        prompts = (A + B + C, [1, 2, 99, 99, 99], [1, 2], C + A)
        before = [miss(cache, prompt, salt) for prompt in prompts]
        keep(cache, A + B + C, [0, 1, 2], salt="yours")
        if evicted:
            cache.evict(1)
        assert [miss(cache, prompt, salt) for prompt in prompts] == before


def test_the_memory_of_evicted_blocks_is_bounded():
    cache = PrefixCache(num_blocks=2, block_size=SIZE)
    for number in range(100, 120):
        keep(cache, [number] * SIZE, [0])
        cache.evict(0)
    remembered = [n for n in range(100, 120) if miss(cache, [n] * 5).reason is MissReason.EVICTED]
    assert remembered == list(range(112, 120))  # the last four times the blocks
    assert miss(cache, [100] * 5).reason is MissReason.NEVER_SEEN


def test_integrity_finds_indices_that_disagree(cache):
    request = keep(cache, A + B, [0, 1])
    cache._block_of[request.block_hashes[1]] = 7
    with pytest.raises(AssertionError, match="two indices differ"):
        cache.check_integrity()
    del cache._block_of[request.block_hashes[1]], cache._content[1]
    with pytest.raises(AssertionError, match="tree differs"):
        cache.check_integrity()
