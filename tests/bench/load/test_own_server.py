"""The client against `twinphase serve` with a random model: counts, ids, claims; no times."""

from __future__ import annotations

import json

import pytest

from running import RunningServer
from tiny_gguf import write_tiny_gguf
from twinphase.bench.client.client import run
from twinphase.bench.load.arrivals import Closed, Poisson
from twinphase.bench.load.run import LoadResult, run_load
from twinphase.bench.load.traces import Scaling, trace_workload
from twinphase.bench.load.workload import Lengths, PromptMaker, make_workload
from twinphase.bench.targets.claims import claims_of, claims_reader
from twinphase.bench.targets.openai import OpenAITarget
from twinphase.bench.targets.target import Prompt
from twinphase.errors import InvalidRequestError


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    model = write_tiny_gguf(folder / "tiny.gguf", tensor_type="Q4_0", context=2048)
    with RunningServer(model, folder / "log", "--api-key", "secret") as running:
        yield running


async def opened(server, **options):
    return await OpenAITarget.open(f"{server.url}/v1", api_key="secret", **options)


def test_a_load_counts_what_the_server_counts(server):
    async def work() -> tuple[OpenAITarget, LoadResult]:
        target = await opened(server)
        workload = make_workload(Lengths((60, 90), (6, 6)), 12, await target.sizing(), num_warm_up=2)
        return target, await run_load(target, workload, Poisson(40), claims=claims_reader(target))

    target, result = run(work())
    assert target.facts.engine.startswith("twinphase ") and target.facts.context_length == 2048 and not target.notes
    assert result.failures == {} and result.num_output_tokens == 12 * 6
    assert all(one.finish_reason == "length" and one.num_cached_tokens == 0 for one in result.observations)
    figures = {(claim.figure, claim.source.split("_")[0].split(":")[0].split(".")[0]) for claim in claims_of(result)}
    assert {("TTFT", "timings"), ("TPOT", "timings"), ("TTFT", "twinphase"), ("queue", "twinphase")} <= figures
    means = [claim for claim in claims_of(result) if claim.source == "twinphase:time_to_first_token_seconds"]
    assert means[0].statistic == "mean of 12", "warm-up requests are not in it"


def test_prompts_have_about_the_wanted_length(server):
    async def work():
        target = await opened(server)
        maker = PromptMaker(await target.sizing(), seed=5)
        return [(wanted, (await target.send(maker.take(wanted), 1)).num_prompt_tokens) for wanted in (300, 1000)]

    for wanted, had in run(work()):
        assert had == pytest.approx(wanted, rel=0.15), "its tokens are letters: words differ more than in real ones"


def test_ids_are_sent_as_ids_and_shared_prefixes_are_shared(server, tmp_path):
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 512 * 2 + 40, "output_length": 4}
    path.write_text("\n".join(json.dumps({**line, "hash_ids": [1, 2, last]}) for last in (3, 4)))

    async def work():
        target = await opened(server)
        ids = await target.send(Prompt("", tuple(range(40, 90))), 4)
        workload = trace_workload(path, await target.sizing(), Scaling(lengths=0.25))
        return ids, await run_load(target, workload, Closed(1))

    ids, result = run(work())
    assert ids.num_prompt_tokens == 50 and ids.num_output_tokens == 4
    first, second = (one.num_cached_tokens for one in result.observations)
    assert first == 0 < second, "the second prompt begins with the blocks of the first"


def test_a_wrong_key_and_a_wrong_model(server):
    with pytest.raises(InvalidRequestError, match="API key"):
        run(OpenAITarget.open(server.url, api_key="wrong"))
    with pytest.raises(Exception, match="does not answer a request"):
        run(opened(server, model="another"))
    target = run(opened(server, endpoint="completions"))
    assert target.dialect.endpoint == "completions"
