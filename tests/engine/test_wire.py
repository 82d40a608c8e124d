import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from added import make_add
from twinphase.engine.process.messages import (
    End,
    FromEngine,
    RequestUpdate,
    StepUpdates,
    ToEngine,
)
from twinphase.engine.process.wire import Decoder, encode
from twinphase.errors import InvalidRequestError
from twinphase.outcome import FinishReason, MissReason, PrefixMiss
from twinphase.phases.record import RequestRecord
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.request import RequestCounts, SamplingParams

ADD = make_add("a", [1, 2], SamplingParams(logit_bias={3: 1.0}, stop=["x"], max_tokens=None), "s")


@settings(deadline=None)
@given(st.lists(st.integers(0, 400), max_size=12))
def test_messages_come_whole_however_the_bytes_are_cut(cuts):
    data = encode(ADD) + encode(End("a", FinishReason.ABORT)) + encode(ADD)
    decoder = Decoder(ToEngine)
    at = 0
    found = []
    for cut in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
        found += decoder.feed(data[at:cut])
        at = cut
    assert found == [ADD, End("a", FinishReason.ABORT), ADD]


def test_what_the_engine_says_comes_back_equal():
    timeline = RequestTimeline(1.0)
    timeline.mark(IntervalKind.QUEUE, 2.5, reason="seats")
    timeline.hand_over_tokens(2, 3.0)
    miss = PrefixMiss(MissReason.DIVERGED, 3)
    counts = RequestCounts("a", 9, 1, 3, miss, 1, 4, draft_steps=[(4, 2)])
    record = RequestRecord(counts, timeline, prices=(0.1, 0.2))
    record.end(FinishReason.STOP)
    sent = StepUpdates([RequestUpdate("a", [7], 9, 3, ended=record)])
    (got,) = Decoder(FromEngine).feed(encode(sent))
    assert got == sent


def test_what_no_message_can_carry_is_refused():
    with pytest.raises(InvalidRequestError, match="not supported"):
        encode(make_add("a", [2**70], SamplingParams()))
    with pytest.raises(InvalidRequestError):
        encode(make_add("a", [1], SamplingParams(stop="\ud800")))
