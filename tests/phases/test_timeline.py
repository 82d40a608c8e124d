import pytest

from twinphase.batch import Phase
from twinphase.phases.work import Cost
from twinphase.phases.timeline import IntervalKind, RequestTimeline, StepRecord


def make_step(start, end):
    return StepRecord(start, end, 0, 0, Cost(), Cost())


def assert_partition(timeline):
    at = timeline.arrival
    for interval in timeline.intervals:
        assert interval.start == at < interval.end
        at = interval.end
    assert at == timeline.end
    assert sum(timeline.totals().values()) == pytest.approx(timeline.end - timeline.arrival)


def test_a_life_adds_up():
    timeline = RequestTimeline(arrival=10.0)
    timeline.mark(IntervalKind.TOKENIZE, 10.5)
    timeline.add_step(make_step(11.0, 13.0), Phase.PREFILL, 8, Cost(100, 10))
    timeline.mark(IntervalKind.DETOKENIZE, 13.25)
    timeline.hand_over_tokens(1, 13.25)
    timeline.mark(IntervalKind.SEND, 13.5)
    timeline.add_step(make_step(13.75, 14.0), Phase.DECODE, 1, Cost(5, 50))
    timeline.mark(IntervalKind.DETOKENIZE, 14.25)
    timeline.hand_over_tokens(1, 14.25)
    assert_partition(timeline)
    assert {kind: seconds for kind, seconds in timeline.totals().items() if seconds} == {
        "tokenize": 0.5,
        "queue": 0.5,
        "prefill": 2.0,
        "decode": 0.25,
        "detokenize": 0.5,
        "send": 0.25,
        "unattributed": 0.25,
    }
    assert (timeline.prefill.tokens, timeline.prefill.flops, timeline.prefill.seconds) == (8, 100, 2.0)
    assert (timeline.decode.steps, timeline.decode.bytes) == (1, 50)
    assert (timeline.ttft, timeline.tpot, timeline.itl) == (3.25, 1.0, [1.0])


def test_steps_of_others_are_queue_then_prefill_wait():
    timeline = RequestTimeline(arrival=0.0)
    timeline.skip_step(make_step(0.5, 1.0))
    timeline.add_step(make_step(1.0, 2.0), Phase.PREFILL, 4, Cost())
    timeline.skip_step(make_step(2.0, 3.0))
    assert_partition(timeline)
    assert timeline.seconds(IntervalKind.QUEUE) == 1.0
    assert timeline.seconds(IntervalKind.PREFILL_WAIT) == 1.0


def test_a_request_that_arrives_after_the_step_began_does_not_overlap():
    timeline = RequestTimeline(arrival=1.5)
    timeline.add_step(make_step(1.0, 2.0), Phase.PREFILL, 4, Cost())
    assert_partition(timeline)
    assert timeline.seconds(IntervalKind.PREFILL) == 0.5


def test_time_does_not_run_backwards():
    timeline = RequestTimeline(arrival=1.0)
    with pytest.raises(ValueError, match="before"):
        timeline.mark(IntervalKind.SEND, 0.5)


def test_no_tokens_no_latencies():
    timeline = RequestTimeline(arrival=1.0)
    assert (timeline.ttft, timeline.tpot, timeline.itl, timeline.end) == (None, None, [], 1.0)
