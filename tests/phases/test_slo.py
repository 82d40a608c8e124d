import pytest

from twinphase.errors import InvalidRequestError
from twinphase.phases.observation import Observation
from twinphase.phases.slo import Slos, goodput


def seen(times, tokens=None, error=""):
    return Observation(
        "", 0.0, 0.0, times, 9.0, 5, 0, len(times) if tokens is None else tokens, 200, error
    )


def test_parsing():
    slos = Slos.parse(["ttft:500", "e2el:2e3", "tpot:12.5"])
    assert (
        slos == Slos(0.5, 0.0125, 2.0)
        and str(slos) == "ttft <= 500 ms, tpot <= 12.5 ms, e2el <= 2000 ms"
    )
    assert Slos.parse([]).bounds == {}


@pytest.mark.parametrize(
    "words",
    [
        "ttft",
        "ttft:x",
        "ttft:0",
        "ttft:-1",
        "ttft:nan",
        "ttft:inf",
        "p99:3",
        ":5",
        "",
        "ttft:1 ttft:2",
    ],
)
def test_words_that_are_no_levels(words):
    with pytest.raises(InvalidRequestError, match="goodput"):
        Slos.parse(words.split(" "))


def test_goodput_says_which_half_was_late():
    slos = Slos(ttft=1.0, tpot=0.5)
    good = seen([1.0, 1.5])
    late_first = seen([1.1, 1.2])
    late_rest = seen([0.5, 1.5])
    both = seen([2.0, 3.0])
    failed = seen([], error="http 500: x")
    one = seen([0.9])
    found = goodput([good, late_first, late_rest, both, failed, one], slos, 4.0)
    assert found.good == 2 and found.total == 6 and found.rate == 0.5
    assert found.missed == {"ttft": 1, "tpot": 1, "ttft + tpot": 1, "failed": 1}
    assert found.by_level == {"ttft": 2, "tpot": 2, "failed": 1}


def test_a_request_that_meets_its_bound_exactly_is_good():
    assert Slos(e2el=1.5).missed(seen([0.5, 1.5])) == ()


def test_without_a_count_of_tokens_the_goodput_is_unknown():
    uncounted = Observation("", 0.0, 0.0, [0.1, 0.2], 1.0, status=200)
    found = goodput([uncounted, seen([0.1, 0.2])], Slos(tpot=1.0), 1.0)
    assert found.rate is None and found.fraction is None and found.missed == {"unknown": 1}
    assert goodput([uncounted], Slos(ttft=1.0), 1.0).rate == 1.0, "TTFT needs no count"
