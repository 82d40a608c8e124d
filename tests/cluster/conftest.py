import asyncio

import pytest

from routed import CONFIG, VOCAB
from steps import own_cache as make_cache
from tiny_gguf import write_tiny_gguf
from twinphase.cluster.router import Router
from twinphase.engine.async_engine import AsyncEngine
from twinphase.engine.host import ProcessHost
from twinphase.engine.llm import LLM


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
    """Runs a coroutine function with a front end over a router of as many workers."""

    def run(body, count=2, hosts=None, silence=2.0, seconds=240, **options):
        async def main():
            made = (
                hosts()
                if hosts
                else {f"worker-{i}": ProcessHost(tiny_path, CONFIG, silence=silence) for i in range(count)}
            )
            engine = AsyncEngine(Router(made, **options))
            try:
                await body(engine)
            finally:
                await asyncio.to_thread(engine.close)

        asyncio.run(asyncio.wait_for(main(), seconds))

    return run
