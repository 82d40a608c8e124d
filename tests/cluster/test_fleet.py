"""What was sent where: accounts that come out even, whatever happens in whatever order."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import Times
from twinphase.cluster.fleet import Fleet
from twinphase.cluster.routing import Routing
from twinphase.errors import EngineUnavailableError

TIMES = Times(row=1e-3, step=5e-3)


def chain(text, num_blocks):
    return [hashlib.sha256(f"{text}{number}".encode()).digest() for number in range(num_blocks)]


def make_fleet(**roles):
    fleet = Fleet(Routing(block_size=16))
    for name, role in roles.items():
        fleet.join(name, role, TIMES)
    return fleet


def test_requests_with_one_beginning_go_to_one_worker_even_before_it_is_computed():
    fleet = make_fleet(a="both", b="both")
    shared = chain("system prompt", 60)
    first = fleet.send("1", 1000, shared)
    fleet.read("1", 800)  # the rest of it is sooner read than all of it once more
    assert fleet.send("2", 1000, shared).worker == first.worker
    assert fleet.send("3", 1000, chain("another", 60)).worker != first.worker


def test_what_was_expected_and_never_came_draws_nobody():
    fleet = make_fleet(a="both", b="both")
    fleet.send("1", 1000, chain("x", 60))
    fleet.end("1")
    assert not fleet.index.hits(chain("x", 60))


def test_a_dead_worker_gives_back_what_it_read_and_decoded():
    fleet = make_fleet(p0="prefill", p1="prefill", d0="decode")
    assert fleet.send("0", 10, []).prefill_worker is None
    first, second = (fleet.send(name, 4000, chain(name, 249)) for name in "12")
    assert {first.prefill_worker, second.prefill_worker} == {"p0", "p1"}
    fleet.read("1", 4000)
    assert fleet.leave(first.prefill_worker) == []  # it had read the prompt
    assert fleet.leave(second.prefill_worker) == ["2"]
    assert fleet.leave("d0") == ["0", "1"]
    with pytest.raises(EngineUnavailableError):
        fleet.send("1", 4001, [], num_done=1)


def test_the_usual_answer_is_learned_from_those_that_finish():
    fleet = make_fleet(a="both")
    for number in range(400):
        fleet.send(str(number), 100, [])
        fleet.end(str(number), 10 if number % 2 else None)
    assert 10 <= fleet.usual_output < 20


EVENTS = st.tuples(
    st.sampled_from(["send", "send", "send", "read", "end", "leave", "join"]),
    st.integers(0, 9),
    st.integers(0, 2000),
)


@given(st.lists(EVENTS, max_size=40))
def test_nothing_is_left_when_all_have_ended(events):
    fleet = make_fleet(p0="prefill", p1="prefill", d0="decode", d1="decode")
    here = set()
    for kind, number, count in events:
        name = str(number)
        worker = ["p0", "p1", "d0", "d1"][number % 4]
        if kind == "send" and name not in here and {"d0", "d1"} & fleet.workers.keys():
            fleet.send(name, 1 + count, chain(number % 3, count // 16))
            here.add(name)
        elif kind == "read":
            fleet.read(name, count)
        elif kind == "end":
            fleet.end(name, count)
            here.discard(name)
        elif kind == "leave":
            here -= set(fleet.leave(worker))
        elif kind == "join" and worker not in fleet.workers:
            fleet.join(worker, "prefill" if worker[0] == "p" else "decode", TIMES)
        places = {name: fleet.where(name) for name in map(str, range(10))}
        on = {
            one: [name for name, place in places.items() if place and place.worker == one]
            for one in fleet.workers
        }
        assert {name: load.num_decodes for name, load in fleet.workers.items()} == {
            n: len(on[n]) for n in on
        }
        assert here == {name for names in on.values() for name in names}
        assert all(
            (fleet.where(name) is not None) == (name in here) for name in map(str, range(10))
        )
    for name in here:
        fleet.end(name)
    for load in fleet.workers.values():
        assert (load.num_decodes, load.decode_tokens) == (0, 0)
        assert load.prefill_seconds == pytest.approx(0.0, abs=1e-9)
    assert not any(fleet.index.hits(chain(prompt, 1)) for prompt in range(3))
