"""What the router sees of one worker: whether it is there, what it is, how its steps went."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace as replaced

from msgspec.structs import replace

from twinphase.cluster.block_index import BlockIndex
from twinphase.cluster.routing import Role, WorkerLoad
from twinphase.engine.process.host import LinkHost
from twinphase.engine.process.messages import (
    BlocksChanged,
    EngineFacts,
    Pushed,
    ReadAtMost,
    Refused,
    StepStats,
    WatchBlocks,
)
from twinphase.engine.process.status import WorkerStatus
from twinphase.phases.cost import FEATURES, CostModel

LOG = logging.getLogger("twinphase.cluster")
NO_PRICES = (0.0,) * len(FEATURES)
SHARE_SECONDS = 10.0  # that the shares of time are told of
DECODE_CHUNK = (
    128  # prompt tokens of a decode worker's step: an answer that comes meanwhile waits for its end
)
TOTALS = ("prefix_queries", "prefix_hits", "num_preemptions")


class WorkerView:
    """One worker.

    Attributes:
        role: as its server was told, or as it was started itself.
        is_up: it takes messages.
        is_absent: it was not to be had when it was wanted first, or has died.
        is_settled: it has been up, or has failed: a server waits no longer for it.
        facts: what it said of itself when it came last.
        prices: of its cost model, which it told last.
        requests: that it has, by id.
        role_reason: to which pool it went over last, and why; "" if it never did.
        num_mismatches: answers that it began, and whose first token another worker computed
            otherwise.
        heard: when a step of it was told last, or its first request was sent, seconds.
    """

    def __init__(self, name: str, role: Role, host: LinkHost) -> None:
        self.name = name
        self.role = role
        self.host = host
        self.is_up = self.is_absent = False
        self.facts: EngineFacts | None = None
        self.prices = NO_PRICES
        self.state = "starting"
        self.heard = 0.0
        self.requests: set[str] = set()
        self.num_mismatches = 0
        self.role_reason = ""
        self._received = Counter[str]()
        self._sent = Counter[str]()
        self._stats: StepStats | None = None
        self._before = dict.fromkeys(TOTALS, 0)  # of those that lived before this one
        self._seconds = [0.0, 0.0]  # prefill, decode
        self._recent: deque[tuple[float, float, float]] = deque()

    @property
    def is_settled(self) -> bool:
        return self.is_up or self.is_absent or self.host.failure is not None

    @property
    def machine(self) -> str:
        """Where it runs, without the port."""
        return self.host.where.rpartition(":")[0]

    @property
    def pid(self) -> int | None:
        """Of its process, while there is one and it is known."""
        return self.host.pid or (self.facts.pid if self.facts is not None and self.is_up else None)

    def join(self, facts: EngineFacts) -> None:
        self.facts = facts
        self.is_up = True
        self.state = "ready"
        self.prices = facts.prices or NO_PRICES
        self.role_reason = "" if facts.role else self.role_reason
        self.take_role(facts.role or self.role)

    def take_role(self, role: Role) -> None:
        """It is there for another half from now on, or has come for this one."""
        self.role = role
        if self.facts is not None and self.facts.shape is not None:
            self.host.put(ReadAtMost(DECODE_CHUNK if role == "decode" else None))

    def load(self, stage: str) -> bool:
        """It is being started; whether it now turns out that nobody is there yet."""
        absent = bool(self.host.waits_for) and not self.is_settled
        self.state = stage
        if absent:
            LOG.warning(
                "%s is not there yet: %s. It is tried again.", self.name, self.host.waits_for
            )
            self.is_absent = True
        return absent

    def leave(self) -> None:
        """It has died; what it counted is kept."""
        self.requests.clear()
        self.is_up = False
        self.is_absent = True
        self.state = "starting" if self.host.is_sought else "gone"
        for name in TOTALS:
            self._before[name] += getattr(self._stats, name, 0)
        self._received.update(self._stats.blocks_received if self._stats else {})
        self._stats = None

    def step(self, stats: StepStats) -> None:
        self._stats = stats
        self._recent.append((stats.end, stats.prefill_seconds, stats.decode_seconds))
        while self._recent[0][0] < stats.end - SHARE_SECONDS:
            self._recent.popleft()
        self._seconds[0] += stats.prefill_seconds
        self._seconds[1] += stats.decode_seconds

    def pushed(self, message: Pushed) -> None:
        """Blocks have gone from it to another worker."""
        self._sent.update(blocks=message.num_stored, bytes=message.num_bytes)

    def watch_blocks(self) -> None:
        """Have it tell which blocks its prefix cache has, and what changes."""
        if self.facts is not None and self.facts.shape is not None:
            self.host.put(WatchBlocks())

    def tell_blocks(self, message: BlocksChanged, index: BlockIndex) -> None:
        """What its prefix cache has, for the index of all; where an event was lost it tells the whole again."""
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
        """Its cost model has other prices: those of its machine's workers, among `views`, change."""
        if not prices:
            return
        self.prices = prices
        near = [one for one in views if one.is_up and one.machine == self.machine]
        times = WorkerView.shared_times(near)
        for one in near:
            if (load := loads.get(one.name)) is not None:
                load.times = times
                load.forget_steps()

    def end_stalled(self, now: float, most: float) -> None:
        """End it if it has requests, and has told of no step for over `most` seconds."""
        if self.is_up and self.requests and now - self.heard > most:
            LOG.error("%s made no step for %.0f s; it is ended.", self.name, most)
            self.host.kill()

    @property
    def seats(self) -> tuple[int, int]:
        """Requests that run there, and that wait, after its last step, which says nothing of one without requests."""
        stats = self._stats if self.requests else None
        return (stats.num_running, stats.num_waiting) if stats else (0, 0)

    def total(self, name: str) -> int:
        return self._before[name] + int(getattr(self._stats, name, 0))

    @staticmethod
    def shared_times(views: Sequence[WorkerView]) -> CostModel:
        """The cost model of workers on one machine, each of which has learned by itself: what they know, together.

        Apart, the noise between them would count for more than what one of them has cached.
        """
        shape = next((view.facts.shape for view in views if view.facts), None)
        prices = [
            sum(column) / len(views)
            for column in zip(*(view.prices for view in views), strict=True)
        ]
        return CostModel(prices, shape.windowed_share if shape else 0.0)

    @staticmethod
    def together(stats: StepStats, views: Collection[WorkerView]) -> StepStats:
        """A worker's step, with the numbers of all workers, as if they were one engine."""
        last = [view._stats for view in views if view.requests and view._stats is not None]
        size = sum(view.is_up for view in views) or 1
        return replace(
            stats,
            num_running=sum(one.num_running for one in last),
            num_waiting=sum(one.num_waiting for one in last),
            kv_cache_usage=sum(one.kv_cache_usage for one in last) / size,
            **{name: sum(view.total(name) for view in views) for name in TOTALS},
        )

    def status(self, index: BlockIndex | None, now: float, transfers: int) -> WorkerStatus:
        """For people; of a worker without requests the last step says nothing."""
        received = self._received + Counter(self._stats.blocks_received if self._stats else {})
        stats = self._stats if self.requests else None
        recent = [one for one in self._recent if one[0] >= now - SHARE_SECONDS]
        prefill, decode = (sum(one[part] for one in recent) / SHARE_SECONDS for part in (1, 2))
        return WorkerStatus(
            self.name,
            self.role,
            self.host.where,
            self.pid,
            self.state,
            *self.seats,
            stats.kv_cache_usage if stats else 0.0,
            index.num_held(self.name) if index else 0,
            round(min(1.0, prefill), 4),
            round(min(1.0, decode), 4),
            self._seconds[0],
            self._seconds[1],
            self.host.num_restarts,
            self.num_mismatches,
            transfers,
            self._sent["blocks"],
            self._sent["bytes"],
            dict(received),
            self.role_reason,
            self.facts.ranks if self.facts else [],
        )


def as_one(all_facts: Sequence[EngineFacts]) -> EngineFacts:
    """What several engines are together: the first, with the seats and blocks of all."""
    seats, blocks = (
        sum(getattr(facts.config, name) or 0 for facts in all_facts)
        for name in ("max_num_seqs", "num_kv_blocks")
    )
    config = replaced(all_facts[0].config, max_num_seqs=seats, num_kv_blocks=blocks or None)
    return replace(all_facts[0], config=config)


def can_answer(views: Collection[WorkerView]) -> bool:
    """Whether a worker is up that does more than read prompts."""
    return any(view.is_up and view.role != "prefill" for view in views)


def failure_of(views: Collection[WorkerView], *, more_may_come: bool) -> Refused | None:
    """Why there is nobody to wait for: what refused the first worker, if all were, or that none is to answer."""
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
