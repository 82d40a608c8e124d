"""A simulated fleet compared with hand-computed times, and the benefit of routing."""

import random

import pytest

from schedules import Times
from twinphase.cluster.routing import FRAMING_SECONDS_PER_BLOCK, Routing
from twinphase.config import EngineConfig
from twinphase.simulate.simulation import Simulation
from twinphase.simulate.spec import FleetSpec, TraceRequest, WorkerSpec

TIMES = Times(row=1e-3, step=5e-3)


def simulate(roles, trace, policy="predicted"):
    config = EngineConfig(num_kv_blocks=4096, max_model_len=1 << 20, itl_slo_ms=None)
    workers = [WorkerSpec(role, TIMES, config) for role in roles]
    spec = FleetSpec(workers, block_bytes=1000, bytes_per_second=1e6)
    simulation = Simulation(spec, Routing(block_size=16, policy=policy))
    simulation.run(trace)
    for worker in simulation.workers.values():
        worker.scheduler.check_integrity()
        assert not worker.scheduler.has_work
    return simulation


def asking(arrival, prompt, num_outputs):
    return TraceRequest(arrival, num_outputs, lambda: list(prompt))


def test_a_lone_request_takes_what_its_steps_take():
    (outcome,) = simulate(["both"], [asking(2.0, range(1000), 11)]).outcomes
    assert outcome.ttft == pytest.approx(1.0 + 2 * 0.005)  # two chunks, of 512 and 488 tokens
    assert outcome.tpot == pytest.approx(0.006)
    assert (outcome.num_prompt, outcome.num_cached, outcome.num_outputs) == (1000, 0, 11)


def test_what_one_pool_reads_the_other_decodes_and_computes_only_what_fills_no_block():
    stream = asking(
        0.0, range(5000, 5016), 10_000
    )  # decodes all the time: reading there would hold it up
    simulation = simulate(["prefill", "decode"], [stream, asking(1.0, range(1000), 11)])
    outcome = simulation.outcomes[1]
    assert outcome.read_apart
    assert outcome.ttft == pytest.approx(1.0 + 2 * 0.005)
    # The thirty blocks of the last chunk are waited for and the step that the stream is in; then
    # eight tokens of the prompt are computed for the first token, which is compared, and ten steps
    # of two streams follow.
    waited = 30 * (FRAMING_SECONDS_PER_BLOCK + 1e-3)
    rest = 10 * outcome.tpot - waited - (1 + 8) * 1e-3 - 5e-3 - 10 * 7e-3
    assert 0 <= rest <= 6e-3
    assert simulation.busy_seconds["prefill-0"] == pytest.approx(1.0 + 2 * 0.005)


def shared_prefixes(seed, num_users=12, num_turns=12):
    """Conversations: each turn's prompt begins with the one before."""
    choose = random.Random(seed)
    turns = []
    for user in range(num_users):
        moment = choose.random()
        length = 400
        for _ in range(num_turns):
            turns.append(
                asking(
                    moment, range(user * 100_000, user * 100_000 + length), choose.randint(1, 30)
                )
            )
            moment = moment + 1.0 + 2.0 * choose.random()
            length = length + choose.randint(50, 300)
    return sorted(turns, key=lambda one: one.arrival)


@pytest.mark.parametrize(
    "roles", [["both"] * 4, ["prefill", "prefill", "decode", "decode"]], ids=["replicas", "pools"]
)
def test_prediction_reads_less_than_chance_and_answers_sooner(roles):
    trace = shared_prefixes(3)
    by_policy = {policy: simulate(roles, trace, policy) for policy in ("predicted", "random")}
    read = {
        policy: sum(one.num_prompt - one.num_cached for one in run.outcomes)
        for policy, run in by_policy.items()
    }
    ttft = {
        policy: sorted(one.ttft for one in run.outcomes)[len(trace) // 2]
        for policy, run in by_policy.items()
    }
    assert read["predicted"] < 0.7 * read["random"]
    assert ttft["predicted"] < ttft["random"]
    for run in by_policy.values():
        assert len(run.outcomes) == len(trace)
        assert all(
            one.num_outputs == asked.num_outputs
            for one, asked in zip(run.outcomes, trace, strict=True)
        )
        assert all(load.num_decodes == 0 for load in run.fleet.workers.values())


def test_the_same_trace_gives_the_same_times():
    runs = [simulate(["both"] * 3, shared_prefixes(5)) for _ in range(2)]
    assert [(one.ttft, one.tpot) for one in runs[0].outcomes] == [
        (one.ttft, one.tpot) for one in runs[1].outcomes
    ]
