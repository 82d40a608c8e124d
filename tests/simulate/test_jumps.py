"""Jumping over decode steps leaves everything as taking them one by one does."""

import random
from dataclasses import replace

import pytest

from schedules import SHAPE, Times
from twinphase.cluster.routing import Routing
from twinphase.config import EngineConfig
from twinphase.phases.cost import FEATURES, CostModel
from twinphase.simulate.deployment import Deployment, Machine, roles_of
from twinphase.simulate.simulation import Simulation
from twinphase.simulate.spec import FleetSpec, Front, TraceRequest, WorkerSpec

WINDOWED = replace(SHAPE, window=64, windowed_layers=1)
PRICES = [
    {"step": 5e-3, "few_rows": 1e-3, "many_rows": 1e-4, "decode_contexts": 1e-7}.get(name, 0.0)
    for name in FEATURES
]


def trace(seed, count=60, mean_gap=0.05):
    """Requests with and without common beginnings, some of them at the same moment."""
    draw = random.Random(seed)
    now = 0.0
    for number in range(count):
        now += draw.choice([0.0, draw.expovariate(1 / mean_gap)])
        shared = [3] * draw.choice([0, 48])
        # An answer, which others find as soon as its blocks are full.
        shared += [7] * draw.choice([0, 40]) if shared else []
        prompt = [*shared, *([1000 + number] * draw.randint(1, 90))]
        yield TraceRequest(now, draw.randint(1, 150), lambda prompt=prompt: list(prompt))


def state(simulation):
    """The results of a simulation, and its remaining state."""
    workers = []
    for worker in simulation.workers.values():
        scheduler = worker.scheduler
        scheduler.check_integrity()
        cache = worker.prefix_cache
        workers.append(
            (
                scheduler.seconds,
                scheduler.usual_output,
                scheduler.num_preemptions,
                scheduler.fair.now,
                list(scheduler.kv_cache.pool.cached),
                {block: cache.find(block) for block in cache._block_of},
                list(cache._evicted),
                worker.ledger and (worker.ledger.seconds, list(worker.ledger.records)),
            )
        )
    return {
        "outcomes": [
            (
                one.arrival,
                one.num_cached,
                one.read_apart,
                list(one.token_times),
                one.timeline,
                one.counts,
            )
            for one in simulation.outcomes
        ],
        "workers": workers,
        "busy": simulation.busy_seconds,
        "decode": simulation.decode_seconds,
        "steps": simulation.num_steps,
        "index": simulation.fleet.index._held,
    }


FLEETS = {
    "replicas": {"roles": ["both"] * 2},
    "pools": {"roles": ["prefill", "decode", "decode"]},
    # Few blocks: cached ones are evicted, and requests preempted.
    "full": {"roles": ["both"], "num_kv_blocks": 24, "max_num_seqs": 6},
    "no-cache": {"roles": ["both"], "enable_prefix_caching": False},
    "window": {"roles": ["both"], "window": 64},
    "ledgers": {"roles": ["both"] * 2, "num_kv_blocks": 40, "shape": SHAPE},
    "ledgers-pools": {"roles": ["prefill", "decode"], "window": 64, "shape": WINDOWED},
    "even": {"roles": ["both"] * 2, "times": Times(row=1e-3, step=5e-3)},
}


def fleet(roles, window=None, times=None, shape=None, **config):
    config = {"num_kv_blocks": 400, "max_model_len": 1 << 20, "itl_slo_ms": None, **config}
    share = 0.5 if window else 0.0
    noise = [0.9, 1.0, 1.2, 0.7, 1.1]
    workers = [
        WorkerSpec(
            role,
            times or CostModel(PRICES, share, window),
            EngineConfig(**config),
            between_steps=0.0 if times else 1e-3,
            between_steps_per_request=0.0 if times else 1e-4,
            noise=() if times else noise,
            prefill_noise=() if times else noise,
        )
        for role in roles
    ]
    return FleetSpec(
        workers,
        block_bytes=1000,
        bytes_per_second=1e6,
        front=Front(1e-3, 1e-5, 2e-3),
        shape=shape,
        seed=4,
    )


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("seed", range(3))
def test_a_jump_ends_as_its_steps_would(name, seed):
    spec = fleet(**FLEETS[name])
    runs = [
        Simulation(spec, Routing(block_size=16), step_by_step=step_by_step)
        for step_by_step in (False, True)
    ]
    scheduled = []
    for run in runs:
        run.run(trace(seed))
        scheduled.append(sum(worker.num_scheduled for worker in run.workers.values()))
    assert state(runs[0]) == state(runs[1])
    assert scheduled[0] < scheduled[1] == runs[1].num_steps


def test_jumps_on_a_datasheet_are_those_of_its_steps():
    one = Deployment("llama-3.1-8b", Machine("l40s"), roles_of(2, None, None))
    runs = []
    for step_by_step in (False, True):
        simulation = Simulation(
            one.fleet(ledgers=False), Routing(block_size=16), step_by_step=step_by_step
        )
        simulation.run(trace(1, 30))
        runs.append([list(outcome.token_times) for outcome in simulation.outcomes])
    assert runs[0] == runs[1]
