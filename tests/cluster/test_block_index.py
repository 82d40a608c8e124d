"""Which worker holds which blocks: against sets kept by hand."""

from hypothesis import given
from hypothesis import strategies as st

from twinphase.cache.prefix_cache import PrefixCache
from twinphase.cluster.block_index import BlockIndex
from twinphase.request import Request, SamplingParams

NAMES = ["a", "b", "c"]
BLOCKS = [bytes([number]) for number in range(6)]
EVENTS = st.tuples(
    st.sampled_from(NAMES),
    st.sampled_from(["store", "evict", "forget", "expect", "give up"]),
    st.lists(st.sampled_from(BLOCKS), max_size=4, unique=True),
)


@given(st.lists(EVENTS, max_size=30))
def test_hits_are_those_of_sets_kept_by_hand(events):
    index = BlockIndex()
    numbers = dict.fromkeys(NAMES, 0)
    held = {name: set() for name in NAMES}
    coming = {name: set() for name in NAMES}
    for name, kind, blocks in events:
        if kind == "forget":
            index.forget(name)
            held[name] = set()
            coming[name] = set()
            numbers[name] = 0
        elif kind == "expect":
            index.expect(name, blocks)
            coming[name] |= set(blocks) - held[name]
        elif kind == "give up":
            index.give_up(name, blocks)
            coming[name] -= set(blocks)
        else:
            stored, evicted = (blocks, []) if kind == "store" else ([], blocks)
            assert index.apply(name, numbers[name], stored, evicted)
            numbers[name] += bool(blocks)
            held[name] = (held[name] - set(evicted)) | set(stored)
            coming[name] -= set(stored)
        for chain in (BLOCKS, BLOCKS[2:], BLOCKS[:1], []):
            wanted = {}
            for one in NAMES:
                depth = 0
                while depth < len(chain) and chain[depth] in held[one] | coming[one]:
                    depth += 1
                if depth:
                    wanted[one] = depth
            assert index.hits(chain) == wanted
    assert len(index) == len(set().union(*held.values()))


def test_a_gap_is_told_and_the_whole_list_mends_it():
    index = BlockIndex()
    assert index.apply("a", 0, BLOCKS[:1], [])
    assert index.apply("a", 0, BLOCKS[3:4], [])  # come twice: taken once
    assert not index.apply("a", 3, BLOCKS[1:2], [])
    assert index.hits(BLOCKS) == {"a": 1}
    index.replace("a", 5, BLOCKS[:3])
    assert index.hits(BLOCKS) == {"a": 3}
    assert index.apply("a", 5, [], BLOCKS[2:3])
    assert index.hits(BLOCKS) == {"a": 2}


def test_the_index_numbers_events_as_caches_do():
    """From one end to the other: what a prefix cache tells is taken without a gap."""
    index = BlockIndex()
    cache = PrefixCache(8, 4)
    request = Request("r", list(range(32)), SamplingParams())
    blocks = [cache.block(request, number) for number in range(8)]
    cache.put(0, blocks[0])
    number, hashes = cache.watch()
    index.replace("a", number, hashes)
    for stored, evicted in (([1, 2, 3], []), ([4], [0]), ([5, 6, 7, 0], [1, 2])):
        for number in stored:
            cache.put(number, blocks[number])
        for number in evicted:
            cache.evict(number)
        assert index.apply("a", *cache.changes.take())
        assert index.num_held("a") == len(cache)
    assert index.hits([block.block_hash for block in blocks]) == {"a": 1}
