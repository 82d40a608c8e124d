"""The feed: watches the engine while it has readers, and makes a frame per tenant every 50 ms.

`view.py` decides the content of a frame, and `stream.py` sends it over HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from contextlib import suppress
from time import perf_counter
from typing import Any, Protocol

from twinphase.engine.frontends.async_engine import AsyncEngine
from twinphase.engine.process.host import Host
from twinphase.engine.process.messages import Accepted, EngineFacts, FromEngine, Moved
from twinphase.engine.process.status import WorkerStatus
from twinphase.errors import EngineDeadError, OverloadedError
from twinphase.explain.prompt_costs import part_at
from twinphase.outcome import PrefixMiss
from twinphase.phases.cost import CostModel
from twinphase.phases.record import RequestRecord
from twinphase.server.access import shutting_down
from twinphase.server.answers import Choice
from twinphase.server.config import ServerConfig
from twinphase.server.live import hello as greeting
from twinphase.server.live.eta import first_tokens
from twinphase.server.live.events import Clock, duration_ms
from twinphase.server.live.lanes import Changes, Fields, Lanes, private_miss
from twinphase.server.live.view import RING_SECONDS, Event, View
from twinphase.server.observe import Timelines, timings

FRAME_SECONDS = 0.05
# Writing to each page takes time, so with many pages there are fewer and larger frames.
FRAME_SECONDS_PER_PAGE = 0.025
TOTALS_SECONDS = 1.0
ETA_SECONDS = 0.5
COMMENT_SECONDS = 15.0
MAX_PAGES_PER_TENANT = 16
RETRY_AFTER_SECONDS = 5
COMMENT = b":\n\n"
LOG = logging.getLogger("twinphase.server")


class Source(Protocol):
    """The server's facts that the feed needs (`Service`)."""

    config: ServerConfig
    host: Host
    model_names: list[str]
    timelines: Timelines

    @property
    def engine(self) -> AsyncEngine | None: ...

    @property
    def facts(self) -> EngineFacts | None: ...

    def cost_model(self) -> CostModel | None: ...

    def workers(self) -> list[WorkerStatus]: ...


class Feed:
    """The feed with all its readers.

    Attributes:
        pages: present readers.
        views: one view per tenant, kept for some time after its last reader leaves.
    """

    def __init__(self, source: Source) -> None:
        self.pages: set[Page] = set()
        self.views: dict[str, View] = {}
        self.is_closed = False
        self._source = source
        self._clock = Clock(perf_counter())
        self._unix_ms = 1e3 * time.time()
        self._boot = secrets.token_hex(4)
        self._inbox: deque[
            tuple[float, FromEngine | EngineDeadError | Choice, RequestRecord | None]
        ] = deque()
        self._lanes: Lanes | None = None
        self._woken = asyncio.Event()
        self._is_awake = False
        self._is_dead = False
        self._reported = 0.0  # Time when `totals` were last sent.
        self._estimated = 0.0
        self._has_new_steps = False
        self._task: asyncio.Task[None] | None = None

    @property
    def is_watching(self) -> bool:
        return self._lanes is not None

    def open(self, tenant: str, last_event_id: str | None = None) -> Page:
        """Add a reader for a tenant that already has the events up to `last_event_id`.

        Raises:
            EngineUnavailableError: the server is shutting down.
            OverloadedError: the tenant has too many readers.
        """
        if self.is_closed:
            raise shutting_down()
        lanes = self._lanes or self._watch()
        view = self.views.get(tenant)
        if view is not None and view.num_pages >= MAX_PAGES_PER_TENANT:
            error = OverloadedError(
                f"{view.num_pages} pages read the engine's events already.",
                f"Close one, or try again in {RETRY_AFTER_SECONDS} s.",
            )
            error.retry_after = RETRY_AFTER_SECONDS
            raise error
        if view is None:
            view = self.views[tenant] = View(tenant, self._boot, lanes, self._others)
        page = Page(self, view, last_event_id)
        view.num_pages += 1
        self.pages.add(page)
        return page

    def leave(self, page: Page) -> None:
        """Remove a reader; its view is kept for a while."""
        if page in self.pages:
            self.pages.discard(page)
            page.view.num_pages -= 1
            page.view.left = perf_counter()

    def finished(self, choice: Choice) -> None:
        """Note that an answer was delivered, or that its client has left."""
        if self._lanes is not None:
            self._inbox.append((perf_counter(), choice, None))
            self._wake()

    def timings_of(self, choice: Choice) -> Fields:
        """The timings of a finished or running answer, without the names of its parts."""
        facts = self._source.facts
        found = choice.timings or timings(choice, facts.shape if facts else None)
        kinds = {part.name: part.kind for part, _, _ in choice.prompt.runs}
        parts = [{**part, "name": part["kind"]} for part in found.get("prompt_parts", ())]
        miss = dict(found.get("prefix_miss", {}))
        if "part" in miss:
            miss["part"] = kinds.get(miss["part"], "")
        named = {"prompt_parts": parts} if parts else {}
        return {**found, **named, **({"prefix_miss": miss} if miss else {})}

    def check(self, now: float) -> None:
        """Disconnect readers that do not read; called periodically."""
        for page in list(self.pages):
            since = page.sending_since
            if since is not None and now - since > self._source.config.slow_reader_timeout:
                page.abort()

    def close(self) -> None:
        """End all streams, because the server is ending."""
        self.is_closed = True
        for view in self.views.values():
            view.wake()

    def opening(self, view: View) -> bytes | None:
        """The first bytes for a reader; None while the model is loading."""
        facts = self._source.facts
        if facts is None or self._lanes is None:
            return None
        return view.opening(self._hello(facts, view), self._totals(self._lanes), perf_counter())

    def take(self, message: FromEngine | EngineDeadError) -> None:
        """Take a message from the engine, on any thread."""
        record: RequestRecord | None = None
        if isinstance(message, (Accepted, Moved)):
            # The engine is read here, because it may be gone when the next frame is made.
            engine = self._source.engine
            transcript = engine.transcript(message.request_id) if engine is not None else None
            record = transcript.record if transcript is not None else None
        self._inbox.append((perf_counter(), message, record))
        self._wake()

    def tick(self, now: float) -> None:
        """Make a frame for each view from the events since the last call."""
        lanes = self._lanes
        if lanes is None:
            return
        while self._inbox:
            moment, message, record = self._inbox.popleft()
            if isinstance(message, Choice):
                lanes.finish(message)
            elif isinstance(message, EngineDeadError):
                self._is_dead = True
                lanes.lose_all(moment)
            elif isinstance(message, EngineFacts) and self._is_dead:
                self._restart(lanes, message, moment)
            else:
                lanes.take(message, moment, record)
        if now - self._estimated >= ETA_SECONDS:
            self._estimated = now
            self._estimate(lanes, now)
        self._frame(lanes, lanes.take_changes(), now)

    def _frame(self, lanes: Lanes, changes: Changes, now: float) -> None:
        more: list[Event] = []
        self._has_new_steps = self._has_new_steps or bool(changes.steps)
        if self._has_new_steps and now - self._reported >= TOTALS_SECONDS:
            self._reported = now
            self._has_new_steps = False
            lanes.check(now)
            more.append(("totals", self._totals(lanes)))
        for view in self.views.values():
            view.add(changes, now, more=more)

    def _restart(self, lanes: Lanes, facts: EngineFacts, now: float) -> None:
        """Start again after a restart of the engine."""
        self._is_dead = False
        self._frame(lanes, lanes.take_changes(), now)
        self._boot = secrets.token_hex(4)
        for view in self.views.values():
            view.boot = self._boot
            greeted = {**self._hello(facts, view), "lanes": []}
            view.add(Changes(), now, first=[("hello", greeted)])

    def _watch(self) -> Lanes:
        engine = self._source.engine
        assert engine is not None, "the server has started"
        lanes = self._lanes = Lanes(self._clock, engine, self._private_miss, self.timings_of)
        self._inbox.clear()
        names = [worker.id for worker in self._source.host.workers()]
        lanes.begin(names, perf_counter())
        lanes.take_changes()
        self._loop = asyncio.get_running_loop()
        engine.watch(self.take)
        self._task = self._loop.create_task(self._run(engine))
        return lanes

    async def _run(self, engine: AsyncEngine) -> None:
        while self.views:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), TOTALS_SECONDS)
            self._woken.clear()
            self._is_awake = False
            await asyncio.sleep(max(FRAME_SECONDS, FRAME_SECONDS_PER_PAGE * len(self.pages)))
            now = perf_counter()
            try:
                self.tick(now)
            except Exception:
                LOG.exception("A frame of the engine's events failed")
            for tenant, view in list(self.views.items()):
                if not view.num_pages and now - view.left > RING_SECONDS:
                    del self.views[tenant]
        engine.watch(None)
        self._lanes = None

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self._loop.call_soon_threadsafe(self._woken.set)

    def _estimate(self, lanes: Lanes, now: float) -> None:
        costs = self._source.cost_model()
        if costs is None:
            return
        found = first_tokens(list(lanes.lanes.values()), costs, lanes.held_back, now)
        for lane, seconds in found:
            lanes.change(lane, {"eta_ms": duration_ms(seconds)})

    def _hello(self, facts: EngineFacts, view: View) -> Fields:
        assert self._lanes is not None, "somebody reads"
        source = self._source
        found = greeting.hello(
            facts,
            model=source.model_names[0],
            quantization=source.host.text.quantization,
            boot=self._boot,
            origin=self._unix_ms,
        )
        listed = greeting.workers(source.workers(), self._lanes, facts.config.num_kv_blocks)
        return {**found, "workers": listed, "tenant": view.tenant, "others": self._others}

    def _totals(self, lanes: Lanes) -> Fields:
        return greeting.totals(lanes, self._source.workers())

    @property
    def _others(self) -> str | None:
        config = self._source.config
        if not config.keys:
            return None
        return "sum" if config.page_others == "none" else "lanes"

    def _private_miss(self, request_id: str, miss: PrefixMiss) -> Fields:
        choice = self._source.timelines.running(request_id)
        part = part_at(choice.prompt.runs, miss.token_index) if choice is not None else None
        return private_miss(miss, part.kind if part is not None else "")


class Page:
    """One reader of the feed.

    Attributes:
        view: view with the frames of its tenant.
        sending_since: start of the pending write, seconds; None between writes.
        abort: function that cuts the connection.
    """

    def __init__(self, feed: Feed, view: View, last_event_id: str | None) -> None:
        self.view = view
        self.sending_since: float | None = None
        self.abort: Any = lambda: None
        self._feed = feed
        self._position: int | None = None
        boot, _, number = (last_event_id or "").partition("-")
        if number.isascii() and number.isdecimal() and view.reaches(boot, int(number)):
            self._position = int(number)

    async def next(self) -> bytes:
        """The next bytes to send; empty at the end of the stream."""
        feed = self._feed
        view = self.view
        while not feed.is_closed:
            if self._position is None:
                data = feed.opening(view)
                if data is not None:
                    self._position = view.last
                    return data
            elif not view.reaches(view.boot, self._position):
                self._position = None
                continue
            elif self._position < view.last:
                data = view.after(self._position, perf_counter())
                self._position = view.last
                return data
            if not await view.wait(1.0 if self._position is None else COMMENT_SECONDS):
                return COMMENT
        return b""
