"""A worker process that Ray's actors and replicas start, and the address of their machine."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from typing import Any

from twinphase import lifeline
from twinphase.cluster.address import ENCRYPTION_VARIABLE, KEY_VARIABLE
from twinphase.cluster.handshake import ClusterKey
from twinphase.cluster.role import Role
from twinphase.config import module_command


class WorkerProcess:
    """A worker on this machine that ends with the process that started it.

    Attributes:
        address: where it listens.
    """

    def __init__(self, listen: str, role: Role, *options: str, key: ClusterKey) -> None:
        """Start the worker on a free port of the host `listen`."""
        command = [*module_command("twinphase.cli"), "worker", "--ends-with-stdin"]
        self._process = lifeline.start(
            [*command, "--listen", f"{listen}:0", "--role", role, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                KEY_VARIABLE: key.secret.decode(),
                ENCRYPTION_VARIABLE: key.encryption,
            },
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().rpartition(" ")[2].strip()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self, seconds: float) -> None:
        """Have the server drain the worker, for at most `seconds`."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._process.kill()
        self._process.wait()


def ray_address() -> str:
    """This machine's address in the Ray cluster."""
    import ray

    # Ray declares no type for it.
    address: Any = ray.util.get_node_ip_address
    return str(address())
