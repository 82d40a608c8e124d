"""Several engines behind a router: the answers of one engine, also when workers die."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from added import greedy
from routed import (
    LONG,
    all_of,
    all_ready,
    check_answers,
    kill,
    mix,
    read,
    reasons,
    same,
    until,
    whole,
)
from twinphase.cluster.routed_request import chain_of
from twinphase.constraint import StructuredOutputsParams
from twinphase.engine.process.messages import Add, EngineFacts, Pong
from twinphase.errors import (
    EngineDeadError,
    EngineUnavailableError,
    InvalidRequestError,
    TwinphaseError,
)
from twinphase.phases.timeline import IntervalKind
from twinphase.request import SamplingParams


def test_answers_through_two_workers_are_those_of_one_engine(serve, lone):
    """Random mixes with prefixes, grammars, penalties and stop strings; some without a seed."""
    num_mixes = int(os.environ.get("TWINPHASE_MIXES", "10"))

    async def body(engine):
        with pytest.raises(EngineUnavailableError):
            await engine.submit([10], LONG)
        await until(lambda: engine.is_running)
        assert isinstance(engine.facts, EngineFacts) and engine.facts.config.max_num_seqs == 128
        used = set()
        for seed in range(num_mixes):
            found = await check_answers(engine, list(mix(seed)), lone)
            used |= {reason.split(":")[0] for reason in reasons(found, IntervalKind.ROUTE)}
        assert used == {"worker-0", "worker-1"}
        free = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
        outputs = await all_of(engine, [([20, 21], free)] * 4)
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4
        for prompt, options in (
            ([], {}),
            ([10**6], {}),
            ([10**12] * 40, {}),
            ([10], {"priority": 1}),
        ):
            with pytest.raises(InvalidRequestError):
                await engine.submit(prompt, LONG, **options)
        await whole(engine)
        found = engine.host.workers()
        assert [(one.id, one.role, one.state, one.restarts) for one in found] == [
            ("worker-0", "both", "ready", 0),
            ("worker-1", "both", "ready", 0),
        ]
        assert all(one.pid and one.prefill_seconds > 0 and one.decode_seconds > 0 for one in found)

    serve(body, waits=False)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_what_a_dead_worker_began_goes_on_elsewhere(serve, lone, sig):
    """The worker dies while requests queue, between two chunks, and during answers."""
    long_prompts = [([10 + (i * j) % 250 for i in range(180)], LONG) for j in (3, 7)]
    answers = [([30 + number, 31, 32], LONG) for number in range(4)]
    everything = answers + long_prompts
    expected = lone.generate([prompt for prompt, _ in everything], LONG)

    async def body(engine):
        for turn in range(2):
            for _ in range(10):  # a worker may be done before a busy machine lets this test go on
                if await disturbed(engine, late=bool(turn)):
                    break
            else:
                raise AssertionError("no worker died while it had a request")
        await whole(engine)

    async def disturbed(engine, late):
        """Whether the killed worker had a request; the answers are the same in any case."""
        router = engine.host
        num_continued = engine.host.num_continued
        streams = [await engine.submit(prompt, params) for prompt, params in everything]
        first = streams[0].transcript
        while (
            late and len(first.token_ids) < 20
        ):  # else while they queue, or the long ones are being read
            await asyncio.sleep(0.002)
        dead = next((sent.worker for sent in router.requests.values()), "worker-0")
        kill(engine, dead, sig)
        outputs = await asyncio.gather(*map(read, streams))
        assert all(map(same, outputs, expected))
        await until(
            lambda: not router.workers_by_name[dead].is_up or router.num_continued > num_continued
        )
        await all_ready(engine)
        moved = 0
        for stream, output in zip(streams, outputs, strict=True):
            routed = reasons([output], IntervalKind.ROUTE)
            if any("died" in reason for reason in routed):
                moved += 1
                assert "died" not in routed[-1] and f"{dead}, which died" in str(
                    await engine.explain(stream)
                )
        assert moved == router.num_continued - num_continued
        return moved > 0

    serve(body, silence=1.0)


def test_an_answer_that_ended_at_a_stop_string_needs_no_other_worker(serve, lone):
    """A worker that dies after the front end found the end of the text changes nothing."""
    params = greedy(300)
    text = lone.generate([[40, 41]], params)[0].outputs[0].text
    stopping = greedy(300, stop=text[20:24])
    expected = lone.generate([[40, 41]], stopping)[0]

    async def body(engine):
        router = engine.host
        put = router.put
        stream = await engine.submit([40, 41], stopping)

        def kill_first(message):
            kill(engine, router.requests[stream.request_id].worker)
            router.requests[stream.request_id].end_reason = message.reason
            del message  # it never reaches the worker

        router.put = kill_first
        output = await read(stream)
        router.put = put
        assert same(output, expected) and output.outputs[0].stop_reason == text[20:24]
        await all_ready(engine)
        await whole(engine)

    serve(body)


def test_without_a_worker_requests_fail_at_once_and_can_be_sent_again(serve, lone):
    expected = lone.generate([[30, 31]], LONG)[0]

    async def body(engine):
        router = engine.host
        streams = [await engine.submit([30, 31], LONG) for _ in range(3)]
        began = time.monotonic()
        for name in router.workers_by_name:
            kill(engine, name)
        for result in await asyncio.gather(*map(read, streams), return_exceptions=True):
            assert isinstance(result, EngineDeadError) and "again" in str(result)
        assert time.monotonic() - began < 10.0  # and not the minutes of a timeout
        with pytest.raises(EngineUnavailableError):
            await engine.submit([30, 31], LONG)
        await until(lambda: engine.is_running)
        assert same(await read(await engine.submit([30, 31], LONG)), expected)
        await all_ready(engine)
        await whole(engine)

    serve(body)


def test_a_reader_who_leaves_frees_its_worker_and_a_dead_worker_forgets_it(serve):
    async def body(engine):
        router = engine.host
        for sig in (None, signal.SIGKILL):
            streams = [await engine.submit([50], LONG)]
            worker = router.requests[streams[0].request_id].worker
            streams += [await engine.submit([50 + number], LONG) for number in range(1, 4)]
            for stream in streams:
                await anext(stream)
            for stream in streams:
                await stream.aclose()
            if sig is not None:
                kill(engine, worker, sig)
                await until(lambda: router.num_restarts == 1)
            await until(lambda: not router.requests)
        await all_ready(engine)
        wanted = StructuredOutputsParams(regex="[ab]{4}")
        for pause in (
            0.0,
            0.0,
            0.001,
            0.003,
        ):  # nobody waits for its grammar, which is being compiled or is not
            task = asyncio.create_task(
                engine.submit([60], SamplingParams(structured_outputs=wanted))
            )
            await asyncio.sleep(pause)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await whole(engine)
        assert router.num_continued == 0

    serve(body)


def test_a_prompt_goes_where_its_beginning_is_cached_until_that_worker_dies(serve):
    prefix = [60 + i % 90 for i in range(160)]
    short = SamplingParams(temperature=0.0, max_tokens=2)

    async def body(engine):
        router = engine.host

        async def cached(number):
            output = await read(await engine.submit([*prefix, 200 + number], short))
            (decision,) = reasons([output], IntervalKind.ROUTE)
            return output.num_cached_tokens, decision.split(":")[0], decision

        first = await cached(0)
        assert first[0] == 0
        chain = chain_of(router._hashes, prefix, None)
        await until(lambda: router.fleet.index.hits(chain).get(first[1]) == 10)
        for number in (1, 2, 3):
            tokens, where, words = await cached(number)
            assert (tokens, where) == (160, first[1]) and "1 of 161 tokens to prefill" in words
        kill(engine, first[1])
        await until(lambda: router.num_restarts == 1)
        assert router.fleet.index.num_held(first[1]) == 0
        tokens, where, _ = await cached(4)
        assert tokens == 0

    serve(body)


def test_a_worker_whose_loop_stands_still_is_ended_while_others_work(serve, lone, caplog):
    """The worker answers pings, which another thread does, but makes no step."""
    expected = lone.generate([[30, 31], [30, 32]], LONG)

    async def body(engine):
        router = engine.host
        router._stall = 1.0
        streams = [await engine.submit([30, 31 + number], LONG) for number in range(2)]
        for stream in streams:
            await anext(stream)
        stuck, works = (
            router.workers_by_name[router.requests[stream.request_id].worker] for stream in streams
        )
        assert stuck is not works
        take = stuck.host.take
        stuck.host.take = lambda message: take(message) if isinstance(message, Pong) else None
        more = asyncio.create_task(keep_busy(engine, works.name))
        outputs = await asyncio.gather(*map(read, streams))
        stuck.host.take = take
        await more
        assert all(map(same, outputs, expected)) and router.num_continued == 1
        assert f"{stuck.name} made no step for 1 s" in caplog.text

    async def keep_busy(engine, name):
        router = engine.host
        router.fleet.workers[name].accepts = True
        others = [one for one in router.fleet.workers if one != name]
        for other in others:
            router.fleet.workers[other].accepts = False
        while router.num_continued == 0:
            await all_of(engine, [([10, 11, 12], SamplingParams(temperature=0.0, max_tokens=20))])

    serve(body)


def test_a_request_that_kills_its_workers_does_not_kill_all_of_them(serve, lone):
    expected = lone.generate([[30, 31]], LONG)[0]

    async def body(engine):
        router = engine.host
        for view in router.workers_by_name.values():
            put = view.host.put
            host = view.host

            def deadly(message, put=put, host=host):
                if isinstance(message, Add) and message.request_id == "poison":
                    os.kill(host.pid, signal.SIGKILL)
                put(message)

            host.put = deadly
        stream = await engine.submit([30, 31], LONG)
        poison = asyncio.create_task(engine.submit([40, 41], LONG, request_id="poison"))
        with pytest.raises(TwinphaseError, match="3 workers died"):
            await read(await poison)
        assert same(await read(stream), expected)
        await all_ready(engine)
        assert router.num_restarts == 3
        await whole(engine)

    serve(body, count=4)
