"""How many engines a server has, and where they are."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from twinphase.cluster.address import ENCRYPTION_VARIABLE, KEY_VARIABLE
from twinphase.cluster.role import Role
from twinphase.config import MAX_THREADS, EngineConfig, available_cores
from twinphase.errors import InvalidRequestError
from twinphase.settings import check_settings, setting


@dataclass(frozen=True)
class ClusterConfig:
    """The workers of one server.

    Raises:
        InvalidRequestError: a field has a value that it does not allow, or there are workers
            elsewhere and no key.
    """

    replicas: int | None = setting(
        None,
        "Number of engines on this machine, each in its own process.",
        minimum=1,
        maximum=256,
        default_text="1, or none where --worker names others",
    )
    prefill_workers: int | None = setting(
        None, "Engines that prefill prompts for the --decode-workers.", minimum=1, maximum=128
    )
    decode_workers: int | None = setting(
        None,
        "Engines that generate the answers, and prefill where that is faster.",
        minimum=1,
        maximum=128,
    )
    workers: tuple[str, ...] = setting(
        (),
        "Address of an engine that `twinphase worker` runs, HOST:PORT or unix:PATH; repeatable.",
        option="worker",
    )
    cluster_listen: str | None = setting(
        None,
        "Address where `twinphase worker --join` can join the running server, HOST:PORT.",
        default_text="no worker can join",
    )
    cluster_key_file: str | None = setting(
        None,
        "File with the key that this server and its workers share.",
        default_text=f"the key in {KEY_VARIABLE}",
    )
    cluster_encryption: str = setting(
        "auto",
        "Encryption between this server and its workers: auto encrypts connections that leave the "
        "machine, on all but Unix sockets, off none, which is for networks that you trust.",
        choices=("auto", "on", "off"),
        environment=ENCRYPTION_VARIABLE,
    )
    threads_per_worker: int | None = setting(
        None,
        "Compute threads of each engine.",
        minimum=1,
        maximum=MAX_THREADS,
        default_text="all cores, divided by the engines",
    )
    ray_address: str | None = setting(
        None,
        "Have Ray start the engines: the address of a Ray cluster, auto, or local to start Ray "
        "here.",
        default_text="without Ray",
    )
    elastic_roles: bool = setting(
        False,
        "Move workers between the prefill and decode pools when one queue is long and the other "
        "short.",
    )
    worker_silence: float = setting(
        1.5,
        "Seconds without a sign of life after which a worker counts as dead.",
        above=0,
        maximum=3600,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if (self.prefill_workers is None) != (self.decode_workers is None):
            raise InvalidRequestError(
                "--prefill-workers needs --decode-workers, and vice versa.", "Give both."
            )
        if self.prefill_workers and (
            self.replicas or self.workers or (self.cluster_listen and not self.ray_address)
        ):
            raise InvalidRequestError(
                "--prefill-workers and --decode-workers are given together with other workers.",
                "Drop --replicas; beside --worker or --cluster-listen, start each as `twinphase "
                "worker --role ...`.",
            )

        if self.elastic_roles and not (self.prefill_workers or self.workers or self.cluster_listen):
            raise InvalidRequestError(
                "--elastic-roles needs separate prefill and decode workers.",
                "Give --prefill-workers and --decode-workers as well.",
            )

    @property
    def roles(self) -> dict[str, Role]:
        """The engines that are started for this server, by name."""
        if not self.prefill_workers or not self.decode_workers:
            return {f"worker-{number}": "both" for number in range(self.num_here)}
        readers: dict[str, Role] = {
            f"prefill-{number}": "prefill" for number in range(self.prefill_workers)
        }
        return {
            **readers,
            **{f"decode-{number}": "decode" for number in range(self.decode_workers)},
        }

    @property
    def num_here(self) -> int:
        """Engines on this machine."""
        if self.prefill_workers and self.decode_workers:
            return self.prefill_workers + self.decode_workers
        return self.replicas if self.replicas is not None else 0 if self.workers else 1

    @property
    def is_cluster(self) -> bool:
        return (
            self.num_here != 1
            or bool(self.workers or self.cluster_listen)
            or self.ray_address is not None
        )

    def of_each(self, engine: EngineConfig) -> int | None:
        """Compute threads of each local engine; warns if all of them need more than the cores."""
        if self.threads_per_worker is not None and engine.threads is not None:
            raise InvalidRequestError(
                "Both --threads and --threads-per-worker are given.",
                "With several engines use --threads-per-worker.",
            )
        threads = self.threads_per_worker or engine.threads
        cores = available_cores()
        if threads is None:
            return max(1, cores // self.num_here) if self.num_here > 1 else None
        if threads * self.num_here > cores and self.ray_address is None:
            logging.getLogger("twinphase.cluster").warning(
                "%d engines with %d threads each are more than the %d cores here: they will wait "
                "for each other. "
                "Lower --threads-per-worker, or have fewer engines.",
                self.num_here,
                threads,
                cores,
            )
        return threads
