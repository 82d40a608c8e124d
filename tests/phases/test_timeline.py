from dataclasses import astuple, fields
from fractions import Fraction

import pytest

from twinphase.batch import StepTimes
from twinphase.phases.timeline import IntervalKind, RequestTimeline, StepRecord
from twinphase.phases.work import Cost

NONE = Cost()


def make_step(start, end, index=0, prefill=NONE, decode=NONE, prefill_ids=(), prefill_tokens=0):
    return StepRecord(index, start, end, prefill_tokens, 0, prefill, decode, prefill_ids)


def assert_partition(timeline):
    at = timeline.arrival
    for interval in timeline.intervals:
        assert interval.start == at < interval.end
        at = interval.end
    assert at == timeline.end
    assert sum(timeline.totals().values()) == pytest.approx(timeline.end - timeline.arrival)


def named(timeline):
    return {kind: seconds for kind, seconds in timeline.totals().items() if seconds}


def test_a_life_adds_up():
    timeline = RequestTimeline(arrival=10.0)
    timeline.mark(IntervalKind.TOKENIZE, 10.5)
    timeline.queue_until(11.0, "seats")
    timeline.add_prefill(make_step(11.0, 13.0, prefill=Cost(80, 20, 10)), 8, own=2.0, again=False)
    timeline.mark(IntervalKind.DETOKENIZE, 13.25)
    timeline.hand_over_tokens(1, 13.25)
    timeline.mark(IntervalKind.SEND, 13.5)
    timeline.reach_step(13.75)
    timeline.add_decode(make_step(13.75, 14.0, decode=Cost(4, 1, 50)), 1, own=0.25, decodes=0.25)
    timeline.mark(IntervalKind.DETOKENIZE, 14.25)
    timeline.hand_over_tokens(1, 14.25)
    assert_partition(timeline)
    assert named(timeline) == {
        "tokenize": 0.5,
        "queue": 0.5,
        "prefill": 2.0,
        "decode": 0.25,
        "detokenize": 0.5,
        "send": 0.25,
        "unattributed": 0.25,
    }
    assert (timeline.prefill.tokens, timeline.prefill.flops, timeline.prefill.seconds) == (
        8,
        100,
        2.0,
    )
    assert (timeline.decode.steps, timeline.decode.bytes) == (1, 50)
    assert (timeline.ttft, timeline.tpot, timeline.itl) == (3.25, 1.0, [1.0])


def test_a_shared_decode_step_is_own_work_batching_and_stall():
    timeline = RequestTimeline(arrival=0.0)
    timeline.add_decode(
        make_step(0.0, 8.0, 5, prefill_ids=("long",), prefill_tokens=64), 1, own=1.0, decodes=3.0
    )
    assert named(timeline) == {"decode": 1.0, "batching": 2.0, "stall": 5.0}
    stall = timeline.intervals[-1]
    assert (stall.kind, stall.step, stall.prefill_tokens, stall.caused_by) == (
        IntervalKind.STALL,
        5,
        64,
        ("long",),
    )
    assert_partition(timeline)


def test_a_shared_prefill_step_is_own_work_and_waiting():
    timeline = RequestTimeline(arrival=0.0)
    timeline.add_prefill(make_step(0.0, 4.0), 8, own=1.0, again=False)
    timeline.skip_step(make_step(4.0, 5.0))
    timeline.add_prefill(make_step(5.0, 6.0), 8, own=1.0, again=True)
    assert named(timeline) == {"prefill": 1.0, "prefill_wait": 4.0, "recompute": 1.0}
    assert_partition(timeline)


@pytest.mark.parametrize(("own", "decodes"), [(9.0, 9.0), (0.0, 0.0), (2.0, 1.0), (-1.0, 0.5)])
def test_shares_beyond_a_steps_ends_do_not_overlap(own, decodes):
    timeline = RequestTimeline(arrival=0.0)
    timeline.add_decode(make_step(0.0, 1.0), 1, own, decodes)
    assert_partition(timeline)
    assert timeline.end == 1.0


def test_a_request_that_arrives_after_the_step_began_does_not_overlap():
    timeline = RequestTimeline(arrival=1.5)
    timeline.add_prefill(make_step(1.0, 2.0), 4, own=1.0, again=False)
    assert_partition(timeline)
    assert timeline.seconds(IntervalKind.PREFILL) == 0.5


def test_what_is_written_down_after_a_step_belongs_to_it():
    timeline = RequestTimeline(arrival=0.0)
    timeline.settle(0.5)
    assert timeline.end == 0.0
    timeline.add_decode(make_step(0.0, 1.0), 1, 1.0, 1.0)
    timeline.settle(1.25)
    timeline.settle(1.0)
    assert named(timeline) == {"decode": 1.25}
    timeline.text_until(1.5, alone=False)
    timeline.text_until(2.0, alone=True)
    assert named(timeline) == {"decode": 1.25, "batching": 0.25, "send": 0.5}
    assert_partition(timeline)


def test_equal_neighbours_are_one_interval():
    timeline = RequestTimeline(arrival=0.0)
    timeline.queue_until(1.0, "seats")
    timeline.queue_until(2.0, "seats")
    timeline.queue_until(3.0, "blocks")
    assert [(i.end, i.reason) for i in timeline.intervals] == [(2.0, "seats"), (3.0, "blocks")]


def test_a_timeline_begins_without_latencies_and_time_does_not_run_backwards():
    timeline = RequestTimeline(arrival=1.0)
    assert (timeline.ttft, timeline.tpot, timeline.itl, timeline.end) == (None, None, [], 1.0)
    with pytest.raises(ValueError, match="before"):
        timeline.mark(IntervalKind.SEND, 0.5)


def test_ends_meet_exactly_whatever_the_floats():
    timeline = RequestTimeline(arrival=0.1)
    for index in range(100):
        start = timeline.end + 1e-7
        end = timeline.end + 0.1 / 3
        timeline.reach_step(start)
        timeline.add_decode(make_step(start, end, index), 1, own=0.007, decodes=0.011)
    total = sum(Fraction(i.end) - Fraction(i.start) for i in timeline.intervals)
    assert total == Fraction(timeline.end) - Fraction(timeline.arrival)
    assert_partition(timeline)


def test_every_measured_part_of_a_step_is_summed():
    numbers = [float(2**i) for i in range(len(fields(StepTimes)))]
    total = StepTimes(*numbers)
    total.add_times(StepTimes(*numbers))
    assert list(astuple(total)) == [2 * number for number in numbers]
