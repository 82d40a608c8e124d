"""Workers that Ray starts: workers die, Ray dies, and the answers stay the same."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from children import descendants
from routed import CONFIG, all_ready, check_answers, mix, num_moved, until
from twinphase.cli import run_app
from twinphase.cluster.address import KEY_VARIABLE
from twinphase.cluster.config import ClusterConfig
from twinphase.cluster.launch import make_host
from twinphase.config import ENGINES_VARIABLE, EngineConfig
from twinphase.engine.frontends.async_engine import AsyncEngine

ENGINE = {name: value for name, value in CONFIG.items() if name != "threads"}


def worker_pids(parent):
    return descendants(parent, lambda words: b"\0worker\0" in words)


@pytest.mark.slow
def test_ray_starts_workers_of_both_roles_and_starts_them_again(tiny_path, lone, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setattr("twinphase.engine.process.host.MAX_RETRY_SECONDS", 1.0)
    asked = list(mix(5))
    monkeypatch.setenv(ENGINES_VARIABLE, "1")
    cluster = ClusterConfig(
        prefill_workers=1, decode_workers=1, threads_per_worker=1, ray_address="local"
    )

    async def main():
        engine = AsyncEngine(make_host(str(tiny_path), EngineConfig(**ENGINE), cluster, stall=60.0))
        router = engine.host
        try:
            for turn in range(2):
                await all_ready(engine)
                roles = [("prefill-0", "prefill"), ("decode-0", "decode")]
                assert [(one.id, one.role) for one in router.workers()] == roles
                router.fleet.routing.policy = "random"  # all prompts go to the one that reads
                found = await check_answers(engine, asked, lone)
                assert num_moved(found, "decode-0") > 5
                for pid in () if turn else worker_pids(os.getpid()):
                    os.kill(pid, signal.SIGKILL)
                await until(lambda turn=turn: turn or router.num_restarts == 2)
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(asyncio.wait_for(main(), 250))
    deadline = time.monotonic() + 30
    while worker_pids(os.getpid()):
        assert time.monotonic() < deadline, "a worker outlives its server"
        time.sleep(0.1)


def test_without_ray_a_line_names_the_extra(tiny_path, monkeypatch, capsys):
    import importlib.util

    monkeypatch.setenv(ENGINES_VARIABLE, "1")
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "ray" else real(name, *rest),
    )
    assert (
        run_app(
            ["serve", str(tiny_path), "--port", "0", "--replicas", "2", "--ray-address", "auto"]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert "Ray is not installed" in error and "[cluster]" in error and len(error.splitlines()) <= 2
