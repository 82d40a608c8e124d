"""Slots and snapshots of recurrent layers' states, beside the blocks they belong to."""

from itertools import count

import pytest

from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.cache.state_cache import ZERO_SLOT, StateCache
from twinphase.outcome import MissReason, PrefixMiss
from twinphase.request import STATE_LOG_ROWS, Request, SamplingParams

SIZE = 4
SYSTEM = list(range(100, 112))  # three blocks


class Manager:
    """A cache of 4-token blocks whose snapshots are 1,000 tokens apart unless `interval` says."""

    def __init__(self, num_slots=12, interval=1000, num_blocks=64):
        self.states = StateCache(num_slots, interval)
        self.cache = KVCacheManager(num_blocks, SIZE, states=self.states)
        self.running = []
        self.names = count()

    def start(self, prompt, output=()):
        request = Request(
            str(next(self.names)), list(prompt), SamplingParams(), output_token_ids=list(output)
        )
        self.cache.start(request, self.cache.find_prefix(request))
        self.running.append(request)
        self.check()
        return request

    def compute(self, request, num_tokens, accepted=0, logged=False):
        """A step of `num_tokens` tokens, the last `accepted` of them accepted drafts."""
        before = request.num_computed_tokens
        self.cache.plan_snapshots(request, num_tokens - accepted)
        self.check()
        request.num_computed_tokens += num_tokens
        self.cache.keep_computed(request, before, accepted, logged=logged)
        self.check()

    def end(self, request):
        self.running.remove(request)
        self.cache.free(request)
        self.check()

    def whole(self, prompt):
        """A request that is admitted, prefilled at once, and finished."""
        request = self.start(prompt)
        self.compute(request, request.num_tokens - request.num_computed_tokens)
        self.end(request)
        return request

    def check(self):
        self.cache.check_integrity(self.running)


def test_a_request_writes_its_two_slots_in_turn():
    manager = Manager()
    request = manager.start(range(40))
    slots = []
    for _ in range(3):
        slots.append((request.state.source, request.state.target))
        manager.compute(request, 5)
    (zero, first), (second, third), last = slots
    assert (zero, second, last) == (ZERO_SLOT, first, (third, first))
    manager.end(request)
    assert manager.states.usage == 0


def test_a_prompt_leaves_a_snapshot_at_its_last_full_block():
    manager = Manager()
    manager.whole([*SYSTEM, 1, 2, 3])
    same = manager.start([*SYSTEM, 1, 2, 3])
    assert same.num_computed_tokens == 12 and same.counts.num_cached_tokens == 12
    assert same.counts.prefix_miss == PrefixMiss(MissReason.BLOCK_GRANULARITY, 12)
    assert same.state.source not in (ZERO_SLOT, *same.state.own)


def test_blocks_without_a_snapshot_are_a_miss_of_their_own_and_get_one():
    """The second prompt with a system part pays for the snapshot, and the third one finds it."""
    manager = Manager()
    manager.whole([*SYSTEM, *range(20)])
    second = manager.whole([*SYSTEM, *range(50, 70)])
    assert second.counts.num_cached_tokens == 0
    assert second.counts.prefix_miss == PrefixMiss(MissReason.NO_SNAPSHOT, 0, num_known=12)
    assert manager.start([*SYSTEM, *range(80, 99)]).num_computed_tokens == 12


def test_an_interval_bounds_what_a_lost_snapshot_costs():
    manager = Manager(interval=8)
    whole = manager.whole(range(30))
    assert manager.states.num_snapshots == 4  # at 8, 16, 24 and 28
    manager.states.drop(whole.block_hashes[6])
    assert manager.start(range(30)).num_computed_tokens == 24


def test_snapshots_go_with_their_blocks_and_blocks_stay_without_them():
    manager = Manager(num_blocks=8)
    manager.whole([*SYSTEM, 1])
    pool = manager.states.pool
    pool.release(pool.allocate(pool.num_available))
    assert manager.states.num_snapshots == 0
    assert manager.start([*SYSTEM, 1]).counts.prefix_miss.reason is MissReason.NO_SNAPSHOT
    manager = Manager(num_blocks=8)
    manager.whole([*SYSTEM, 1])
    blocks = manager.cache.pool
    blocks.release(blocks.allocate(blocks.num_available))
    assert manager.states.num_snapshots == 0 and manager.states.pool.num_cached == 0


def test_accepted_drafts_wait_in_the_slot():
    manager = Manager(interval=4)
    request = manager.start(range(5), output=[1] * 20)
    manager.compute(request, 6)
    manager.compute(request, 4, accepted=3)
    assert request.num_computed_tokens == 10 and request.state.pending == 3
    # The state stands at 7, so that there is none at 8.
    assert manager.states.num_snapshots == 1
    manager.compute(request, 1)
    assert request.state.pending == 0


def test_short_steps_wait_in_the_slot_until_it_is_full():
    manager = Manager()
    request = manager.start(range(5), output=[1] * 20)
    assert request.state.log_room == 0  # The zeros are never written.
    manager.compute(request, 5)
    source = request.state.source
    for rows in (1, 3, 4):
        manager.compute(request, rows, accepted=rows - 1, logged=True)
        assert request.state.source == source
    assert (request.state.pending, request.state.log_room) == (STATE_LOG_ROWS, 0)
    manager.compute(request, 3, accepted=2)
    assert request.state.source != source
    assert (request.state.pending, request.state.log_room) == (2, STATE_LOG_ROWS - 2)
    # A snapshot that was begun from is another's.
    manager.end(request)
    manager.whole([*SYSTEM, 1])
    assert manager.start([*SYSTEM, 1]).state.log_room == 0


def test_no_slot_no_snapshot():
    manager = Manager(num_slots=4, interval=4)
    first = manager.start(range(30))
    manager.compute(first, 29)
    assert manager.states.num_snapshots == 1
    assert not manager.cache.has_state_slots([])
    manager.end(first)
    assert manager.cache.has_state_slots([])


def test_a_request_jumps_to_what_another_has_computed():
    manager = Manager(interval=8)
    late = manager.start(range(40))
    manager.whole(range(40))
    manager.cache.share_new_prefix(late)
    manager.check()
    assert late.num_computed_tokens == 36 and manager.cache.lost_tokens(late) == 0


def test_rows_that_waited_in_a_slot_are_left_by_a_jump():
    manager = Manager(interval=8)
    late = manager.start(range(40))
    manager.compute(late, 8)
    manager.compute(late, 4, logged=True)
    assert late.state.pending == 4
    manager.whole(range(40))
    manager.cache.share_new_prefix(late)
    assert (late.num_computed_tokens, late.state.pending) == (36, 0)


@pytest.mark.parametrize("computed", [0, 8])
def test_a_chunk_is_worth_waiting_for_up_to_the_snapshot_it_leaves(computed):
    manager = Manager(interval=16)
    first = manager.start(range(40))
    manager.cache.plan_snapshots(first, 24)
    computing = manager.cache.blocks_of_chunk(first, 24)
    other = Request("other", [*range(20), *range(70, 90)], SamplingParams())
    assert manager.cache.tokens_in(other, computed, computing) == 16 - computed


def test_a_prompt_that_is_not_believed_takes_its_snapshots_along():
    manager = Manager()
    request = manager.whole([*SYSTEM, 1])
    manager.cache.forget(request)
    assert manager.states.num_snapshots == 0
    assert manager.start([*SYSTEM, 1]).num_computed_tokens == 0
