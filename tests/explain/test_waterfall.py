import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinphase.explain.waterfall import Waterfall, WaterfallBar, WaterfallError, waterfall
from twinphase.phases.timeline import IntervalKind, RequestTimeline

LIVES = st.lists(
    st.tuples(st.sampled_from(list(IntervalKind)), st.floats(1e-6, 10)), min_size=1, max_size=30
)


def lived(pieces, first=None):
    timeline = RequestTimeline(100.0)
    for kind, seconds in pieces:
        timeline.mark(kind, timeline.end + seconds)
    if first is not None:
        timeline.token_times = [timeline.arrival + first * (timeline.end - timeline.arrival)]
    return timeline


@given(
    LIVES,
    st.one_of(st.none(), st.floats(0, 1)),
    st.dictionaries(st.text(), st.floats(0, 5), max_size=3),
)
def test_the_bars_are_the_wall_time_whatever_happened(pieces, first, before):
    timeline = lived(pieces, first)
    found = waterfall(timeline, before)
    lead = sum(before.values())
    assert sum(bar.share for bar in found.bars) == pytest.approx(1)
    assert found.wall_seconds == pytest.approx(lead + sum(seconds for _, seconds in pieces))
    early = sum(bar.before_first_token for bar in found.bars)
    assert all(-1e-9 <= bar.before_first_token <= bar.seconds + 1e-9 for bar in found.bars)
    if first is None:
        assert found.first_token is None and early == pytest.approx(found.wall_seconds)
    else:
        assert found.first_token == pytest.approx(lead + timeline.ttft) and early == pytest.approx(
            found.first_token
        )


def test_bars_stand_in_the_order_of_a_life():
    found = waterfall(
        lived([(IntervalKind.SEND, 1), (IntervalKind.QUEUE, 2), (IntervalKind.SEND, 3)]),
        {"load": 4},
    )
    assert [(bar.name, bar.seconds) for bar in found.bars] == [
        ("load", 4),
        ("queue", 2),
        ("send", 4),
    ]


@pytest.mark.parametrize("wall", [0.9, 1.1])
def test_what_does_not_add_up_is_refused(wall):
    bars = (WaterfallBar("queue", 0.4, 0.4, 0.4), WaterfallBar("prefill", 0.6, 0.6, 0.6))
    assert Waterfall(1.0, None, bars).bars == bars
    with pytest.raises(WaterfallError, match="add up"):
        Waterfall(wall, None, bars)
