"""Workers on a Ray cluster: an actor for each, which starts it and starts it again.

No token goes through Ray.

Ray lives in a process of its own, `python -m twinphase.cluster.pools`, which tells the server where
the workers are, a JSON object a line. So the server outlives Ray: what the workers compute goes on
while it is away, and when it is back, the workers are asked for again. Not for what workers do
(`worker.py`), nor for Ray Serve (`deploy.py`).
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

from twinphase.cluster.address import KEY_VARIABLE, read_key
from twinphase.cluster.routing import Role
from twinphase.config import module_command
from twinphase.errors import InvalidRequestError, TwinphaseError

LOG = logging.getLogger("twinphase.cluster")
LOCAL = "local"  # instead of an address: Ray is started here, and ends with the server
LOST_SECONDS = 10.0  # in which no actor answers, after which Ray is tried anew
LOOK_SECONDS = 0.5  # between two looks at the actors
REPLY_SECONDS = 5.0
# seconds before Ray is tried again
FIRST_DELAY = 1.0
LONGEST_DELAY = 30.0
OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes: nothing is put there


def key_id(key: bytes) -> str:
    """What may be said of a key, so that two ends can tell whether theirs are the same."""
    return hashlib.sha256(b"twinphase key id" + key).hexdigest()[:12]


class WorkerKeeper:
    """The actor: one worker's process on its machine, which ends when the actor does."""

    def __init__(self, listen: str | None, role: Role) -> None:
        """`listen` is the address of the worker's port; None uses its machine's cluster address."""
        if listen is None:
            import ray

            own_address: Any = ray.util.get_node_ip_address  # which has no types
            listen = own_address()
        self._listen = listen
        self._role = role
        self._address = ""
        self._process: subprocess.Popen[str] | None = None
        self._key_id = key_id(read_key())

    def where(self) -> tuple[str, str]:
        """The worker's address and the id of its key; restarts a worker that has ended."""
        if self._process is None or self._process.poll() is not None:
            command = [*module_command("twinphase.cluster.worker"), "--listen", f"{self._listen}:0"]
            command += ["--role", self._role, "--ends-with-stdin"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
            assert self._process.stdout is not None
            self._address = self._process.stdout.readline().rpartition(" ")[2].strip()
        return self._address, self._key_id


class RayPool:
    """The server's view of its workers on Ray."""

    def __init__(self, roles: Mapping[str, Role], threads: int, ray_address: str) -> None:
        """Nothing is started yet; `roles` is by the workers' names.

        A local Ray's key is made here if there is none.

        Raises:
            InvalidRequestError: Ray is not installed, or there is no key.
        """
        import importlib.util

        if importlib.util.find_spec("ray") is None:
            raise InvalidRequestError("Ray is not installed.", "pip install 'twinphase[cluster]'")
        if ray_address == LOCAL:
            os.environ.setdefault(KEY_VARIABLE, os.urandom(32).hex())
        self.key = read_key()
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
        """Where a worker is, as it was told last.

        Raises:
            TwinphaseError: it was refused.
            ConnectionError: it is not known yet.
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
                self._process.wait(2 * REPLY_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _watch(self) -> None:
        delay = FIRST_DELAY
        while not self._closing.is_set():
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._process = process = subprocess.Popen(
                self._command, text=True, start_new_session=True, **pipes
            )  # type: ignore[call-overload]
            assert process.stdin is not None and process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    if line.startswith("{"):
                        self._take(json.loads(line))
                        delay = FIRST_DELAY
            code = process.wait()
            self._known.clear()
            with suppress(OSError):
                process.stdin.close()
            if self._closing.is_set() or self._error is not None:
                return
            LOG.error("Ray is gone (exit code %d); it is tried again in %.0f s.", code, delay)
            self._closing.wait(delay)
            delay = min(2 * delay, LONGEST_DELAY)

    def _take(self, told: dict[str, Any]) -> None:
        if "error" in told:
            self._error = InvalidRequestError(told["error"], told["fix"])
        elif told["key"] != key_id(self.key):
            self._error = InvalidRequestError(
                f"The machine of {told['worker']} has another key.",
                f"Set {KEY_VARIABLE} alike on all of them.",
            )
        else:
            self._known[told["worker"]] = told["address"]


def main(roles: Mapping[str, Role], threads: int, ray_address: str) -> int:
    """The process that runs Ray: starts the actors and reports workers until stdin closes."""
    import ray

    ended = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    local = ray_address == LOCAL
    own: dict[str, Any] = (
        {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES} if local else {}
    )
    try:
        ray.init(
            "local" if local else ray_address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **own,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        words = " ".join(str(error).split())[:200]
        return _refuse(
            f"No Ray cluster answers at {ray_address}: {words}.",
            "Check --ray-address, and `ray status`.",
        )
    resources: Any = ray.cluster_resources  # which has no types
    cores = resources().get("CPU", 0)
    if len(roles) * threads > cores:
        return _refuse(
            f"{len(roles)} workers with {threads} threads each need more than the Ray cluster's "
            f"{cores:.0f} cores.",
            "Have fewer, or lower --threads-per-worker.",
        )
    actors = _start(roles, threads, "127.0.0.1" if local else None)
    known: dict[str, tuple[str, str]] = {}
    answered = float("inf")  # when one did last; none has yet
    while not ended.wait(LOOK_SECONDS):
        if time.monotonic() - answered > LOST_SECONDS:
            ray.shutdown()
            return 1  # Ray's own process here may be dead, which Ray does not tell
        asked = {actor.where.remote(): name for name, actor in actors.items()}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=REPLY_SECONDS)
        for reference in done:
            try:
                found = tuple(ray.get(reference))
            except ray.exceptions.RayError:
                continue  # it is being started again
            answered = time.monotonic()
            if known.get(asked[reference]) != found:
                known[asked[reference]] = found
                print(
                    json.dumps({"worker": asked[reference], "address": found[0], "key": found[1]}),
                    flush=True,
                )
    ray.shutdown()
    return 0


def _start(roles: Mapping[str, Role], threads: int, listen: str | None) -> dict[str, Any]:
    """An actor with cores of its own for each worker; workers that exchange KV blocks are close."""
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
    # By its name: the actors' machines are to find the class in the module, not in this one.
    from twinphase.cluster import pools

    sys.exit(pools.main(json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
