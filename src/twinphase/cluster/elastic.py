"""Workers that leave, or change pools, while requests run.

Such a worker gets no new requests, finishes its present ones, sends its prefix cache to another
worker, and then ends or changes its role. `Balance` decides which worker moves, and when.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from twinphase.batch import StepWork
from twinphase.cluster.fleet import Fleet
from twinphase.cluster.routing import WorkerLoad
from twinphase.cluster.worker_view import WorkerView
from twinphase.engine.process.messages import HandOver, Pushed, PushTo, Stop

LOG = logging.getLogger("twinphase.cluster")
HANDOVER_LEASE_SECONDS = 10.0
LONG_QUEUE_SECONDS = 2.0
MIN_LONG_TO_SHORT_QUEUE_RATIO = 4.0
PATIENCE_SECONDS = 10.0
CHECK_INTERVAL_SECONDS = 1.0

Half = Literal["prefill", "decode"]


class Balance:
    """Detects that one pool's queue has been long for some time while the other's was short.

    The timer restarts after each move, so that workers do not move back and forth.
    """

    def __init__(
        self, *, long_queue: float = LONG_QUEUE_SECONDS, patience: float = PATIENCE_SECONDS
    ) -> None:
        """Set the minimum length and the minimum duration of a long queue, both in seconds."""
        self._long_queue = long_queue
        self._patience = patience
        self._wanting: Half | None = None
        self._since = self._checked = 0.0

    def choose(
        self, loads: Collection[WorkerLoad], queues: Mapping[str, float], now: float
    ) -> tuple[WorkerLoad, Half, str] | None:
        """The worker to move, its new role, and why; None if none should move.

        Each pool keeps at least one worker.

        Args:
            loads: loads of all workers that are up.
            queues: seconds until a worker could begin with a new request, by the worker's name.
            now: seconds.
        """
        if now - self._checked < min(CHECK_INTERVAL_SECONDS, self._patience):
            return None
        self._checked = now
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
            or means[long] < MIN_LONG_TO_SHORT_QUEUE_RATIO * means[short]
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
    """A worker that gets no new requests; `role` is its next role, or None if it will end."""

    view: WorkerView
    role: Half | None
    hands_over: bool = False


class Drains:
    """The workers that will end or change their role; their `state` shows the progress."""

    def __init__(
        self,
        views: Mapping[str, WorkerView],
        fleet: Fleet,
        changed: Callable[[], None],
        balance: Balance | None = None,
    ) -> None:
        """`views` and `fleet` are the router's; `changed` is called when a role has changed."""
        self._views = views
        self._fleet = fleet
        self._changed = changed
        self._balance = balance
        self._drains: dict[str, _Drain] = {}

    def __bool__(self) -> bool:
        return bool(self._drains)

    def begin(self, view: WorkerView, role: Half | None = None) -> None:
        """Send a worker no more requests; it changes to `role`, or ends if None."""
        if not view.is_up:
            return
        view.state = f"moving to {role}" if role else "draining"
        self._fleet.workers[view.name].accepts = False
        self._drains[view.name] = _Drain(view, role)
        LOG.info(
            "%s is %s: it gets no new requests, and finishes %d.",
            view.name,
            view.state,
            view.num_requests,
        )

    def rebalance(self, now: float) -> None:
        """Move one worker to the other pool if the queues require it."""
        if self._balance is None or self._drains:
            return
        loads = [load for load in self._fleet.workers.values() if load.accepts]
        queues = {
            load.name: _queue_seconds(load, self._views[load.name], self._fleet.usual_output)
            for load in loads
        }
        move = self._balance.choose(loads, queues, now)
        if move is not None:
            load, role, why = move
            view = self._views[load.name]
            view.role_reason = f"to {role}: {why}"
            LOG.info("%s moves to the %s pool: %s.", view.name, role, why)
            self.begin(view, role)

    def advance(self, owing: Collection[str], expected: Collection[str]) -> None:
        """Have the workers without requests hand over their prefix cache.

        Two kinds of workers are skipped: those in `owing`, which still have a question to answer,
        and workers that will end but are in `expected`, since they will decode requests that are
        being prefilled. A worker that only changes its role still decodes such requests.
        """
        for drain in list(self._drains.values()):
            view = drain.view
            if drain.hands_over or view.num_requests or view.name in owing:
                continue
            if drain.role is None and view.name in expected:
                continue
            drain.hands_over = True
            view.state = view.state if drain.role else "handing over"
            heir = self._heir(view)
            if heir is not None and heir.facts is not None:
                LOG.info("%s hands over its prefix cache to %s.", view.name, heir.name)
                view.host.put(HandOver(PushTo(heir.facts.kv_addresses, HANDOVER_LEASE_SECONDS)))
            # A worker that stays sends its prefix cache while it serves new requests.
            if heir is None or drain.role is not None:
                self._end(drain)

    def handed_over(self, view: WorkerView, pushed: Pushed) -> None:
        problem = f": {pushed.problem}" if pushed.problem else ""
        LOG.info(
            "%s has handed over %d of %d blocks%s.",
            view.name,
            pushed.num_stored,
            pushed.num_blocks,
            problem,
        )
        drain = self._drains.get(view.name)
        # Otherwise the worker has changed its role in the meantime.
        if drain is not None and drain.hands_over:
            self._end(drain)

    def gone(self, view: WorkerView) -> bool:
        """Handle a closed connection; return True if it was planned and no request is affected."""
        drain = self._drains.pop(view.name, None)
        if drain is not None and drain.role is not None:
            view.role_reason = ""
        left = drain is not None and drain.role is None and not view.num_requests
        if left:
            LOG.info("%s has left.", view.name)
        return left

    def keep_pools(self) -> None:
        """A worker has died or joined: fill an empty pool from the other one.

        A worker that was about to move stays if its pool would be empty. With elastic roles, a
        prefill worker becomes a decode worker at once if there is none, and a decode worker becomes
        a prefill worker if there is none and another decode worker stays.
        """
        if not all(view.is_settled for view in self._views.values()):
            return

        def pool(half: str) -> list[WorkerLoad]:
            return [
                load
                for load in self._fleet.workers.values()
                if load.accepts and load.role in (half, "both")
            ]

        for name, drain in list(self._drains.items()):
            if drain.role is not None and not pool(drain.view.role):
                del self._drains[name]
                drain.view.role_reason = ""
                self._give(drain.view, "prefill" if drain.role == "decode" else "decode")
        spare: tuple[tuple[Half, Half, int], ...] = (
            ("decode", "prefill", 1),
            ("prefill", "decode", 2),
        )
        for half, other, least in spare if self._balance is not None else ():
            others = pool(other)
            if not pool(half) and len(others) >= least:
                load = min(others, key=lambda load: (load.num_decodes, load.prefill_seconds))
                view = self._views[load.name]
                view.role_reason = f"to {half}: the pool was empty"
                self._give(view, half)

    def _heir(self, view: WorkerView) -> WorkerView | None:
        """The worker that inherits the prefix cache: of the same role if any, with least blocks."""
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
            heirs,
            key=lambda one: (one.role != view.role, self._fleet.index.num_held(one.name)),
            default=None,
        )

    def _end(self, drain: _Drain) -> None:
        view = drain.view
        if drain.role is None:
            view.state = "leaving"
            view.host.put(Stop())
            return
        del self._drains[view.name]
        self._give(view, drain.role)

    def _give(self, view: WorkerView, role: Half) -> None:
        load = self._fleet.workers[view.name]
        load.role = role
        load.accepts = True
        view.state = "ready"
        view.take_role(role)
        LOG.info("%s is in the %s pool.", view.name, role)
        self._changed()


def _queue_seconds(load: WorkerLoad, view: WorkerView, usual_output: float) -> float:
    """Seconds until a worker could begin a new request.

    A seat becomes free after one step per token of its answer; every step computes all seats.
    """
    if load.role == "prefill":
        return load.prefill_seconds
    running, waiting = view.seats
    if not waiting:
        return 0.0
    step = load.times.seconds(
        StepWork.of_decodes(
            max(1, running), load.decode_tokens / max(1, load.num_decodes), load.times.window
        )
    )
    return waiting * usual_output * step / max(1, running)
