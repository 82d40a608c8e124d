"""One host for several engines: sends each request where it costs least, and goes on elsewhere when an engine dies.

The front end speaks to it as to any `Host`. What is where, and where the next one goes, `fleet.py`
knows; here are the messages. An answer is the same whichever engine computes it, so that a request
that lost its engine is sent on with the tokens it has, and its reader sees a pause and nothing
else. Not for how engines are started (`launch.py`, `pools.py`).
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
from twinphase.cluster.routing import Role, Routing
from twinphase.cluster.sent import Sent, chain_of
from twinphase.cluster.worker_view import WorkerView, as_one, can_answer, failure_of
from twinphase.engine.frontends.text import ModelText
from twinphase.engine.process.host import Died, LinkHost, Receive
from twinphase.engine.process.messages import (
    Accepted,
    Add,
    BlocksChanged,
    Embed,
    Embedded,
    End,
    EngineFacts,
    FromEngine,
    Leaving,
    Loading,
    LookAt,
    News,
    Pushed,
    Refused,
    Seen,
    StepNews,
    ToEngine,
)
from twinphase.engine.process.status import WorkerStatus
from twinphase.errors import EngineDeadError, InvalidRequestError, TwinphaseError
from twinphase.outcome import FinishReason

LOG = logging.getLogger("twinphase.cluster")
STALL_LOOKS = 1.0  # seconds between two looks at who makes no steps


class Router:
    """A `Host` of several others, which are its workers.

    Attributes:
        fleet: what was sent where.
        num_continued: requests so far that went on at another worker.
        last_death: of the worker that died last.
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
        """`hosts` by name, all of the same model, none of them started; there may be none where there is a `door`.

        One that has work and makes no step for `stall` seconds is ended, though it may answer
        pings. `closed` is called when all hosts are closed. Workers that come to the `door` are
        added. Roles change as `balance` says.
        """
        self._stall = stall
        self._looked = 0.0
        self._closed = closed
        self._door = door
        self.workers_by_name = {
            name: WorkerView(name, (roles or {}).get(name, "both"), host)
            for name, host in hosts.items()
        }
        first = next(iter(hosts.values())) if hosts or door is None else door.make("", "")
        self.text: ModelText = first.text
        self.embeds: bool = first.embeds
        self.last_death: EngineDeadError | None = None
        self.num_continued = 0
        self._routing = routing
        self.fleet: Fleet | None = None  # once the size of a block is known
        self._sent: dict[str, Sent] = {}
        self._drains = Drains(self.workers_by_name, self._tell_facts, balance)
        self._asked = Questions()
        self._facts: EngineFacts | None = None
        self._hashes: PrefixCache | None = None
        self._lock = threading.RLock()  # a host may bring its messages on a thread of its own
        self._closing = False

    @property
    def is_running(self) -> bool:
        """Whether a worker answers, and all others have come or failed."""
        views = self.workers_by_name.values()
        return can_answer(views) and all(view.is_settled for view in views)

    @property
    def num_restarts(self) -> int:
        return sum(view.host.num_restarts for view in self.workers_by_name.values())

    @property
    def failure(self) -> Refused | None:
        """Why no worker will ever answer, where none will."""
        return failure_of(self.workers_by_name.values(), more_may_come=self._door is not None)

    def start(self, receive: Receive, died: Died) -> None:
        self._receive = receive
        self._died = died
        for view in self.workers_by_name.values():
            self._start(view)
        if self._door is not None:
            self._door.open(self.workers_by_name, self._start)

    def _start(self, view: WorkerView) -> None:
        view.host.start(
            lambda message: self._take(view, message), lambda error: self._lose(view, error)
        )

    def put(self, message: ToEngine) -> None:
        with self._lock:
            if isinstance(message, Add):
                self._add(message)
            elif isinstance(message, End):
                self._end(message)
            elif isinstance(message, (LookAt, Embed)):
                self._ask(message)

    def kill(self) -> None:
        """Those that have work, and answer no more."""
        for view in self.workers_by_name.values():
            if view.is_up and view.requests:
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
            index = self.fleet.index if self.fleet else None
            views = self.workers_by_name.values()
            moving = Counter(sent.worker for sent in self._sent.values() if sent.then)
            return [
                view.status(index, perf_counter(), moving[view.name])
                for view in views
                if view.state != "gone"
            ]

    def _add(self, add: Add) -> None:
        if add.request_id in self._sent:
            raise InvalidRequestError(f"Request id {add.request_id!r} is in use.", "Use another.")
        sent = Sent.of(add)
        self._send(sent)
        self._sent[add.request_id] = sent

    def _send(self, sent: Sent) -> None:
        """Choose a worker and hand the request over, with the tokens that it has."""
        if self.fleet is None or self._facts is None:
            raise EngineDeadError(
                "The engine is being started.", "Send the request again in a moment."
            )
        add = sent.add
        done = sent.token_ids
        tokens = add.prompt_token_ids + done
        chain = chain_of(self._hashes, tokens, add.cache_salt)
        most = add.sampling_params.max_tokens
        decision = self.fleet.send(
            add.request_id, len(tokens), chain, num_done=len(done), most=most
        )
        view = self.workers_by_name[decision.worker]
        sent.worker = view.name
        sent.reason = decision.reason
        now = sent.route_until_now(decision.reason)
        sent.num_when_sent = len(done)
        try:
            message = sent.message(now)
            reader = self.workers_by_name.get(decision.prefill_worker or "")
            if (
                reader
                and (here := reader.facts)
                and (there := view.facts)
                and sent.goes_on(here, there)
            ):
                sent.worker = reader.name
                message = sent.first_token(message, view.name, there)
                view = reader
            self._hand(view, message)
        except TwinphaseError:
            self.fleet.end(add.request_id)
            raise

    def _hand(self, view: WorkerView, add: Add) -> None:
        if not view.requests:
            view.heard = perf_counter()  # it had nothing to tell of
        view.host.put(add)
        view.requests.add(add.request_id)

    def _end(self, message: End) -> None:
        sent = self._sent.get(message.request_id)
        if sent is not None:
            sent.ending = message.reason
            if not sent.accepted:  # a worker that compiles its grammar gives it up without a word
                self._drop(message.request_id)
                self.workers_by_name[sent.worker].requests.discard(message.request_id)
            if sent.waits:  # no worker has it
                self._continue(sent, sent.worker)
            else:
                self.workers_by_name[sent.worker].host.put(message)

    def _ask(self, message: LookAt | Embed) -> None:
        sent = self._sent.get(message.request_id) if isinstance(message, LookAt) else None
        views = self.workers_by_name
        self._asked.ask(message, views.values(), views[sent.worker] if sent else None)

    def _take(self, view: WorkerView, message: FromEngine) -> None:
        with self._lock:
            if isinstance(message, StepNews):
                self._news(view, message)
            elif isinstance(message, Leaving):
                self._drains.begin(view, self.fleet)
            elif isinstance(message, Pushed):
                view.pushed(message)
                if not message.request_id:
                    self._drains.handed_over(view, message, self.fleet)
                elif (sent := self._of(view, message.request_id)) is not None and sent.waits:
                    self._go_on(sent, f"{message.num_stored} of {message.num_blocks} blocks there")
            elif isinstance(message, BlocksChanged) and self.fleet is not None:
                view.tell_blocks(message, self.fleet.index)
            elif isinstance(message, EngineFacts):
                self._join(view, message)
            elif isinstance(message, Accepted):
                sent = self._of(view, message.request_id)
                if sent is not None and not sent.accepted:
                    sent.accepted = True
                    self._receive(message)
            elif isinstance(message, Refused):
                self._refused(view, message)
            elif isinstance(message, (Seen, Embedded)):
                self._answered(message)
            elif isinstance(message, Loading):
                if view.load(message.stage):
                    self._tell_facts()
                if not self.is_running:
                    self._receive(message)
            if self._drains and self.fleet is not None:
                self._drains.go_on(
                    self._asked.owing, {sent.then for sent in self._sent.values()}, self.fleet
                )

    def _join(self, view: WorkerView, facts: EngineFacts) -> None:
        view.join(facts)
        if self.fleet is None:
            self._hashes = PrefixCache(1, facts.config.block_size, facts.kv_fingerprint.encode())
            self.fleet = Fleet(self._routing or Routing(block_size=facts.config.block_size))
        self.fleet.join(view.name, view.role, WorkerView.shared_times([view]))
        view.learn(view.prices, self.workers_by_name.values(), self.fleet.workers)
        view.watch_blocks()
        self._tell_facts()
        self._drains.keep_pools(self.fleet)

    def _tell_facts(self) -> None:
        """Those that answer, together, as one engine: their seats are what is let in.

        Or why there will be none.
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

    def _of(self, view: WorkerView, request_id: str) -> Sent | None:
        """The request, if that worker has it."""
        sent = self._sent.get(request_id)
        return sent if sent is not None and sent.worker == view.name else None

    def _refused(self, view: WorkerView, message: Refused) -> None:
        if message.about is None:
            view.state = "failed"
            LOG.error("%s: %s", view.name, message.error())
            self._tell_facts()
        elif isinstance(message.about, int):
            self._asked.end(message.about)
            self._receive(message)
        elif self._of(view, message.about) is not None:
            view.requests.discard(message.about)
            self._drop(message.about)
            self._receive(message)

    def _answered(self, message: Seen | Embedded) -> None:
        question = self._asked.end(message.number)
        sent = self._sent.get(question.request_id) if isinstance(question, LookAt) else None
        if isinstance(message, Seen) and message.timeline is not None and sent is not None:
            message = replace(message, timeline=sent.whole(message.timeline))
        self._receive(message)

    def _news(self, view: WorkerView, message: StepNews) -> None:
        view.requests -= {news.request_id for news in message.news if news.finished is not None}
        passed = [
            self._passed_on(sent, news)
            for news in message.news
            if (sent := self._of(view, news.request_id)) is not None and self._is_right(sent, news)
        ]
        stats = message.stats
        view.heard = perf_counter()
        if (
            view.heard - self._looked > STALL_LOOKS
        ):  # while others work; where none does, the server notices
            self._looked = view.heard
            for one in self.workers_by_name.values():
                one.end_stalled(view.heard, self._stall)
        self._drains.look(self.fleet, view.heard)
        if stats is not None:
            view.step(stats)
            stats = WorkerView.together(stats, self.workers_by_name.values())
        if passed or stats is not None:
            self._receive(StepNews(passed, stats))

    def _passed_on(self, sent: Sent, news: News) -> News:
        assert self.fleet is not None, "a worker has joined"
        finished = (found := sent.take(news)).finished
        self.fleet.read(news.request_id, news.num_prefilled + len(sent.token_ids))
        if finished is not None:
            del self._sent[news.request_id]
            done = finished.reason in (FinishReason.STOP, FinishReason.LENGTH)
            self._forget(news.request_id, finished.counts.num_output_tokens if done else None)
            (views := self.workers_by_name)[sent.worker].learn(
                finished.prices, views.values(), self.fleet.workers
            )
        return found

    def _is_right(self, sent: Sent, news: News) -> bool:
        """Or a worker computed another first token than was told: its blocks are bad, or what was told is wrong."""
        digits = (
            self._facts is None or self._facts.config.backend != "torch"
        )  # whose last ones depend on the batch
        if (said := sent.is_doubted_by(news, digits=digits)) is None:
            return True
        name = news.request_id
        view = self.workers_by_name[sent.worker]
        what = f"{view.name} computed another first token than {said.worker}"
        if news.finished is None:
            view.host.put(End(name, FinishReason.ABORT))
        elif not sent.fresh:
            LOG.error("%s: it computes the prompt itself, without the blocks that came.", what)
            self.workers_by_name[said.worker].num_mismatches += 1
            self._hand(view, sent.anew(what))
        else:
            LOG.error("%s, by itself too: the answer ends.", what)
            self._drop(name)
            self._receive(
                Refused(
                    name,
                    "EngineUnavailableError",
                    f"{what}, which is told already.",
                    "Send it again.",
                )
            )
        return False

    def _go_on(self, sent: Sent, how: str) -> None:
        """Its prompt is read, and its first token there: the worker that has the blocks does the rest."""
        view = self.workers_by_name[sent.then]
        now = sent.moved(how)
        if not view.is_up:
            return self._continue(sent, view.name)
        sent.worker = view.name
        sent.num_when_sent = len(sent.token_ids)
        self._hand(view, sent.message(now))

    def _lose(self, view: WorkerView, error: EngineDeadError) -> None:
        """A worker has died: what it was computing goes on elsewhere, or fails where there is nobody else."""
        with self._lock:
            left = self._drains.gone(view)
            view.leave()
            if self._closing:
                return
            self.last_death = EngineDeadError(
                f"{view.name}: {'It has left.' if left else error.cause}", error.fix
            )
            if self.fleet is not None:
                self.fleet.leave(view.name)
            self._drains.keep_pools(self.fleet)
            lost = [sent for sent in self._sent.values() if sent.worker == view.name]
            if not can_answer(self.workers_by_name.values()):
                for name, sent in self._sent.items():
                    self._forget(name)
                    if (reader := self.workers_by_name[sent.worker]).is_up:
                        reader.host.put(End(name, FinishReason.ABORT))
                self._sent.clear()
                self._asked.clear()
                self._died(self.last_death)
                return
            self.last_death = EngineDeadError(
                self.last_death.cause, "" if left else "It is being started again."
            )
            if not left:
                LOG.warning("%s: what it had goes on elsewhere, %d requests.", view.name, len(lost))
            for sent in lost:
                self._continue(sent, view.name)
            for message in self._asked.of(view):
                self._ask(message)
            self._tell_facts()

    def _continue(self, sent: Sent, dead: str) -> None:
        name = sent.add.request_id
        sent.lost(dead)
        self._forget(name)
        if sent.ending is not None:  # nothing more is wanted of it
            del self._sent[name]
            self._receive(StepNews([sent.ended(sent.ending)]))
            return
        self.num_continued += 1
        try:
            sent.check_hope()
            self._send(sent)
        except TwinphaseError as error:
            del self._sent[name]
            self._receive(Refused(name, type(error).__name__, error.cause, error.fix))

    def _drop(self, request_id: str) -> None:
        del self._sent[request_id]
        self._forget(request_id)

    def _forget(self, request_id: str, num_outputs: int | None = None) -> None:
        assert self.fleet is not None, "a worker has joined"
        self.fleet.end(request_id, num_outputs)
