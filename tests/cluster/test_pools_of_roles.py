"""One engine reads prompts, another one answers: through the router, with the bits of one engine alone."""

from __future__ import annotations

import asyncio
import dataclasses
import os

import pytest
from msgspec.structs import replace

from kv_workers import rewritten, through
from routed import LONG, all_of, mix, read, same, whole
from twinphase.cluster.address import KEY_VARIABLE
from twinphase.cluster.config import ClusterConfig
from twinphase.cluster.launch import make_host
from twinphase.cluster.ported import PortedHost
from twinphase.engine.messages import StepNews
from twinphase.errors import EngineUnavailableError
from twinphase.phases.timeline import IntervalKind
from twinphase.request import FinishReason

TOPOLOGIES = {
    "1P1D": {"reader": "prefill", "writer": "decode"},
    "2P1D": {"reader": "prefill", "second": "prefill", "writer": "decode"},
    "1P2D": {"reader": "prefill", "writer": "decode", "other": "decode"},
}
LONG_PROMPTS = [[10 + (i * j) % 250 for i in range(180)] for j in (3, 7, 9)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "topology", ["1P1D", *(pytest.param(name, marks=pytest.mark.slow) for name in ("2P1D", "1P2D"))]
)
def test_answers_through_both_pools_are_those_of_one_engine(serve_pools, lone, topology):
    """Mixes of requests with prefixes, grammars, penalties and stop strings, all at once."""
    num_mixes = int(os.environ.get("TWINPHASE_MIXES", "10"))

    async def body(engine):
        sent = 0
        for seed in range(num_mixes):
            asked = list(mix(seed))
            expected = lone.generate([prompt for prompt, _ in asked], [params for _, params in asked])
            found = await all_of(engine, asked)
            assert all(map(same, found, expected))
            routes = [one.reason for output in found for one in output.metrics.intervals
                      if one.kind is IntervalKind.TRANSFER]  # fmt: skip
            sent += sum("blocks there" in reason for reason in routes)
        assert sent > 5 * num_mixes
        # Who reads the prompt says all of an answer that has one token.
        prompt, params = LONG_PROMPTS[0], dataclasses.replace(LONG, max_tokens=1)
        before = {one.id: one.prefill_seconds for one in engine.host.workers()}
        assert same(*await all_of(engine, [(prompt, params)]), lone.generate([prompt], params)[0])
        assert {one.role for one in engine.host.workers() if one.prefill_seconds > before[one.id]} == {"prefill"}
        # Log probabilities of a prompt are its reader's business: who goes on uses the blocks that came.
        prompt, params = LONG_PROMPTS[1], dataclasses.replace(LONG, prompt_logprobs=1)
        (found,) = await all_of(engine, [(prompt, params)])
        assert same(found, lone.generate([prompt], params)[0]) and found.num_cached_tokens == 176
        await whole(engine)

    serve_pools(body, TOPOLOGIES[topology], seconds=800)


def of_other_layers(bits):
    return bytes(len(bits))


@pytest.mark.timeout(300)
def test_blocks_that_are_wrong_are_found_by_the_first_token_and_not_used(serve_pools, lone):
    """They pass every check on the way. The second time around the writer has the right ones, which it computed."""
    expected = lone.generate(LONG_PROMPTS, LONG)
    proxies, heard = through(rewritten(of_other_layers))

    async def body(engine):
        for _ in range(2):
            assert all(map(same, await all_of(engine, [(prompt, LONG) for prompt in LONG_PROMPTS]), expected))
            found = {one.id: one.first_token_mismatches for one in engine.host.workers()}
            assert found == {"reader": len(LONG_PROMPTS), "writer": 0}
        assert proxies[0].num_spoilt >= 11
        await whole(engine)

    serve_pools(body, TOPOLOGIES["1P1D"], heard)


@pytest.mark.timeout(300)
def test_a_reader_that_lies(serve_pools, lone):
    """A wrong token that was told already ends the stream; it can be asked for again. Other lies cost time alone."""
    expected = lone.generate(LONG_PROMPTS, LONG)
    lie = ""

    def told(news):
        if news.finished is None or not lie:
            return news
        if lie == "another token":
            return replace(news, token_ids=[news.token_ids[0] ^ 1])
        if lie == "other digits":
            return replace(news, logprobs=[dataclasses.replace(news.logprobs[0], logprob=-1.0)])
        if lie == "no token":
            return replace(news, token_ids=[], logprobs=[])
        return replace(news, finished=replace(news.finished, reason=FinishReason.STOP))

    def heard(name, message):
        if name != "reader" or not isinstance(message, StepNews):
            return message
        return replace(message, news=[told(news) for news in message.news])

    async def body(engine):
        nonlocal lie
        for lie, num_wrong in {"another token": 3, "other digits": 6, "no token": 6, "an end": 6}.items():
            streams = [await engine.submit(prompt, LONG) for prompt in LONG_PROMPTS]
            found = await asyncio.gather(*map(read, streams), return_exceptions=True)
            if lie in ("another token", "other digits"):
                assert all(isinstance(one, EngineUnavailableError) and "told already" in str(one) for one in found)
            else:
                assert all(map(same, found, expected))
            assert sum(one.first_token_mismatches for one in engine.host.workers()) == num_wrong
        lie = ""
        assert all(map(same, await all_of(engine, [(prompt, LONG) for prompt in LONG_PROMPTS]), expected))
        await whole(engine)

    serve_pools(body, TOPOLOGIES["1P1D"], heard)


def test_the_command_lines_pools(tiny_path, own_cache, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "put back after this test")
    cluster = ClusterConfig(prefill_workers=1, decode_workers=2)
    router = make_host(str(tiny_path), {"trace_file": "log"}, cluster, stall=60.0)
    views = router.workers_by_name
    assert {name: view.role for name, view in views.items()} == {
        "prefill-0": "prefill",
        "decode-0": "decode",
        "decode-1": "decode",
    }
    assert [view.host._config["trace_file"] for view in views.values()] == [f"log.{name}" for name in views]
    assert all(isinstance(view.host, PortedHost) for view in views.values())
