"""A prompt's cost is divided among its parts without a remainder."""

from __future__ import annotations

import pytest

from twinphase.batch import StepWork
from twinphase.explain.prompt_costs import divide, part_at
from twinphase.phases.cost import FEATURES, CostModel
from twinphase.phases.work import ModelShape

SHAPE = ModelShape(10**8, 3 * 10**7, 6 * 10**7, 3 * 10**7, 30, 9, 3, 64, kv_token_bytes=1000)
RUNS = [
    ("template", 0, 10),
    ("system", 10, 300),
    ("template", 300, 310),
    ("question", 310, 400),
    ("template", 400, 405),
]
MODEL = CostModel((2.5e-3, 1e-4, 3e-4, 1.3e-4, 2e-6, 1e-6, 3e-5))


def only(**prices: float) -> CostModel:
    return CostModel([prices.get(name, 0.0) for name in FEATURES])


@pytest.mark.parametrize("cached", [0, 16, 304, 404])
def test_parts_add_up(cached):
    parts = divide(RUNS, cached, 2.0, MODEL, SHAPE)
    assert [part.part for part in parts] == ["template", "system", "question"]
    assert (
        sum(part.tokens for part in parts) == 405
        and sum(part.kv_bytes for part in parts) == 405_000
    )
    assert sum(part.cached_tokens for part in parts) == cached
    assert sum(part.computed_tokens for part in parts) == 405 - cached
    assert sum(part.prefill_share for part in parts) == pytest.approx(1)
    assert sum(part.prefill_seconds for part in parts) == pytest.approx(2)


def test_cached_tokens_cost_nothing():
    template, system, question = divide(RUNS, 304, 1.0, MODEL, SHAPE)
    assert (system.prefill_share, system.cached_tokens, system.kv_bytes) == (0, 290, 290_000)
    assert (template.cached_tokens, template.computed_tokens) == (14, 11)
    assert (question.cached_tokens, question.computed_tokens) == (0, 90)
    assert {part.prefill_share for part in divide(RUNS, 405, 1.0, MODEL, SHAPE)} == {0}
    assert divide([], 0, 1.0, MODEL, SHAPE) == []


def test_attention_counts_by_position():
    halves = [("first", 0, 100), ("second", 100, 200)]
    first, second = divide(halves, 0, 1.0, only(prefill_contexts=1.0), SHAPE)
    contexts = StepWork.of_chunk(100, 100, False).prefill_contexts
    assert second.prefill_share == pytest.approx(
        contexts / StepWork.of_chunk(0, 200, False).prefill_contexts
    )
    first, second = divide(halves, 0, 1.0, only(step=1.0, few_rows=1.0, many_rows=0.1), SHAPE)
    assert first.prefill_share == pytest.approx(second.prefill_share)


def test_the_part_of_a_token():
    assert [part_at(RUNS, i) for i in (0, 9, 10, 309, 404)] == [
        "template",
        "template",
        "system",
        "template",
        "template",
    ]
    assert part_at(RUNS, 405) is None and part_at([], 0) is None
