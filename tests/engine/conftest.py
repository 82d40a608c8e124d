import pytest

from tiny_gguf import write_tiny_gguf
from twinphase.engine.llm import LLM


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", tensor_type="F32", context=128)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Indexes of the tiny models do not go to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
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
