"""Makes a server's host from its configuration: one engine, or a router over several."""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import replace
from functools import partial

from twinphase.cluster.address import KEY_VARIABLE, UNENCRYPTED, read_key
from twinphase.cluster.config import ClusterConfig
from twinphase.cluster.elastic import Balance
from twinphase.cluster.handshake import ClusterKey
from twinphase.cluster.joining import Door
from twinphase.cluster.pools import RayPool
from twinphase.cluster.ported import PortedHost
from twinphase.cluster.remote import CalledHost, RemoteHost
from twinphase.cluster.router import Router
from twinphase.config import ENGINES_VARIABLE, EngineConfig
from twinphase.engine.process.host import Host, LinkHost, ProcessHost

LOG = logging.getLogger("twinphase.cluster")


def make_host(model: str, engine: EngineConfig, cluster: ClusterConfig, *, stall: float) -> Host:
    """The host of a server.

    Args:
        model: name or path; a worker elsewhere finds it on its own machine.
        engine: configuration of every engine.
        cluster: how many engines there are, and where.
        stall: seconds without a step after which an engine with work is killed, if there are
            several.

    Raises:
        TwinphaseError: the model cannot be found or read, a configuration is wrong, or there is no
            key.
    """
    threads = cluster.of_each(engine)
    if threads is not None:
        engine = replace(engine, threads=threads)
    here = cluster.num_here if cluster.ray_address is None else 1
    os.environ[ENGINES_VARIABLE] = str(max(1, here))
    if not cluster.is_cluster:
        return ProcessHost(model, engine)
    roles = cluster.roles
    hosts = dict[str, LinkHost]()
    pool = (
        RayPool(roles, threads or 1, cluster.ray_address, cluster.cluster_encryption)
        if cluster.ray_address is not None
        else None
    )
    key = pool.key if pool is not None else ClusterKey(b"")
    if cluster.workers or (cluster.cluster_listen and pool is None):
        key = read_key(cluster.cluster_key_file, cluster.cluster_encryption)
    if key.secret and key.encryption == "off":
        LOG.warning(UNENCRYPTED)
    if cluster.prefill_workers and pool is None:
        # Only the engines of this server inherit this key.
        os.environ[KEY_VARIABLE] = secrets.token_hex(32)
    for name, role in roles.items():
        own = _own(engine, name)
        if pool is not None:
            hosts[name] = RemoteHost(
                partial(pool.address, name), pool.key, model, own, cluster.worker_silence
            )
        else:
            hosts[name] = (ProcessHost if role == "both" else PortedHost)(
                model, own, cluster.worker_silence
            )
    for number, address in enumerate(cluster.workers, len(roles)):
        own = _own(engine, name := f"worker-{number}")
        hosts[name] = RemoteHost(address, key, model, own, cluster.worker_silence)

    def newcomer(name: str, address: str) -> CalledHost:
        return CalledHost(address, key, model, _own(engine, name), cluster.worker_silence)

    door = Door(cluster.cluster_listen, key, newcomer) if cluster.cluster_listen else None
    if pool is not None:
        pool.start()
    closed = pool.close if pool else lambda: None
    balance = Balance() if cluster.elastic_roles else None
    return Router(hosts, roles=roles, stall=stall, door=door, balance=balance, closed=closed)


def _own(engine: EngineConfig, name: str) -> EngineConfig:
    """The configuration of one engine; each engine writes its own step log."""
    trace = engine.trace_file
    return replace(engine, trace_file=f"{trace}.{name}") if trace else engine
