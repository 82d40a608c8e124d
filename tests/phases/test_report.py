from __future__ import annotations

import json

import pytest

from twinphase.backends.base import Units
from twinphase.phases.hardware import Ceilings
from twinphase.phases.report import PhaseReport, phase_report
from twinphase.phases.timeline import IntervalKind, RequestTimeline, StepRecord
from twinphase.phases.work import Cost
from twinphase.terminal import percentages, report_lines

CEILINGS = Ceilings("p", 1, "generic", ((1, 1e6), (1 << 30, 1e6)), 1e6, 1e5, None)
UNITS = Units(linear="int8", scores="int8", values="float32")


def timeline(decode_steps: int = 2) -> RequestTimeline:
    line = RequestTimeline(arrival=10.0)
    line.mark(IntervalKind.TOKENIZE, 10.1)
    line.queue_until(10.2, "")
    record = StepRecord(
        0, 10.2, 10.3, 4, 0, Cost(9000, 700, 950), Cost()
    )  # linear layers and head, attention
    line.add_prefill(record, 4, own=0.06, again=False)
    line.hand_over_tokens(1, 10.3)
    for step in range(decode_steps):
        start = line.end
        record = StepRecord(step + 1, start, start + 0.1, 0, 1, Cost(), Cost(3000, 0, 60000))
        line.add_decode(record, 1, own=0.05, decodes=0.08)
        line.hand_over_tokens(1, start + 0.1)
    return line


def make(
    ceilings: Ceilings | None = CEILINGS, wall: float = 2.0, load: float = 1.0, steps: int = 2
) -> PhaseReport:
    return phase_report(
        timeline(steps),
        units=UNITS,
        ceilings=ceilings,
        wall_seconds=wall,
        before={"load": load},
        num_cached_tokens=7,
    )


def test_every_second_has_one_name():
    result = make()
    rows = {row.name: row.seconds for row in (*result.phases, *result.rest)}
    assert rows == pytest.approx(
        {
            "prefill": 0.1,
            "decode": 0.2,
            "load": 1.0,
            "tokenize": 0.1,
            "queue": 0.1,
            "unattributed": 0.5,
        }
    )
    assert sum(rows.values()) == pytest.approx(result.wall_seconds)
    assert sum(row.share for row in (*result.phases, *result.rest)) == pytest.approx(1.0)


def test_prefill_is_measured_as_mfu_with_the_unit_of_each_part():
    prefill, _ = make().phases
    # 9,000 FLOP of linear layers and 350 of scores on int8 at 1e6 a second, 350 on float32 at 1e5,
    # in 0.1 s
    assert (prefill.metric, prefill.efficiency) == (
        "MFU",
        pytest.approx((9350 / 1e6 + 350 / 1e5) / 0.1),
    )
    assert (prefill.tokens, prefill.cached_tokens) == (4, 7)
    assert prefill.tokens_per_second == pytest.approx(40)
    assert prefill.bound == "kernels"


def test_a_phase_that_waited_says_for_what():
    line = timeline()
    line.prefill.cpu_wait = 0.07
    result = phase_report(line, units=UNITS, ceilings=CEILINGS, wall_seconds=2.0)
    assert [row.bound for row in result.phases] == ["contention", "memory"]
    assert report_lines(result)[0].endswith("MFU 13 %, contention, nearest limit: compute")
    line.prefill.cpu_wait = 0.0
    line.prefill.rank_wait = 0.07
    result = phase_report(line, units=UNITS, ceilings=CEILINGS, wall_seconds=2.0)
    assert report_lines(result)[0].endswith(
        "MFU 13 %, bound by ranks that wait, nearest limit: compute, waiting for ranks 70 %"
    )


def test_decode_is_measured_as_mbu_at_its_working_set():
    _, decode = make().phases
    assert (decode.metric, decode.efficiency) == ("MBU", pytest.approx(120000 / 1e6 / 0.2))
    assert (decode.tokens, decode.working_set, decode.bound) == (2, 60000, "memory")


def test_without_ceilings_all_is_unknown():
    for row in make(ceilings=None).phases:
        assert (row.efficiency, row.other_efficiency, row.bound) == (None, None, "unknown")
    lines = report_lines(make(ceilings=None))
    assert not any(word in line for line in lines for word in ("unknown", "MFU", "MBU", "bound"))


def test_time_outside_kernels_is_overhead():
    line = timeline()
    line.prefill.executed = 0.06
    line.prefill.building = 0.02
    assert line.prefill.outside == pytest.approx(0.06)
    result = phase_report(line, units=UNITS, ceilings=CEILINGS, wall_seconds=2.0)
    assert report_lines(result)[0].endswith("MFU 13 %, overhead-bound, nearest limit: compute")
    line.prefill.device = 0.09  # A device's own clock knows better.
    assert line.prefill.outside == pytest.approx(0.01)
    result = phase_report(line, units=UNITS, ceilings=CEILINGS, wall_seconds=2.0)
    assert "kernels below their peak" in report_lines(result)[0]


def test_a_request_without_decode_steps_and_one_that_never_ran():
    result = make(steps=0)
    _, decode = result.phases
    assert (decode.tokens, decode.seconds, decode.tokens_per_second, decode.bound) == (
        0,
        0.0,
        None,
        "unknown",
    )
    never = phase_report(
        RequestTimeline(arrival=0.0), units=UNITS, ceilings=CEILINGS, wall_seconds=0.0
    )
    assert [row.share for row in never.rest] == [0.0]
    assert len(report_lines(result)) == len(report_lines(never)) == 3


def test_above_the_ceiling_is_said_and_not_clamped():
    slow = Ceilings("p", 1, "generic", ((1, 1e5), (1 << 30, 1e5)), 1e6, 1e5, None)
    result = make(ceilings=slow)
    assert result.over_ceiling
    assert not make().over_ceiling
    assert "MBU 600 % (above 100 %" in "\n".join(report_lines(result))


def test_json_has_the_formulas_and_only_plain_values():
    found = json.loads(json.dumps(make().as_dict()))
    assert set(found["formulas"]) == {"MFU", "MBU"}
    assert [row["name"] for row in found["phases"]] == ["prefill", "decode"]
    assert found["ttft"] == pytest.approx(0.3)


def test_printed_lines():
    prefill, decode, rest = report_lines(make())
    assert prefill.startswith("prefill  4 tokens (7 cached)")
    assert (
        "40 tok/s" in prefill
        and "5.0 %" in prefill
        and "MFU 13 %, kernels below their peak" in prefill
    )
    assert (
        decode.startswith("decode   2 tokens")
        and "MBU 60 % (0 MB per step), memory-bound" in decode
    )
    assert rest.startswith("rest     load 1,000.0 ms 50.0 %, tokenize 100.0 ms 5.0 %")


@pytest.mark.parametrize(
    "shares", [[1 / 3] * 3, [0.1234, 0.4321, 0.4445], [0.0, 1.0], [0.99999, 0.00001], [1.2, -0.2]]
)
def test_printed_percentages_sum_to_100(shares):
    texts = percentages(shares)
    assert sum(round(float(text.removesuffix(" %")) * 10) for text in texts) == 1000
