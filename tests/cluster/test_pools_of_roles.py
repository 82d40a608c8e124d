"""One engine reads prompts, another one answers: through the router, with the bits of one engine alone."""

from __future__ import annotations

import os
import signal

import pytest

from routed import CONFIG, LONG, all_of, mix, same, until
from twinphase.cluster.address import KEY_VARIABLE
from twinphase.cluster.config import ClusterConfig
from twinphase.cluster.launch import make_host
from twinphase.cluster.ported import PortedHost
from twinphase.cluster.router import Router
from twinphase.cluster.routing import Routing
from twinphase.engine.async_engine import AsyncEngine
from twinphase.phases.timeline import IntervalKind

ROLES = {"reader": "prefill", "writer": "decode"}


@pytest.fixture
def serve_pools(tiny_path, own_cache, monkeypatch):
    """Runs a coroutine function with a front end over workers of both roles; every prompt goes to a reader."""
    import asyncio

    monkeypatch.setenv(KEY_VARIABLE, "the key of these tests")

    def run(body, roles=ROLES):
        async def main():
            hosts = {name: PortedHost(tiny_path, CONFIG, silence=2.0) for name in roles}
            routing = Routing(block_size=CONFIG["block_size"], policy="random")
            engine = AsyncEngine(Router(hosts, roles=roles, routing=routing))
            try:
                await until(lambda: engine.is_running)
                await body(engine)
            finally:
                await asyncio.to_thread(engine.close)

        asyncio.run(asyncio.wait_for(main(), 240))

    return run


async def settled(engine):
    """The router knows of no request, and of none at a worker."""
    router = engine.host
    await until(lambda: not router._sent and engine.num_unfinished == 0)
    for load in router.fleet.workers.values():
        assert (load.num_decodes, load.decode_tokens) == (0, 0) and abs(load.prefill_seconds) < 1e-9


@pytest.mark.timeout(300)
def test_answers_through_both_pools_are_those_of_one_engine(serve_pools, lone):
    num_mixes = int(os.environ.get("TWINPHASE_MIXES", "10"))

    async def body(engine):
        sent = 0
        for seed in range(num_mixes):
            asked = list(mix(seed))
            expected = lone.generate([prompt for prompt, _ in asked], [params for _, params in asked])
            found = await all_of(engine, asked)
            assert all(map(same, found, expected))
            routes = [one.reason for output in found for one in output.metrics.intervals
                      if one.kind is IntervalKind.ROUTE]  # fmt: skip
            sent += sum(reason.startswith("writer: ") and "blocks there" in reason for reason in routes)
        assert sent > 5 * num_mixes
        await settled(engine)

    serve_pools(body)


def test_the_command_lines_pools(tiny_path, own_cache, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "put back after this test")
    cluster = ClusterConfig(prefill_workers=1, decode_workers=2)
    router = make_host(str(tiny_path), {"trace_file": "log"}, cluster, stall=60.0)
    views = router.workers_by_name
    assert {name: view.role for name, view in views.items()} == {
        "prefill-0": "prefill",
        "decode-0": "decode",
        "decode-1": "decode",
    }
    assert [view.host._config["trace_file"] for view in views.values()] == [f"log.{name}" for name in views]
    assert all(isinstance(view.host, PortedHost) for view in views.values())


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("victim", ROLES)
def test_either_may_die(serve_pools, lone, victim):
    """Without a reader the writer reads; without a writer the answers wait for the next one."""
    prompts = [([10 + (i * j) % 250 for i in range(180)], LONG) for j in (3, 7, 9)]
    expected = lone.generate([prompt for prompt, _ in prompts], LONG)
    roles = {"reader": "prefill", "writer": "decode", "other": "decode"}

    async def body(engine):
        streams = [await engine.submit(prompt, params) for prompt, params in prompts]
        os.kill(engine.host.workers_by_name[victim].host.pid, signal.SIGKILL)
        for stream, wanted in zip(streams, expected, strict=True):
            updates = [update async for update in stream]
            assert same(updates[-1].output, wanted)
        await until(lambda: engine.host.workers_by_name[victim].is_up)
        assert all(map(same, await all_of(engine, prompts), expected))
        await settled(engine)

    serve_pools(body, roles)
