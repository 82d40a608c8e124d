"""The engine in a process of its own: the same answers, and what happens when it dies."""

import asyncio
import os
import signal

import pytest

from tiny_gguf import write_tiny_gguf
from twinphase.engine.async_engine import AsyncEngine
from twinphase.engine.host import ProcessHost
from twinphase.errors import EngineDeadError, EngineUnavailableError, InvalidRequestError, ModelNotFoundError
from twinphase.request import SamplingParams, StructuredOutputsParams

PROMPTS = ["hello world", "the king and the thing", "a"]
PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=12, logprobs=2, ignore_eos=True)


async def until_ready(engine):
    for _ in range(9000):
        if engine.is_running:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not ready: {engine.progress}")


async def read(stream):
    return [update async for update in stream]


@pytest.fixture(scope="session")
def long_path(tmp_path_factory):
    """The same model with room for answers that are not over before what a test does to their engine."""
    return write_tiny_gguf(tmp_path_factory.mktemp("long") / "tiny.gguf", tensor_type="F32", context=8192)


@pytest.fixture
def serve(tiny_path, own_cache):
    """Runs a coroutine function with an engine in a process of its own."""

    def run(body, path=tiny_path, **config):
        async def main():
            engine = AsyncEngine.in_process(path, backend="reference", **config)
            try:
                await body(engine)
            finally:
                await asyncio.to_thread(engine.close)

        asyncio.run(asyncio.wait_for(main(), 120))

    return run


def test_answers_are_those_of_an_engine_in_this_process(serve, llm):
    alone = [llm.generate([prompt], PARAMS)[0].outputs[0] for prompt in PROMPTS]

    async def body(engine):
        with pytest.raises(EngineUnavailableError, match="not ready"):
            await engine.submit("hello")
        await until_ready(engine)
        streams = [await engine.submit(prompt, PARAMS) for prompt in PROMPTS]
        for updates, expected in zip(await asyncio.gather(*map(read, streams)), alone, strict=True):
            answer = updates[-1].output.outputs[0]  # the oracle's log probabilities are not bitwise those of a batch
            assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
            assert [set(found) for found in answer.logprobs] == [set(found) for found in expected.logprobs]
            timeline = updates[-1].output.metrics
            assert sum(timeline.totals().values()) == pytest.approx(timeline.end - timeline.arrival)
            assert len(timeline.token_times) == 12
        assert "cached" in str(await engine.explain(streams[0]))
        assert engine.facts.config.max_model_len == 128 and engine.stats.num_running == 0
        for arguments in ({"prompt": "x" * 100_000}, {"prompt": [1, 10**9]}, {"prompt": [1], "priority": 1}):
            with pytest.raises(InvalidRequestError):
                await engine.submit(**arguments)
        assert (await read(await engine.submit(PROMPTS[0], PARAMS)))[-1].output.outputs[0] == alone[0]

    serve(body)


def test_a_grammar_compiles_beside_the_loop_and_may_be_given_up(serve):
    wanted = StructuredOutputsParams(regex="[ab]{4}")
    params = SamplingParams(max_tokens=20, seed=1, structured_outputs=wanted)

    async def body(engine):
        await until_ready(engine)
        output = (await read(await engine.submit("hello", params)))[-1].output.outputs[0]
        assert len(output.text) == 4 and set(output.text) <= set("ab") and output.finish_reason == "stop"
        with pytest.raises(InvalidRequestError, match="regex"):
            await engine.submit("hello", SamplingParams(structured_outputs=StructuredOutputsParams(regex="[")))
        task = asyncio.create_task(engine.submit("hello", params))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len((await read(await engine.submit("hello", PARAMS)))[-1].output.outputs[0].token_ids) == 12
        assert engine.num_unfinished == 0

    serve(body)


def test_a_killed_engine_fails_its_requests_and_is_started_again(serve, long_path, llm):
    expected = llm.generate(["hello"], PARAMS)[0].outputs[0]
    long = SamplingParams(temperature=0.0, max_tokens=8000, ignore_eos=True)

    async def body(engine):
        await until_ready(engine)
        for number in (1, 2):
            streams = [await engine.submit("hello", long) for _ in range(3)]
            os.kill(engine.host.pid, signal.SIGKILL)
            for result in await asyncio.gather(*map(read, streams), return_exceptions=True):
                assert isinstance(result, EngineDeadError) and "signal 9" in str(result)
            assert engine.num_unfinished == 0 and not engine.is_running
            await until_ready(engine)
            assert engine.host.num_restarts == number
            assert (await read(await engine.submit("hello", PARAMS)))[-1].output.outputs[0] == expected

    serve(body, long_path)


def test_a_model_that_is_refused_is_not_tried_again(serve, tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tensor_type="F32", context=128)

    async def body(engine):
        while engine.host.failure is None:
            await asyncio.sleep(0.01)
        assert engine.host.failure.kind == "InvalidRequestError" and "max_model_len" in engine.host.failure.cause
        assert not engine.is_running and engine.host.num_restarts == 0

    serve(body, path, max_model_len=100_000)
    with pytest.raises(ModelNotFoundError):
        ProcessHost(tmp_path / "nothing.gguf", {})
