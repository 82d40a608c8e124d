import asyncio

import pytest

from routed import CONFIG, VOCAB, until
from steps import own_cache as make_cache
from tiny_gguf import write_tiny_gguf
from twinphase.cluster.address import KEY_VARIABLE
from twinphase.cluster.ported import PortedHost
from twinphase.cluster.router import Router
from twinphase.cluster.routing import Routing
from twinphase.config import EngineConfig
from twinphase.engine.frontends.async_engine import AsyncEngine
from twinphase.engine.frontends.llm import LLM
from twinphase.engine.process.host import ProcessHost


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    with make_cache(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", vocab=VOCAB, context=512)


@pytest.fixture(scope="session")
def lone(tiny_path, own_cache):
    """One engine, without a router."""
    return LLM(tiny_path, **CONFIG)


@pytest.fixture
def serve(tiny_path, own_cache):
    """Runs a coroutine function with a front end over a router of `count` workers, once it runs."""

    def run(body, count=2, hosts=None, silence=2.0, waits=True, **options):
        async def main():
            made = (
                hosts()
                if hosts
                else {
                    f"worker-{i}": ProcessHost(tiny_path, EngineConfig(**CONFIG), silence=silence)
                    for i in range(count)
                }
            )
            engine = AsyncEngine(Router(made, **options))
            try:
                await until(lambda: engine.is_running or not waits)
                await body(engine)
            finally:
                await asyncio.to_thread(engine.close)

        asyncio.run(asyncio.wait_for(main(), 240))

    return run


@pytest.fixture
def serve_pools(tiny_path, own_cache, monkeypatch):
    """Runs a coroutine function with a front end over workers of both roles."""
    monkeypatch.setenv(KEY_VARIABLE, "the key of these tests")

    def run(body, roles, heard=None, config=CONFIG, seconds=240, balance=None, silence=2.0):
        """`heard` gets each message of a worker, with its name, and returns a replacement."""

        async def main():
            hosts = {
                name: PortedHost(tiny_path, EngineConfig(**config), silence=silence)
                for name in roles
            }
            for name, host in hosts.items() if heard else ():
                take = host.take
                host.take = lambda message, name=name, take=take: take(heard(name, message))
            routing = Routing(policy="random")
            engine = AsyncEngine(Router(hosts, roles=roles, routing=routing, balance=balance))
            try:
                await until(lambda: engine.is_running)
                await body(engine)
            finally:
                await asyncio.to_thread(engine.close)

        asyncio.run(asyncio.wait_for(main(), seconds))

    return run
