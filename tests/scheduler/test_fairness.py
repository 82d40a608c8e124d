"""Tenants share by work, in the cost model's time, on a scheduler without an engine."""

import random
from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Times, chunks, ids, make_request, make_scheduler, run_all, run_step
from twinphase.batch import StepOutput, StepWork
from twinphase.errors import InvalidRequestError
from twinphase.outcome import RequestStatus
from twinphase.scheduler.fairness import work_by_tenant
from twinphase.scheduler.pace import Pace

SLO = 0.03
STEP = 0.25  # seconds that a step of the whole token budget takes
TIMES = Times(row=4.5e-4, step=3e-3)


def shared_scheduler(**settings):
    options = {
        "num_blocks": 8192,
        "block_size": 16,
        "max_model_len": 8192,
        "max_num_batched_tokens": 512,
    }
    return make_scheduler(
        **options | {"times": TIMES, "pace": Pace(SLO), "enable_prefix_caching": False} | settings
    )


class Load:
    """Tenants' requests for a scheduler, and a record of the work done for each tenant."""

    def __init__(self, scheduler, choose):
        self.scheduler = scheduler
        self.choose = choose
        self.numbers = count()
        self.requests = []
        self.history = []  # (seconds at the end of the step, work by tenant)

    def ask(self, tenant, prompt, output, weight=1.0):
        request = make_request(f"{tenant}{next(self.numbers)}", [1] * prompt, max_tokens=output)
        request.tenant = tenant
        request.weight = weight
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self):
        batch = self.scheduler.schedule()
        self.scheduler.commit(
            batch, StepOutput({s.request_id: [7] for s in batch.scheduled if s.samples})
        )
        self.history.append((self.scheduler.seconds, self.scheduler.step_work))
        return batch

    def run(self, seconds, backlogged):
        """Steps for so long, in which each tenant always has more than a step holds.

        Tenants are {name: (weight, longest prompt, longest output)}.
        """
        end = self.scheduler.seconds + seconds
        while self.scheduler.seconds < end:
            for tenant, (weight, prompt, output) in backlogged.items():
                while (
                    sum(one.num_tokens for one in self.scheduler.fair.lines.get(tenant, [])) < 1024
                ):
                    sizes = (self.choose.randint(-(-most // 2), most) for most in (prompt, output))
                    self.ask(tenant, *sizes, weight)
            self.step()

    def had(self, tenant, start, end):
        """Seconds of work between two moments."""
        return sum(work.get(tenant, 0.0) for at, work in self.history if start < at <= end)


TENANTS = st.tuples(
    st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.0]),
    st.sampled_from([20, 200, 800, 3000]),
    st.sampled_from([1, 16, 64]),
)


def let_in(prompt, output):
    """Seconds of work that one step may begin for a tenant, all admitted at once."""
    return min(64, 512 / prompt) * output * TIMES.row


@settings(max_examples=10)
@given(st.lists(TENANTS, min_size=2, max_size=5), st.integers(0, 999))
def test_who_always_has_more_to_do_gets_a_share_by_weight_over_any_ten_seconds(tenants, seed):
    load = Load(shared_scheduler(), random.Random(seed))
    wanted = dict(zip("abcde", tenants, strict=False))
    load.run(25.0, wanted)
    whole = sum(weight for weight, _, _ in tenants)
    for start in range(4, 15):
        for tenant, (weight, prompt, output) in wanted.items():
            due = 10.0 * weight / whole
            slack = 0.1 * due + STEP + let_in(prompt, output)
            assert abs(load.had(tenant, start, start + 10.0) - due) < slack, (tenant, start)


@settings(max_examples=10)
@given(TENANTS, TENANTS, st.integers(0, 999))
def test_idleness_is_no_credit_and_use_of_an_idle_machine_no_debt(first, second, seed):
    load = Load(shared_scheduler(), random.Random(seed))
    load.ask("b", 20, 4)
    load.run(10.0, {"a": first})  # b was there once, and then for ten seconds only a
    load.run(6.0, {"a": first, "b": second})
    now = load.scheduler.seconds
    whole = first[0] + second[0]
    for tenant, (weight, prompt, output) in (("a", first), ("b", second)):
        due = 5.0 * weight / whole
        # What a had running when b came is computed to its end, at b's cost.
        running_on = 1.0 if tenant == "a" else -1.0
        slack = 0.15 * due + STEP + let_in(prompt, output)
        had = load.had(tenant, now - 6.0, now - 1.0)
        assert -slack + min(0, running_on) < had - due < slack + max(0, running_on), tenant


def test_a_short_request_goes_between_the_chunks_of_anothers_long_prompt():
    load = Load(shared_scheduler(), random.Random(0))
    stream = load.ask("a", 20, 1000)
    long = [load.ask("a", 3000, 4) for _ in range(40)]
    while not long[0].num_computed_tokens:
        load.step()
    short = load.ask("b", 12, 4)
    batch = load.step()
    assert chunks(batch)[0] == (short.request_id, 0, 12)
    assert ids(batch.decodes) == [stream.request_id]


def test_decodes_of_all_run_in_each_step_whoever_had_more():
    load = Load(shared_scheduler(), random.Random(0))
    running = [
        load.ask(tenant, 20, 1000, weight)
        for tenant, weight in (("a", 0.1), ("b", 10.0), ("a", 0.1))
    ]
    load.step()
    load.ask("b", 3000, 4, 10.0)
    for _ in range(20):
        assert sorted(ids(load.step().decodes)) == sorted(request.request_id for request in running)


def test_priorities_count_within_a_tenant_only():
    scheduler = shared_scheduler(policy="priority", max_num_seqs=2)
    requests = {}
    for name, tenant, priority in (("a1", "a", 5), ("a2", "a", 1), ("b1", "b", 9)):
        requests[name] = make_request(name, 20, priority=priority, max_tokens=4)
        requests[name].tenant = tenant
        scheduler.add(requests[name])
    assert set(ids(run_step(scheduler)[0].prefills)) == {"a2", "b1"}


class TestSeats:
    def full(self, **settings):
        load = Load(shared_scheduler(max_num_seqs=4, **settings), random.Random(0))
        load.running = [load.ask("a", 20, 1000) for _ in range(4)]
        load.waiting = [load.ask("a", 20, 1000) for _ in range(9)]
        load.step()
        return load

    def test_an_idle_tenant_gets_the_newest_seat_of_the_largest_holder_within_the_slo(
        self,
    ):
        load = self.full()
        load.step()
        came = load.scheduler.seconds
        request = load.ask("b", 12, 4)
        while request.status is RequestStatus.WAITING:
            load.step()
        assert load.scheduler.seconds - came <= SLO + 2 * TIMES.seconds(StepWork(rows=20))
        assert [one.status for one in load.running] == 3 * [RequestStatus.RUNNING] + [
            RequestStatus.PREEMPTED
        ]
        assert load.scheduler.num_preemptions == 1

    def test_the_next_free_seat_is_the_newcomers(self):
        load = self.full()
        load.running[1].sampling_params = make_request("x", 1, max_tokens=3).sampling_params
        request = load.ask("b", 12, 4)
        for _ in range(3):
            load.step()
        assert request.status is RequestStatus.RUNNING
        assert load.scheduler.num_preemptions == 0

    def test_seats_are_not_taken_so_often_that_the_whole_loses(self):
        load = self.full()
        lost = 0
        for _ in range(4000):
            if not load.scheduler.fair.lines.get("b"):
                load.ask("b", 12, 2)
            load.step()
        for request in load.requests:
            lost += request.counts.num_recomputed_tokens
        assert load.scheduler.num_preemptions > 0
        assert lost * TIMES.row < 0.06 * load.scheduler.seconds

    def test_the_only_seat_is_nobodys_to_take(self):
        load = Load(shared_scheduler(max_num_seqs=1), random.Random(0))
        first = load.ask("a", 20, 300)
        load.step()
        load.ask("b", 12, 4)
        while first.finish_reason is None:
            load.step()
        assert load.scheduler.num_preemptions == 0
        assert load.step().prefills[0].tenant == "b"


def test_what_a_preemption_lost_is_on_nobodys_account():
    scheduler = shared_scheduler(pace=Pace())
    mine = make_request("a", 100, max_tokens=50)
    other = make_request("b", 100, max_tokens=50)
    mine.tenant = "a"
    other.tenant = "b"
    for request in (mine, other):
        scheduler.add(request)
    run_step(scheduler)
    scheduler._preempt(mine)
    before = dict(scheduler.fair._times)
    batch, _ = run_step(scheduler)
    assert chunks(batch) == [("a", 0, 101)]  # of which only the last is new
    assert scheduler.fair._times["a"] - before["a"] < 2 * TIMES.row
    work = work_by_tenant(batch, TIMES)
    assert work["b"] < sum(work.values()) < TIMES.seconds(batch.work) / 10


def test_tenants_that_are_gone_are_forgotten():
    scheduler = shared_scheduler()
    for number in range(50):
        request = make_request(str(number), 20, max_tokens=2)
        request.tenant = f"tenant {number}"
        scheduler.add(request)
        run_all(scheduler)
    assert len(scheduler.fair._times) <= 2
    assert Counter(scheduler.fair.seats).total() == 0


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), 1e-4, "much", True])
def test_a_weight_that_gives_no_share_is_refused(weight):
    with pytest.raises(InvalidRequestError, match="weight is"):
        make_request("a", 3).__class__(
            "a", [1], make_request("b", 1).sampling_params, weight=weight
        )


def test_steps_are_short_once_a_second_tenant_was_there():
    """Its next request may arrive during any step, and waits for that step's end."""
    load = Load(shared_scheduler(), random.Random(0))
    load.ask("a", 4000, 1)
    assert TIMES.seconds(load.step().work) > 7 * SLO
    short = load.ask("b", 20, 1)
    batch = load.step()
    assert short.request_id in {share.request_id for share in batch.prefills}
    while load.scheduler.has_work:
        assert TIMES.seconds(batch.work) <= SLO
        batch = load.step()
