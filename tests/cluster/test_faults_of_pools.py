"""Faults at any point of a request's life: the undisturbed engine's bits, and no leaks."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import threading

import pytest

from kv_workers import FAULTS, through
from routed import CONFIG, LONG, all_ready, check_answers, kill, mix, read, same, until, whole
from twinphase.cluster.elastic import Balance
from twinphase.engine.process.messages import StepUpdates
from twinphase.errors import EngineDeadError

ROLES = {"reader": "prefill", "writer": "decode", "other": "decode"}
SMALL_STEPS = {**CONFIG, "max_num_batched_tokens": 16}  # many chunks, to be between two of them
POINTS = ("queued", "mid-chunk", "mid-transfer", "before hand-over", "mid-answer")
PARAMS = dataclasses.replace(LONG, max_tokens=100)


def prompts_of(number, count=2):
    """Prompts of 400 tokens without common prefixes."""
    return [
        [10 + (i * (3 + 2 * which) + number + which) % 250 for i in range(400)]
        for which in range(count)
    ]


class Point:
    """Runs an action when a request reaches a point of its life.

    Attributes:
        happened: it was done.
    """

    def __init__(self):
        self.proxies, self._through = through(self._pass)
        self._point = ""
        self._act = lambda: None
        self.happened = threading.Event()
        self._open = threading.Event()

    def arm(self, point, act):
        self._point = point
        self._act = act
        self.happened.clear()
        (self._open.clear if point == "before hand-over" else self._open.set)()

    def _now(self):
        if not self.happened.is_set():
            self._act()
            self.happened.set()
            self._open.set()

    def heard(self, name, message):
        """For `serve_pools`."""
        steps = message.updates if name == "reader" and isinstance(message, StepUpdates) else []
        if self._point == "mid-chunk" and any(0 < step.num_prefilled < 400 for step in steps):
            self._now()
        return self._through(name, message)

    def _pass(self, choose, data):
        if self._point == "mid-transfer":
            self._now()
        self._open.wait(60)
        return data

    async def reach(self, router, stream):
        """Continue until the action has run."""
        if self._point == "before hand-over":
            await until(lambda: any(sent.is_transferring for sent in router.requests.values()))
        elif self._point == "mid-answer":
            await until(lambda: len(stream.transcript.token_ids) > 9)
        elif self._point != "queued":
            await until(self.happened.is_set)
        self._now()


def who(router, victims):
    """Names of the workers that have the first request, or will have it."""
    sent = next(iter(router.requests.values()))
    writer = sent.decode_worker or sent.worker
    return {"reader": ["reader"], "writer": [writer], "both": ["reader", writer]}[victims]


@pytest.mark.parametrize(
    ("sig", "victims", "points"),
    [
        ("SIGKILL", "both", ["mid-transfer"]),
        *(
            pytest.param(sig, victims, POINTS, marks=pytest.mark.slow)
            for sig, victims in (("SIGKILL", "reader"), ("SIGKILL", "writer"), ("SIGSTOP", "both"))
        ),
    ],
)
def test_workers_that_die_or_stand_still_at_any_point(serve_pools, lone, sig, victims, points):
    point = Point()

    async def body(engine):
        router = engine.host

        def act():
            for name in who(router, victims):
                kill(engine, name, getattr(signal, sig))

        for number, where in enumerate(points):
            restarts = router.num_restarts
            prompts = prompts_of(number)
            point.arm(where, act)
            streams = [await engine.submit(prompt, PARAMS) for prompt in prompts]
            await point.reach(router, streams[0])
            outputs = await asyncio.gather(*map(read, streams))
            assert all(map(same, outputs, lone.generate(prompts, PARAMS))), where
            await until(lambda before=restarts: router.num_restarts > before)
            await all_ready(engine)
        assert router.num_continued
        await whole(engine)

    serve_pools(body, ROLES, point.heard, SMALL_STEPS, silence=1.0)


def test_a_client_who_leaves_at_any_point(serve_pools, lone):
    """The other answers are not affected, and nothing of the request remains."""
    point = Point()

    async def body(engine):
        loop = asyncio.get_running_loop()
        for number, where in enumerate(POINTS):
            prompts = prompts_of(number)
            streams = []
            point.arm(
                where,
                lambda streams=streams: loop.call_soon_threadsafe(lambda: streams[0].abandon()),
            )
            for prompt in prompts:
                streams.append(await engine.submit(prompt, PARAMS))
            await point.reach(engine.host, streams[0])
            assert same(await read(streams[1]), lone.generate(prompts[1:], PARAMS)[0])
            await whole(engine)

    serve_pools(body, ROLES, point.heard, SMALL_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("dead", ["writer", "other"])
def test_a_worker_dies_while_one_is_about_to_go_over_to_the_other_pool(serve_pools, lone, dead):
    """Either that worker dies, or the only other one of its pool: then it stays, or returns."""
    prompts = prompts_of(0, 8)
    point = Point()

    async def body(engine):
        router = engine.host
        views = engine.host.workers_by_name

        def act():
            router._drains.begin(views["writer"], "prefill")
            kill(engine, dead)

        point.arm("before hand-over", act)
        streams = [await engine.submit(prompt, PARAMS) for prompt in prompts]
        await point.reach(router, streams[0])
        outputs = await asyncio.gather(*map(read, streams))
        assert all(map(same, outputs, lone.generate(prompts, PARAMS))) and router.num_continued
        await all_ready(engine)
        assert {view.role for view in views.values()} == {
            "prefill",
            "decode",
        }  # it may have gone over before it died
        await whole(engine)

    serve_pools(body, ROLES, point.heard, balance=Balance())


@pytest.mark.slow
def test_frames_are_spoilt_while_the_router_sends_requests(serve_pools, lone):
    """Each frame has its own fault, or none."""
    choices = [*FAULTS.values(), *[lambda choose, data: data] * 7]
    proxies, heard = through(lambda choose, data: choose.choice(choices)(choose, data))

    async def body(engine):
        for seed in range(2):
            asked = [*mix(seed), *((prompt, PARAMS) for prompt in prompts_of(seed))]
            await check_answers(engine, asked, lone)
        assert sum(proxy.num_spoilt for proxy in proxies) > 5
        await whole(engine)

    serve_pools(body, ROLES, heard)


@pytest.mark.slow
def test_a_decode_worker_without_room_and_one_that_takes_no_blocks(serve_pools, lone):
    """The decode worker's cache holds three of eight prompts; then its port hangs."""
    point = Point()
    point.arm("", None)

    async def body(engine):
        for number in range(2):
            await check_answers(
                engine, [(prompt, PARAMS) for prompt in prompts_of(number, 8)], lone
            )
            await whole(engine)
            point.arm("before hand-over", lambda: None)  # nobody opens it
        point._now()

    serve_pools(body, {"reader": "prefill", "writer": "decode"}, point.heard)


def test_without_a_decode_worker_answers_end_at_once(serve_pools, lone):
    """The end does not wait for the reader; later the same requests are answered."""
    point = Point()
    prompts = prompts_of(0)

    async def body(engine):
        router = engine.host
        point.arm("before hand-over", lambda: kill(engine, "writer"))
        streams = [await engine.submit(prompt, PARAMS) for prompt in prompts]
        await point.reach(router, streams[0])
        for found in await asyncio.gather(*map(read, streams), return_exceptions=True):
            assert isinstance(found, EngineDeadError) and "again" in str(found)
        await until(lambda: engine.is_running)
        await check_answers(engine, [(prompt, PARAMS) for prompt in prompts], lone)
        await whole(engine)

    serve_pools(body, {"reader": "prefill", "writer": "decode"}, point.heard, SMALL_STEPS)


@pytest.mark.slow
def test_with_elastic_roles_answers_go_on_without_the_only_decode_worker(serve_pools, lone):
    point = Point()
    prompts = prompts_of(0)

    async def body(engine):
        views = engine.host.workers_by_name
        point.arm("before hand-over", lambda: kill(engine, "writer"))
        streams = [await engine.submit(prompt, PARAMS) for prompt in prompts]
        await point.reach(engine.host, streams[0])
        assert all(
            map(same, await asyncio.gather(*map(read, streams)), lone.generate(prompts, PARAMS))
        )
        await all_ready(engine)
        assert {view.role for view in views.values()} == {"prefill", "decode"}
        assert "the pool was empty" in views["reader"].role_reason
        await whole(engine)

    serve_pools(
        body, {"reader": "prefill", "writer": "decode"}, point.heard, SMALL_STEPS, balance=Balance()
    )
