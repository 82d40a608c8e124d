"""Frames of events for the readers of one tenant; all of them share the bytes.

Other tenants' requests are shown as unnamed lanes or as one sum. `lanes.py` records the events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from twinphase.engine.process.messages import StepStats, StepView
from twinphase.server.live.events import Clock, duration_ms, event_bytes, ranges
from twinphase.server.live.lanes import Blocks, Changes, Fields, Lane, Lanes

# Events are kept this long for readers that reconnect.
RING_SECONDS = 30.0
MAX_RING_BYTES = 8 << 20
# A reader with more unsent bytes than this does not get steps.
MAX_WAITING_BYTES = 256 << 10
# Only the request's own tenant sees these fields of a lane.
PRIVATE_FIELDS = {"id", "arrival", "route", "why", "eta_ms", "transfer", "timings"}
# The lane that sums up all requests of other tenants.
OTHERS = 0

Event = tuple[str, Fields]
Step = tuple[StepStats, StepView]


@dataclass(frozen=True)
class Frame:
    """Events that are sent together.

    Attributes:
        first, last: numbers of the first and last event.
        data: bytes of all events, shared by all readers.
        steps: part of `data` that may be dropped for slow readers.
        num_steps: number of steps in that part.
        moment: time when the frame was made, seconds.
    """

    first: int
    last: int
    data: bytes
    steps: slice
    num_steps: int
    moment: float

    @property
    def kept(self) -> bytes:
        """The data without the steps."""
        return self.data[: self.steps.start] + self.data[self.steps.stop :]

    def since(self, number: int) -> bytes:
        """The events after number `number`."""
        skipped = max(0, number + 1 - self.first)
        return self.data.split(b"\n\n", skipped)[skipped] if skipped else self.data


class View:
    """The frames of one tenant.

    Attributes:
        tenant: the tenant's name; "" without keys.
        boot: identifies the engine's start in the events' ids.
        num_pages: number of present readers.
        left: time when the last reader left, seconds.
        num_frames: number of frames so far.
        num_lost: number of steps dropped for slow readers so far.
        last: number of the last event.
    """

    def __init__(self, tenant: str, boot: str, state: Lanes, others: str | None) -> None:
        """`others`: how other tenants' requests are shown, as in `hello`."""
        self.tenant = tenant
        self.boot = boot
        self.others = others
        self.num_pages = 0
        self.left = 0.0
        self.num_frames = 0
        self.num_lost = 0
        self.last = 0
        self._state = state
        self._clock: Clock = state.clock
        self._frames: deque[Frame] = deque()
        self._num_bytes = 0
        # Lane numbers of unfinished requests, and of ended ones whose blocks are not reported yet.
        self._numbers: dict[str, int] = {}
        self._ended: set[str] = set()
        self._num_lanes = OTHERS
        self._grown = asyncio.Event()

    def add(
        self,
        changes: Changes,
        moment: float,
        first: Iterable[Event] = (),
        more: Iterable[Event] = (),
    ) -> None:
        """Make a frame of the changes, with the events `first` before and `more` after them."""
        begin = self.last + 1
        time = self._clock.ms(moment)
        before = self._bytes([*first, *_pace(changes, self._clock)], time)
        before += self._bytes(self._lane_events(changes.before), time)
        steps = self._bytes(self._step_events(changes), time)
        after = self._bytes([*self._lane_events(changes.after), *more], time)
        self._ended |= {
            lane.request_id for lane, fields in changes.after if fields.get("state") == "ended"
        }
        holders = {name for blocks in self._state.blocks.values() for name in blocks.lanes}
        for name in self._ended - holders:
            self._numbers.pop(name, None)
        self._ended &= holders
        if self.last < begin:
            return
        num_steps = sum(map(len, changes.steps.values()))
        part = slice(len(before), len(before) + len(steps))
        frame = Frame(begin, self.last, before + steps + after, part, num_steps, moment)
        self.num_frames += 1
        self._frames.append(frame)
        self._num_bytes += len(frame.data)
        while self._frames[0].moment < moment - RING_SECONDS or self._num_bytes > MAX_RING_BYTES:
            self._num_bytes -= len(self._frames.popleft().data)
        self.wake()

    def opening(self, hello: Fields, totals: Fields, moment: float) -> bytes:
        """The first bytes for a new reader, with the whole present state."""
        found = [
            {**self._shown(lane, lane.fields), "done": lane.done, "output": lane.output}
            for lane in self._state.lanes.values()
            if self._sees(lane.tenant)
        ]
        events = [("hello", {**hello, "lanes": found}), *self._whole(), ("totals", totals)]
        return self._unnumbered(events, moment)

    def reaches(self, boot: str, number: int) -> bool:
        """Whether all events after number `number` are still available."""
        if boot != self.boot or number > self.last:
            return False
        return number == self.last or bool(self._frames and self._frames[0].first <= number + 1)

    def after(self, number: int, moment: float) -> bytes:
        """All events after number `number`, without steps if there are too many."""
        newest = takewhile(lambda frame: frame.last > number, reversed(self._frames))
        frames = list(newest)[::-1]
        if sum(len(frame.data) for frame in frames) <= MAX_WAITING_BYTES:
            return b"".join(frame.since(number) for frame in frames)
        num_steps = sum(frame.num_steps for frame in frames)
        self.num_lost += num_steps
        kept = b"".join(frame.kept for frame in frames)
        return kept + self._unnumbered([("lost", {"steps": num_steps}), *self._whole()], moment)

    async def wait(self, seconds: float) -> bool:
        """Wait for a new frame; return False after `seconds` without one."""
        try:
            # Unlike `wait_for`, this creates no task per page and frame.
            async with asyncio.timeout(seconds):
                await self._grown.wait()
        except TimeoutError:
            return False
        return True

    def wake(self) -> None:
        """Wake all readers that wait for a frame."""
        grown = self._grown
        self._grown = asyncio.Event()
        grown.set()

    def _bytes(self, events: Iterable[Event], time: float) -> bytes:
        data = []
        for name, fields in events:
            self.last += 1
            data.append(event_bytes(f"{self.boot}-{self.last}", name, time, fields))
        return b"".join(data)

    def _unnumbered(self, events: Iterable[Event], moment: float) -> bytes:
        """Events for one reader, with the number of the last shared event."""
        ident = f"{self.boot}-{self.last}"
        time = self._clock.ms(moment)
        return b"".join(event_bytes(ident, name, time, fields) for name, fields in events)

    def _sees(self, tenant: str) -> bool:
        return tenant == self.tenant or self.others != "sum"

    def _number(self, lane: Lane) -> int:
        number = lane.numbers.get(self.tenant)
        if number is None:
            self._num_lanes += 1
            number = lane.numbers[self.tenant] = self._num_lanes
            self._numbers[lane.request_id] = number
        return number

    def _shown(self, lane: Lane, fields: Fields) -> Fields:
        own = lane.tenant == self.tenant
        shown: Fields = {"lane": self._number(lane)}
        shown |= {"own": own} if "prompt" in fields else {}
        if own:
            return shown | fields
        shown |= {name: value for name, value in fields.items() if name not in PRIVATE_FIELDS}
        if (miss := fields.get("miss")) is not None:
            shown["miss"] = {"reason": miss["reason"]}
        return shown

    def _lane_events(self, changes: Iterable[tuple[Lane, Fields]]) -> Iterator[Event]:
        for lane, fields in changes:
            is_known = self.tenant in lane.numbers or "prompt" in fields
            if is_known and self._sees(lane.tenant):
                shown = self._shown(lane, fields)
                if shown.keys() > {"lane"}:
                    yield "lane", shown

    def _step_events(self, changes: Changes) -> Iterator[Event]:
        for worker, steps in changes.steps.items():
            for run in _without_gaps(steps):
                yield "steps", self._steps(worker, run)
        for worker, blocks in changes.blocks.items():
            alone = blocks.alone
            cached = [block_id for block_id, is_cached in alone.items() if is_cached]
            freed = [block_id for block_id, is_cached in alone.items() if not is_cached]
            fields: Fields = {"worker": worker} | ({"whole": True} if blocks.whole else {})
            fields |= {
                "lanes": self._block_lanes(blocks.lanes),
                "cached": ranges(sorted(cached)),
                "freed": ranges(sorted(freed)),
            }
            yield "blocks", fields | _numbers(self._state.blocks[worker])

    def _whole(self) -> Iterator[Event]:
        for worker, blocks in self._state.blocks.items():
            lanes = [(name, 0, block_ids) for name, block_ids in blocks.lanes.items()]
            fields: Fields = {
                "worker": worker,
                "whole": True,
                "lanes": self._block_lanes(lanes),
                "cached": ranges(sorted(blocks.cached)),
                "freed": [],
            }
            yield "blocks", fields | _numbers(blocks)

    def _block_lanes(self, lanes: Iterable[tuple[str, int, list[int]]]) -> list[Any]:
        numbers = self._numbers
        return [
            (numbers[name], kept, ranges(block_ids))
            for name, kept, block_ids in lanes
            if name in numbers
        ]

    def _steps(self, worker: int, steps: list[Step]) -> Fields:
        clock = self._clock
        fields: Fields = {
            "worker": worker,
            "first": steps[0][1].index,
            "start": [clock.ms(stats.start) for stats, _ in steps],
            "duration_ms": [duration_ms(stats.end - stats.start) for stats, _ in steps],
            "predicted_ms": [duration_ms(view.predicted) for _, view in steps],
            "decode_ms": [duration_ms(stats.decode_seconds) for stats, _ in steps],
            "bookkeeping_ms": [duration_ms(view.bookkeeping) for _, view in steps],
        }
        for name in ("prefill_flops", "decode_flops", "prefill_bytes", "decode_bytes"):
            fields[name] = [getattr(stats, name) for stats, _ in steps]
        fields["running"] = [view.running for _, view in steps]
        fields["waiting"] = [view.waiting for _, view in steps]
        fields["pre"] = [self._prefills(view) for _, view in steps]
        fields["dec"] = [self._decodes(view) for _, view in steps]
        held = steps[-1][1].held_back
        return fields | ({"held": held} if held else {})

    def _prefills(self, view: StepView) -> list[Any]:
        numbers = self._numbers
        found: list[Any] = []
        others = [0, 0.0, 0]
        for name, tokens, seconds, new in view.prefills:
            number = numbers.get(name)
            if number is None:
                others = [others[0] + tokens, others[1] + seconds, others[2] + new]
            else:
                found.append(_short([number, tokens, duration_ms(seconds), new]))
        if others[0] and self.others == "sum":
            found.append(_short([OTHERS, others[0], duration_ms(others[1]), others[2]]))
        return found

    def _decodes(self, view: StepView) -> list[Any]:
        numbers = self._numbers
        found: list[Any] = []
        others = [0, 0]
        for name, new, drafted in view.decodes:
            number = numbers.get(name)
            if number is None:
                others = [others[0] + new, others[1] + drafted]
            else:
                found.append(_short([number, new, drafted]))
        if others[0] and self.others == "sum":
            found.append(_short([OTHERS, *others]))
        return found


def _short(entry: list[Any]) -> list[Any]:
    """The entry without a trailing 0."""
    return entry if entry[-1] else entry[:-1]


def _without_gaps(steps: list[Step]) -> Iterator[list[Step]]:
    """Groups of steps with consecutive indices, which restart at 0 with a new worker."""
    begin = 0
    for place in range(1, len(steps) + 1):
        if place == len(steps) or steps[place][1].index != steps[place - 1][1].index + 1:
            yield steps[begin:place]
            begin = place


def _pace(changes: Changes, clock: Clock) -> Iterator[Event]:
    if changes.pace is not None:
        moment, seconds = changes.pace
        yield "pace", {"at": clock.ms(moment), "itl_slo_ms": duration_ms(seconds) or None}


def _numbers(blocks: Blocks) -> Fields:
    return dict(zip(("held", "shared", "num_cached", "free"), blocks.numbers, strict=True))
