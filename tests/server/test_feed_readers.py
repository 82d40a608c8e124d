"""Readers of the feed: many, slow, returning; what each tenant sees. Without an engine."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from twinphase.engine.process.messages import (
    Accepted,
    BlocksHeld,
    Moved,
    RequestUpdate,
    StepStats,
    StepUpdates,
    StepView,
)
from twinphase.errors import EngineUnavailableError, OverloadedError
from twinphase.outcome import FinishReason, MissReason, PrefixMiss
from twinphase.phases.record import RequestRecord, RequestState
from twinphase.server.config import ServerConfig
from twinphase.server.live import feed as feed_module
from twinphase.server.live.events import Clock
from twinphase.server.live.feed import Feed
from twinphase.server.live.lanes import Lanes
from twinphase.server.live.view import MAX_WAITING_BYTES, OTHERS


class Engine:
    """The parts of an `AsyncEngine` that the feed uses."""

    def __init__(self):
        self.records = {}
        self.watchers = []

    @property
    def unfinished(self):
        return list(self.records)

    def transcript(self, name):
        return SimpleNamespace(
            record=self.records[name],
            num_prefilled=0,
            token_ids=[],
            counts=self.records[name].counts,
        )

    def watch(self, watcher):
        self.watchers.append(watcher)


class Rig:
    """A feed, and an engine that makes steps."""

    def __init__(self, **config):
        self.engine = Engine()
        self.source = SimpleNamespace(
            config=ServerConfig(**config),
            engine=self.engine,
            facts=None,
            host=SimpleNamespace(workers=list, text=SimpleNamespace(quantization="Q4_0")),
            model_names=["tiny"],
            timelines=SimpleNamespace(running=lambda name: None),
            workers=list,
            cost_model=lambda: None,
        )
        self.feed = Feed(self.source)
        self.index = 0
        self.now = 100.0
        # No model is loaded, but readers are to begin.
        self.feed.opening = lambda view: b"id: x-0\nevent: hello\ndata: {}\n\n"

    def accept(self, name, tenant=""):
        record = RequestRecord.arrived(name, 0.0)
        record.tenant = tenant
        record.tokenized(5, 0.0)
        self.engine.records[name] = record
        self.feed.take(Accepted(name))

    def step(self, prefills=(), decodes=(), started=(), misses=None):
        stats = StepStats(self.now, self.now + 0.004, 0, 0.004, 0, 1, *[0] * 4, 1, 0, 0.0, 0, 0, 0)
        view = StepView(
            self.index,
            predicted=0.004,
            bookkeeping=0.0,
            held_back="",
            running=1,
            waiting=0,
            prefills=list(prefills),
            decodes=list(decodes),
            started=dict.fromkeys(started, "seats"),
            misses=misses or {},
        )
        self.index += 1
        self.now += 0.005
        updates = [RequestUpdate(name, [], 5, 0) for name in started]
        self.feed.take(StepUpdates(updates, stats, view))

    def tick(self):
        self.now += 0.05
        self.feed.tick(self.now)


async def read(page, rig):
    """All events that are available for a reader now."""
    data = b""
    while page._position is None or page._position < page.view.last:
        data += await page.next()
    return events_of(data)


def events_of(data):
    return [json.loads(one.split(b"data: ", 1)[1]) for one in data.split(b"\n\n") if one]


def test_ten_readers_cause_as_many_frames_as_one():
    async def frames(count):
        rig = Rig()
        pages = [rig.feed.open("") for _ in range(count)]
        [await page.next() for page in pages]
        rig.accept("a")
        got = []
        for _ in range(20):
            for _ in range(5):
                rig.step(decodes=[("a", 1, 0)])
            rig.tick()
            got.append([await page.next() for page in pages])
        assert all(one is pieces[0] for pieces in got for one in pieces)  # the same bytes
        return rig.feed.views[""].num_frames

    assert asyncio.run(frames(1)) == asyncio.run(frames(10)) == 20


def test_nothing_is_watched_without_a_reader_and_no_longer_than_needed(monkeypatch):
    monkeypatch.setattr(feed_module, "FRAME_SECONDS", 0.001)
    monkeypatch.setattr(feed_module, "TOTALS_SECONDS", 0.001)
    monkeypatch.setattr(feed_module, "RING_SECONDS", 0.01)

    async def watchers():
        rig = Rig()
        rig.feed.finished(None)  # costs nothing, looks at nothing
        assert rig.engine.watchers == [] and not rig.feed.is_watching
        page = rig.feed.open("")
        assert rig.feed.is_watching
        rig.feed.leave(page)
        while rig.feed.is_watching:
            await asyncio.sleep(0.002)
        return rig.engine.watchers

    begun, ended = asyncio.run(watchers())
    assert begun is not None and ended is None


def test_a_reader_that_comes_back_misses_nothing_and_gets_nothing_twice():
    async def run():
        rig = Rig()
        first = rig.feed.open("")
        await first.next()
        rig.accept("a")
        seen = []
        for _ in range(3):
            rig.step(decodes=[("a", 1, 0)])
            rig.tick()
            seen.append(await first.next())
        events = [one for data in seen for one in data.split(b"\n\n") if one]
        ids = [one.split(b"\n")[0].removeprefix(b"id: ").decode() for one in events]
        rig.feed.leave(first)
        for place, ident in enumerate(ids):  # also in the middle of a frame
            again = rig.feed.open("", ident)
            assert again._position is not None
            rest = b"".join([await again.next()] if place + 1 < len(ids) else [])
            assert [one for one in rest.split(b"\n\n") if one] == events[place + 1 :]
            rig.feed.leave(again)
        for stale in ("other-3", f"{ids[0].partition('-')[0]}-999999", "nonsense", "a-b", None):
            page = rig.feed.open("", stale)
            assert b"event: hello" in await page.next()
            rig.feed.leave(page)

    asyncio.run(run())


def test_a_reader_that_does_not_read_loses_steps_only_and_holds_up_nobody():
    async def run():
        rig = Rig()
        fast = rig.feed.open("")
        slow = rig.feed.open("")
        for page in (fast, slow):
            await page.next()
        rig.accept("a")
        many = [("a", 1, 0)] * 60
        num_steps = 0
        received = b""
        while len(received) < 3 * MAX_WAITING_BYTES:
            for _ in range(20):
                rig.step(decodes=many)
                num_steps += 1
            rig.tick()
            received += await fast.next()
        rig.accept("b")
        rig.tick()
        late = await read(slow, rig)
        assert [one["lane"] for one in late if one["event"] == "lane"] == [1, 2]
        assert [one["steps"] for one in late if one["event"] == "lost"] == [num_steps]
        assert not [one for one in late if one["event"] == "steps"]
        assert sum(len(json.dumps(one)) for one in late) < MAX_WAITING_BYTES / 8
        assert len([one for one in events_of(received) if one["event"] == "steps"]) > 3
        rig.step(decodes=many)
        rig.tick()
        assert [one["event"] for one in events_of(await slow.next())] == ["steps"]

    asyncio.run(run())


def test_a_tenant_has_at_most_16_readers_and_the_others_their_own():
    async def run():
        rig = Rig(named_keys=("a=1", "b=2"))
        pages = [rig.feed.open("a") for _ in range(16)]
        with pytest.raises(OverloadedError) as error:
            rig.feed.open("a")
        assert error.value.http_status == 429 and error.value.retry_after > 0
        rig.feed.open("b")
        rig.feed.leave(pages[0])
        rig.feed.leave(pages[0])  # twice counts once
        rig.feed.open("a")
        with pytest.raises(OverloadedError):
            rig.feed.open("a")
        rig.feed.close()
        assert await pages[1].next() == b""
        with pytest.raises(EngineUnavailableError):
            rig.feed.open("b")

    asyncio.run(run())


def play(rig):
    """Two tenants' requests in one step each."""
    rig.accept("secret-alice", "alice")
    rig.accept("secret-bob", "bob")
    rig.accept("secret-bob-2", "bob")
    rig.feed.take(Moved("secret-bob", 100.0, "engine", "chosen since it is idle"))
    miss = PrefixMiss(MissReason.DIVERGED, 3)
    names = ["secret-alice", "secret-bob", "secret-bob-2"]
    rig.step([(name, 5, 0.001, 1) for name in names], started=names, misses={names[1]: miss})
    rig.step(decodes=[(name, 2, 1) for name in names])
    rig.feed.take(BlocksHeld([(name, 0, [i]) for i, name in enumerate(names)], [], [], 3, 0, 0, 9))
    rig.tick()


@pytest.mark.parametrize("others", ["load", "none"])
def test_other_tenants_are_load_without_names(others):
    async def run():
        rig = Rig(named_keys=("alice=1", "bob=2"), page_others=others)
        pages = [rig.feed.open(tenant) for tenant in ("alice", "bob")]
        for page in pages:
            await page.next()
        play(rig)
        alice, bob = [await page.next() for page in pages]
        assert b"bob" not in alice and b"alice" not in bob and b"idle" not in alice
        assert b"token_index" in bob and b"token_index" not in alice
        seen = events_of(alice)
        own = [one for one in seen if one.get("own")]
        assert [one["id"] for one in own] == ["secret-alice"]
        lanes = {one["lane"] for one in seen if one["event"] == "lane"}
        (steps,) = (one for one in seen if one["event"] == "steps")
        (blocks,) = (one for one in seen if one["event"] == "blocks")
        assert blocks["held"] == 3
        if others == "load":
            assert lanes == {1, 2, 3}
            assert {entry[0] for entry in steps["pre"][0]} == lanes
            assert [row[0] for row in blocks["lanes"]] == [1, 2, 3]
            assert {"reason": "diverged"} in [one.get("miss") for one in seen]
        else:
            assert lanes == {1} and [row[0] for row in blocks["lanes"]] == [1]
            assert steps["pre"][0] == [[1, 5, 1.0, 1], [OTHERS, 10, 2.0, 2]]
            assert steps["dec"][1] == [[1, 2, 1], [OTHERS, 4, 2]]
        # Each tenant numbers the lanes for itself.
        theirs = events_of(bob)
        mine = {one["id"]: one["lane"] for one in theirs if one.get("own") and "id" in one}
        assert len(mine) == 2 and "secret-alice" not in mine

    asyncio.run(run())


@pytest.mark.parametrize("leaves", ["before the engine's last report", "after it"])
def test_an_answer_that_its_client_leaves_has_timings_in_either_order(leaves):
    engine = Engine()
    record = engine.records["a"] = RequestRecord.arrived("a", 0.0)
    record.tokenized(5, 0.0)
    taken = []
    choice = SimpleNamespace(
        record=record, stream=SimpleNamespace(transcript=SimpleNamespace(take=taken.append))
    )
    lanes = Lanes(Clock(0.0), engine, lambda *_: {}, lambda choice: {"reports": len(taken)})
    lanes.begin([], 0.0)
    ended = replace(record, state=RequestState.ENDED, finish_reason=FinishReason.ABORT)
    report = StepUpdates([RequestUpdate("a", [], 5, 0, ended=ended)], None, None)
    if leaves == "after it":
        lanes.take(report, 1.0, None)
        lanes.finish(choice)
    else:
        lanes.finish(choice)
        lanes.take(report, 1.0, None)
    end, timings = [fields for _, fields in lanes.changes.after]
    assert end["finish"] == "abort" and timings == {"timings": {"reports": 1}}


def test_blocks_that_are_freed_after_their_lane_has_ended_are_reported_free():
    """The engine reports blocks after the step that ended their request, or a frame later."""

    async def reported():
        rig = Rig()
        page = rig.feed.open("")
        await page.next()
        rig.accept("a")
        rig.step(started=["a"], prefills=[("a", 5, 0.001, 0)])
        rig.feed.take(BlocksHeld([("a", 0, [7, 8])], [], [], 2, 0, 0, 2))
        rig.tick()
        record = replace(rig.engine.records.pop("a"), state=RequestState.ENDED)
        rig.feed.take(StepUpdates([RequestUpdate("a", [], 5, 0, ended=record)], None, None))
        rig.tick()
        rig.feed.take(BlocksHeld([("a", 0, [])], [], [7, 8], 0, 0, 0, 4))
        rig.tick()
        return [one["lanes"] for one in await read(page, rig) if one["event"] == "blocks"]

    (first, last) = asyncio.run(reported())
    assert first == [[last[0][0], 0, [[7, 2]]]] and last[0][1:] == [0, []]
