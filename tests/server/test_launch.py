"""`twinphase launch`: stub programs write down what they were started with."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from tiny_gguf import write_tiny_gguf
from twinphase.commands.launch import CLIENTS
from twinphase.server.started import started_servers

pytestmark = pytest.mark.usefixtures("cache")
# Asks the server as the program would, and keeps its own arguments and variables.
STUB = """#!{python}
import json, os, sys, urllib.request
found = dict(os.environ)
request = urllib.request.Request({url!r} + "/v1/models", headers={{"Authorization": "Bearer key"}})
models = json.load(urllib.request.urlopen(request))
json.dump([sys.argv[1:], found, models], open({out!r}, "w"))
sys.exit(3)
"""


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Makes a program of that name, which asks `url`; returns the path of what it writes."""

    def make(name: str, url: str) -> Path:
        out = tmp_path / f"{name}.json"
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(STUB.format(python=sys.executable, url=url, out=str(out)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        return out

    return make


@pytest.mark.parametrize("name", CLIENTS)
def test_a_program_is_pointed_to_the_server(server, twinphase, stub, name):
    out = stub(name, server.url)
    done = twinphase("launch", name, "--url", server.url, "--api-key", "key", "--", "-x", "hi")
    assert done.code == 3, "the program's own exit code"
    words, variables, _ = json.loads(out.read_text())
    assert words[-2:] == ["-x", "hi"]
    text = " ".join([*words, *(variables[one] for one in sorted(variables))])
    assert server.url in text and server.model in text and "key" in text
    assert ("4,096 tokens" in done.err) is CLIENTS[name].is_agent


def test_what_each_program_reads(twinphase):
    def shown(name: str) -> str:
        given = ("--url", "http://127.0.0.1:1", "--model", "m", "--api-key", "k", "--show")
        return str(twinphase("launch", name, *given).text())

    assert "export ANTHROPIC_BASE_URL=http://127.0.0.1:1\n" in shown("claude")
    assert "export ANTHROPIC_DEFAULT_HAIKU_MODEL=m\n" in shown("claude")
    assert shown("claude").endswith("\nclaude\n")
    assert "aider --model openai/m" in shown("aider")
    assert """-c 'model_providers.twinphase.base_url="http://127.0.0.1:1/v1"'""" in shown("codex")
    assert "export OPENAI_HOST=http://127.0.0.1:1\n" in shown("goose")
    line = shown("opencode").splitlines()[0]
    config = json.loads(line.removeprefix("export OPENCODE_CONFIG_CONTENT='").removesuffix("'"))
    assert config["provider"]["twinphase"]["options"]["baseURL"] == "http://127.0.0.1:1/v1"
    assert config["model"] == "twinphase/m"


def test_a_server_is_started_and_ends_with_the_program(twinphase, stub, tmp_path, free_port):
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    url = f"http://127.0.0.1:{free_port}"
    out = stub("aider", url)
    done = twinphase("launch", "aider", "--url", url, "--model", model)
    assert done.code == 3 and f"No server answers at 127.0.0.1:{free_port}" in done.err
    words, _, models = json.loads(out.read_text())
    assert models["data"][0]["id"] == str(model) and f"openai/{model}" in words
    assert started_servers() == []


def test_programs_are_listed_and_missing_ones_say_how_to_install(twinphase, stub, free_port):
    stub("aider", "")
    rows = dict(line.split(maxsplit=1) for line in twinphase("launch").text().splitlines())
    assert rows.keys() == CLIENTS.keys()
    assert rows["aider"].endswith("/bin/aider")
    assert rows["opencode"] == "not installed: npm install -g opencode-ai"
    assert "Install it: npm install" in twinphase("launch", "claude").error()
    assert "It knows aider" in twinphase("launch", "emacs").error()
    missing = ("--url", f"http://127.0.0.1:{free_port}", "--model", "missing.gguf")
    done = twinphase("launch", "aider", *missing)
    assert done.code == 1 and "The server did not start." in done.err and "missing.gguf" in done.err
    elsewhere = twinphase("launch", "aider", "--url", "http://127.0.0.9:1")
    assert "launch starts one on this machine only" in elsewhere.error()
