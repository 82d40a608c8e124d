"""The number of tokens from a draft model, and isolation of its failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from twinphase.batch import Batch, Phase, ScheduledRequest, StepOutput, StepWork
from twinphase.phases.cost import FEATURES, CostModel
from twinphase.request import Request, SamplingParams
from twinphase.speculation.draft_lengths import drafted_row
from twinphase.speculation.draft_model_policy import (
    LEARNING_STEPS,
    TRIAL_TIME_SHARE,
    DraftModelPolicy,
    tokens_to_draft,
)
from twinphase.speculation.speculator import Speculator


@pytest.mark.parametrize(
    ("chance", "writing", "row", "requests", "expected"),
    [
        (0.0, 0.1, 0.1, 1, 0),
        (1.0, 0.1, 0.1, 1, 4),
        (1.0, 1.1, 0.0, 1, 0),
        # Tokens per second: 1, 1.8 / 1.5, 2.44 / 2, 2.95 / 2.5.
        (0.8, 0.4, 0.1, 1, 2),
        # Of two requests: 2, 3.6 / 1.6, 4.88 / 2.2.
        (0.8, 0.4, 0.1, 2, 1),
        (0.8, 0.4, 0.9, 2, 0),
    ],
)
def test_as_far_as_the_next_token_brings_more_than_it_costs(
    chance, writing, row, requests, expected
):
    decodes = StepWork.of_decodes(requests, 10)
    more = drafted_row(10, None)

    def seconds(work: StepWork) -> float:
        return 1.0 + row * (work.rows - requests)

    assert (
        tokens_to_draft(lambda position: [chance] * requests, writing, decodes, more, seconds, 4)
        == expected
    )


class Model:
    """Writes 7, 7, 7 ...; notes what it was asked for."""

    num_speculative_tokens = 3

    def __init__(self) -> None:
        self.times = CostModel([1e-3] * len(FEATURES))
        self.limits: list[dict[str, int]] = []
        self.forgotten: list[str] = []
        self.fails = False
        self.missing: dict[str, int] = {}

    def num_missing(self, request: Request) -> int:
        return self.missing.get(request.request_id, 4)

    def draft(self, requests: Sequence[Request], limits: Mapping[str, int]) -> dict[str, list[int]]:
        if self.fails:
            raise RuntimeError("struck by the test")
        self.limits.append(dict(limits))
        return {name: [7] * limit for name, limit in limits.items() if limit}

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """Do nothing: this model keeps no state."""

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.request_id)


def speculator(seconds_per_step: float = 1.0) -> tuple[Speculator, Any]:
    model: Any = Model()
    times = CostModel([seconds_per_step, *[1e-9] * (len(FEATURES) - 1)])
    made = Speculator([], times, most=3)
    made.draft_model = DraftModelPolicy(model, times)
    return made, model


def request(name: str) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(max_tokens=10_000), output_token_ids=[4])


def one_step(made: Speculator, requests: Sequence[Request], token_id: int) -> dict[str, list[int]]:
    """A step in which every request says `token_id` as often as it may."""
    drafts = made.draft(requests)
    shares = [
        ScheduledRequest(
            one.request_id,
            Phase.DECODE,
            [4, *drafts.get(one.request_id, [])],
            3,
            [0],
            True,
            one.sampling_params,
            num_drafts=len(drafts.get(one.request_id, [])),
        )
        for one in requests
    ]
    said = {
        share.request_id: [token_id]
        * (share.num_logits if token_id == 7 else 1)  # 7 is what the model writes
        for share in shares
    }
    made.observe(Batch(shares, []), StepOutput(said))
    return drafts


def test_a_model_that_is_right_goes_on_writing():
    made, _ = speculator()
    for _ in range(2 * LEARNING_STEPS):
        drafts = one_step(made, [request("a")], 7)
    assert drafts == {"a": [7, 7, 7]}


def test_one_that_is_wrong_is_tried_for_little_of_the_time_and_comes_back_when_it_is_right():
    made, model = speculator(seconds_per_step=0.02)
    both = [request("a"), request("b")]
    for _ in range(LEARNING_STEPS + 1000):
        one_step(made, both, 5)
    asked = [sum(limits.values()) for limits in model.limits]
    assert asked[:LEARNING_STEPS] == [6] * LEARNING_STEPS
    # By these prices a step of the draft model that catches up with 4 tokens takes 4 + 10 + 1 + 1 +
    # 1 ms.
    tried = sum(asked[LEARNING_STEPS:])
    assert 0 < tried * 0.017 <= TRIAL_TIME_SHARE * 1000 * 0.0201
    assert set(asked[LEARNING_STEPS:]) == {0, 1}
    for _ in range(8000):
        one_step(made, both, 7)
    assert sum(model.limits[-1].values()) > 1


def test_what_is_far_behind_is_not_caught_up_with_only_to_try():
    made, model = speculator(seconds_per_step=0.02)
    model.missing = {"a": 5000, "b": 5000}
    both = [request("a"), request("b")]
    for one in both:
        one.output_token_ids *= 5000
    for _ in range(LEARNING_STEPS + 1000):
        one_step(made, both, 5)
    assert sum(sum(limits.values()) for limits in model.limits[LEARNING_STEPS:]) == 0


def test_a_model_that_fails_is_switched_off_for_those_requests(
    caplog,
):
    made, model = speculator()
    model.fails = True
    assert made.draft([request("a")]) == {}
    assert "switched off" in caplog.text
    assert made.draft_model is not None
    assert (made.draft_model.num_failures, model.forgotten) == (1, ["a"])
    model.fails = False
    assert set(made.draft([request("a"), request("b")])) <= {"b"}
    assert set(model.limits[-1]) == {"b"}
    made.forget(request("a"))
    made.draft([request("a")])
    assert set(model.limits[-1]) == {"a"}, "another request of that name"
