"""Loads of our own engine and of `twinphase serve` with a random model, without times."""

from __future__ import annotations

import json

import pytest

from bench.load.made_load import check_sections
from running import RunningServer
from tiny_gguf import write_tiny_gguf
from twinphase.errors import InvalidRequestError
from twinphase.workload.distributions import Closed, Lengths, Paced
from twinphase.workload.traces import Scaling
from twinphase_bench.client.client import run
from twinphase_bench.load.report import load_sections
from twinphase_bench.load.run import run_load
from twinphase_bench.load.traces import trace_workload
from twinphase_bench.load.workload import PromptMaker, make_workload
from twinphase_bench.targets.engine_load import EngineLoadTarget
from twinphase_bench.targets.openai import OpenAITarget
from twinphase_bench.targets.server_times import claims_of
from twinphase_bench.targets.target import Prompt


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    model = write_tiny_gguf(folder / "tiny.gguf", tensor_type="Q4_0", context=2048)
    with RunningServer(model, folder / "log", "--api-key", "secret") as running:
        yield running


def opened(server, **options):
    return run(OpenAITarget.open(f"{server.url}/v1", api_key="secret", **options))


def test_a_load_counts_what_the_server_counts(server):
    target = opened(server)
    workload = make_workload(Lengths((60, 90), (6, 6)), 12, run(target.sizing()), num_warm_up=2)
    result = run(run_load(target, workload, Paced(40)))
    assert (
        target.facts.engine.startswith("twinphase ")
        and target.facts.context_length == 2048
        and not target.notes
    )
    assert result.failures == {} and result.num_output_tokens == 12 * 6
    assert all(
        one.finish_reason == "length" and one.num_cached_tokens == 0 for one in result.observations
    )
    claims = {claim.source: claim.number for claim in claims_of(result)}
    assert claims["timings.ttft_ms"] == claims["timings.tpot_ms"] == 12, (
        "warm-up requests are not in it"
    )


def test_prompts_have_about_the_wanted_length(server):
    target = opened(server)
    maker = PromptMaker(run(target.sizing()), seed=5)
    for wanted in (300, 1000):
        seen = run(target.send(maker.take(wanted), 1))
        # Its tokens are letters: words differ more than in real ones.
        assert seen.num_prompt_tokens == pytest.approx(wanted, rel=0.15)


def test_ids_are_sent_as_ids_and_shared_prefixes_are_shared(server, tmp_path):
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 512 * 2 + 40, "output_length": 4}
    path.write_text("\n".join(json.dumps({**line, "hash_ids": [1, 2, last]}) for last in (3, 4)))

    target = opened(server)
    ids = run(target.send(Prompt("", tuple(range(40, 90))), 4))
    workload = trace_workload(path, run(target.sizing()), Scaling(lengths=0.25))
    result = run(run_load(target, workload, Closed(1)))
    assert ids.num_prompt_tokens == 50 and ids.num_output_tokens == 4
    first, second = (one.num_cached_tokens for one in result.observations)
    assert first == 0 < second, "the second prompt begins with the blocks of the first"


def test_a_wrong_key_and_a_wrong_model(server):
    with pytest.raises(InvalidRequestError, match="API key"):
        run(OpenAITarget.open(server.url, api_key="wrong"))
    with pytest.raises(Exception, match="does not answer a request"):
        opened(server, model="another")
    assert opened(server, endpoint="completions").dialect.endpoint == "completions"


class NoUpdates:
    """A stream of the engine that ends before its first update."""

    request_id = "empty"

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def __aiter__(self):
        for update in ():
            yield update


@pytest.fixture
def engine(tmp_path):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tensor_type="Q4_0", context=512)
    return EngineLoadTarget(str(path), backend="reference")


def test_an_engine_that_fails_loses_one_request(engine, monkeypatch):
    submit = engine._engine.submit
    ways = iter(["", "raise", "empty", ""])

    async def broken(asked, params):
        way = next(ways)
        if way == "raise":
            raise RuntimeError("of the engine")
        return NoUpdates() if way == "empty" else await submit(asked, params)

    async def work():
        monkeypatch.setattr(engine._engine, "submit", broken)
        workload = make_workload(Lengths((8, 8), (3, 3)), 4, await engine.sizing(), num_warm_up=0)
        result = await run_load(engine, workload, Closed(1))
        await engine.close()
        return result

    result = run(work())
    assert len(result.succeeded) == 2 and result.failures == {"exception": 1, "no output": 1}
    assert all(one.tpot is not None for one in result.succeeded)


def test_our_engine_in_this_process_as_a_target(engine):
    async def work():
        sizing = await engine.sizing()
        assert sizing.encode is not None and sizing.encode("ab")
        workload = make_workload(Lengths((10, 20), (4, 4)), 6, sizing, num_warm_up=1)
        result = await run_load(engine, workload, Paced(50, even=True))
        closed = await run_load(
            engine, make_workload(Lengths((8, 8), (3, 3)), 4, sizing, seed=1), Closed(2)
        )
        long = make_workload(Lengths((600, 600), (3, 3)), 1, sizing)
        with pytest.raises(InvalidRequestError, match="context"):
            await run_load(engine, long, Closed(1))
        refused = await engine.send(long.requests[0].prompt, 3)
        await engine.close()
        return workload, result, closed, refused

    workload, result, closed, refused = run(work())
    counted = [
        (one.error, one.num_prompt_tokens, one.num_output_tokens) for one in result.observations
    ]
    assert counted == [("", request.prompt.num_tokens, 4) for request in workload.requests]
    assert all(
        one.num_cached_tokens == 0 and one.finish_reason == "length" for one in result.observations
    )
    assert all(
        a.ttft > 0 and a.sent <= a.token_times[0] <= a.token_times[-1] <= a.ended
        for a in result.observations
    )
    assert len(closed.succeeded) == 4 and refused.status == 400 and not refused.succeeded
    check_sections(load_sections(result))
