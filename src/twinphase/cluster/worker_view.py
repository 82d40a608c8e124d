"""The router's view of one worker: its state, its facts, and its steps."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace as replaced

from msgspec.structs import replace

from twinphase.cluster.block_index import BlockIndex
from twinphase.cluster.role import Role
from twinphase.cluster.routed_request import RequestTable
from twinphase.cluster.routing import WorkerLoad
from twinphase.engine.process.host import LinkHost
from twinphase.engine.process.messages import (
    BlocksChanged,
    EngineFacts,
    LimitPrefill,
    Pushed,
    Refused,
    StepStats,
    WatchBlocks,
    WatchSteps,
)
from twinphase.engine.process.status import PhaseTimes, WorkerStatus, limits_of
from twinphase.phases.cost import FEATURES, CostModel

LOG = logging.getLogger("twinphase.cluster")
NO_PRICES = (0.0,) * len(FEATURES)
# A request that reaches a decode worker during a step waits for the end of that step.
DECODE_WORKER_CHUNK_TOKENS = 128
TOTALS = ("prefix_queries", "prefix_hits", "num_preemptions")


class WorkerView:
    """The router's view of one worker.

    Attributes:
        role: role given by the server's or the worker's own command line.
        is_up: whether it takes messages.
        is_absent: whether it was unreachable at the start, or has died.
        is_settled: whether it has been up or has failed, so that the server does not wait for it.
        facts: facts that it reported when it joined.
        prices: last reported prices of its cost model.
        role_reason: the pool that it last moved to, and why; "" if it never moved.
        num_mismatches: first tokens of this worker that a decode worker computed differently.
        last_step: time of its last reported step, or of its first request, seconds.
    """

    def __init__(self, name: str, role: Role, host: LinkHost, requests: RequestTable) -> None:
        self.name = name
        self.role = role
        self.host = host
        self.is_up = self.is_absent = False
        self.facts: EngineFacts | None = None
        self.prices = NO_PRICES
        self.state = "starting"
        self.last_step = 0.0
        self._requests = requests
        self.num_mismatches = 0
        self.num_departures = 0
        self.role_reason = ""
        self._received = Counter[str]()
        self._sent = Counter[str]()
        self._stats: StepStats | None = None
        self._before = dict.fromkeys(TOTALS, 0)  # Totals of the worker's earlier processes.
        self._times = PhaseTimes()

    @property
    def is_settled(self) -> bool:
        return self.is_up or self.is_absent or self.host.failure is not None

    @property
    def num_requests(self) -> int:
        return len(self._requests.at(self.name))

    @property
    def num_restarts(self) -> int:
        """How often the worker was lost; orderly departures do not count."""
        return self.host.num_restarts - self.num_departures

    @property
    def machine(self) -> str:
        """The host that the worker runs on, without the port."""
        return self.host.where.rpartition(":")[0]

    @property
    def pid(self) -> int | None:
        """The id of the worker's process, if it is running and known."""
        return self.host.pid or (self.facts.pid if self.facts is not None and self.is_up else None)

    def join(self, facts: EngineFacts) -> None:
        self.facts = facts
        self.is_up = True
        self.state = "ready"
        self.prices = facts.prices or NO_PRICES
        self.role_reason = "" if facts.role else self.role_reason
        self.take_role(facts.role or self.role)

    def take_role(self, role: Role) -> None:
        self.role = role
        if self.facts is not None and self.facts.shape is not None:
            self.host.put(LimitPrefill(DECODE_WORKER_CHUNK_TOKENS if role == "decode" else None))

    def load(self, stage: str) -> bool:
        """Note a stage of loading; return True if the worker has just become unreachable."""
        absent = bool(self.host.waits_for) and not self.is_settled
        self.state = stage
        if absent:
            LOG.warning(
                "%s cannot be reached yet: %s. Trying again.", self.name, self.host.waits_for
            )
            self.is_absent = True
        return absent

    def leave(self) -> None:
        """Note that the worker died; its counters are kept."""
        self.is_up = False
        self.is_absent = True
        self.state = "starting" if self.host.is_sought else "gone"
        for name in TOTALS:
            self._before[name] += getattr(self._stats, name, 0)
        self._received.update(self._stats.blocks_received if self._stats else {})
        self._stats = None

    def step(self, stats: StepStats) -> None:
        self._stats = stats
        self._times.add(stats)

    def pushed(self, message: Pushed) -> None:
        self._sent.update(blocks=message.num_stored, bytes=message.num_bytes)

    def watch_blocks(self) -> None:
        """Have the worker report its cached blocks now, and their changes from then on."""
        if self.facts is not None and self.facts.shape is not None:
            self.host.put(WatchBlocks())

    def watch_steps(self, *, on: bool) -> None:
        """Start or stop the worker's reports on each step."""
        if self.is_up:
            self.host.put(WatchSteps(on))

    def update_index(self, message: BlocksChanged, index: BlockIndex) -> None:
        """Update the index with cached blocks; request the full list after a lost event."""
        if message.whole:
            index.replace(self.name, message.number, message.stored)
        elif not index.apply(self.name, message.number, message.stored, message.evicted):
            self.watch_blocks()

    def learn(
        self,
        prices: tuple[float, ...],
        views: Collection[WorkerView],
        loads: Mapping[str, WorkerLoad],
    ) -> None:
        """Set new prices of the cost model, which all workers in `views` on its machine share."""
        if not prices:
            return
        self.prices = prices
        near = [one for one in views if one.is_up and one.machine == self.machine]
        times = WorkerView.shared_times(near)
        for one in near:
            if (load := loads.get(one.name)) is not None:
                load.times = times
                load.forget_steps()

    def end_stalled(self, now: float, limit: float) -> None:
        """Kill the worker if it has requests and reported no step for more than `limit` seconds."""
        if self.is_up and now - self.last_step > limit and self.num_requests:
            LOG.error("%s made no step for %.0f s; it is ended.", self.name, limit)
            self.host.kill()

    @property
    def seats(self) -> tuple[int, int]:
        """Running and waiting requests after its last step."""
        stats = self._stats if self.num_requests else None
        return (stats.num_running, stats.num_waiting) if stats else (0, 0)

    def total(self, name: str) -> int:
        return self._before[name] + int(getattr(self._stats, name, 0))

    @staticmethod
    def shared_times(views: Sequence[WorkerView]) -> CostModel:
        """One cost model for the workers of a machine: the mean of what each has learned.

        The noise between separate models would outweigh the gain from cached blocks.
        """
        shape = next((view.facts.shape for view in views if view.facts), None)
        prices = [
            sum(column) / len(views)
            for column in zip(*(view.prices for view in views), strict=True)
        ]
        return CostModel(prices, shape.windowed_share, shape.window) if shape else CostModel(prices)

    @staticmethod
    def together(
        stats: StepStats, views: Collection[WorkerView], num_requests: Mapping[str, int]
    ) -> StepStats:
        """A worker's step with the totals of all workers, as if they were one engine.

        The last step of an idle worker does not show its present load.
        """
        last = [
            view._stats for view in views if num_requests[view.name] and view._stats is not None
        ]
        size = sum(view.is_up for view in views) or 1
        return replace(
            stats,
            num_running=sum(one.num_running for one in last),
            num_waiting=sum(one.num_waiting for one in last),
            kv_cache_usage=sum(one.kv_cache_usage for one in last) / size,
            itl_slo_seconds=max(
                (one.itl_slo_seconds for one in last if one.itl_slo_seconds), default=None
            ),
            chunk_tokens=min((one.chunk_tokens for one in last if one.chunk_tokens), default=None),
            **{name: sum(view.total(name) for view in views) for name in TOTALS},
        )

    def status(self, index: BlockIndex, now: float, transfers: int) -> WorkerStatus:
        received = self._received + Counter(self._stats.blocks_received if self._stats else {})
        stats = self._stats if self.num_requests else None
        running, waiting = self.seats
        return WorkerStatus(
            self.name,
            self.role,
            self.host.where,
            self.pid,
            self.state,
            running=running,
            waiting=waiting,
            kv_cache_usage=stats.kv_cache_usage if stats else 0.0,
            cached_blocks=index.num_held(self.name),
            restarts=self.num_restarts,
            first_token_mismatches=self.num_mismatches,
            transfers=transfers,
            blocks_sent=self._sent["blocks"],
            bytes_sent=self._sent["bytes"],
            blocks_received=dict(received),
            role_reason=self.role_reason,
            ranks=self.facts.ranks if self.facts else [],
            **self._times.fields(now),
            **limits_of(self.facts, self._stats, self.host.where),
        )


def as_one(all_facts: Sequence[EngineFacts]) -> EngineFacts:
    """The facts of several engines as one: the first engine's, with the seats and blocks of all."""
    seats, blocks = (
        sum(getattr(facts.config, name) or 0 for facts in all_facts)
        for name in ("max_num_seqs", "num_kv_blocks")
    )
    config = replaced(all_facts[0].config, max_num_seqs=seats, num_kv_blocks=blocks or None)
    return replace(all_facts[0], config=config)


def can_answer(views: Collection[WorkerView]) -> bool:
    """Whether a worker is up that decodes."""
    return any(view.is_up and view.role != "prefill" for view in views)


def failure_of(views: Collection[WorkerView], *, more_may_come: bool) -> Refused | None:
    """Why no worker will ever answer: all have failed, or none decodes."""
    failures = [view.host.failure for view in views]
    if failures and all(failures):
        return failures[0]
    if (
        more_may_come
        or can_answer(views)
        or not all(view.is_up or view.host.failure for view in views)
    ):
        return None
    return Refused(
        None,
        "InvalidRequestError",
        "All workers have the role prefill, so that none would answer.",
        "Start one with --role decode, or both.",
    )
