import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinphase.batch import Phase, StepOutput
from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.errors import CacheFullError
from twinphase.request import FinishReason, Request, RequestStatus, SamplingParams
from twinphase.scheduler.phase import give_tokens, phase_of
from twinphase.scheduler.scheduler import Scheduler

EOS = 2


def make_scheduler(num_blocks=64, block_size=4, max_model_len=100, **settings):
    manager = KVCacheManager(num_blocks, block_size)
    return Scheduler(manager, max_model_len=max_model_len, eos_token_ids=[EOS], **settings)


def make_request(request_id, prompt_length, **params):
    return Request(request_id, list(range(10, 10 + prompt_length)), SamplingParams(**params))


def run_step(scheduler, token_id=7):
    """Schedule and commit a step in which every sampling request gets `token_id`."""
    batch = scheduler.schedule()
    output = StepOutput({share.request_id: [token_id] for share in batch.scheduled if share.samples})
    return batch, scheduler.commit(batch, output)


def run_all(scheduler, token_id=7):
    while scheduler.has_work:
        run_step(scheduler, token_id)


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "num_computed", "phase"),
    [
        (5, 0, 0, Phase.PREFILL),
        (5, 0, 4, Phase.PREFILL),  # the last prompt token, say after a hand-over, is still prompt
        (5, 1, 5, Phase.DECODE),
        (5, 3, 7, Phase.DECODE),
        (5, 3, 0, Phase.PREFILL),  # recompute
        (5, 3, 6, Phase.PREFILL),
    ],
)
def test_phase_is_derived_from_computed_tokens(num_prompt, num_output, num_computed, phase):
    request = Request("r", [1] * num_prompt, SamplingParams(), output_token_ids=[1] * num_output)
    request.num_computed_tokens = num_computed
    assert phase_of(request) is phase


def test_a_share_spans_prompt_and_output():
    request = Request("r", [1, 2, 3], SamplingParams(), output_token_ids=[4, 5])
    request.num_computed_tokens = 2
    assert give_tokens(request, 2).token_ids == [3, 4]
    assert not give_tokens(request, 2).samples
    assert give_tokens(request, 3).samples


def test_a_prompt_is_cut_into_chunks_of_the_token_budget():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("a", 10, max_tokens=2))
    chunks = []
    for _ in range(4):
        batch, finished = run_step(scheduler)
        chunks.append((len(batch.decodes), [(s.num_computed_tokens, s.num_scheduled_tokens) for s in batch.prefills]))
    assert chunks == [(0, [(0, 4)]), (0, [(4, 4)]), (0, [(8, 2)]), (1, [])]
    assert [(r.request_id, r.finish_reason) for r in finished] == [("a", FinishReason.LENGTH)]
    assert not scheduler.has_work


def test_decodes_come_first_and_prefills_fill_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", 3, max_tokens=9))
    run_step(scheduler)
    scheduler.add(make_request("b", 5, max_tokens=9))
    scheduler.add(make_request("c", 5, max_tokens=9))
    batch, _ = run_step(scheduler)
    assert [s.request_id for s in batch.decodes] == ["a"]
    assert [(s.request_id, s.num_scheduled_tokens, s.samples) for s in batch.prefills] == [
        ("b", 5, True),
        ("c", 2, False),
    ]


def test_requests_are_admitted_only_when_their_whole_life_fits():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    first, second = make_request("a", 8, max_tokens=5), make_request("b", 4, max_tokens=5)  # 3 and 2 blocks
    scheduler.add(first)
    scheduler.add(second)
    run_step(scheduler)
    assert (first.status, second.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    run_all(scheduler)
    assert first.finish_reason is second.finish_reason is FinishReason.LENGTH
    scheduler.check_integrity()


def test_a_request_larger_than_the_cache_is_refused():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    with pytest.raises(CacheFullError, match="needs up to 5 KV cache blocks of 4 tokens; the cache has 4"):
        scheduler.add(make_request("a", 8, max_tokens=10))
    assert not scheduler.has_work


def test_seats_are_limited():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, 3))
    batch, _ = run_step(scheduler)
    assert [s.request_id for s in batch.prefills] == ["a", "b"]


def test_ids_are_unique():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(make_request("a", 3))


@pytest.mark.parametrize(
    ("params", "token_id", "reason", "num_output"),
    [
        ({}, EOS, FinishReason.STOP, 1),
        ({"ignore_eos": True, "max_tokens": 3}, EOS, FinishReason.LENGTH, 3),
        ({"stop_token_ids": [9]}, 9, FinishReason.STOP, 1),
        ({"max_tokens": 4}, 7, FinishReason.LENGTH, 4),
        ({"min_tokens": 3}, EOS, FinishReason.STOP, 3),
        ({"max_tokens": None}, 7, FinishReason.LENGTH, 95),
    ],
)
def test_why_a_request_ends(params, token_id, reason, num_output):
    scheduler = make_scheduler()
    request = make_request("a", 5, **params)
    scheduler.add(request)
    run_all(scheduler, token_id)
    assert (request.finish_reason, len(request.output_token_ids)) == (reason, num_output)
    assert scheduler.kv_cache.pool.num_free == 64


def test_tokens_behind_the_end_are_dropped():
    scheduler = make_scheduler()
    request = make_request("a", 5)
    scheduler.add(request)
    batch = scheduler.schedule()
    scheduler.commit(batch, StepOutput({"a": [7, EOS, 8]}))
    assert request.output_token_ids == [7, EOS]


def test_a_request_that_could_not_be_sampled_fails_alone():
    scheduler = make_scheduler()
    bad, good = make_request("bad", 3), make_request("good", 3)
    scheduler.add(bad)
    scheduler.add(good)
    batch = scheduler.schedule()
    assert scheduler.commit(batch, StepOutput({"good": [7]})) == [bad]
    assert bad.finish_reason is FinishReason.ERROR
    run_all(scheduler)
    assert good.finish_reason is FinishReason.LENGTH
    scheduler.check_integrity()


def test_an_abort_between_schedule_and_commit_is_passed_over():
    scheduler = make_scheduler()
    request = make_request("a", 3)
    scheduler.add(request)
    batch = scheduler.schedule()
    scheduler.abort("a")
    assert scheduler.commit(batch, StepOutput({"a": [7]})) == []
    assert request.finish_reason is FinishReason.ABORT
    assert scheduler.kv_cache.pool.num_free == 64
    scheduler.abort("a")
    scheduler.abort("never there")


def test_a_step_that_failed_is_scheduled_again():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    first = scheduler.schedule()
    assert scheduler.schedule() == first


class TestConversation:
    def turn(self, scheduler, request_id, prompt):
        request = Request(request_id, prompt, SamplingParams(max_tokens=4))
        scheduler.add(request, keep_kv=True)
        batch, _ = run_step(scheduler)
        while request.finish_reason is None:
            run_step(scheduler)
        scheduler.check_integrity()
        return request, batch

    def test_the_second_turn_prefills_only_what_is_new(self):
        scheduler = make_scheduler()
        first, _ = self.turn(scheduler, "1", [3] * 10)
        second, batch = self.turn(scheduler, "2", [*first.token_ids(0, first.num_tokens), 4, 4])
        assert second.num_cached_tokens == 13  # the last sampled token was never computed
        assert [s.num_scheduled_tokens for s in batch.prefills] == [3]

    def test_kept_blocks_go_to_whoever_needs_them(self):
        scheduler = make_scheduler(num_blocks=8, block_size=4)
        self.turn(scheduler, "1", [3] * 10)
        assert scheduler.kv_cache.pool.num_free == 4
        scheduler.add(make_request("big", 28, max_tokens=4))
        run_all(scheduler)
        assert scheduler.kv_cache.pool.num_free == 8

    def test_other_requests_leave_kept_blocks_alone(self):
        scheduler = make_scheduler()
        first, _ = self.turn(scheduler, "1", [3] * 10)
        scheduler.add(make_request("other", 10))
        run_all(scheduler)
        second, _ = self.turn(scheduler, "2", [3] * 12)
        assert second.num_cached_tokens == 10
        assert first.block_ids == []

    def test_an_aborted_turn_leaves_what_it_computed(self):
        scheduler = make_scheduler(max_num_batched_tokens=16)
        scheduler.add(Request("1", [3] * 20, SamplingParams(max_tokens=4)), keep_kv=True)
        run_step(scheduler)
        scheduler.abort("1")
        second, _ = self.turn(scheduler, "2", [3] * 30)
        assert second.num_cached_tokens == 16


@given(st.integers(0, 2**32 - 1))
def test_no_block_leaks_whatever_happens(seed):
    choose = random.Random(seed)
    scheduler = make_scheduler(
        num_blocks=choose.randint(8, 24),
        block_size=choose.randint(1, 8),
        max_num_batched_tokens=choose.randint(4, 20),
        max_num_seqs=4,
    )
    requests = []
    for number in range(40):
        action = choose.random()
        if action < 0.4:
            request = make_request(str(number), choose.randint(1, 20), max_tokens=choose.choice([None, 1, 5]))
            try:
                scheduler.add(request, keep_kv=choose.random() < 0.5)
                requests.append(request)
            except CacheFullError:
                pass
        elif action < 0.5 and requests:
            scheduler.abort(choose.choice(requests).request_id)
        elif action < 0.6 and requests:
            scheduler.finish(choose.choice(requests).request_id, FinishReason.STOP)
        elif scheduler.has_work:
            batch, _ = run_step(scheduler, choose.choice([7, 7, 7, EOS]))
            assert 0 < batch.num_tokens <= scheduler.max_num_batched_tokens
        scheduler.check_integrity()
    run_all(scheduler)
    scheduler.check_integrity()
    assert all(request.status is RequestStatus.FINISHED for request in requests)
