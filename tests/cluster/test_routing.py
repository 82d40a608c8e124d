"""Where a request goes: where it costs everybody the least predicted time."""

from collections import Counter

import pytest

from schedules import Times
from twinphase.cluster.routing import Routing, WorkerLoad
from twinphase.errors import EngineUnavailableError

TIMES = Times(row=1e-3, step=5e-3)  # a token takes 1 ms, and a step 5 ms on top


def worker(name, role="both", **state):
    return WorkerLoad(name, role, state.pop("times", TIMES), **state)


def choose(workers, num_tokens=1000, num_outputs=10, policy="predicted", **hits):
    return Routing(block_size=16, policy=policy).choose(num_tokens, num_outputs, hits, workers)


def test_an_idle_worker_is_taken_before_one_that_reads_or_decodes():
    idle = worker("idle")
    reading = worker("reading", prefill_seconds=1.0)
    decoding = worker("decoding", num_decodes=8)
    for others in ([reading], [decoding], [reading, decoding]):
        assert choose([*others, idle]).worker == "idle"


def test_a_cached_prefix_is_worth_waiting_for_as_long_as_it_saves():
    # 960 of 1,000 tokens are cached there: 0.96 s are saved.
    assert choose([worker("idle"), worker("warm", prefill_seconds=0.95)], warm=60).worker == "warm"
    assert choose([worker("idle"), worker("warm", prefill_seconds=0.97)], warm=60).worker == "idle"


def test_the_reason_names_the_next_best_and_both_costs():
    decision = choose([worker("idle"), worker("warm", prefill_seconds=0.1)], warm=60)
    assert decision.num_cached == 960
    assert decision.reason == "warm: 40 of 1,000 tokens to prefill, 145 ms < 1005 ms (idle)"
    assert choose([worker("only")]).reason == "only: 1,000 of 1,000 tokens to prefill"


def test_the_last_token_is_always_computed():
    assert choose([worker("a")], num_tokens=64, a=4).num_cached == 48


def test_a_prompt_is_read_in_the_prefill_pool_where_it_would_hold_up_decodes():
    pools = [worker("p0", "prefill"), worker("d0", "decode", num_decodes=4)]
    long = choose(pools)
    assert (long.worker, long.prefill_worker) == ("d0", "p0")
    assert long.reason.startswith("p0, then d0: 1,000 of 1,000 tokens to prefill, ")
    assert long.reason.endswith("(d0)")
    short = choose(pools, d0=62)  # eight tokens are left to read: sending would save nothing
    assert (short.worker, short.prefill_worker) == ("d0", None)
    assert short.reason.endswith("(p0, then d0)")


def test_a_busy_prefill_pool_leaves_reading_to_an_idle_decode_worker():
    pools = [worker("p0", "prefill", prefill_seconds=30.0), worker("d0", "decode")]
    assert choose(pools).prefill_worker is None


def test_slow_machines_get_less():
    slow = worker("slow", times=Times(row=4e-3, step=2e-2))
    fast = worker("fast", num_decodes=1)
    assert choose([slow, fast]).worker == "fast"
    assert choose([slow, worker("fast", prefill_seconds=9.0)]).worker == "slow"


def test_who_drains_gets_nothing():
    leaving = worker("leaving", accepts=False)
    assert choose([leaving, worker("stays", num_decodes=60)]).worker == "stays"
    with pytest.raises(EngineUnavailableError, match="No worker takes requests"):
        choose([leaving, worker("p0", "prefill")])


def test_random_takes_all_workers_of_the_right_role():
    pools = [
        worker("p0", "prefill"),
        worker("p1", "prefill"),
        worker("d0", "decode"),
        worker("d1", "decode"),
    ]
    routing = Routing(block_size=16, policy="random")
    seen = Counter(
        (one.worker, one.prefill_worker)
        for one in (routing.choose(100, 1, {}, pools) for _ in range(200))
    )
    assert set(seen) == {("d0", "p0"), ("d0", "p1"), ("d1", "p0"), ("d1", "p1")}
