"""Division of steps among requests, on a machine with known step times."""

import random

import pytest

from schedules import SHAPE, Machine, engine_request, machine_engine
from twinphase.phases.cost import features, starting_prices
from twinphase.phases.report import DECODE_KINDS
from twinphase.phases.timeline import IntervalKind
from twinphase.phases.work import rows_cost


def run(engine):
    results = []
    while engine.has_work:
        results.append(engine.step())
    return results


def named(timeline):
    return {kind: round(seconds, 9) for kind, seconds in timeline.totals().items() if seconds}


def add(engine, name, prompt, **options):
    return engine.add_request(engine_request(name, prompt, **options))


def test_who_is_alone_in_its_steps_bears_them():
    engine = machine_engine(Machine(), max_num_batched_tokens=8)
    timeline = add(engine, "a", 10, max_tokens=3)
    results = run(engine)
    assert [(r.record.prefill_tokens, r.record.decode_tokens) for r in results] == [
        (8, 0),
        (2, 0),
        (0, 1),
        (0, 1),
    ]
    assert named(timeline) == {"prefill": 1.8 + 1.2, "decode": 2.2}
    assert timeline.end - timeline.arrival == pytest.approx(5.2)
    assert (timeline.prefill.tokens, timeline.decode.tokens) == (10, 2)
    assert timeline.prefill.flops == rows_cost(SHAPE, 0, 10, 1).flops
    assert timeline.decode.flops == sum(rows_cost(SHAPE, start, 1, 1).flops for start in (10, 11))
    assert timeline.decode.bytes == sum(
        2700 + rows_cost(SHAPE, start, 1, 1).bytes for start in (10, 11)
    )


def test_decodes_together_are_batching():
    engine = machine_engine(Machine())
    timelines = [add(engine, name, 4, max_tokens=3) for name in "abc"]
    run(engine)
    # A decode by itself takes 1.1 s, three take 1.3; four rows of prefill 1.4, twelve 2.2.
    for timeline in timelines:
        assert named(timeline) == {
            "decode": 2.2,
            "batching": 0.4,
            "prefill": 1.4,
            "prefill_wait": 0.8,
        }


def test_bytes_and_weights_of_a_shared_step_are_counted_once():
    engine = machine_engine(Machine())
    timelines = [add(engine, name, 3, max_tokens=4) for name in "ab"]
    engine.step()
    record = engine.step().record
    assert record.decode.bytes == 2700 + 2 * rows_cost(SHAPE, 3, 1, 1).bytes
    assert [timeline.decode.bytes for timeline in timelines] == [record.decode.bytes] * 2


@pytest.mark.parametrize(
    ("settings", "reason", "seconds"),
    [
        ({"max_num_seqs": 1}, "seats", 3.3),
        ({"max_num_batched_tokens": 12}, "budget", 2.2),
        ({"num_blocks": 4}, "blocks", 3.3),
    ],
)
def test_what_kept_a_request_waiting_is_named(settings, reason, seconds):
    engine = machine_engine(Machine(), **settings)
    add(engine, "a", 12, max_tokens=2)
    waiting = add(engine, "b", 12, max_tokens=1)
    run(engine)
    queue, prefill = waiting.intervals[:2]
    assert (queue.kind, queue.reason, queue.end - queue.start) == (
        IntervalKind.QUEUE,
        reason,
        pytest.approx(seconds),
    )
    assert prefill.kind is IntervalKind.PREFILL


def test_a_preempted_request_queues_again_and_recomputes():
    engine = machine_engine(Machine(), num_blocks=9, enable_prefix_caching=False)
    timelines = {name: add(engine, name, 8, max_tokens=9) for name in "abc"}
    results = run(engine)
    (preempted,) = {name for result in results for name in result.batch.preempted}
    timeline = timelines[preempted]
    kinds = [interval.kind for interval in timeline.intervals]
    again = kinds.index(IntervalKind.QUEUE)
    assert kinds.index(IntervalKind.DECODE) < again < kinds.index(IntervalKind.RECOMPUTE)
    assert timeline.intervals[again].reason == "blocks"
    assert IntervalKind.RECOMPUTE not in {
        i.kind for name in "ab" for i in timelines[name].intervals
    }
    assert timeline.seconds(IntervalKind.RECOMPUTE) > 1.0


def test_the_ledger_sums_over_finished_requests_and_keeps_the_records():
    engine = machine_engine(Machine())
    timelines = [add(engine, name, 5, max_tokens=4) for name in "abc"]
    results = run(engine)
    ledger = engine.ledger
    assert ledger.timelines == {}
    assert ledger.num_steps == len(ledger.records) == 4
    assert list(ledger.records) == [result.record for result in results]
    assert sum(ledger.seconds.values()) == pytest.approx(sum(t.end - t.arrival for t in timelines))
    assert ledger.seconds["unattributed"] == 0.0
    assert all(
        record.predicted == pytest.approx(record.seconds) == record.times.executed
        for record in ledger.records
    )


def test_time_between_steps_that_nobody_names_is_unattributed():
    machine = Machine()
    engine = machine_engine(machine)
    timeline = add(engine, "a", 4, max_tokens=2)
    engine.step()
    machine.now += 0.5
    engine.step()
    assert named(timeline)["unattributed"] == 0.5


@pytest.mark.parametrize("known", [True, False])
def test_a_long_prompt_in_the_middle_is_the_named_cause_of_the_stall(known):
    """Nine requests decode when it comes; their stall is what their steps took longer, within 10 %.

    The model either knows the machine's prices, or starts from a guess and learns them from noisy
    steps.
    """
    choose = random.Random(0)
    true = (2.5e-3, 1e-4, 3e-4, 1.3e-4, 2e-7, 1e-6, 3e-5, 3e-7, 2e-4)

    def seconds(work):
        exact = sum(price * count for price, count in zip(true, features(work), strict=True))
        return exact if known else exact * choose.uniform(0.97, 1.03)

    prices = true if known else starting_prices(SHAPE, None)
    engine = machine_engine(
        Machine(seconds),
        prices,
        num_blocks=800,
        max_model_len=1200,
        max_num_batched_tokens=128,
        block_size=16,
    )
    for number in range(30):  # what the engine did before
        add(engine, f"w{number}", choose.randint(20, 300), max_tokens=20)
    run(engine)

    readers = [add(engine, f"r{number}", 20 + number, max_tokens=60) for number in range(9)]
    for _ in range(20):
        engine.step()
    add(engine, "long", 1000, max_tokens=1)
    results = run(engine)

    spiked = [r.record for r in results if "long" in r.record.prefill_ids]
    plain = [r.record for r in results if not r.record.prefill_ids and r.record.num_decodes == 9]
    assert len(spiked) == 9  # 119 tokens a step beside nine decodes
    usual = sum(record.seconds for record in plain) / len(plain)
    spike = sum(record.seconds - usual for record in spiked)
    for timeline in readers:
        stalls = [
            i
            for i in timeline.intervals
            if i.kind is IntervalKind.STALL and i.step >= spiked[0].index
        ]
        assert [i.step for i in stalls] == [record.index for record in spiked]
        assert sum(i.prefill_tokens for i in stalls) == 1000
        assert {i.caused_by for i in stalls} == {("long",)}
        assert sum(i.end - i.start for i in stalls) == pytest.approx(spike, rel=0.1)


def test_a_wait_and_a_stall_say_how_much_of_them_was_other_tenants_work():
    engine = machine_engine(Machine(), max_num_seqs=2, max_num_batched_tokens=16)
    timelines = {}
    for name, tenant, prompt, output in (
        ("s", "a", 4, 9),
        ("p", "b", 48, 2),
        ("q", "a", 16, 2),
        ("w", "b", 4, 2),
    ):
        request = engine_request(name, prompt, max_tokens=output)
        request.tenant = tenant
        timelines[name] = engine.add_request(request)
    run(engine)
    (waited,) = [one for one in timelines["w"].intervals if one.kind is IntervalKind.QUEUE]
    assert waited.reason == "seats"
    assert 0 < waited.other_tenants < waited.end - waited.start
    stalls = [one for one in timelines["s"].intervals if one.kind is IntervalKind.STALL]
    for stall in stalls:
        theirs = sum(name in "pw" for name in stall.caused_by) / len(stall.caused_by)
        if theirs in (0.0, 1.0):
            assert stall.other_tenants == pytest.approx(theirs * (stall.end - stall.start))
    assert any(stall.other_tenants for stall in stalls)


def test_alone_nothing_is_other_tenants_work():
    engine = machine_engine(Machine(), max_num_seqs=1, max_num_batched_tokens=8)
    timelines = [add(engine, name, 12, max_tokens=5) for name in "abc"]
    run(engine)
    assert all(not one.other_tenants for timeline in timelines for one in timeline.intervals)


class Guesser:
    """Drafts the same tokens again, and takes half a second for it."""

    def __init__(self, machine, **drafts):
        self.machine = machine
        self.drafts = drafts

    def draft(self, requests):
        self.machine.now += 0.5
        return {
            r.request_id: self.drafts[r.request_id] for r in requests if r.request_id in self.drafts
        }

    def observe(self, batch, output):
        pass

    def forget(self, request):
        pass


def test_guesses_and_the_wrong_ones_among_them_are_told_apart():
    machine = Machine()
    engine = machine_engine(machine)
    engine.drafter = Guesser(machine, a=[7, 7, 8, 8])
    timeline = add(engine, "a", 4, max_tokens=6)
    run(engine)
    # Five rows take 1.5 s, two of them for wrong guesses; then two rows take 1.2 s, and the guess
    # is right.
    assert named(timeline) == {
        "prefill": 1.4,
        "drafting": 1.0,
        "decode": 1.3 + 1.2,
        "rejected": 0.2,
    }
    assert (timeline.decode.steps, timeline.decode.tokens) == (2, 5)
    assert [step.times.drafting for step in engine.ledger.records] == pytest.approx([0.0, 0.5, 0.5])


def test_others_guesses_are_batching():
    machine = Machine()
    engine = machine_engine(machine)
    engine.drafter = Guesser(machine, a=[8, 8, 8])
    first, second = (add(engine, name, 4, max_tokens=2) for name in "ab")
    run(engine)
    # No guess: the last token needs none. Half of the time for asking is each one's own.
    assert named(first) == named(second)
    assert named(first)["drafting"] == 0.25
    first, second = (add(engine, name, 4, max_tokens=9) for name in "ab")
    engine.step()
    engine.step()
    # Together 0.5 s of guessing and 1.5 s for five rows; alone a's four rows take 1.4 s, three of
    # them for nothing.
    assert {k: v for k, v in named(first).items() if k in DECODE_KINDS} == {
        "drafting": 0.25,
        "decode": 1.1,
        "rejected": 0.3,
        "batching": 0.35,
    }
    assert {k: v for k, v in named(second).items() if k in DECODE_KINDS} == {
        "drafting": 0.25,
        "decode": 1.1,
        "batching": 0.65,
    }


def test_the_cost_model_learns_steps_without_the_guessing():
    machine = Machine()
    engine = machine_engine(machine)
    engine.drafter = Guesser(machine, a=[7, 8])
    add(engine, "a", 4, max_tokens=60)
    run(engine)
    assert engine.cost_model.error().p95 < 1e-6
