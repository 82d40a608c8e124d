"""Workers that leave, or go over to the other pool, while requests run.

Each takes nothing new, finishes what it has, hands over its prefix cache, and then ends or has its
other role. Which one goes over, and when, `Balance` says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from twinphase.batch import StepWork
from twinphase.cluster.block_index import BlockIndex
from twinphase.cluster.fleet import Fleet
from twinphase.cluster.routing import WorkerLoad
from twinphase.cluster.worker_view import WorkerView
from twinphase.engine.process.messages import HandOver, Pushed, PushTo, Stop

LOG = logging.getLogger("twinphase.cluster")
LEASE_SECONDS = 10.0  # for the blocks of a whole prefix cache
LONG_QUEUE = 2.0  # seconds
LONGER = 4.0  # times as long as the other pool's
PATIENCE = 10.0  # seconds that it is that long
LOOK_SECONDS = 1.0

Half = Literal["prefill", "decode"]


class Balance:
    """Finds that one pool's queue has been long for some time, while the other's was short.

    After a worker has gone over, and while any is about to, the time begins anew: so roles do not
    flutter.
    """

    def __init__(self, *, long_queue: float = LONG_QUEUE, patience: float = PATIENCE) -> None:
        """Both in seconds: a queue that is long, and for how long it has to be."""
        self._long_queue = long_queue
        self._patience = patience
        self._wanting: Half | None = None
        self._since = self._looked = 0.0

    def choose(
        self, loads: Collection[WorkerLoad], queues: Mapping[str, float], now: float
    ) -> tuple[WorkerLoad, Half, str] | None:
        """Who is to go over, to which role, and why; None if nobody is. Each pool keeps a worker.

        Args:
            loads: of all workers that are up.
            queues: seconds until a worker could begin with what came last, by its name.
            now: seconds.
        """
        if now - self._looked < min(LOOK_SECONDS, self._patience):
            return None
        self._looked = now
        pools = {
            half: [load for load in loads if load.role == half] for half in ("prefill", "decode")
        }
        means = {
            half: sum(queues[load.name] for load in pool) / (len(pool) or 1)
            for half, pool in pools.items()
        }
        short, long = sorted(means, key=means.__getitem__)
        if (
            len(pools[short]) < 2
            or means[long] < self._long_queue
            or means[long] < LONGER * means[short]
        ):
            self._wanting = None
            return None
        wanting: Half = "prefill" if long == "prefill" else "decode"
        if self._wanting != wanting:
            self._wanting = wanting
            self._since = now
        if now - self._since < self._patience:
            return None
        self._wanting = None
        why = (
            f"{means[long]:.2g} s of work wait for each {long} worker, {means[short]:.2g} s "
            f"for each {short} worker"
        )
        return (
            min(pools[short], key=lambda load: (load.num_decodes, load.prefill_seconds)),
            wanting,
            why,
        )


@dataclass
class _Drain:
    """A worker that takes nothing new; `role` is what comes then, None is its end."""

    view: WorkerView
    role: Half | None
    hands_over: bool = False


class Drains:
    """The workers that want to end, or to have the other role; a worker's `state` says how far it has come."""

    def __init__(
        self,
        views: Mapping[str, WorkerView],
        changed: Callable[[], None],
        balance: Balance | None = None,
    ) -> None:
        """`views` are a router's, which changes them; `changed` is called when a worker has another role."""
        self._views = views
        self._changed = changed
        self._balance = balance
        self._drains: dict[str, _Drain] = {}

    def __bool__(self) -> bool:
        return bool(self._drains)

    def begin(self, view: WorkerView, fleet: Fleet | None, role: Half | None = None) -> None:
        """It takes nothing new."""
        if fleet is None or not view.is_up:
            return
        view.state = f"moving to {role}" if role else "draining"
        fleet.workers[view.name].accepts = False
        self._drains[view.name] = _Drain(view, role)
        LOG.info(
            "%s is %s: it takes nothing new, and finishes %d requests.",
            view.name,
            view.state,
            len(view.requests),
        )

    def look(self, fleet: Fleet | None, now: float) -> None:
        """Have a worker go over to the other pool where the queues say so, one at a time."""
        if self._balance is None or self._drains or fleet is None:
            return
        loads = [load for load in fleet.workers.values() if load.accepts]
        queues = {
            load.name: _queue_seconds(load, self._views[load.name], fleet.usual_output)
            for load in loads
        }
        found = self._balance.choose(loads, queues, now)
        if found is not None:
            load, role, why = found
            view = self._views[load.name]
            view.role_reason = f"to {role}: {why}"
            LOG.info("%s goes over to the %s pool: %s.", view.name, role, why)
            self.begin(view, fleet, role)

    def go_on(self, owing: Collection[str], promised: Collection[str], fleet: Fleet) -> None:
        """Those that have finished hand over what they have cached.

        Not who is `owing` the answer to a question, nor who is to end while a request is `promised`
        to it that another worker reads: in its other role it takes that one all the same.
        """
        for drain in list(self._drains.values()):
            view = drain.view
            if drain.hands_over or view.requests or view.name in owing:
                continue
            if drain.role is None and view.name in promised:
                continue
            drain.hands_over = True
            view.state = view.state if drain.role else "handing over"
            heir = self._heir(view, fleet.index)
            if heir is not None and heir.facts is not None:
                LOG.info("%s hands over its prefix cache to %s.", view.name, heir.name)
                view.host.put(HandOver(PushTo(heir.facts.kv_addresses, LEASE_SECONDS)))
            if heir is None or drain.role is not None:  # who stays does so beside its new work
                self._end(drain, fleet)

    def handed_over(self, view: WorkerView, told: Pushed, fleet: Fleet | None) -> None:
        """Its blocks are where they should be, or no more will come."""
        problem = f": {told.problem}" if told.problem else ""
        LOG.info(
            "%s has handed over %d of %d blocks%s.",
            view.name,
            told.num_stored,
            told.num_blocks,
            problem,
        )
        drain = self._drains.get(view.name)
        if (
            drain is not None and drain.hands_over and fleet is not None
        ):  # else it has gone over meanwhile
            self._end(drain, fleet)

    def gone(self, view: WorkerView) -> bool:
        """Its connection has ended; whether that was to be, and costs nothing."""
        drain = self._drains.pop(view.name, None)
        if drain is not None and drain.role is not None:
            view.role_reason = ""
        left = drain is not None and drain.role is None and not view.requests
        if left:
            LOG.info("%s has left.", view.name)
        return left

    def keep_pools(self, fleet: Fleet | None) -> None:
        """A worker has died, or has come: no pool is to be without one that another could do without.

        Who was about to go over stays where there is nobody else. Where roles are elastic, a
        prefill worker answers when nobody else does, and a second decode worker reads when nobody
        else does: at once, whatever it has to do.
        """
        if fleet is None or not all(view.is_settled for view in self._views.values()):
            return

        def pool(half: str) -> list[WorkerLoad]:
            return [
                load
                for load in fleet.workers.values()
                if load.accepts and load.role in (half, "both")
            ]

        for name, drain in list(self._drains.items()):
            if drain.role is not None and not pool(drain.view.role):
                del self._drains[name]
                drain.view.role_reason = ""
                self._give(drain.view, fleet, "prefill" if drain.role == "decode" else "decode")
        spare: tuple[tuple[Half, Half, int], ...] = (
            ("decode", "prefill", 1),
            ("prefill", "decode", 2),
        )
        for half, other, least in spare if self._balance is not None else ():
            others = pool(other)
            if not pool(half) and len(others) >= least:
                load = min(others, key=lambda load: (load.num_decodes, load.prefill_seconds))
                view = self._views[load.name]
                view.role_reason = f"to {half}: nobody else was there"
                self._give(view, fleet, half)

    def _heir(self, view: WorkerView, index: BlockIndex) -> WorkerView | None:
        """Who can use the blocks: one of the same role if there is one, and of those the one with the fewest."""
        if view.facts is None or not view.facts.kv_addresses:
            return None
        kind = view.facts.kv_fingerprint
        heirs = [
            one
            for one in self._views.values()
            if one.state == "ready"
            and one.facts is not None
            and one.facts.kv_addresses
            and one.facts.kv_fingerprint == kind
        ]
        return min(
            heirs, key=lambda one: (one.role != view.role, index.num_held(one.name)), default=None
        )

    def _end(self, drain: _Drain, fleet: Fleet) -> None:
        view = drain.view
        if drain.role is None:
            view.state = "leaving"
            view.host.put(Stop())
            return
        del self._drains[view.name]
        self._give(view, fleet, drain.role)

    def _give(self, view: WorkerView, fleet: Fleet, role: Half) -> None:
        load = fleet.workers[view.name]
        load.role = role
        load.accepts = True
        view.state = "ready"
        view.take_role(role)
        LOG.info("%s is in the %s pool.", view.name, role)
        self._changed()


def _queue_seconds(load: WorkerLoad, view: WorkerView, usual_output: float) -> float:
    """Until a worker could begin with what came last: prompts to read, or answers for which it has no seat or blocks.

    An answer's seat is free after as many steps as it has tokens; all seats are in each step.
    """
    if load.role == "prefill":
        return load.prefill_seconds
    running, waiting = view.seats
    if not waiting:
        return 0.0
    step = load.times.seconds(
        StepWork.of_decodes(max(1, running), load.decode_tokens / max(1, load.num_decodes))
    )
    return waiting * usual_output * step / max(1, running)
