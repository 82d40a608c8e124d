"""`twinphase ps` and `twinphase stop`: list the model of a server, or end the server."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import typer

from twinphase.arguments import API_KEY, JSON, URL
from twinphase.errors import EngineUnavailableError, TwinphaseError

COLUMNS = ("model", "size", "context", "waiting", "prefill", "decode", "url")
NUM_TEXT_COLUMNS = 1
POLL_SECONDS = 0.05
# The first signal lets answers finish, and later ones end them.
SIGNAL_SECONDS = 0.5


def ps(url: str = URL, api_key: str = API_KEY, json: bool = JSON) -> None:
    """Show the models that a server has loaded, and how many requests are in each phase."""
    from twinphase.commands.explain_source import get_json, server_base
    from twinphase.commands.status import table
    from twinphase.terminal import describe_bytes, note, print_json

    base = server_base(url)
    models = _objects(get_json(f"{base}/api/ps", api_key), "models", base)
    cluster = get_json(f"{base}/v1/cluster", api_key)
    requests = cluster.get("requests")
    requests = requests if isinstance(requests, dict) else {}
    if json:
        print_json({"url": base, "models": models, "requests": requests})
        return
    if not models:
        states = {str(worker.get("state")) for worker in _objects(cluster, "workers", base)}
        note(f"No model is ready at {base} yet; its state: {', '.join(sorted(states))}.")
        return
    rows = [
        (
            str(model.get("name")),
            describe_bytes(model.get("size") or 0),
            f"{model.get('context_length') or 0:,}",
            *(str(requests.get(phase, "-")) for phase in ("waiting", "prefill", "decode")),
            base,
        )
        for model in models
    ]
    print("\n".join(table([COLUMNS, *rows], NUM_TEXT_COLUMNS)))


def _objects(reply: dict[str, Any], name: str, base: str) -> list[dict[str, Any]]:
    from twinphase.commands.explain_source import CHECK_URL

    found = reply.get(name)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise TwinphaseError(f"The server at {base} has no list of {name}.", CHECK_URL)
    return found


def stop(
    url: str = URL,
    now: bool = typer.Option(False, "--now", help="Cut running answers off."),
) -> None:
    """End a server that you started on this machine; running answers may finish first."""
    from twinphase.commands.explain_source import server_base
    from twinphase.server.started import started_servers
    from twinphase.terminal import transient

    base = server_base(url)
    running = started_servers()
    server = next((one for one in running if one.answers_at(base)), None)
    if server is None:
        others = ", ".join(one.url for one in running)
        raise EngineUnavailableError(
            f"No server that you started on this machine listens at {base}.",
            f"Give one of these to --url: {others}."
            if others
            else "A server elsewhere ends on Ctrl-C, or on SIGTERM.",
        )
    transient(f"{server.url} finishes its running answers ...")
    signalled = 0.0
    while server.is_running:
        if not signalled or (now and time.monotonic() > signalled + SIGNAL_SECONDS):
            try:
                os.kill(server.pid, signal.SIGTERM)
            except ProcessLookupError:
                break
            except PermissionError:
                raise TwinphaseError(
                    f"The process {server.pid} that serves {server.url} is another user's.",
                    "Ask that user to end it.",
                ) from None
            signalled = time.monotonic()
        time.sleep(POLL_SECONDS)
    transient("")
    print(f"{server.url} has ended.")
