"""The accounts of sent requests always balance, in any order of events."""

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
    first = fleet.place(1000, shared)
    fleet.prefilled(first, 800)  # prefilling the rest is faster than all of the prompt elsewhere
    assert fleet.place(1000, shared).decoder is first.decoder
    assert fleet.place(1000, chain("another", 60)).decoder is not first.decoder


def test_a_placement_ends_alike_when_its_workers_have_died_or_come_back():
    fleet = make_fleet(p0="prefill", p1="prefill", d0="decode")
    placements = [fleet.place(10, [])]
    assert placements[0].decision.prefill_worker is None
    placements += [fleet.place(4000, chain(name, 249)) for name in "12"]
    first, second = (placement.prefiller for placement in placements[1:])
    assert {first.name, second.name} == {"p0", "p1"}
    fleet.prefilled(placements[1], 4000)
    fleet.leave("d0")
    with pytest.raises(EngineUnavailableError):
        fleet.place(4001, [], num_done=1)
    fleet.join("d0", "decode", TIMES)
    fleet.place(4000, chain("1", 249))
    for placement in placements:
        fleet.end(placement)
    assert (fleet.workers["d0"].num_decodes, fleet.workers["d0"].decode_tokens) == (1, 4000)
    assert fleet.index.hits(chain("1", 249))["d0"] == 249


def test_the_usual_answer_is_learned_from_those_that_finish():
    fleet = make_fleet(a="both")
    for number in range(400):
        fleet.end(fleet.place(100, []), 10 if number % 2 else None)
    assert 10 <= fleet.usual_output < 20


EVENTS = st.tuples(
    st.sampled_from(["place", "place", "place", "prefilled", "end", "end", "leave", "join"]),
    st.integers(0, 9),
    st.integers(0, 2000),
)


@given(st.lists(EVENTS, max_size=40))
def test_nothing_is_left_when_all_have_ended(events):
    fleet = make_fleet(p0="prefill", p1="prefill", d0="decode", d1="decode")
    placements = {}
    for kind, number, count in events:
        worker = ["p0", "p1", "d0", "d1"][number % 4]
        if kind == "place":
            if number not in placements and {"d0", "d1"} & fleet.workers.keys():
                placements[number] = fleet.place(1 + count, chain(number % 3, count // 16))
        elif kind == "prefilled" and number in placements:
            fleet.prefilled(placements[number], count)
        elif kind == "end" and number in placements:
            fleet.end(placements.pop(number), count)
        elif kind == "leave":
            fleet.leave(worker)
        elif kind == "join" and worker not in fleet.workers:
            fleet.join(worker, "prefill" if worker[0] == "p" else "decode", TIMES)
        for load in fleet.workers.values():
            here = [one for one in placements.values() if one.decoder is load]
            seconds = sum(
                one.prefill_seconds for one in placements.values() if one.prefiller is load
            )
            assert load.num_decodes == len(here)
            assert load.decode_tokens == sum(one.decision.num_tokens for one in here)
            assert load.prefill_seconds == pytest.approx(seconds, abs=1e-9)
    for placement in placements.values():
        fleet.end(placement)
        fleet.end(placement)
    for load in fleet.workers.values():
        assert (load.num_decodes, load.decode_tokens) == (0, 0)
        assert load.prefill_seconds == pytest.approx(0.0, abs=1e-9)
    assert not any(fleet.index.hits(chain(prompt, 1)) for prompt in range(3))
