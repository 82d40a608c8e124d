"""From a configuration to the host that a server speaks to: one engine, or a router over several."""

from __future__ import annotations

from typing import Any

from twinphase.cluster.config import ClusterConfig
from twinphase.cluster.router import Router
from twinphase.engine.checks import engine_config
from twinphase.engine.host import Host, ProcessHost

__all__ = ["make_host"]


def make_host(model: str, engine: dict[str, Any], cluster: ClusterConfig) -> Host:
    """The host of a server; `engine` has fields of `EngineConfig`, for every engine.

    Raises:
        TwinphaseError: the model cannot be found or read, or a configuration is wrong.
    """
    threads = cluster.of_each(engine_config(engine))
    engine = {**engine, "threads": threads} if threads is not None else engine
    if not cluster.is_cluster:
        return ProcessHost(model, engine)
    hosts = {}
    for number in range(cluster.replicas):
        own = dict(engine)
        if own.get("trace_file"):  # a log of steps is of one engine
            own["trace_file"] += f".worker-{number}"
        hosts[f"worker-{number}"] = ProcessHost(model, own, silence=cluster.worker_silence)
    return Router(hosts)
