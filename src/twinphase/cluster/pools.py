"""Workers on a Ray cluster: one actor per worker starts its process and restarts it.

Tokens do not pass through Ray.

Ray runs in its own process, `python -m twinphase.cluster.pools`, which reports the workers'
addresses to the server, one JSON object per line. So the server outlives Ray: the workers keep
computing while Ray is down, and their addresses are queried again when it is back. `worker.py` is
the worker itself, and `deploy.py` is for Ray Serve.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from twinphase import lifeline
from twinphase.cluster.address import KEY_VARIABLE, read_key
from twinphase.cluster.role import Role
from twinphase.cluster.worker_process import WorkerProcess, ray_address
from twinphase.config import module_command
from twinphase.errors import InvalidRequestError, TwinphaseError
from twinphase.installed import install_command

LOG = logging.getLogger("twinphase.cluster")
# This address starts a Ray cluster on this machine that ends with the server.
LOCAL_RAY = "local"
RAY_TIMEOUT_SECONDS = 10.0
POLL_INTERVAL_SECONDS = 0.5
REPLY_TIMEOUT_SECONDS = 5.0
FIRST_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0
# The smallest size that Ray accepts; the store stays empty.
OBJECT_STORE_BYTES = 80 << 20


def key_id(key: bytes) -> str:
    """A digest that shows whether two keys are the same without revealing them."""
    return hashlib.sha256(b"twinphase key id" + key).hexdigest()[:12]


class WorkerKeeper:
    """The actor: one worker's process on its machine, which ends when the actor does."""

    def __init__(self, listen: str | None, role: Role) -> None:
        """`listen` is the address of the worker's port; None uses the machine's address in Ray."""
        self._listen = listen or ray_address()
        self._role = role
        self._key = read_key()
        self._worker: WorkerProcess | None = None

    def where(self) -> tuple[str, str]:
        """The worker's address and the id of its key; restarts a worker that has ended."""
        if self._worker is None or not self._worker.is_running:
            self._worker = WorkerProcess(self._listen, self._role, key=self._key)
        return self._worker.address, key_id(self._key.secret)


class RayPool:
    """The server's view of its workers on Ray."""

    def __init__(
        self, roles: Mapping[str, Role], threads: int, ray_address: str, encryption: str = "auto"
    ) -> None:
        """Define the workers without starting them; `roles` maps names to roles.

        A local Ray cluster gets a new key if there is none.

        Raises:
            InvalidRequestError: Ray is not installed, or there is no key.
        """
        import importlib.util

        if importlib.util.find_spec("ray") is None:
            raise InvalidRequestError("Ray is not installed.", install_command("cluster"))
        if ray_address == LOCAL_RAY:
            os.environ.setdefault(KEY_VARIABLE, os.urandom(32).hex())
        self.key = read_key(encryption=encryption)
        self._command = [
            *module_command("twinphase.cluster.pools"),
            json.dumps(dict(roles)),
            str(threads),
            ray_address,
        ]
        self._known: dict[str, str] = {}
        self._error: TwinphaseError | None = None
        self._process: subprocess.Popen[str] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="twinphase-ray", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def address(self, name: str) -> str:
        """The last reported address of a worker.

        Raises:
            TwinphaseError: Ray or the worker's key was refused.
            ConnectionError: the address is not known yet.
        """
        if self._error is not None:
            raise self._error
        if name not in self._known:
            raise ConnectionError("Ray has not started it yet")
        return self._known[name]

    def close(self) -> None:
        """Stop the workers, and Ray if it was started here."""
        self._closing.set()
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(2 * REPLY_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _watch(self) -> None:
        delay = FIRST_RETRY_SECONDS
        while not self._closing.is_set():
            self._process = process = lifeline.start(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            assert process.stdin is not None and process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    if line.startswith("{"):
                        self._take(json.loads(line))
                        delay = FIRST_RETRY_SECONDS
            code = process.wait()
            self._known.clear()
            with suppress(OSError):
                process.stdin.close()
            if self._closing.is_set() or self._error is not None:
                return
            LOG.error("Ray is gone (exit code %d); it is tried again in %.0f s.", code, delay)
            self._closing.wait(delay)
            delay = min(2 * delay, MAX_RETRY_SECONDS)

    def _take(self, report: dict[str, Any]) -> None:
        if "error" in report:
            self._error = InvalidRequestError(report["error"], report["fix"])
        elif report["key"] != key_id(self.key.secret):
            self._error = InvalidRequestError(
                f"The machine of {report['worker']} has another key.",
                f"Set {KEY_VARIABLE} alike on all of them.",
            )
        else:
            self._known[report["worker"]] = report["address"]


def main(roles: Mapping[str, Role], threads: int, ray_address: str) -> int:
    """Run Ray in this process: start the actors, and report workers until stdin closes."""
    import ray

    ended = threading.Event()

    def wait_for_end_of_stdin() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end_of_stdin, daemon=True).start()
    local = ray_address == LOCAL_RAY
    options: dict[str, Any] = (
        {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES} if local else {}
    )
    try:
        ray.init(
            "local" if local else ray_address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **options,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        return _refuse(
            f"No Ray cluster answers at {ray_address}: {reason}.",
            "Check --ray-address, and `ray status`.",
        )
    # Ray declares no type for it.
    resources: Any = ray.cluster_resources
    cores = resources().get("CPU", 0)
    if len(roles) * threads > cores:
        return _refuse(
            f"{len(roles)} workers with {threads} threads each need more than the Ray cluster's "
            f"{cores:.0f} cores.",
            "Have fewer, or lower --threads-per-worker.",
        )
    actors = _start(roles, threads, "127.0.0.1" if local else None)
    known: dict[str, tuple[str, str]] = {}
    # An actor takes long to give its first answer.
    answered = float("inf")
    while not ended.wait(POLL_INTERVAL_SECONDS):
        if time.monotonic() - answered > RAY_TIMEOUT_SECONDS:
            # Ray does not report the death of its own process on this machine.
            ray.shutdown()
            return 1
        asked = {actor.where.remote(): name for name, actor in actors.items()}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=REPLY_TIMEOUT_SECONDS)
        for reference in done:
            try:
                location = tuple(ray.get(reference))
            except ray.exceptions.RayError:
                continue  # Ray is restarting the actor.
            answered = time.monotonic()
            name = asked[reference]
            if known.get(name) != location:
                known[name] = location
                address, key = location
                print(json.dumps({"worker": name, "address": address, "key": key}), flush=True)
    ray.shutdown()
    return 0


def _start(roles: Mapping[str, Role], threads: int, listen: str | None) -> dict[str, Any]:
    """Start one actor with its own cores per worker, close together if they exchange blocks."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = "SPREAD" if set(roles.values()) == {"both"} else "PACK"
    group = placement_group([{"CPU": threads}] * len(roles), strategy=strategy)
    actors = {}
    for number, (name, role) in enumerate(roles.items()):
        place = PlacementGroupSchedulingStrategy(group, number)
        keeper = ray.remote(WorkerKeeper).options(
            name=name,
            num_cpus=threads,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=place,
        )
        actors[name] = keeper.remote(listen, role)
    return actors


def _refuse(cause: str, fix: str) -> int:
    print(json.dumps({"error": cause, "fix": fix}), flush=True)
    return 2


if __name__ == "__main__":
    # The import makes the actors find the class in this module instead of `__main__`.
    from twinphase.cluster import pools

    sys.exit(pools.main(json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
