"""One engine prefills, another decodes: through the router, with the bits of one engine."""

from __future__ import annotations

import asyncio
import dataclasses
import os

import pytest
from msgspec.structs import replace

from kv_workers import rewritten, through
from routed import CONFIG, LONG, check_answers, mix, read, reasons, same, until, whole
from twinphase.cluster.address import KEY_VARIABLE
from twinphase.cluster.config import ClusterConfig
from twinphase.cluster.elastic import Balance
from twinphase.cluster.launch import make_host
from twinphase.cluster.ported import PortedHost
from twinphase.cluster.routing import WorkerLoad
from twinphase.config import ENGINES_VARIABLE, EngineConfig
from twinphase.engine.process.messages import StepUpdates
from twinphase.errors import ContextLengthError, EngineUnavailableError
from twinphase.outcome import FinishReason
from twinphase.phases.timeline import IntervalKind

TOPOLOGIES = {
    "1P1D": {"reader": "prefill", "writer": "decode"},
    "2P1D": {"reader": "prefill", "second": "prefill", "writer": "decode"},
    "1P2D": {"reader": "prefill", "writer": "decode", "other": "decode"},
}
LONG_PROMPTS = [[10 + (i * j) % 250 for i in range(180)] for j in (3, 7, 9)]
ASKED = [(prompt, LONG) for prompt in LONG_PROMPTS]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("topology", ["1P2D", pytest.param("2P1D", marks=pytest.mark.slow)])
def test_answers_through_both_pools_are_those_of_one_engine(serve_pools, lone, topology):
    """Mixes of requests with prefixes, grammars, penalties and stop strings, all at once."""
    num_mixes = int(os.environ.get("TWINPHASE_MIXES", "10"))

    async def body(engine):
        sent = 0
        for seed in range(num_mixes):
            found = await check_answers(engine, list(mix(seed)), lone)
            moves = reasons(found, IntervalKind.TRANSFER)
            sent += sum("blocks there" in reason for reason in moves)
        assert sent > 5 * num_mixes
        # Who reads the prompt says all of an answer that has one token.
        prompt = LONG_PROMPTS[0]
        params = dataclasses.replace(LONG, max_tokens=1)
        before = {one.id: one.prefill_seconds for one in engine.host.workers()}
        await check_answers(engine, [(prompt, params)], lone)
        assert {
            one.role for one in engine.host.workers() if one.prefill_seconds > before[one.id]
        } == {"prefill"}
        # Log probabilities of a prompt are its reader's business: who goes on uses the blocks that
        # came.
        prompt = LONG_PROMPTS[1]
        params = dataclasses.replace(LONG, prompt_logprobs=1)
        (found,) = await check_answers(engine, [(prompt, params)], lone)
        assert found.num_cached_tokens == 176
        with pytest.raises(
            ContextLengthError
        ):  # before the first token, although its reader has room for that
            await engine.submit(list(range(10, 300)), LONG)
        await whole(engine)

    serve_pools(body, TOPOLOGIES[topology], seconds=800)


def of_other_layers(bits):
    return bytes(len(bits))


def test_blocks_that_are_wrong_are_found_by_the_first_token_and_not_used(serve_pools, lone):
    """They pass every check on the way.

    The second time around the writer has the right ones, which it computed.
    """
    proxies, heard = through(rewritten(of_other_layers))

    async def body(engine):
        for _ in range(2):
            await check_answers(engine, ASKED, lone)
            found = {one.id: one.first_token_mismatches for one in engine.host.workers()}
            assert found == {"reader": len(LONG_PROMPTS), "writer": 0}
        assert proxies[0].num_spoilt >= 11
        await whole(engine)

    serve_pools(body, TOPOLOGIES["1P1D"], heard)


def test_a_reader_that_lies(serve_pools, lone):
    """A wrong token that the client has already ends the stream; it can be asked for again.

    Other lies cost time alone.
    """
    expected = lone.generate(LONG_PROMPTS, LONG)
    lie = ""

    def changed(update):
        if update.ended is None or not lie:
            return update
        if lie == "another token":
            return replace(update, token_ids=[update.token_ids[0] ^ 1])
        if lie == "other digits":
            entry = dataclasses.replace(update.logprobs[0], logprob=-1.0)
            return replace(update, logprobs=[entry])
        if lie == "no token":
            return replace(update, token_ids=[], logprobs=[])
        ended = dataclasses.replace(update.ended, finish_reason=FinishReason.STOP)
        return replace(update, ended=ended)

    def heard(name, message):
        if name != "reader" or not isinstance(message, StepUpdates):
            return message
        return replace(message, updates=[changed(update) for update in message.updates])

    async def body(engine):
        nonlocal lie
        for lie, num_wrong in {
            "another token": 3,
            "other digits": 6,
            "no token": 6,
            "an end": 6,
        }.items():
            streams = [await engine.submit(prompt, LONG) for prompt in LONG_PROMPTS]
            found = await asyncio.gather(*map(read, streams), return_exceptions=True)
            if lie in ("another token", "other digits"):
                assert all(
                    isinstance(one, EngineUnavailableError) and "the client has already" in str(one)
                    for one in found
                )
            else:
                assert all(map(same, found, expected))
            assert sum(one.first_token_mismatches for one in engine.host.workers()) == num_wrong
        lie = ""
        await check_answers(engine, ASKED, lone)
        await whole(engine)

    serve_pools(body, TOPOLOGIES["1P1D"], heard)


class OneWay(Balance):
    """Any queue counts as long, but workers move only to the role in `wanted`."""

    wanted = ""

    def choose(self, loads, queues, now):
        found = super().choose(loads, queues, now)
        return found if found is not None and found[1] == self.wanted else None


def test_a_worker_goes_over_to_the_pool_that_has_too_much_to_do_and_answers_stay_the_same(
    serve_pools, lone
):
    """A flood of prompts comes first, then one of answers with few seats."""
    balance = OneWay(long_queue=1e-6, patience=0.0)
    short = dataclasses.replace(LONG, max_tokens=2)
    many = dataclasses.replace(LONG, max_tokens=60)
    floods = [
        ("prefill", [([10 + (i * j) % 250 for i in range(400)], short) for j in range(3, 27)]),
        ("decode", [([10 + j, 11], many) for j in range(16)]),
    ]

    async def body(engine):
        views = engine.host.workers_by_name

        def roles():
            return sorted(view.role for view in views.values())

        for role, asked in floods:
            assert roles().count(role) == 1
            balance.wanted = role
            answers = asyncio.create_task(check_answers(engine, asked, lone))
            await until(lambda role=role: roles().count(role) == 2)
            (moved,) = [
                one for one in engine.host.workers() if one.role_reason.startswith(f"to {role}: ")
            ]
            assert moved.role == role and moved.state == "ready"
            await answers
        await whole(engine)

    config = {**CONFIG, "max_num_batched_tokens": 16, "max_num_seqs": 2}
    serve_pools(body, TOPOLOGIES["1P2D"], config=config, balance=balance)


def test_a_pool_has_to_be_short_of_workers_for_some_time_before_one_goes_over():
    def load(name, role, num_decodes=0):
        return WorkerLoad(name, role, None, num_decodes=num_decodes)

    pools = [load("p0", "prefill"), load("d0", "decode", 3), load("d1", "decode", 2)]
    uneven = {"p0": 5.0, "d0": 0.0, "d1": 1.0}
    even = {"p0": 5.0, "d0": 2.0, "d1": 2.0}
    other = {"p0": 0.0, "d0": 5.0, "d1": 5.0}
    balance = Balance(long_queue=2.0, patience=10.0)
    looks = [(uneven, 100.0), (uneven, 109.0), (even, 110.0), (uneven, 111.0), (uneven, 120.9)]
    said = [balance.choose(pools, queues, now) is not None for queues, now in looks]
    assert not any(said)  # it was uneven twice, for less than 10 s
    found, role, why = balance.choose(pools, uneven, 122.0)
    assert (found.name, role) == (
        "d1",
        "prefill",
    ) and "5 s of work wait for each prefill worker" in why
    assert balance.choose(pools, uneven, 123.5) is None  # from the beginning again
    for now in range(
        130, 160
    ):  # its only worker stays in a pool, however short the queue, and however long another's
        assert balance.choose(pools, other, float(now)) is None
        assert (
            balance.choose([load("w", "both"), pools[0]], {"w": 0.0, "p0": 9.0}, now + 0.5) is None
        )


def test_the_command_lines_pools(tiny_path, own_cache, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "put back after this test")
    monkeypatch.setenv(ENGINES_VARIABLE, "1")
    cluster = ClusterConfig(prefill_workers=1, decode_workers=2)
    router = make_host(str(tiny_path), EngineConfig(trace_file="log"), cluster, stall=60.0)
    views = router.workers_by_name
    assert {name: view.role for name, view in views.items()} == {
        "prefill-0": "prefill",
        "decode-0": "decode",
        "decode-1": "decode",
    }
    assert [view.host._config.trace_file for view in views.values()] == [
        f"log.{name}" for name in views
    ]
    assert all(isinstance(view.host, PortedHost) for view in views.values())
