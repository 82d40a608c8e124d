import asyncio

import pytest

import steps
from tiny_gguf import write_tiny_gguf
from twinphase.engine.frontends.async_engine import AsyncEngine
from twinphase.engine.frontends.llm import LLM


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    return write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf", tensor_type="F32", context=128
    )


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Indexes of the tiny models do not go to the user's cache."""
    with steps.own_cache(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="session")
def shared_llm(tiny_path, own_cache):
    return LLM(tiny_path, backend="reference")


@pytest.fixture
def llm(shared_llm):
    yield shared_llm
    assert not shared_llm.engine.has_work
    assert not shared_llm.engine.timelines
    shared_llm.engine.scheduler.check_integrity()


@pytest.fixture
def make_llm(tiny_path, own_cache):
    return lambda **config: LLM(tiny_path, backend="reference", **config)


@pytest.fixture(scope="session")
def cpu_llm(tmp_path_factory, own_cache):
    """On the cpu backend, whose threads a forked child does not have."""
    path = write_tiny_gguf(
        tmp_path_factory.mktemp("cpu") / "tiny.gguf", tensor_type="Q8_0", context=128
    )
    return LLM(path, threads=2, max_num_batched_tokens=64)


@pytest.fixture
def serve(tiny_path, own_cache):
    """Runs a coroutine function with a fresh AsyncEngine, which must be left clean."""

    def run(body, **config):
        async def main():
            engine = AsyncEngine.from_model(tiny_path, backend="reference", **config)
            try:
                await body(engine)
                if engine.is_running:
                    inner = engine.host.loaded.engine  # its thread waits for a message
                    inner.scheduler.check_integrity()
                    assert not inner.has_work and not inner.timelines
            finally:
                engine.close()

        asyncio.run(asyncio.wait_for(main(), 90))

    return run
