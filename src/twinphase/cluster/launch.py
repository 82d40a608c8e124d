"""From a configuration to the host that a server speaks to: one engine, or a router over several."""

from __future__ import annotations

from functools import partial
from typing import Any

from twinphase.cluster.address import read_key
from twinphase.cluster.config import ClusterConfig
from twinphase.cluster.pools import RayPool
from twinphase.cluster.remote import RemoteHost
from twinphase.cluster.router import Router
from twinphase.engine.checks import engine_config
from twinphase.engine.host import Host, LinkHost, ProcessHost

__all__ = ["make_host"]


def make_host(model: str, engine: dict[str, Any], cluster: ClusterConfig, *, stall: float) -> Host:
    """The host of a server.

    Args:
        model: name or path; a worker elsewhere finds it on its own machine.
        engine: fields of `EngineConfig`, for every engine.
        cluster: how many engines there are, and where.
        stall: seconds without a step, while there is work, until one of several engines is ended.

    Raises:
        TwinphaseError: the model cannot be found or read, a configuration is wrong, or there is no key.
    """
    threads = cluster.of_each(engine_config(engine))
    engine = {**engine, "threads": threads} if threads is not None else engine
    if not cluster.is_cluster:
        return ProcessHost(model, engine)
    pool = None
    if cluster.ray_address is not None:
        pool = RayPool(cluster.num_here, threads or 1, cluster.ray_address)
    key = read_key(cluster.cluster_key_file) if cluster.workers else b""
    hosts: dict[str, LinkHost] = {}
    for number in range(cluster.num_here + len(cluster.workers)):
        name, own = f"worker-{number}", dict(engine)
        if own.get("trace_file"):  # a log of steps is of one engine
            own["trace_file"] += f".{name}"
        if number < cluster.num_here and pool is not None:
            hosts[name] = RemoteHost(partial(pool.address, number), pool.key, model, own, cluster.worker_silence)
        elif number < cluster.num_here:
            hosts[name] = ProcessHost(model, own, cluster.worker_silence)
        else:
            address = cluster.workers[number - cluster.num_here]
            hosts[name] = RemoteHost(address, key, model, own, cluster.worker_silence)
    if pool is not None:
        pool.start()
    return Router(hosts, stall=stall, closed=pool.close if pool else None)
