"""Workers on the torch backend, on a CPU: blocks travel, and the tokens are equal.

Plain torch adds in an order that depends on shapes: log probabilities are near each other, not
equal, and the likeliest tokens are compared.
"""

from dataclasses import replace

import pytest
import torch

from added import greedy
from kv_workers import workers
from routed import CONFIG, all_of, mix, reasons
from twinphase.engine.frontends.llm import LLM
from twinphase.engine.process.messages import PushTo

TORCH = {**CONFIG, "backend": "torch", "device": "cpu"}


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_prompt_is_read_on_one_and_answered_on_another(tiny_path):
    prompt = [10 + (7 * i + i * i) % 250 for i in range(150)]
    params = greedy(8)
    with workers(tiny_path, 2, **TORCH) as (reader, writer):
        expected = reader.ask(prompt, params)
        reader.forget()
        first = reader.ask(prompt, params, PushTo(writer.port.addresses, 30.0))
        assert (first.pushed.num_blocks, first.pushed.num_stored, first.pushed.problem) == (
            9,
            9,
            "",
        )
        answer = writer.ask(prompt, params)
    assert answer.tokens == expected.tokens == first.tokens and answer.num_cached == 144


@pytest.mark.slow
def test_a_mix_through_both_pools(serve_pools, tiny_path):
    lone = LLM(tiny_path, **TORCH)
    asked = [
        (prompt, replace(params, temperature=0.0))
        for seed in range(2)
        for prompt, params in mix(seed)
    ]
    expected = lone.generate([prompt for prompt, _ in asked], [params for _, params in asked])

    async def body(engine):
        found = await all_of(engine, asked)
        assert [one.outputs[0].token_ids for one in found] == [
            one.outputs[0].token_ids for one in expected
        ]
        assert sum("blocks there" in reason for reason in reasons(found)) > 5

    serve_pools(body, {"reader": "prefill", "writer": "decode"}, config=TORCH)
