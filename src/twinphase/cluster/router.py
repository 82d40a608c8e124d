"""One host for several engines: routes requests, and continues the requests of dead engines.

The front end uses it like any other `Host`. This file handles the messages; `fleet.py` counts the
loads, and `routing.py` chooses. Every engine computes the same answer, so a request that lost its
engine is sent to another one with its tokens so far, and the client only sees a pause. `launch.py`
and `pools.py` start engines.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from time import perf_counter

from msgspec.structs import replace

from twinphase.cache.prefix_cache import PrefixCache
from twinphase.cluster.elastic import Balance, Drains
from twinphase.cluster.fleet import Fleet
from twinphase.cluster.joining import Door
from twinphase.cluster.questions import Questions
from twinphase.cluster.role import Role
from twinphase.cluster.routed_request import RequestTable, RoutedRequest, chain_of
from twinphase.cluster.routing import Routing
from twinphase.cluster.worker_view import WorkerView, as_one, can_answer, failure_of
from twinphase.engine.frontends.text import ModelText
from twinphase.engine.process.host import Died, LinkHost, Receive
from twinphase.engine.process.messages import (
    Accepted,
    Add,
    BlocksChanged,
    BlocksHeld,
    Embed,
    Embedded,
    End,
    EngineFacts,
    FromEngine,
    Inspect,
    Inspected,
    Leaving,
    Loading,
    Pushed,
    Refused,
    RequestUpdate,
    StepUpdates,
    ToEngine,
    WatchSteps,
)
from twinphase.engine.process.status import WorkerStatus
from twinphase.errors import EngineDeadError, InvalidRequestError, TwinphaseError
from twinphase.outcome import FinishReason

LOG = logging.getLogger("twinphase.cluster")
STALL_CHECK_SECONDS = 1.0


class Router:
    """A `Host` that consists of several others, its workers.

    Attributes:
        requests: the unfinished requests.
        fleet: the workers' loads.
        num_continued: requests so far that another worker continued.
        last_death: cause of the most recent death of a worker.
    """

    totals_last = True

    def __init__(
        self,
        hosts: Mapping[str, LinkHost],
        *,
        roles: Mapping[str, Role] | None = None,
        routing: Routing | None = None,
        stall: float = 60.0,
        door: Door | None = None,
        balance: Balance | None = None,
        closed: Callable[[], object] = lambda: None,
    ) -> None:
        """Route to `hosts`, which have the same model and are not started yet.

        Args:
            hosts: hosts by name; may be empty if there is a `door`.
            roles: roles by the host's name; the default is "both".
            routing: the default policy if None.
            stall: seconds without a step after which a worker with requests is killed, even if it
                answers pings.
            door: adds workers that ask to join.
            balance: changes the roles of workers.
            closed: called when all hosts are closed.
        """
        self._stall = stall
        self._stall_checked = 0.0
        self._closed = closed
        self._door = door
        self.requests = RequestTable()
        self.workers_by_name: dict[str, WorkerView] = {}
        for name, host in hosts.items():
            self._new_view(name, host, (roles or {}).get(name, "both"))
        first = next(iter(hosts.values())) if hosts or door is None else door.make("", "")
        self.text: ModelText = first.text
        self.task: str = first.task
        self.last_death: EngineDeadError | None = None
        self.num_continued = 0
        self.fleet = Fleet(routing or Routing())
        self._drains = Drains(self.workers_by_name, self.fleet, self._report_facts, balance)
        self._questions = Questions()
        self._facts: EngineFacts | None = None
        self._hashes: PrefixCache | None = None
        self._lock = threading.RLock()  # A host may deliver its messages on its own thread.
        self._closing = False
        self._is_watched = False

    @property
    def is_running(self) -> bool:
        """Whether a worker can decode and all others have joined or failed."""
        views = self.workers_by_name.values()
        return can_answer(views) and all(view.is_settled for view in views)

    @property
    def num_restarts(self) -> int:
        return sum(view.num_restarts for view in self.workers_by_name.values())

    @property
    def failure(self) -> Refused | None:
        return failure_of(self.workers_by_name.values(), more_may_come=self._door is not None)

    def start(self, receive: Receive, died: Died) -> None:
        self._receive = receive
        self._died = died
        for view in self.workers_by_name.values():
            self._start(view)
        if self._door is not None:
            self._door.open(self.workers_by_name, self._add_worker)

    def put(self, message: ToEngine) -> None:
        with self._lock:
            if isinstance(message, Add):
                self._add(message)
            elif isinstance(message, End):
                self._end(message)
            elif isinstance(message, (Inspect, Embed)):
                self._ask(message)
            elif isinstance(message, WatchSteps) and message.on != self._is_watched:
                self._is_watched = message.on
                for view in self.workers_by_name.values():
                    view.watch_steps(on=message.on)

    def kill(self) -> None:
        """End the workers that have requests."""
        for view in self.workers_by_name.values():
            if view.is_up and view.num_requests:
                view.host.kill()

    def close(self) -> None:
        self._closing = True
        if self._door is not None:
            self._door.close()
        for view in list(self.workers_by_name.values()):
            view.host.close()
        self._closed()

    def workers(self) -> list[WorkerStatus]:
        with self._lock:
            views = self.workers_by_name.values()
            transfers = Counter(one.worker for one in self.requests.values() if one.decode_worker)
            return [
                view.status(self.fleet.index, perf_counter(), transfers[view.name])
                for view in views
                if view.state != "gone"
            ]

    def _new_view(self, name: str, host: LinkHost, role: Role) -> WorkerView:
        view = self.workers_by_name[name] = WorkerView(name, role, host, self.requests)
        return view

    def _add_worker(self, name: str, host: LinkHost) -> None:
        view = self._new_view(name, host, "both")
        view.is_absent = True  # The server does not wait for this worker.
        self._start(view)

    def _start(self, view: WorkerView) -> None:
        view.host.start(
            lambda message: self._take(view, message), lambda error: self._lose(view, error)
        )

    def _add(self, add: Add) -> None:
        if add.request_id in self.requests:
            raise InvalidRequestError(f"Request id {add.request_id!r} is in use.", "Use another.")
        request = RoutedRequest.of(add)
        self._send(request)
        self.requests[add.request_id] = request

    def _send(self, request: RoutedRequest) -> None:
        """Send a request to the cheapest worker, with the tokens of its answer so far."""
        if self._facts is None:
            raise EngineDeadError(
                "The engine is being started.", "Send the request again in a moment."
            )
        add = request.add
        done = request.token_ids
        tokens = add.prompt_token_ids + done
        request.placement = self.fleet.place(
            len(tokens),
            chain_of(self._hashes, tokens, add.record.cache_salt),
            num_done=len(done),
            max_tokens=add.sampling_params.max_tokens,
        )
        decision = request.placement.decision
        request.num_tokens_when_sent = len(done)
        message = request.message(request.mark_until_now(decision.reason))
        view = self.workers_by_name[decision.worker]
        prefiller = self.workers_by_name.get(decision.prefill_worker or "")
        if (
            prefiller is not None
            and prefiller.facts is not None
            and view.facts is not None
            and request.can_split(prefiller.facts, view.facts)
        ):
            message = request.split(message, view.name, view.facts)
            view = prefiller
        try:
            self._hand(view, request, message)
        except TwinphaseError:
            self._take_off(request)
            raise

    def _hand(
        self,
        view: WorkerView,
        request: RoutedRequest,
        message: Add,
        blocks: tuple[int, int] | None = None,
    ) -> None:
        if not view.num_requests:
            view.last_step = perf_counter()
        request.worker = view.name
        view.host.put(message)
        if self._is_watched:
            self._receive(request.moved(blocks))

    def _end(self, message: End) -> None:
        request = self.requests.get(message.request_id)
        if request is None:
            return
        request.end_reason = message.reason
        if not request.is_accepted:
            # A worker that is compiling the grammar drops the request without a reply.
            self._drop(request)
        if request.is_transferring:
            self._continue(request, request.worker)
        else:
            self.workers_by_name[request.worker].host.put(message)

    def _ask(self, message: Inspect | Embed) -> None:
        request = self.requests.get(message.request_id) if isinstance(message, Inspect) else None
        views = self.workers_by_name
        self._questions.ask(message, views.values(), views[request.worker] if request else None)

    def _take(self, view: WorkerView, message: FromEngine) -> None:
        with self._lock:
            if isinstance(message, StepUpdates):
                self._update(view, message)
            elif isinstance(message, Leaving):
                self._drains.begin(view)
            elif isinstance(message, Pushed):
                self._pushed(view, message)
            elif isinstance(message, BlocksChanged):
                view.update_index(message, self.fleet.index)
            elif isinstance(message, BlocksHeld):
                self._receive(replace(message, worker=view.name))
            elif isinstance(message, EngineFacts):
                self._join(view, message)
            elif isinstance(message, Accepted):
                request = self._request_at(view, message.request_id)
                if request is not None and not request.is_accepted:
                    request.is_accepted = True
                    self._receive(message)
            elif isinstance(message, Refused):
                self._refused(view, message)
            elif isinstance(message, (Inspected, Embedded)):
                self._answered(message)
            elif isinstance(message, Loading):
                if view.load(message.stage):
                    self._report_facts()
                if not self.is_running:
                    self._receive(message)
            if self._drains:
                expected = {request.decode_worker for request in self.requests.values()}
                self._drains.advance(self._questions.owing, expected)

    def _pushed(self, view: WorkerView, message: Pushed) -> None:
        view.pushed(message)
        if not message.request_id:
            self._drains.handed_over(view, message)
            return
        request = self._request_at(view, message.request_id)
        if request is not None and request.is_transferring:
            self._decode(request, message)

    def _join(self, view: WorkerView, facts: EngineFacts) -> None:
        view.join(facts)
        if self._hashes is None:
            size = self.fleet.routing.block_size = facts.config.block_size
            self._hashes = PrefixCache(1, size, facts.kv_fingerprint.encode())
        self.fleet.join(view.name, view.role, WorkerView.shared_times([view]))
        view.learn(view.prices, self.workers_by_name.values(), self.fleet.workers)
        view.watch_blocks()
        if self._is_watched:
            view.watch_steps(on=True)
        self._report_facts()
        self._drains.keep_pools()

    def _report_facts(self) -> None:
        """Report the decode workers as one engine, or why there will be none.

        Admission counts only the seats of decode workers.
        """
        if (failure := self.failure) is not None:
            self._receive(failure)
        views = self.workers_by_name.values()
        up = [
            view.facts
            for view in views
            if view.facts is not None and view.is_up and view.role != "prefill"
        ]
        if not up or not self.is_running:
            return
        self._facts = as_one(up)
        self._receive(self._facts)

    def _request_at(self, view: WorkerView, request_id: str) -> RoutedRequest | None:
        """The request, if this worker has it."""
        request = self.requests.get(request_id)
        return request if request is not None and request.worker == view.name else None

    def _refused(self, view: WorkerView, message: Refused) -> None:
        if message.about is None:
            view.state = "failed"
            LOG.error("%s: %s", view.name, message.error())
            self._report_facts()
        elif isinstance(message.about, int):
            self._questions.end(message.about)
            self._receive(message)
        elif (request := self._request_at(view, message.about)) is not None:
            self._drop(request)
            self._receive(message)

    def _answered(self, message: Inspected | Embedded) -> None:
        question = self._questions.end(message.number)
        if isinstance(message, Inspected) and isinstance(question, Inspect):
            request = self.requests.get(question.request_id)
            if message.record is not None and request is not None:
                message.record.timeline = request.whole_timeline(message.record.timeline)
        self._receive(message)

    def _update(self, view: WorkerView, message: StepUpdates) -> None:
        updates = []
        for update in message.updates:
            request = self._request_at(view, update.request_id)
            if request is not None and self._check_first_token(view, request, update):
                updates.append(self._passed_on(view, request, update))
        view.last_step = now = perf_counter()
        if now - self._stall_checked > STALL_CHECK_SECONDS:
            self._stall_checked = now
            for one in self.workers_by_name.values():
                one.end_stalled(now, self._stall)
        self._drains.rebalance(now)
        stats = message.stats
        if stats is not None:
            view.step(stats)
            stats = WorkerView.together(
                stats, self.workers_by_name.values(), self.requests.num_per_worker()
            )
        if updates or stats is not None:
            seen = message.view and replace(message.view, worker=view.name)
            self._receive(StepUpdates(updates, stats, seen))

    def _passed_on(
        self, view: WorkerView, request: RoutedRequest, update: RequestUpdate
    ) -> RequestUpdate:
        assert request.placement is not None, "the request was sent"
        # `take` replaces the number by the maximum over all workers that had the request.
        num_prefilled = update.num_prefilled
        was_transferring = request.is_transferring
        update = request.take(update)
        if self._is_watched and request.is_transferring and not was_transferring:
            self._receive(request.transfer_began())
        self.fleet.prefilled(request.placement, num_prefilled + len(request.token_ids))
        if (ended := update.ended) is not None:
            complete = ended.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            self._drop(request, ended.counts.num_output_tokens if complete else None)
            view.learn(ended.prices, self.workers_by_name.values(), self.fleet.workers)
        return update

    def _check_first_token(
        self, view: WorkerView, request: RoutedRequest, update: RequestUpdate
    ) -> bool:
        """Whether to pass an update on; after a mismatch, have the decode worker compute it again.

        If the decode worker's first token differs from the client's, either the received blocks or
        the client's token are wrong.
        """
        expected = request.first_token
        # The last digits of torch's log probabilities depend on the batch.
        compare = self._facts is None or self._facts.config.backend != "torch"
        if request.check_first_token(update, compare_logprobs=compare) or expected is None:
            return True
        name = update.request_id
        what = f"{view.name} computed another first token than {expected.worker}"
        if update.ended is None:
            view.host.put(End(name, FinishReason.ABORT))
        elif not request.recompute:
            LOG.error("%s: it computes the prompt itself, without the received blocks.", what)
            self.workers_by_name[expected.worker].num_mismatches += 1
            self._hand(view, request, request.recompute_message(what))
        else:
            LOG.error("%s, even by itself: the answer ends.", what)
            self._drop(request)
            cause = f"{what}, which the client has already."
            self._receive(Refused(name, "EngineUnavailableError", cause, "Send it again."))
        return False

    def _decode(self, request: RoutedRequest, pushed: Pushed) -> None:
        """Have the decode worker continue after the first token, since the transfer is over."""
        view = self.workers_by_name[request.decode_worker]
        blocks = (pushed.num_stored, pushed.num_blocks)
        now = request.end_transfer(f"{blocks[0]} of {blocks[1]} blocks there")
        if not view.is_up:
            self._continue(request, view.name)
            return
        request.num_tokens_when_sent = len(request.token_ids)
        self._hand(view, request, request.message(now), blocks)

    def _lose(self, view: WorkerView, error: EngineDeadError) -> None:
        """A worker died: continue its requests on other workers, or fail them if there are none."""
        with self._lock:
            lost = [one for one in self.requests.values() if one.worker == view.name]
            left = self._drains.gone(view)
            view.num_departures += left
            view.leave()
            if self._closing:
                return
            self.last_death = EngineDeadError(
                f"{view.name}: {'It has left.' if left else error.cause}", error.fix
            )
            self.fleet.leave(view.name)
            self._drains.keep_pools()
            if not can_answer(self.workers_by_name.values()):
                self._fail_all()
                return
            self.last_death = EngineDeadError(
                self.last_death.cause, "" if left else "It is being started again."
            )
            if not left:
                LOG.warning("%s: other workers continue its %d requests.", view.name, len(lost))
            for request in lost:
                self._continue(request, view.name)
            for message in self._questions.of(view):
                self._ask(message)
            self._report_facts()

    def _fail_all(self) -> None:
        for request in list(self.requests.values()):
            self._drop(request)
            if (view := self.workers_by_name[request.worker]).is_up:
                view.host.put(End(request.record.request_id, FinishReason.ABORT))
        self._questions.clear()
        assert self.last_death is not None, "a worker has died"
        self._died(self.last_death)

    def _continue(self, request: RoutedRequest, dead: str) -> None:
        """Send a request that lost its worker to another one, unless the front end has ended it."""
        name = request.record.request_id
        request.lose_worker(dead)
        self._take_off(request)
        if request.end_reason is not None:
            del self.requests[name]
            self._receive(StepUpdates([request.end(request.end_reason)]))
            return
        self.num_continued += 1
        try:
            request.check_retry_limit()
            self._send(request)
        except TwinphaseError as error:
            del self.requests[name]
            self._receive(Refused(name, type(error).__name__, error.cause, error.fix))

    def _drop(self, request: RoutedRequest, num_outputs: int | None = None) -> None:
        del self.requests[request.record.request_id]
        self._take_off(request, num_outputs)

    def _take_off(self, request: RoutedRequest, num_outputs: int | None = None) -> None:
        """Remove a request from the loads of its workers."""
        if request.placement is not None:
            self.fleet.end(request.placement, num_outputs)
