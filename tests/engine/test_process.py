"""The engine in a process of its own: the same answers, and a model that it refuses."""

import asyncio

import pytest

from twinphase.config import EngineConfig
from twinphase.engine.frontends.async_engine import AsyncEngine
from twinphase.engine.process.host import ProcessHost
from twinphase.errors import EngineUnavailableError, InvalidRequestError, ModelNotFoundError
from twinphase.request import SamplingParams

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


@pytest.fixture
def serve(tiny_path, own_cache):
    """Runs a coroutine function with an engine in a process of its own."""

    def run(body, **config):
        async def main():
            engine = AsyncEngine.in_process(tiny_path, backend="reference", **config)
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
            answer = updates[-1].output.outputs[
                0
            ]  # the oracle's log probabilities are not bitwise those of a batch
            assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
            assert [set(found) for found in answer.logprobs] == [
                set(found) for found in expected.logprobs
            ]
            timeline = updates[-1].output.metrics
            assert sum(timeline.totals().values()) == pytest.approx(timeline.end - timeline.arrival)
            assert len(timeline.token_times) == 12
        assert "cached" in str(await engine.explain(streams[0]))
        assert engine.facts.config.max_model_len == 128 and engine.stats.num_running == 0
        # Steps with prefill report what they taught the cost model.
        assert engine.stats.prices == ()
        await read(await engine.submit("another prompt", SamplingParams(max_tokens=1)))
        assert len(engine.stats.prices) == len(engine.facts.prices) > 0
        assert engine.stats.prices != engine.facts.prices
        for arguments in (
            {"prompt": "x" * 100_000},
            {"prompt": [1, 10**9]},
            {"prompt": [1], "priority": 1},
        ):
            with pytest.raises(InvalidRequestError):
                await engine.submit(**arguments)
        assert (await read(await engine.submit(PROMPTS[0], PARAMS)))[-1].output.outputs[0] == alone[
            0
        ]

    serve(body)


def test_a_model_that_is_refused_is_not_tried_again(serve, tmp_path):
    async def body(engine):
        while engine.host.failure is None:
            await asyncio.sleep(0.01)
        assert (
            engine.host.failure.kind == "InvalidRequestError"
            and "max_model_len" in engine.host.failure.cause
        )
        assert not engine.is_running and engine.host.num_restarts == 0

    serve(body, max_model_len=100_000)
    with pytest.raises(ModelNotFoundError):
        ProcessHost(tmp_path / "nothing.gguf", EngineConfig())
