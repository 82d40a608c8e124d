import asyncio
import gc
import threading
from contextlib import contextmanager

import pytest

from added import greedy
from twinphase.engine.frontends.outputs import Transcript
from twinphase.engine.process.messages import End
from twinphase.errors import EngineDeadError, InvalidRequestError, RequestNotFoundError
from twinphase.outcome import FinishReason
from twinphase.request import SamplingParams

PROMPTS = [list(range(40, 40 + n)) for n in (30, 1, 17, 64)]
LONG = greedy(60)


async def read(stream):
    return [update async for update in stream]


async def until_idle(engine):
    while engine.host.loaded.engine.has_work:  # `serve` has a limit
        await asyncio.sleep(0.01)


@contextmanager
def held(engine, after=0):
    """Yields requests that cannot end while the test acts on them, however slow it is.

    What is submitted first of all is taken at once; whoever comes later waits for the step that is
    held.
    """
    executor = engine.host.loaded.engine.executor
    whole = executor.execute
    go_on = threading.Event()
    steps = []

    def execute(batch):
        steps.append(batch)
        assert len(steps) <= after or go_on.wait(60)
        return whole(batch)

    executor.execute = execute
    try:
        yield steps
    finally:
        go_on.set()


async def let_others_run():
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_reader_that_comes_late_gets_everything_in_one_update(serve):
    async def body(engine):
        stream = await engine.submit(PROMPTS[0], greedy(20))
        await until_idle(engine)
        (update,) = await read(stream)
        assert update.finished and len(update.token_ids) == 20

    serve(body)


def test_abort_ends_the_stream_and_frees_the_blocks(serve):
    async def body(engine):
        with held(engine):
            stream = await engine.submit(PROMPTS[0], greedy(90), request_id="mine")
            coming = asyncio.create_task(engine.submit(PROMPTS[1], greedy(5)))
            await engine.abort("mine")
        other = await coming
        updates = await read(stream)
        assert updates[-1].output.outputs[0].finish_reason == "abort"
        with pytest.raises(RequestNotFoundError, match="'mine'"):
            await engine.abort("mine")
        with pytest.raises(RequestNotFoundError, match="'nobody'"):
            await engine.abort("nobody")
        assert len((await read(other))[-1].output.outputs[0].token_ids) == 5

    serve(body)


async def read_one(stream):
    async for update in stream:
        if update.token_ids:
            return


async def read_nothing(stream):
    pass


async def close_at_once(stream):
    async with stream:
        pass
    assert await read(stream) == []


@pytest.mark.parametrize(("leave", "after"), [(read_one, 2), (read_nothing, 0), (close_at_once, 0)])
def test_a_reader_that_leaves_aborts_its_request(serve, leave, after):
    async def body(engine):
        with held(engine, after=after) as steps:
            stream = await engine.submit(PROMPTS[0], greedy(90))
            await leave(stream)
            del stream
            gc.collect()
            await let_others_run()
        await until_idle(engine)
        assert len(steps) <= after + 2, "the one that was held, and the next at most"

    serve(body)


def test_bad_requests_are_refused_and_disturb_nobody(serve):
    async def body(engine):
        with held(engine):
            good = await engine.submit(PROMPTS[0], greedy(90), request_id="good")
            with pytest.raises(InvalidRequestError, match="in use"):
                await engine.submit(PROMPTS[0], request_id="good")
        for arguments, match in (
            ({"request_id": ""}, "request id is ''"),
            ({"request_id": 7}, "request id is 7"),
            ({"prompt": [1, 2, 10**9]}, "not in the vocabulary"),
            ({"prompt": 5}, "prompt is of type int"),
            ({"prompt": "x" * 10_000}, "10000"),
            ({"priority": 1}, "scheduling_policy is 'fcfs'"),
            ({"priority": 2**40}, "priority is"),
            ({"cache_salt": 5}, "cache_salt is"),
            ({"sampling_params": greedy(10**6)}, "max_tokens"),
            ({"sampling_params": {"temperature": 0}}, "type dict. Give SamplingParams"),
        ):
            with pytest.raises(InvalidRequestError, match=match):
                await engine.submit(
                    **{"prompt": PROMPTS[0], "sampling_params": greedy(1), **arguments}
                )
        assert len((await read(good))[-1].output.outputs[0].token_ids) == 90

    serve(body)


def test_when_the_loop_dies_every_stream_and_call_says_so(serve):
    async def body(engine):
        def schedule(drafts):
            raise RuntimeError("broken scheduler")

        with held(engine):
            stream = await engine.submit(PROMPTS[0], greedy(90))
            engine.host.loaded.engine.scheduler.schedule = schedule
        with pytest.raises(EngineDeadError, match="broken scheduler"):
            await read(stream)
        with pytest.raises(EngineDeadError):
            await engine.submit(PROMPTS[0])
        assert not engine.is_running

    serve(body)


def test_close_fails_what_is_unfinished(serve):
    async def body(engine):
        with held(engine):
            stream = await engine.submit(PROMPTS[0], greedy(90))
            closing = asyncio.create_task(asyncio.to_thread(engine.close))
            while engine.is_running:
                await asyncio.sleep(0.01)
        await closing
        with pytest.raises(EngineDeadError):
            await read(stream)

    serve(body)


def test_ends_from_two_sides_do_not_meet_badly(serve):
    async def body(engine):
        stream = await engine.submit(PROMPTS[0], greedy(90), request_id="mine")
        engine.host.put(End("mine", FinishReason.ABORT))  # behind the stream's back
        stream.abandon()
        good = await engine.submit(PROMPTS[1], greedy(3))
        assert len((await read(good))[-1].output.outputs[0].token_ids) == 3

    serve(body)


def test_text_that_cannot_be_made_fails_its_own_stream_only(serve, monkeypatch):
    take_tokens = Transcript.take_tokens

    def fail_for_bad(transcript, *step):
        if transcript.request_id == "bad":
            raise RuntimeError("no such text")
        take_tokens(transcript, *step)

    monkeypatch.setattr(Transcript, "take_tokens", fail_for_bad)  # before any token can come

    async def body(engine):
        bad, good = [
            await engine.submit(PROMPTS[0], greedy(20), request_id=name) for name in ("bad", "good")
        ]
        results = await asyncio.gather(read(bad), read(good), return_exceptions=True)
        assert "no such text" in str(results[0])
        assert len(results[1][-1].output.outputs[0].token_ids) == 20
        await until_idle(engine)

    serve(body)


def test_a_stop_string_ends_the_stream_at_once_and_the_request_in_the_engine_too(serve, llm):
    text = llm.generate([PROMPTS[0]], greedy(30))[0].outputs[0].text
    stop = text[5:8]

    async def body(engine):
        updates = []
        finished = []
        async for update in await engine.submit(PROMPTS[0], greedy(60, stop=[stop])):
            updates.append(update)
            finished.append((update.finished, update.output.finished))
        assert finished == [(False, False)] * (len(finished) - 1) + [(True, True)]
        completion = updates[-1].output.outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.text == text[: text.index(stop)]
        timeline = updates[-1].output.metrics
        assert sum(timeline.totals().values()) == pytest.approx(timeline.end - timeline.arrival)
        await until_idle(engine)

    serve(body)


def test_what_was_cached_is_known_from_the_first_update(serve):
    async def body(engine):
        await read(await engine.submit(PROMPTS[3], greedy(1)))
        async for update in await engine.submit(PROMPTS[3], greedy(5)):
            assert update.output.num_cached_tokens == 48

    serve(body)


def test_the_pace_is_chosen_once_step_times_are_known_unless_the_user_set_one(serve, llm):
    def body_of(chosen):
        async def body(engine):
            scheduler = engine.host.loaded.engine.scheduler
            assert engine.facts.pace is None  # it was not warmed up
            await asyncio.gather(*[read(await engine.submit(prompt, LONG)) for prompt in PROMPTS])
            assert (scheduler.pace.slo_seconds, scheduler.pace.step_factor > 0) == chosen(
                scheduler.pace.slo_seconds
            )

        return body

    serve(body_of(lambda slo: (slo if slo and slo > 0 else "chosen", True)))
    serve(body_of(lambda slo: (None, False)), itl_slo_ms="off")
    serve(body_of(lambda slo: (0.25, False)), itl_slo_ms=250)
    llm.generate(PROMPTS, LONG)
    assert llm.engine.scheduler.pace.slo_seconds is None  # nobody reads these as they come


def test_a_tenants_short_request_is_not_behind_all_of_anothers(serve):
    async def body(engine):
        sent = []
        put = engine.host.put
        engine.host.put = lambda message: (sent.append(message), put(message))
        with held(engine):
            asked = [engine.submit(PROMPTS[3], greedy(60), tenant="a") for _ in range(12)]
            asked.append(engine.submit(PROMPTS[1], greedy(2), tenant="b", weight=2))
            coming = [asyncio.create_task(one) for one in asked]
            while len(sent) < len(asked):
                await asyncio.sleep(0)
        *flood, short = await asyncio.gather(*coming)
        await asyncio.gather(*map(read, [*flood, short]))
        assert short.last_step_end < min(
            stream.last_step_end for stream in flood
        )  # whenever they were read
        with pytest.raises(InvalidRequestError, match="weight is 0"):
            await engine.submit(PROMPTS[0], tenant="b", weight=0)

    serve(body, max_num_seqs=2, max_num_batched_tokens=16, num_kv_blocks=64)


def test_seeds_are_chosen_where_requests_come_in_as_an_engine_would_choose_them(serve, make_llm):
    """A request without a seed draws as in `LLM`; seeded and greedy ones take no number."""
    free = SamplingParams(temperature=1.5, max_tokens=8)
    asked = [free, greedy(8), SamplingParams(temperature=1.5, max_tokens=8, seed=5), free]
    alone = [
        output.outputs[0].token_ids for output in make_llm(seed=3).generate(["hello"] * 4, asked)
    ]

    async def body(engine):
        sent = []
        put = engine.host.put
        engine.host.put = lambda message: (sent.append(message), put(message))
        streams = [await engine.submit("hello", params) for params in asked]
        found = [
            [update async for update in stream][-1].output.outputs[0].token_ids
            for stream in streams
        ]
        assert found == alone and found[0] != found[3]
        assert [message.sampling_params.seed is None for message in sent] == [
            False,
            True,
            False,
            False,
        ]

    serve(body, seed=3)
