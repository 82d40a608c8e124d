"""`twinphase launch`: starts another program that uses a server on this machine.

`CLIENTS` has the environment variables and arguments of each program, so that the program's own
files are not changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from twinphase import lifeline
from twinphase.arguments import API_KEY, DEFAULT_MODEL, URL
from twinphase.errors import EngineUnavailableError, InvalidRequestError, TwinphaseError

# Programs refuse to start without a key, and a server without keys ignores it.
NO_KEY = "none"
POLL_SECONDS = 0.2
END_SECONDS = 20.0
# Coding agents describe their tools in prompts of about this many tokens.
AGENT_PROMPT_TOKENS = 16_000


@dataclass(frozen=True)
class Target:
    """A server's base URL, the name of its model, and a key for it."""

    url: str
    model: str
    key: str


@dataclass(frozen=True)
class Client:
    """A program that `launch` starts.

    Attributes:
        title: the program's own name.
        command: its executable.
        install: the command that installs it.
        prepare: returns the variables and arguments for a server.
        is_agent: whether it sends long prompts that describe its tools.
    """

    title: str
    command: str
    install: str
    prepare: Callable[[Target], tuple[Mapping[str, str], list[str]]]
    is_agent: bool = True


def _aider(target: Target) -> tuple[Mapping[str, str], list[str]]:
    variables = {"OPENAI_API_BASE": f"{target.url}/v1", "OPENAI_API_KEY": target.key}
    return variables, ["--model", f"openai/{target.model}", "--no-show-model-warnings"]


def _claude(target: Target) -> tuple[Mapping[str, str], list[str]]:
    models = ("MODEL", "SMALL_FAST_MODEL", *(f"DEFAULT_{size}_MODEL" for size in SIZES))
    return {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        # With a key from the user's own environment, the program would ask which one to use.
        "ANTHROPIC_API_KEY": "",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **{f"ANTHROPIC_{name}": target.model for name in models},
    }, []


def _codex(target: Target) -> tuple[Mapping[str, str], list[str]]:
    # Values are TOML, where JSON's strings are valid.
    provider = {
        "name": "twinphase",
        "base_url": f"{target.url}/v1",
        "env_key": "TWINPHASE_API_KEY",
        "wire_api": "responses",
    }
    settings = {
        "model_provider": "twinphase",
        "model": target.model,
        **{f"model_providers.twinphase.{name}": value for name, value in provider.items()},
    }
    given = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    return {"TWINPHASE_API_KEY": target.key}, [word for one in given for word in ("-c", one)]


def _goose(target: Target) -> tuple[Mapping[str, str], list[str]]:
    return {
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": target.model,
        "OPENAI_HOST": target.url,
        "OPENAI_API_KEY": target.key,
    }, []


def _opencode(target: Target) -> tuple[Mapping[str, str], list[str]]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "twinphase",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key},
        "models": {target.model: {"name": target.model}},
    }
    config = {"provider": {"twinphase": provider}, "model": f"twinphase/{target.model}"}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}, []


SIZES = ("OPUS", "SONNET", "HAIKU")
CLIENTS = {
    "aider": Client("aider", "aider", "pip install aider-chat", _aider, is_agent=False),
    "claude": Client("Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Client("Codex", "codex", "npm install -g @openai/codex", _codex),
    "goose": Client("Goose", "goose", "see https://block.github.io/goose for an installer", _goose),
    "opencode": Client("OpenCode", "opencode", "npm install -g opencode-ai", _opencode),
}


def launch(
    client: str = typer.Argument(None, help=f"{', '.join(CLIENTS)}. [default: list them]"),
    arguments: list[str] = typer.Argument(
        None, metavar="[-- ARGUMENTS]", help="Arguments for the program itself."
    ),
    model: str = typer.Option(
        None, help=f"Model to serve if no server answers. [default: {DEFAULT_MODEL}]"
    ),
    url: str = URL,
    api_key: str = API_KEY,
    show: bool = typer.Option(False, "--show", help="Print the command and start nothing."),
) -> None:
    """Start a coding program that uses your own server; start the server if none answers.

    The program gets the server's address, model and key in environment variables and arguments; its
    own files do not change. A server that this command started is stopped when the program ends.
    """
    if client is None:
        for name, one in CLIENTS.items():
            found = shutil.which(one.command)
            print(f"{name:<10} {found or f'not installed: {one.install}'}")
        return
    chosen = CLIENTS.get(client)
    if chosen is None:
        raise InvalidRequestError(
            f"launch does not know {client!r}.", f"It knows {', '.join(CLIENTS)}."
        )
    program = shutil.which(chosen.command)
    if program is None and not show:
        raise TwinphaseError(f"{chosen.title} is not installed.", f"Install it: {chosen.install}.")
    from twinphase.commands.explain_source import server_base
    from twinphase.terminal import note

    base = server_base(url)
    with _serving(base, model, api_key, start=not show) as target:
        variables, own = chosen.prepare(target)
        if (trusted := os.environ.get("SSL_CERT_FILE")) and base.startswith("https:"):
            # Programs on Node.js use this variable instead.
            variables = {"NODE_EXTRA_CA_CERTS": trusted, **variables}
        words = [*own, *(arguments or [])]
        if show:
            lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
            print("\n".join([*lines, shlex.join([chosen.command, *words])]))
            return
        if chosen.is_agent and (short := _short_context(base, api_key)):
            note(
                f"{target.model} has a context of {short:,} tokens; {chosen.title} may send "
                "prompts that are longer, which are refused."
            )
        raise typer.Exit(_run([str(program), *words], variables))


def _run(command: list[str], variables: Mapping[str, str]) -> int:
    """Run a program until it ends; Ctrl-C goes to the program."""
    # Unlike an ignored signal, a handled one has its default effect in the child.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _serving(base: str, model: str | None, key: str | None, start: bool) -> Iterator[Target]:
    """The server at `base`, or one for the duration of the block if none answers."""
    from twinphase.terminal import note

    if (name := _served_model(base, key)) is not None:
        if model is not None:
            note(f"A server answers at {base} already; it serves {name}.")
        yield Target(base, name, key or NO_KEY)
        return
    address = urllib.parse.urlsplit(base)
    if not start:
        yield Target(base, model or DEFAULT_MODEL, key or NO_KEY)
        return
    if address.scheme == "https" or address.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise EngineUnavailableError(
            f"No server answers at {base}.",
            "Start one there; launch starts one on this machine only, and without TLS.",
        )
    with _started(model or DEFAULT_MODEL, str(address.hostname), address.port or 80, key):
        yield Target(base, _require_model(base, key), key or NO_KEY)


def _served_model(base: str, key: str | None) -> str | None:
    """The first name of the server's model; None if no server answers."""
    from twinphase.commands.explain_source import get_json

    try:
        listed = get_json(f"{base}/v1/models", key).get("data")
    except EngineUnavailableError:
        return None
    names = [str(one.get("id")) for one in listed or [] if isinstance(one, dict)]
    return names[0] if names else None


@contextlib.contextmanager
def _started(model: str, host: str, port: int, key: str | None) -> Iterator[None]:
    """Run a server in its own session, so that it does not get Ctrl-C."""
    from twinphase.terminal import note, transient
    from twinphase.weights.storage import cache_root

    log = cache_root() / "servers" / f"launch-{port}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    words = ["serve", model, "--host", host, "--port", str(port)]
    environment = {**os.environ, **({"TWINPHASE_API_KEY": key} if key else {})}
    note(f"No server answers at {host}:{port}; starting one with {model}. Its log: {log}")
    with open(log, "w") as file:
        process = lifeline.start(
            [sys.executable, "-m", "twinphase.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )
    before = {one: signal.signal(one, _leave) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:
        _wait_until_ready(process, f"http://{host}:{port}", log)
        transient("")
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        for one, handler in before.items():
            signal.signal(one, handler)


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _wait_until_ready(process: subprocess.Popen[bytes], base: str, log: Path) -> None:
    from twinphase.commands.explain_source import get_json
    from twinphase.terminal import transient

    while True:
        if process.poll() is not None:
            lines = log.read_text(errors="replace").split("error: ")
            raise EngineUnavailableError("The server did not start.", lines[-1].strip())
        try:
            get_json(f"{base}/health", None)
            return
        except TwinphaseError:
            transient("The server loads its model ...")
        time.sleep(POLL_SECONDS)


def _require_model(base: str, key: str | None) -> str:
    name = _served_model(base, key)
    if name is None:
        raise EngineUnavailableError(f"The server at {base} has no model.", "Look at its log.")
    return name


def _short_context(base: str, key: str | None) -> int | None:
    """The model's context in tokens if an agent's prompts may exceed it."""
    from twinphase.commands.explain_source import get_json

    loaded = get_json(f"{base}/api/ps", key).get("models") or [{}]
    length = loaded[0].get("context_length")
    return length if isinstance(length, int) and length < AGENT_PROMPT_TOKENS else None
