"""Workers that leave while requests run: each takes nothing new, finishes, hands over its prefix cache, and ends."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from twinphase.cluster.block_index import BlockIndex
from twinphase.cluster.fleet import Fleet
from twinphase.cluster.worker_view import WorkerView
from twinphase.engine.messages import HandOver, Pushed, PushTo, Stop

__all__ = ["Leavers"]

LOG = logging.getLogger("twinphase.cluster")
LEASE_SECONDS = 10.0  # for the blocks of a whole prefix cache


class Leavers:
    """The workers that want to end; a worker's `state` says how far it has come."""

    def __init__(self, views: Mapping[str, WorkerView]) -> None:
        """`views` are a router's, which changes them."""
        self._views = views
        self._leaving: dict[str, WorkerView] = {}

    def __bool__(self) -> bool:
        return bool(self._leaving)

    def begin(self, view: WorkerView, fleet: Fleet | None) -> None:
        """It takes nothing new."""
        if fleet is None or not view.is_up:
            return
        view.state = "draining"
        fleet.workers[view.name].accepts = False
        self._leaving[view.name] = view
        LOG.info("%s is draining: it takes nothing new, and finishes %d requests.", view.name, len(view.requests))

    def go_on(self, busy: Collection[str], index: BlockIndex) -> None:
        """Those that have finished, and are not among the `busy` ones, hand over what they have cached."""
        for view in self._leaving.values():
            if view.state != "draining" or view.requests or view.name in busy:
                continue
            view.state = "handing over"
            heir = self._heir(view, index)
            if heir is None or heir.facts is None:
                self._end(view)
            else:
                LOG.info("%s hands over its prefix cache to %s.", view.name, heir.name)
                view.host.put(HandOver(PushTo(heir.facts.kv_addresses, LEASE_SECONDS)))

    def handed_over(self, view: WorkerView, told: Pushed) -> None:
        """Its blocks are where they should be, or no more will come."""
        problem = f": {told.problem}" if told.problem else ""
        LOG.info("%s has handed over %d of %d blocks%s.", view.name, told.num_stored, told.num_blocks, problem)
        self._end(view)

    def gone(self, view: WorkerView) -> bool:
        """Its connection has ended; whether that was to be, and costs nothing."""
        left = self._leaving.pop(view.name, None) is not None and not view.requests
        if left:
            LOG.info("%s has left.", view.name)
        return left

    def _heir(self, view: WorkerView, index: BlockIndex) -> WorkerView | None:
        """Who can use the blocks: one of the same role if there is one, and of those the one with the fewest."""
        if view.facts is None or not view.facts.kv_addresses:
            return None
        kind = view.facts.kv_fingerprint
        heirs = [one for one in self._views.values() if one.state == "ready" and one.facts is not None
                 and one.facts.kv_addresses and one.facts.kv_fingerprint == kind]  # fmt: skip
        return min(heirs, key=lambda one: (one.role != view.role, index.num_held(one.name)), default=None)

    @staticmethod
    def _end(view: WorkerView) -> None:
        view.state = "leaving"
        view.host.put(Stop())
