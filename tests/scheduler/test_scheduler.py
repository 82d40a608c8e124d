import pytest

from schedules import EOS, chunks, ids, make_request, make_scheduler, run_all, run_step
from twinphase.batch import Batch, Phase, StepOutput
from twinphase.errors import CacheCapacityError, InvalidRequestError
from twinphase.outcome import FinishReason, RequestStatus
from twinphase.request import Request, SamplingParams
from twinphase.scheduler.phase import give_tokens, phase_of


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "num_computed", "phase"),
    [
        (5, 0, 0, Phase.PREFILL),
        (5, 0, 4, Phase.PREFILL),  # the last prompt token, say after a prefix hit, is still prompt
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
    batches = run_all(scheduler)
    assert [chunks(batch) for batch in batches] == [[("a", 0, 4)], [("a", 4, 4)], [("a", 8, 2)], []]
    assert [ids(batch.decodes) for batch in batches] == [[], [], [], ["a"]]


def test_chunks_end_on_block_boundaries_where_they_can():
    scheduler = make_scheduler(max_num_batched_tokens=7)
    scheduler.add(make_request("a", 20, max_tokens=1))
    scheduler.add(make_request("b", 6, max_tokens=1))
    batches = run_all(scheduler)
    assert [chunks(batch) for batch in batches] == [
        [
            ("a", 0, 4)
        ],  # the 3 tokens that are left are no block: not worth beginning another prompt for
        [("a", 4, 4)],
        [("a", 8, 4)],
        [("a", 12, 4)],
        [("a", 16, 4)],
        [("b", 0, 6)],
    ]


def test_decodes_come_first_and_prefills_fill_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add(make_request("a", 3, max_tokens=9))
    run_step(scheduler)
    scheduler.add(make_request("b", 5, max_tokens=9))
    scheduler.add(make_request("c", 5, max_tokens=9))
    batch, _ = run_step(scheduler)
    assert ids(batch.decodes) == ["a"]
    assert chunks(batch) == [("b", 0, 5), ("c", 0, 4)]
    assert [share.samples for share in batch.prefills] == [True, False]


class TestAdmission:
    @pytest.mark.parametrize(
        ("limit", "length", "admitted", "held_back"),
        [
            ({"max_num_seqs": 2}, 3, "ab", "seats"),
            ({"max_num_batched_tokens": 8}, 8, "a", "budget"),
            ({"num_state_slots": 6}, 3, "ab", "states"),
            ({}, 3, "abc", None),
        ],
    )
    def test_what_is_limited_is_named(self, limit, length, admitted, held_back):
        scheduler = make_scheduler(**limit)
        for name in "abc":
            scheduler.add(make_request(name, length))
        batch, _ = run_step(scheduler)
        assert (ids(batch.prefills), batch.held_back) == (list(admitted), held_back)

    def test_blocks_are_limited_and_each_running_request_may_want_one_more(self):
        scheduler = make_scheduler(num_blocks=4)
        first = make_request("a", 8, max_tokens=5)
        second = make_request("b", 8, max_tokens=5)
        scheduler.add(first)
        scheduler.add(second)
        batch, _ = run_step(scheduler)
        assert batch.held_back == "blocks"
        assert (first.status, second.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
        run_all(scheduler)
        assert first.finish_reason is second.finish_reason is FinishReason.LENGTH
        assert scheduler.num_preemptions == 0

    def test_nobody_overtakes(self):
        scheduler = make_scheduler(num_blocks=6)
        for name, length in (("a", 12), ("large", 12), ("small", 2)):
            scheduler.add(make_request(name, length, max_tokens=5))
        assert ids(run_step(scheduler)[0].prefills) == ["a"]

    def test_a_shared_prefix_is_computed_once(self):
        scheduler = make_scheduler(max_num_batched_tokens=8)
        prompt = list(range(10, 22))
        for name in "abc":
            scheduler.add(make_request(name, [*prompt, ord(name)], max_tokens=1))
        batches = run_all(scheduler)
        assert sum(batch.num_tokens for batch in batches) == 13 + 1 + 1
        assert scheduler.kv_cache.num_hit_tokens == 12 + 12

    @pytest.mark.parametrize("budget", [512, 100])
    def test_prompts_that_come_together_wait_a_step_for_a_long_beginning_in_common(self, budget):
        scheduler = make_scheduler(num_blocks=200, max_model_len=200, max_num_batched_tokens=budget)
        for name in "abc":
            scheduler.add(make_request(name, [*range(10, 110), ord(name), 7], max_tokens=1))
        batches = run_all(scheduler)
        assert sum(batch.num_tokens for batch in batches) == 102 + 2 + 2
        assert batches[0].held_back == ("prefix" if budget == 512 else "budget")

    def test_a_short_beginning_in_common_is_not_waited_for(self):
        scheduler = make_scheduler(num_blocks=200, max_model_len=200)
        for name in "abc":
            scheduler.add(make_request(name, [*range(10, 22), *[ord(name)] * 80], max_tokens=1))
        assert len(run_all(scheduler)) == 1


class TestPolicy:
    def order(self, policy, *priorities):
        scheduler = make_scheduler(policy=policy, max_num_seqs=1)
        for number, priority in enumerate(priorities):
            scheduler.add(make_request(str(number), 3, priority=priority, max_tokens=1))
        return [int(batch.prefills[0].request_id) for batch in run_all(scheduler)]

    def test_lower_priorities_go_first_then_the_order_of_arrival(self):
        assert self.order("fcfs", 0, 0, 0) == [0, 1, 2]
        assert self.order("priority", 5, -1, 0, 5, -1) == [1, 4, 2, 0, 3]

    def test_chunks_go_to_the_more_urgent_first(self):
        scheduler = make_scheduler(policy="priority", max_num_batched_tokens=8)
        scheduler.add(make_request("later", 40, priority=1, max_tokens=1))
        run_step(scheduler)
        scheduler.add(make_request("urgent", 12, priority=0, max_tokens=1))
        assert chunks(run_step(scheduler)[0]) == [("urgent", 0, 8)]
        assert chunks(run_step(scheduler)[0]) == [("urgent", 8, 4), ("later", 8, 4)]
        assert chunks(run_step(scheduler)[0]) == [("later", 12, 8)]


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "needed"),
        [(8, 10, 5), (17, 1, 5), (17, None, 5), (10, 8, 5), (60, None, 15)],
    )
    def test_what_the_empty_cache_could_not_hold(self, prompt, max_tokens, needed):
        scheduler = make_scheduler(num_blocks=4)
        with pytest.raises(
            CacheCapacityError, match=f"up to {needed} KV cache blocks of 4 .* whole cache has 4"
        ):
            scheduler.add(make_request("a", prompt, max_tokens=max_tokens))
        assert not scheduler.has_work

    @pytest.mark.parametrize(("prompt", "max_tokens"), [(8, 9), (16, 1), (16, None), (1, None)])
    def test_what_just_fits(self, prompt, max_tokens):
        scheduler = make_scheduler(num_blocks=4)
        request = make_request("a", prompt, max_tokens=max_tokens)
        scheduler.add(request)
        run_all(scheduler)
        assert request.num_tokens == (17 if max_tokens is None else prompt + max_tokens)

    def test_ids_are_unique_among_the_unfinished(self):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", 3))
        with pytest.raises(InvalidRequestError, match="'a' is in use"):
            scheduler.add(make_request("a", 3))
        run_all(scheduler)
        scheduler.add(make_request("a", 3))


class TestEnds:
    def test_tokens_behind_the_end_are_dropped(self):
        scheduler = make_scheduler()
        request = make_request("a", 5)
        scheduler.add(request)
        batch = scheduler.schedule()
        scheduler.commit(batch, StepOutput({"a": [7, EOS, 8]}))
        assert request.output_token_ids == [7, EOS]

    def test_a_request_that_could_not_be_sampled_fails_alone(self):
        scheduler = make_scheduler()
        bad = make_request("bad", 3)
        good = make_request("good", 3)
        scheduler.add(bad)
        scheduler.add(good)
        assert scheduler.commit(scheduler.schedule(), StepOutput({"good": [7]})) == [
            bad
        ]  # no token, and no reason
        assert bad.finish_reason is FinishReason.ERROR
        run_all(scheduler)
        assert good.finish_reason is FinishReason.LENGTH

    def test_an_abort_between_schedule_and_commit_is_passed_over(self):
        scheduler = make_scheduler()
        request = make_request("a", 3)
        scheduler.add(request)
        batch = scheduler.schedule()
        scheduler.finish("a", FinishReason.ABORT)
        assert scheduler.commit(batch, StepOutput({"a": [7]})) == []
        assert request.finish_reason is FinishReason.ABORT
        assert scheduler.kv_cache.pool.num_free == 64
        scheduler.finish("a", FinishReason.STOP)
        scheduler.finish("never there", FinishReason.STOP)
        assert request.finish_reason is FinishReason.ABORT

    def test_a_step_that_was_never_committed_is_scheduled_again(self):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", 3))
        first = scheduler.schedule()
        assert scheduler.schedule() == first


@pytest.mark.parametrize("damage", ["order", "lost", "blocks"])
def test_integrity_finds_a_damaged_state(damage):
    scheduler = make_scheduler(max_num_seqs=1)
    for name in "abc":
        scheduler.add(make_request(name, 3))
    run_step(scheduler)
    if damage == "order":
        scheduler.fair.lines[""].reverse()
    elif damage == "lost":
        scheduler.fair.lines[""].pop()
    else:
        scheduler.fair.lines[""][0].num_computed_tokens = 1
    with pytest.raises(AssertionError, match={"blocks": "holds blocks"}.get(damage, damage)):
        scheduler.check_integrity()


def running_scheduler(count=1, max_tokens=20, **settings):
    """Requests of 4 prompt tokens, one block each, that decode next."""
    scheduler = make_scheduler(enable_prefix_caching=False, **{"block_size": 4, **settings})
    for number in range(count):
        scheduler.add(make_request(f"r{number}", 4, max_tokens=max_tokens))
    run_step(scheduler)
    return scheduler


def commit_tokens(scheduler, batch, **tokens):
    finished = scheduler.commit(batch, StepOutput(tokens))
    scheduler.check_integrity()
    return finished


def test_a_decode_advances_by_its_accepted_drafts():
    scheduler = running_scheduler()
    request = scheduler.get("r0")
    (share,) = scheduler.schedule({"r0": [11, 12, 13, 14], "nobody": [5]}).decodes
    assert (share.token_ids, share.num_drafts, share.num_logits) == ([7, 11, 12, 13, 14], 4, 5)
    assert len(request.block_ids) == 3  # for 9 tokens
    commit_tokens(scheduler, Batch([share], []), r0=[11, 12, 9])
    assert request.output_token_ids == [7, 11, 12, 9]
    assert (
        request.num_computed_tokens,
        request.counts.num_draft_tokens,
        request.counts.num_accepted_draft_tokens,
    ) == (7, 4, 2)
    assert len(request.block_ids) == 2  # the third is given back
    batch = scheduler.schedule({"r0": [11, 12]})
    commit_tokens(scheduler, batch, r0=[11, 12, 13])
    assert request.num_computed_tokens == 10


def test_drafts_end_where_the_output_has_to():
    scheduler = make_scheduler()
    scheduler.add(make_request("r0", 4, max_tokens=4))
    run_step(scheduler)
    batch = scheduler.schedule({"r0": list(range(20, 30))})
    assert batch.decodes[0].num_drafts == 2  # the fourth token is sampled behind them
    assert commit_tokens(scheduler, batch, r0=[20, 21, 22])[0].finish_reason is FinishReason.LENGTH
    assert scheduler.kv_cache.pool.num_held == 0


def test_drafts_take_free_blocks_only():
    scheduler = running_scheduler(2, num_blocks=5, max_tokens=16)
    batch = scheduler.schedule(
        {"r0": [1] * 12, "r1": [1] * 12}
    )  # each needs its second block; one is left
    assert [share.num_drafts for share in batch.decodes] == [7, 3]
    assert not batch.preempted
    commit_tokens(scheduler, batch, r0=[9], r1=[9])
    assert scheduler.kv_cache.pool.num_held == 4


def test_drafts_evict_nothing_and_hold_nobody_back():
    scheduler = make_scheduler(num_blocks=10, block_size=4)
    scheduler.add(make_request("old", list(range(50, 62)), max_tokens=1))
    run_all(scheduler)
    assert scheduler.kv_cache.pool.num_cached == 3
    scheduler.add(make_request("r0", 4, max_tokens=30))
    run_step(scheduler)
    batch = scheduler.schedule({"r0": [1] * 29})
    assert scheduler.kv_cache.pool.num_cached == 3
    assert batch.decodes[0].num_drafts == 23
    commit_tokens(scheduler, batch, r0=[9])
    scheduler.add(make_request("new", 12, max_tokens=2))
    batch = scheduler.schedule({"r0": [1] * 29})
    assert ids(batch.prefills) == ["new"]
    commit_tokens(scheduler, batch, r0=[9], new=[9])


def test_drafts_leave_half_of_the_budget_to_prompts():
    scheduler = running_scheduler(2, max_num_batched_tokens=12)
    scheduler.add(make_request("long", 40, max_tokens=2))
    batch = scheduler.schedule({"r0": [1] * 9, "r1": [1] * 9})
    assert [share.num_drafts for share in batch.decodes] == [5, 0]
    assert chunks(batch) == [("long", 0, 4)]  # 5 are left, a whole block of them is taken
    assert batch.num_tokens <= 12


def test_only_right_drafts_are_findable():
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_request("r0", 4, max_tokens=20))
    run_step(scheduler)
    commit_tokens(
        scheduler, scheduler.schedule({"r0": [11, 12, 13, 14, 15, 16]}), r0=[11, 12, 13, 9]
    )
    prompt = scheduler.get("r0").prompt_token_ids
    scheduler.finish("r0", FinishReason.ABORT)
    for tail, found in (
        ([7, 11, 12, 13], 8),
        ([7, 11, 12, 13, 14, 15, 16, 0], 8),
        ([7, 11, 12, 14], 4),
    ):
        again = make_request(f"{tail}", [*prompt, *tail, 99], max_tokens=1)
        scheduler.add(again)
        run_all(scheduler)
        assert again.counts.num_cached_tokens == found
