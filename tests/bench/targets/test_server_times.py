"""Servers' own latencies compared with the client's, for the same requests."""

import pytest

from bench.load.made_load import opened, requests
from twinphase.workload.distributions import Closed
from twinphase_bench.client.client import run
from twinphase_bench.load.run import run_load
from twinphase_bench.targets.server_times import claims_of, claims_section

LLAMA = {
    "prompt_n": 10,
    "prompt_ms": 15.0,
    "predicted_n": 5,
    "predicted_ms": 20.0,
    "predicted_per_token_ms": 4.0,
}


def load(stub, *scripts):
    return run(run_load(opened(stub, *scripts), requests(len(scripts)), Closed(1)))


def test_llama_cpp_timings_stand_beside_ours(stub):
    result = load(stub, *[{"first": 0.03, "gaps": [0.005] * 4, "timings": LLAMA}] * 4)
    ttft, tpot = claims_of(result)
    assert (ttft.figure, ttft.theirs, ttft.source) == ("TTFT", 0.015, "timings.prompt_ms")
    assert ttft.ours >= 0.03 and ttft.difference == pytest.approx(ttft.ours - 0.015)
    assert (tpot.figure, tpot.theirs, tpot.number) == ("TPOT", 0.004, 4)
    assert tpot.ours >= 0.005 and "divided by n" in tpot.definition
    (table,) = claims_section(result).tables
    assert table.rows[0][2] == "15.00"


@pytest.mark.parametrize(
    ("where", "said", "figures"),
    [
        # Ours has llama.cpp's fields, too: they are not taken for llama.cpp's claims.
        (
            "timings",
            {
                "prompt_ms": 9.0,
                "predicted_per_token_ms": 9.0,
                "ttft_ms": 10.0,
                "tpot_ms": None,
                "e2e_ms": 20.0,
            },
            [("TTFT", 10.0), ("E2E", 20.0)],
        ),
        (
            "metrics",
            {
                "queue_time_ms": 3.0,
                "time_to_first_token_ms": 11.0,
                "mean_itl_ms": 5.0,
                "generation_time_ms": 40.0,
            },
            [("queue", 3.0), ("TTFT", 11.0), ("TPOT", 5.0), ("decode time", 40.0)],
        ),
    ],
)
def test_claims_in_replies_of_twinphase_and_vllm(stub, where, said, figures):
    result = load(stub, *[{"gaps": [0.001]}] * 2)
    for one in result.observations:
        one.claims[where] = said
    claims = claims_of(result)
    assert [(claim.figure, round(1e3 * claim.theirs, 6)) for claim in claims] == figures
    assert all((claim.ours is None) == (claim.figure == "queue") for claim in claims)


def test_a_server_without_claims_is_said_to_have_none(stub):
    result = load(stub, {})
    assert claims_of(result) == [] and "none that is read" in claims_section(result).paragraphs[0]
