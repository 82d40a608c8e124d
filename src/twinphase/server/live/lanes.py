"""Converts the engine's messages to changes of lanes, the feed's record of requests and steps.

This record is the same for all readers; `view.py` decides what each tenant sees of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from twinphase.engine.frontends.outputs import Transcript
from twinphase.engine.process.messages import (
    Accepted,
    BlocksHeld,
    FromEngine,
    Moved,
    Refused,
    RequestUpdate,
    StepStats,
    StepUpdates,
    StepView,
)
from twinphase.outcome import PrefixMiss
from twinphase.phases.record import RequestRecord
from twinphase.server.answers import Choice
from twinphase.server.live.events import Clock

Fields = dict[str, Any]
MAX_ENDED_LANES = 1024


class Requests(Protocol):
    """Looks up requests for the feed (`AsyncEngine`)."""

    @property
    def unfinished(self) -> list[str]: ...

    def transcript(self, request_id: str) -> Transcript | None: ...


@dataclass
class Lane:
    """One request in the feed.

    Attributes:
        fields: all known fields (docs/feed.md).
        state: state of the request (docs/feed.md).
        done: prompt tokens in the KV cache; `output` is the number of output tokens.
        started: time of admission, seconds; None while it is queued.
        choice: answer, once it was delivered or its client has left.
        is_missed: whether a check found it missing among the unfinished requests.
        numbers: lane number by the tenant of the readers.
    """

    request_id: str
    tenant: str
    prompt: int
    fields: Fields
    state: str = "queued"
    done: int = 0
    cached: int = 0
    output: int = 0
    started: float | None = None
    choice: Choice | None = None
    is_missed: bool = False
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def is_prefilling(self) -> bool:
        return self.state == "running" and self.done < self.prompt


@dataclass
class Blocks:
    """The KV cache of one worker.

    Attributes:
        lanes: block ids by request.
        cached: blocks without a holder whose content is cached.
        numbers: numbers of held, shared, cached and free blocks.
    """

    lanes: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[int, None] = field(default_factory=dict)
    numbers: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def size(self) -> int:
        held, _, cached, free = self.numbers
        return held + cached + free

    def take(self, message: BlocksHeld) -> None:
        if message.whole:
            self.lanes.clear()
            self.cached.clear()
        for name, kept, block_ids in message.lanes:
            held = self.lanes.setdefault(name, [])
            held[kept:] = block_ids
            if not held:
                del self.lanes[name]
            for block_id in block_ids:
                self.cached.pop(block_id, None)
        self.cached.update(dict.fromkeys(message.cached))
        for block_id in message.freed:
            self.cached.pop(block_id, None)
        self.numbers = (
            message.num_held,
            message.num_shared,
            message.num_cached,
            message.num_free,
        )


@dataclass
class BlockChanges:
    """Changes of one worker's blocks since the last frame.

    Attributes:
        lanes: in order: a request, the number of its blocks that stay, and its new blocks.
        alone: blocks without a holder, and whether their content is cached.
        whole: whether this replaces all earlier changes.
    """

    lanes: list[tuple[str, int, list[int]]] = field(default_factory=list)
    alone: dict[int, bool] = field(default_factory=dict)
    whole: bool = False

    def take(self, message: BlocksHeld) -> None:
        if message.whole:
            self.lanes.clear()
            self.alone.clear()
            self.whole = True
        self.lanes += message.lanes
        self.alone |= dict.fromkeys(message.cached, True) | dict.fromkeys(message.freed, False)


@dataclass
class Changes:
    """The changes since the last frame.

    Attributes:
        before, after: changes of lanes to report before the steps, and after them.
        steps, blocks: steps and changes of blocks, by the worker's number.
        pace: time and maximum gap between tokens, in seconds, if the gap has changed.
    """

    before: list[tuple[Lane, Fields]] = field(default_factory=list)
    after: list[tuple[Lane, Fields]] = field(default_factory=list)
    steps: defaultdict[int, list[tuple[StepStats, StepView]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    blocks: defaultdict[int, BlockChanges] = field(
        default_factory=lambda: defaultdict(BlockChanges)
    )
    pace: tuple[float, float] | None = None


class Lanes:
    """The present requests and blocks, and their changes since the last frame.

    Attributes:
        lanes: unfinished requests by id.
        blocks: blocks by the worker's number.
        changes: changes since the last `take_changes`.
        workers: numbers of the workers by name.
        stats: statistics of the last step; `held_back` as in its `StepView`.
        misses, drafts: totals since the feed began.
    """

    def __init__(
        self,
        clock: Clock,
        requests: Requests,
        part_of: Callable[[str, PrefixMiss], Fields],
        timings: Callable[[Choice], Fields],
    ) -> None:
        """Begin without requests.

        Args:
            clock: the feed's clock.
            requests: the front end's requests.
            part_of: returns the fields of a prefix miss that only its own tenant may see.
            timings: returns the timings of an answer.
        """
        self.lanes: dict[str, Lane] = {}
        self.blocks: defaultdict[int, Blocks] = defaultdict(Blocks)
        self.changes = Changes()
        self.workers: dict[str, int] = {}
        self.stats: StepStats | None = None
        self.misses: Counter[str] = Counter()
        self.drafts: Counter[str] = Counter()
        self.held_back = ""
        self.clock = clock
        self._requests = requests
        self._part_of = part_of
        self._timings = timings
        # Lanes that wait for their answer's `timings`, with the last update of each.
        self._ended_lanes: OrderedDict[str, tuple[Lane, RequestUpdate]] = OrderedDict()
        self._slo: float | None = None

    def begin(self, names: list[str], moment: float) -> None:
        """Add the workers, in order, and the requests that exist already."""
        for name in names:
            self.worker(name)
        for request_id in self._requests.unfinished:
            transcript = self._requests.transcript(request_id)
            if transcript is None:
                continue
            lane = self._queued(transcript.record, moment)
            if transcript.num_prefilled or transcript.token_ids:
                lane.done = transcript.num_prefilled
                lane.output = len(transcript.token_ids)
                self._run(lane, moment, transcript.counts.num_cached_tokens)

    def worker(self, name: str) -> int:
        """The number of a worker; a lone engine's name is empty."""
        return self.workers.setdefault(name, len(self.workers)) if name else 0

    def take_changes(self) -> Changes:
        changes = self.changes
        self.changes = Changes()
        return changes

    def take(self, message: FromEngine, moment: float, record: RequestRecord | None) -> None:
        """Take a message received at `moment`, seconds, and its request's record, if any."""
        if isinstance(message, StepUpdates):
            self._step(message, moment)
        elif isinstance(message, BlocksHeld):
            number = self.worker(message.worker)
            self.blocks[number].take(message)
            self.changes.blocks[number].take(message)
        elif isinstance(message, Accepted):
            if message.request_id not in self.lanes and record is not None:
                self._queued(record, moment)
        elif isinstance(message, Moved):
            self._moved(message, record)
        elif isinstance(message, Refused) and message.about in self.lanes:
            self._end(self.lanes[str(message.about)], moment, "error")

    def finish(self, choice: Choice) -> None:
        """Note that an answer was delivered, or that its client has left."""
        request_id = choice.record.request_id
        if (ended := self._ended_lanes.pop(request_id, None)) is not None:
            self._time(*ended, choice)
        elif request_id in self.lanes:
            self.lanes[request_id].choice = choice

    def lose_all(self, moment: float) -> None:
        """End all lanes, because the engine has died with its requests."""
        for lane in list(self.lanes.values()):
            self._end(lane, moment, None)
        self.blocks.clear()

    def check(self, moment: float) -> None:
        """End lanes whose requests are gone without an update, as when a client leaves a router."""
        unfinished = set(self._requests.unfinished)
        for lane in list(self.lanes.values()):
            if lane.is_missed:
                self._end(lane, moment, "abort")
            lane.is_missed = lane.request_id not in unfinished

    def change(self, lane: Lane, fields: Fields, *, after: bool = False) -> None:
        lane.fields |= fields
        (self.changes.after if after else self.changes.before).append((lane, fields))

    def _queued(self, record: RequestRecord, moment: float) -> Lane:
        request_id = record.request_id
        lane = Lane(request_id, record.tenant, record.counts.num_prompt_tokens, {})
        self.lanes[request_id] = lane
        fields = {
            "at": self.clock.ms(min(moment, max(record.arrival, record.timeline.end))),
            "prompt": lane.prompt,
            "id": request_id,
            "arrival": self.clock.ms(record.arrival),
            "state": "queued",
        }
        if not self.workers or len(self.workers) == 1:
            fields["worker"] = 0
        self.change(lane, fields)
        return lane

    def _moved(self, message: Moved, record: RequestRecord | None) -> None:
        lane = self.lanes.get(message.request_id)
        if lane is None and record is not None:
            lane = self._queued(record, message.moment)
        if lane is None:
            return
        number = self.worker(message.worker)
        at = self.clock.ms(message.moment)
        if message.is_transfer:
            lane.state = "transfer"
            travel = {"to": number, "start": at}
            self.change(lane, {"at": at, "state": "transfer", "transfer": travel})
            return
        fields: Fields = {"worker": number, "route": message.reason}
        if lane.state != "queued":
            lane.state = "queued"
            lane.started = None
            fields |= {"at": at, "state": "queued"}
        if message.blocks is not None and lane.fields.get("transfer"):
            stored, blocks = message.blocks
            end = {"end": at, "stored": stored, "blocks": blocks}
            fields["transfer"] = lane.fields["transfer"] | end
        self.change(lane, fields)

    def _run(self, lane: Lane, moment: float, cached: int, why: str = "") -> None:
        lane.state = "running"
        lane.started = moment
        lane.cached = cached
        fields: Fields = {"at": self.clock.ms(moment), "state": "running", "cached": cached}
        self.change(lane, fields | ({"why": why} if why else {}))

    def _step(self, message: StepUpdates, moment: float) -> None:
        stats = message.stats
        view = message.view
        if stats is not None:
            self._count(stats)
        if stats is not None and view is not None:
            self.held_back = view.held_back
            self.changes.steps[self.worker(view.worker)].append((stats, view))
            self._let_in(message.updates, stats, view)
        for update in message.updates:
            lane = self.lanes.get(update.request_id)
            if lane is None:
                continue
            lane.done = max(lane.done, update.num_prefilled)
            lane.output += len(update.token_ids)
            if update.num_cached > lane.cached:
                lane.cached = update.num_cached
                self.change(lane, {"cached": lane.cached})
            if update.ended is not None:
                self._ended(lane, update, update.ended)

    def _let_in(self, updates: list[RequestUpdate], stats: StepStats, view: StepView) -> None:
        for name in view.preempted:
            if (lane := self.lanes.get(name)) is not None:
                lane.state = "preempted"
                lane.started = None
                self.change(lane, {"at": self.clock.ms(stats.start), "state": "preempted"})
        cached = {update.request_id: update.num_cached for update in updates}
        for name, why in view.started.items():
            lane = self.lanes.get(name)
            if lane is None:
                continue
            self._run(lane, stats.start, cached.get(name, lane.cached), why)
            if (miss := view.misses.get(name)) is not None:
                fields = {"reason": miss.reason.value, **self._part_of(name, miss)}
                self.change(lane, {"miss": fields})

    def _count(self, stats: StepStats) -> None:
        self.stats = stats
        self.drafts["drafts"] += stats.num_drafts
        self.drafts["draft_tokens"] += stats.num_draft_tokens
        self.drafts["accepted_tokens"] += sum(stats.accepted)
        if stats.itl_slo_seconds != self._slo:
            if self._slo is not None:
                self.changes.pace = (stats.start, stats.itl_slo_seconds or 0.0)
            self._slo = stats.itl_slo_seconds

    def _ended(self, lane: Lane, update: RequestUpdate, record: RequestRecord) -> None:
        if (miss := record.counts.prefix_miss) is not None:
            self.misses[miss.reason.value] += 1
        reason = record.finish_reason
        self._end(lane, record.timeline.end, reason.value if reason is not None else None)
        if lane.choice is not None:
            self._time(lane, update, lane.choice)
            return
        self._ended_lanes[lane.request_id] = lane, update
        if len(self._ended_lanes) > MAX_ENDED_LANES:
            self._ended_lanes.popitem(last=False)

    def _time(self, lane: Lane, update: RequestUpdate, choice: Choice) -> None:
        """Report the timings of an ended lane."""
        # The client had left, and its answer did not get the last update.
        if not choice.record.has_ended:
            choice.stream.transcript.take(update)
        self.change(lane, {"timings": self._timings(choice)}, after=True)

    def _end(self, lane: Lane, moment: float, finish: str | None) -> None:
        lane.state = "ended"
        del self.lanes[lane.request_id]
        fields = {"at": self.clock.ms(moment), "state": "ended", "finish": finish}
        self.change(lane, fields, after=True)


def private_miss(miss: PrefixMiss, part: str) -> Fields:
    """The fields of a prefix miss that only its own tenant may see, unlike the reason."""
    fields: Fields = {"token_index": miss.token_index}
    fields |= {"part": part} if part else {}
    return fields | ({"num_known": miss.num_known} if miss.num_known else {})
