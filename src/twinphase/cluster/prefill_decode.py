"""Prefill and decode as deployments of Ray Serve: a server with a router, and its workers.

Each replica starts a worker process with a role. The worker joins the server (`joining.py`), and is
drained when Serve stops the replica. Only the key, addresses and loads pass through Ray.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from twinphase.cluster.handshake import ClusterKey
from twinphase.cluster.joining import Door
from twinphase.cluster.remote import CalledHost
from twinphase.cluster.replica import LLMConfig, OpenAIServer
from twinphase.cluster.role import Role
from twinphase.cluster.router import Router
from twinphase.cluster.worker_process import WorkerProcess, ray_address
from twinphase.engine.frontends.checks import engine_config
from twinphase.engine.process.host import Host
from twinphase.server.config import ServerConfig

POLL_INTERVAL_SECONDS = 0.2
# This must be shorter than the time that Serve gives a replica to end.
DRAIN_TIMEOUT_SECONDS = 15.0


class PDServer(OpenAIServer):
    """The server; there is only one, because a worker serves one server at a time."""

    # The workers wait for the server, so the server must not wait for the workers.
    when_ready = False

    def __init__(self, config: LLMConfig, key: str, pools: list[Any]) -> None:
        """`pools` are the workers' deployments; as arguments here, they are started by Serve."""
        self._key = ClusterKey(key.encode())
        super().__init__(config)

    def _host(self, model: str, config: LLMConfig, server: ServerConfig) -> Host:
        def newcomer(name: str, address: str) -> CalledHost:
            return CalledHost(address, self._key, model, engine_config(config.engine_kwargs))

        self._door = Door(f"{ray_address()}:0", self._key, newcomer)
        self._router = Router({}, stall=server.stall_timeout, door=self._door)
        return self._router

    def where(self) -> str:
        """The address at which workers ask to join."""
        return self._door.address

    def load(self, address: str) -> dict[str, float] | None:
        """Seconds of queued prefill at a worker, and its share of used seats; None if down."""
        views = self._router.workers_by_name.values()
        view = next((view for view in views if view.host.where == address and view.is_up), None)
        if view is None or view.facts is None:
            return None
        seats = view.facts.config.max_num_seqs or 1
        return {
            "queue_seconds": self._router.fleet.workers[view.name].prefill_seconds,
            "busy": view.num_requests / seats,
        }


class PDWorker:
    """A replica with one worker process, which ends with the replica."""

    _worker: WorkerProcess | None = None

    async def __init__(self, config: LLMConfig, role: Role, key: str) -> None:  # type: ignore[misc]
        """Start the worker, and return once it has joined the server."""
        from ray import serve

        self._server = serve.get_deployment_handle("PDServer", serve.get_replica_context().app_name)
        self._role = role
        self._key = ClusterKey(key.encode())
        self._options = ["--engine", json.dumps(config.engine_kwargs), "--join"]
        self._door = self._address = ""
        await self.check_health()
        while await self._server.load.remote(self._address) is None:
            await self.check_health()
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def check_health(self) -> None:
        """Restart the worker if it has ended, or if its server has moved."""
        door = await self._server.where.remote()
        if self._worker is None or not self._worker.is_running or door != self._door:
            self._end(0.0)
            self._door = door
            self._worker = await asyncio.to_thread(
                WorkerProcess, ray_address(), self._role, *self._options, door, key=self._key
            )
            self._address = self._worker.address

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Statistics for `by_queue_seconds`."""
        found: dict[str, float] | None = await self._server.load.remote(self._address)
        return found or {"queue_seconds": 0.0, "busy": 0.0}

    def __del__(self) -> None:
        """Drain the worker: Serve calls this when it stops the replica."""
        self._end(DRAIN_TIMEOUT_SECONDS)

    def _end(self, seconds: float) -> None:
        if self._worker is not None:
            self._worker.end(seconds)
            self._worker = None
