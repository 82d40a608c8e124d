"""A request goes to the worker where it costs all users the least predicted time."""

import random
from collections import Counter

import pytest

from schedules import Times
from twinphase.batch import StepWork
from twinphase.cluster.fleet import Fleet
from twinphase.cluster.routing import FRAMING_SECONDS_PER_BLOCK, Routing, WorkerLoad
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


def plain_costs(load, num_tokens, num_outputs, hits):
    """Cost of prefill and decode at a worker, and of decode after a transfer, one by one."""
    cacheable = (num_tokens - 1) // 16 * 16
    cached = min(16 * hits.get(load.name, 0), cacheable)

    def prefill(done):
        return load.times.seconds(StepWork.of_chunk(done, num_tokens - done, True))

    slowed = 1 + load.num_decodes
    decode = num_outputs * load.step_seconds()
    wait = 0.0 if cached == cacheable else FRAMING_SECONDS_PER_BLOCK
    sent = wait + prefill(cacheable) * slowed + decode
    return load.prefill_seconds + prefill(cached) * slowed + decode, sent, prefill(cached)


def plain_choice(loads, num_tokens, num_outputs, hits):
    """(worker, prefill worker) by a walk over all workers."""
    accepting = [load for load in loads if load.accepts]
    costs = {
        load.name: plain_costs(load, num_tokens, num_outputs, hits)
        for load in accepting
        if load.role != "prefill"
    }
    local = min(costs, key=lambda name: costs[name][0])
    until = {
        load.name: load.prefill_seconds + plain_costs(load, num_tokens, 0, hits)[2]
        for load in accepting
        if load.role == "prefill"
    }
    if until:
        soonest = min(until, key=until.__getitem__)
        sent = min(costs, key=lambda name: costs[name][1])
        if until[soonest] + costs[sent][1] < costs[local][0]:
            return sent, soonest
    return local, None


@pytest.mark.parametrize("roles", [["both"], ["prefill", "decode"]], ids=["replicas", "pools"])
def test_columns_of_loads_choose_what_a_walk_over_all_workers_chooses(roles):
    draw = random.Random(5)
    fleet = Fleet(Routing(block_size=16))
    times = [TIMES, Times(row=2e-3, step=3e-3)]
    for number in range(12):
        fleet.join(f"w{number}", roles[number % len(roles)], times[number % 3 == 0])
    prefixes = [[bytes([kind, place]) for place in range(40)] for kind in range(4)]
    placed = []
    for _ in range(300):
        chain = draw.choice(prefixes)[: draw.randrange(41)]
        num_tokens = 16 * len(chain) + draw.randint(1, 15)
        expected = plain_choice(
            fleet.workers.values(), num_tokens, fleet.usual_output, fleet.index.hits(chain)
        )
        placed.append(fleet.place(num_tokens, chain))
        decision = placed[-1].decision
        assert (decision.worker, decision.prefill_worker) == expected
        fleet.prefilled(draw.choice(placed), draw.randrange(600))
        if draw.random() < 0.4:
            fleet.end(placed.pop(draw.randrange(len(placed))), 30)
        name = draw.choice(list(fleet.workers))
        load = fleet.workers[name]
        match draw.randrange(12):
            case 0:
                load.accepts = load.accepts is False or name in ("w0", "w1")
            case 1:
                load.times = draw.choice(times)
                load.forget_steps()
            case 2 if name not in ("w0", "w1"):
                fleet.join(name, draw.choice(roles), TIMES)
