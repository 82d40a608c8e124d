"""A cache too small for all: which request is preempted, and that all of them finish."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import EOS, chunks, ids, make_request, make_scheduler, run_all, run_step
from twinphase.errors import CacheCapacityError
from twinphase.outcome import FinishReason, RequestStatus
from twinphase.scheduler.pace import Pace


def crowd(policy="fcfs", priorities=(0, 0, 0), caching=True):
    """Three requests that together need twelve blocks, but there are only nine."""
    scheduler = make_scheduler(num_blocks=9, policy=policy, enable_prefix_caching=caching)
    requests = {}
    for name, priority in zip("abc", priorities, strict=True):
        requests[name] = make_request(name, 8, priority=priority, max_tokens=9)
        scheduler.add(requests[name])
    run_step(scheduler)
    return scheduler, requests


def first_preempted(scheduler):
    for _ in range(100):
        batch, _ = run_step(scheduler)
        if batch.preempted:
            return batch
    raise AssertionError("nobody was preempted")


@pytest.mark.parametrize(
    ("policy", "priorities", "victim"),
    [
        ("fcfs", (0, 0, 0), "c"),
        ("priority", (0, 5, 0), "b"),
        ("priority", (1, 0, 1), "c"),
        ("priority", (2, 1, 1), "a"),
    ],
)
def test_the_lowest_priority_and_the_youngest_gives_way(policy, priorities, victim):
    scheduler, requests = crowd(policy, priorities)
    assert first_preempted(scheduler).preempted == (victim,)
    request = requests[victim]
    assert (request.status, request.counts.num_preemptions, request.num_computed_tokens) == (
        RequestStatus.PREEMPTED,
        1,
        0,
    )
    assert scheduler.fair.waiting == [request]


def test_it_comes_back_at_its_old_place_and_computes_again_what_was_lost():
    scheduler, requests = crowd(caching=False)
    batch = first_preempted(scheduler)
    assert batch.held_back == "blocks"
    victim = requests["c"]
    known = victim.num_tokens
    scheduler.add(make_request("d", 3, max_tokens=1))
    while victim.status is RequestStatus.PREEMPTED:
        batch, _ = run_step(scheduler)
    assert chunks(batch)[0] == ("c", 0, known)
    assert (
        victim.counts.num_recomputed_tokens == known - 1 == scheduler.num_recomputed_tokens
    )  # the last was never computed
    run_all(scheduler)
    assert [len(request.output_token_ids) for request in requests.values()] == [9, 9, 9]


def test_what_of_it_was_not_evicted_is_not_computed_again():
    scheduler = make_scheduler(num_blocks=5)
    request = make_request("a", 11, max_tokens=5)
    scheduler.add(request)
    run_step(scheduler)
    run_step(scheduler)
    scheduler._preempt(request)
    pool = scheduler.kv_cache.pool
    pool.release(pool.allocate(pool.num_free + 1))  # others needed one of its three full blocks
    batch, _ = run_step(scheduler)
    assert chunks(batch) == [("a", 8, 5)]
    assert (
        request.counts.num_recomputed_tokens == 4
    )  # the last token is computed for the first time
    assert (
        request.counts.num_cached_tokens == 0
    )  # to find one's own earlier blocks is no hit of the prompt


def test_one_that_is_back_with_all_but_its_last_token_cached_decodes_at_once():
    scheduler = make_scheduler()
    request = make_request("a", 8, max_tokens=9)
    scheduler.add(request)
    run_step(scheduler)
    scheduler._preempt(request)
    batch, _ = run_step(scheduler)
    assert (ids(batch.decodes), chunks(batch)) == (["a"], [])
    assert request.counts.num_recomputed_tokens == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_load_of_several_times_what_fits_finishes_without_thrashing(policy, caching):
    choose = random.Random(1)
    scheduler = make_scheduler(
        num_blocks=40,
        policy=policy,
        enable_prefix_caching=caching,
        max_num_batched_tokens=32,
        max_num_seqs=32,
    )
    requests = []
    for number in range(60):
        priority = choose.randint(0, 3) if policy == "priority" else 0
        requests.append(
            make_request(f"{number}", choose.randint(4, 30), priority=priority, max_tokens=30)
        )
        scheduler.add(requests[-1])
    outputs = Counter()  # of each request when it was preempted last
    for _ in range(10_000):
        if not scheduler.has_work:
            break
        batch, _ = run_step(scheduler)
        for name in batch.preempted:
            request = requests[int(name)]
            assert len(request.output_token_ids) > outputs[name] or name not in outputs, (
                f"{name} came back for nothing"
            )
            outputs[name] = len(request.output_token_ids)
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)
    computed = sum(request.num_tokens - 1 for request in requests)
    assert 0 < scheduler.num_preemptions < len(requests)
    assert scheduler.num_recomputed_tokens < 0.5 * computed


@given(st.integers(0, 2**32 - 1))
def test_nobody_waits_for_ever_and_nothing_leaks_whatever_happens(seed):
    choose = random.Random(seed)
    policy = choose.choice(["fcfs", "priority"])
    scheduler = make_scheduler(
        num_blocks=choose.randint(8, 40),
        block_size=choose.randint(1, 8),
        max_num_batched_tokens=choose.randint(4, 20),
        max_num_seqs=choose.randint(1, 4),
        policy=policy,
        pace=Pace(choose.choice([None, 0.001, 8.0])),
        enable_prefix_caching=choose.random() < 0.6,
    )
    requests = []
    tenants = choose.choice(["a", "aaabc"])
    weights = {tenant: choose.choice([0.01, 1.0, 1.0, 50.0]) for tenant in tenants}
    for number in range(60):
        action = choose.random()
        if action < 0.45:
            prompt = (
                [10] * choose.randint(1, 24) if choose.random() < 0.5 else choose.randint(1, 24)
            )
            request = make_request(
                str(number),
                prompt,
                priority=choose.randint(-2, 2) if policy == "priority" else 0,
                max_tokens=choose.choice([None, 1, 5, 9]),
            )
            request.tenant = choose.choice(tenants)
            request.weight = weights[request.tenant]
            try:
                scheduler.add(request)
                requests.append(request)
            except CacheCapacityError:
                pass
        elif action < 0.5 and requests:
            scheduler.finish(choose.choice(requests).request_id, choose.choice(list(FinishReason)))
        elif action < 0.6 and scheduler.running:
            scheduler._preempt(choose.choice(scheduler.running))
        elif scheduler.has_work:
            batch, _ = run_step(scheduler, choose.choice([7, 7, 7, EOS]))
            assert 0 < batch.num_tokens <= scheduler.config.max_num_batched_tokens
        scheduler.check_integrity()
    run_all(scheduler)
    assert scheduler.kv_cache.pool.num_held == 0
    assert all(request.status is RequestStatus.FINISHED for request in requests)
    assert not scheduler.fair.lines and not +scheduler.fair.seats


def test_room_to_grow_is_left_for_answers_as_long_as_of_late():
    scheduler = make_scheduler(num_blocks=20, usual_output=24.0)
    for name in "abcd":
        scheduler.add(make_request(name, 8, max_tokens=24))  # 2 blocks now, 8 in the end
    batch, _ = run_step(scheduler)
    assert [share.request_id for share in batch.scheduled] == ["a", "b"]
    assert batch.held_back == "blocks"
    run_all(scheduler)
    assert scheduler.num_preemptions == 0


def test_short_answers_let_more_in():
    scheduler = make_scheduler(num_blocks=20, usual_output=24.0, max_num_seqs=1)
    for number in range(30):
        scheduler.add(make_request(f"{number}", 8, max_tokens=1))
    run_all(scheduler)
    assert scheduler.usual_output < 3
    scheduler.config = replace(scheduler.config, max_num_seqs=8)
    for name in "abcd":
        scheduler.add(make_request(name, 8, max_tokens=24))
    assert len(run_step(scheduler)[0].scheduled) == 4
