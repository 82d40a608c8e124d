"""The rules on made-up ledgers: what counts before and after the first token, and what no second is claimed twice for.

`test_diagnosis_provoked.py` has each cause on a real engine.
"""

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from twinphase.config import EngineConfig
from twinphase.phases.client_diagnosis import CLIENT_RULES
from twinphase.phases.cost import CostModel
from twinphase.phases.diagnosis import DECODE_RULES, PREFILL_RULES, diagnose
from twinphase.phases.evidence import Evidence, Machine
from twinphase.phases.explain import explain, explain_evidence
from twinphase.phases.hardware import Ceilings
from twinphase.phases.levers import Lever, rank
from twinphase.phases.report import Units
from twinphase.phases.timeline import IntervalKind, RequestTimeline, StepRecord
from twinphase.phases.work import Cost, ModelShape
from twinphase.request import MissReason, PrefixMiss, Request, SamplingParams

ROOT = Path(__file__).parents[2]
SHAPE = ModelShape(1000, 500, 600, 300, 2, 4, 2, 64, kv_token_bytes=800)
PRICES = (2e-3, 1e-4, 5e-4, 1e-4, 1e-8, 1e-6, 1e-5)
CEILINGS = Ceilings("p", 1, "generic", ((1, 1e6), (1 << 30, 1e6)), 1e6, 1e5, None)
UNITS = Units("int8", "int8", "float32")


def machine(ceilings=CEILINGS, **config):
    known = {name: config.pop(name) for name in ("cores", "best_isa") if name in config}
    return Machine(EngineConfig(num_kv_blocks=64, **config), SHAPE, CostModel(PRICES), ceilings, UNITS, **known)


def evidence(pieces, first=None, miss=None, **fields):
    timeline = RequestTimeline(0.0)
    for index, (kind, seconds) in enumerate(pieces):
        timeline.mark(kind, timeline.end + seconds, index + 10)
    if first is not None:
        timeline.token_times = [first, timeline.end]
    request = Request("me", [1] * 100, SamplingParams())
    request.output_token_ids, request.prefix_miss = [1, 1], miss
    return Evidence(request, timeline, fields.pop("machine", machine()), **fields)


def decoded(bytes_=0, linear=10, seconds=1.0, **inside):
    timeline = RequestTimeline(0.0)
    timeline.add_prefill(StepRecord(9, 0.0, 0.1, 100, 0, Cost(), Cost()), 100, 0.1)
    timeline.hand_over_tokens(1, 0.1)
    record = StepRecord(10, 0.1, 0.1 + seconds, 0, 1, Cost(), Cost(linear, 0, bytes_), (), 1, 0.0, **inside)
    timeline.add_decode(record, 1, seconds, seconds)
    timeline.hand_over_tokens(1, timeline.end)
    request = Request("me", [1] * 100, SamplingParams())
    request.output_token_ids = [1, 1]
    return request, timeline


def causes(found, phase):
    return [one.cause for one in found if one.phase == phase]


def test_each_symptom_weighs_its_own_side_of_the_first_token():
    pieces = [(IntervalKind.QUEUE, 3.0), (IntervalKind.PREFILL, 1.0), (IntervalKind.STALL, 5.0),
              (IntervalKind.SEND, 1.0)]  # fmt: skip
    found = diagnose(evidence(pieces, first=4.0))
    assert [(one.cause, one.share) for one in found if one.phase == "prefill"] == [
        ("queue", 0.75),
        ("prompt_length", pytest.approx(0.25)),
    ]
    assert [(one.cause, one.share) for one in found if one.phase == "decode"] == [
        ("stalls", pytest.approx(5 / 6)),
        ("slow_reader", pytest.approx(1 / 6)),
    ]


@given(
    st.lists(st.tuples(st.sampled_from(list(IntervalKind)), st.floats(1e-4, 10)), min_size=1, max_size=12),
    st.floats(0, 1),
    st.sampled_from([None, *(PrefixMiss(reason, index) for reason in MissReason for index in (0, 5, 40))]),
    st.booleans(),
)
@settings(deadline=None)
@example([(IntervalKind.QUEUE, 2.0)], 0.5, None, False)
def test_no_second_is_claimed_twice(pieces, first, miss, known):
    whole = sum(seconds for _, seconds in pieces)
    found = diagnose(evidence(pieces, first * whole, miss, machine=machine() if known else None))
    for phase in ("prefill", "decode"):
        assert sum(one.share or 0 for one in found if one.phase == phase) <= 1 + 1e-6
    assert all(one.seconds is None or one.seconds >= 0 for one in found)


def test_without_an_engine_nothing_is_predicted():
    found = explain_evidence(evidence([(IntervalKind.QUEUE, 1.0), (IntervalKind.PREFILL, 1.0)], machine=None))
    assert found.alone is None and found.error is None and set(found.bounds.values()) == {"unknown"}
    assert [lever.flag for lever in found.levers if lever.saved_seconds is not None] == []


@pytest.mark.parametrize(
    ("bytes_", "linear", "inside", "config", "cause"),
    [
        (900_000, 10, {}, {}, "model_size"),
        (10, 900_000, {}, {}, "model_size"),
        (10, 10, {}, {}, "step_overhead"),
        (900_000, 10, {}, {"ceilings": None}, "unknown_bound"),
        (900_000, 10, {}, {"threads": 1, "cores": 2}, "threads"),
        (900_000, 10, {}, {"isa": "generic", "best_isa": "avx2"}, "isa"),
        (900_000, 10, {"executed": 1.0, "cpu_wait": 0.8}, {}, "contention"),
        (900_000, 10, {"executed": 1.0, "sampling": 0.8}, {}, "sampling"),
        (900_000, 10, {"executed": 0.2}, {}, "step_overhead"),
    ],
)
def test_what_a_token_waits_for(bytes_, linear, inside, config, cause):
    small = Machine(machine(**dict(config)).config, ModelShape(1000, 500, 600_000, 300_000, 2, 4, 2, 64, 800),
                    CostModel(PRICES), config.get("ceilings", CEILINGS), UNITS, config.get("cores"),
                    config.get("best_isa"))  # fmt: skip
    found = explain(*decoded(bytes_, linear, **inside), small)
    assert causes(found.diagnoses, "decode")[0] == cause


def test_a_long_context_is_told_from_a_large_model():
    found = explain(*decoded(900_000), machine())  # 900 bytes of weights, 800 of each of 101 tokens
    assert causes(found.diagnoses, "decode") == ["context_length"]


def test_above_the_ceiling_is_not_clamped():
    found = explain(*decoded(3_000_000), machine())
    assert found.efficiency["decode"].mbu == pytest.approx(3.0)


def test_had_it_run_alone_is_the_cost_model_without_the_others():
    pieces = [(IntervalKind.TOKENIZE, 0.5), (IntervalKind.QUEUE, 3.0), (IntervalKind.PREFILL, 1.0),
              (IntervalKind.STALL, 5.0), (IntervalKind.SEND, 0.25)]  # fmt: skip
    lived = evidence(pieces, first=4.5)
    alone = explain_evidence(lived).alone
    assert alone.ttft == pytest.approx(0.5 + lived.prefill_alone())
    assert alone.seconds == pytest.approx(0.75 + lived.prefill_alone() + lived.decode_step_at(101))
    assert alone.own_shares == pytest.approx(1.0)


def test_levers_without_a_prediction_come_last():
    levers = [Lever("a", ""), Lever("b", "", 1.0), Lever("c", "", 2.0), Lever("b", "worse", 0.5)]
    assert [(lever.flag, lever.saved_seconds) for lever in rank(levers)] == [("c", 2.0), ("b", 1.0), ("a", None)]


def test_the_page_lists_every_cause_and_tests_that_exist():
    page = (ROOT / "docs" / "explain.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert listed == set(PREFILL_RULES) | set(DECODE_RULES) | set(CLIENT_RULES)
    named = re.findall(r"`(test_\w+)`", page)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named and all(f"def {name}(" in tests for name in named)
