"""The rules on synthetic ledgers: each second before and after the first token has one cause.

`test_diagnosis_provoked.py` has each cause on a real engine.
"""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from made_up import made_up_machine as machine
from twinphase.batch import StepTimes
from twinphase.explain.alone import alone_sentences, had_it_run_alone
from twinphase.explain.causes import CAUSES
from twinphase.explain.diagnosis import diagnose
from twinphase.explain.evidence import Evidence
from twinphase.explain.explanation import explain, explain_evidence
from twinphase.explain.levers import Lever, rank
from twinphase.explain.load_diagnosis import CLIENT_RULES
from twinphase.outcome import MissReason, PrefixMiss
from twinphase.phases.cost import CostError
from twinphase.phases.hardware import Efficiency
from twinphase.phases.timeline import IntervalKind, RequestTimeline, StepRecord
from twinphase.phases.work import Cost, ModelShape
from twinphase.request import RequestCounts, SamplingParams

ROOT = Path(__file__).parents[2]
LARGE = ModelShape(10**6, 500_000, 600_000, 300_000, 2, 4, 2, 64, 800)


def evidence(pieces, first=None, miss=None, **fields):
    timeline = RequestTimeline(0.0)
    for index, (kind, seconds) in enumerate(pieces):
        timeline.mark(kind, timeline.end + seconds, index + 10)
    if first is not None:
        timeline.token_times = [first, timeline.end]
    request = RequestCounts("me", 100, 2, prefix_miss=miss)
    return Evidence(request, timeline, fields.pop("machine", machine()), **fields)


def decoded(bytes_=0, linear=10, seconds=1.0, **inside):
    timeline = RequestTimeline(0.0)
    timeline.add_prefill(StepRecord(9, 0.0, 0.1, 100, 0, Cost(), Cost()), 100, 0.1)
    timeline.hand_over_tokens(1, 0.1)
    record = StepRecord(
        10,
        0.1,
        0.1 + seconds,
        0,
        1,
        Cost(),
        Cost(linear, 0, bytes_),
        (),
        1,
        0.0,
        StepTimes(**inside),
    )
    timeline.add_decode(record, 1, seconds, seconds)
    timeline.hand_over_tokens(1, timeline.end)
    return RequestCounts("me", 100, 2), timeline


def causes(found, phase):
    return [one.cause for one in found if one.phase == phase]


def test_each_symptom_weighs_its_own_side_of_the_first_token():
    pieces = [
        (IntervalKind.QUEUE, 3.0),
        (IntervalKind.PREFILL, 1.0),
        (IntervalKind.STALL, 5.0),
        (IntervalKind.SEND, 1.0),
    ]
    found = diagnose(evidence(pieces, first=4.0))
    assert [(one.cause, one.share) for one in found if one.phase == "prefill"] == [
        ("queue", 0.75),
        ("prompt_length", pytest.approx(0.25)),
    ]
    assert [(one.cause, one.share) for one in found if one.phase == "decode"] == [
        ("stalls", pytest.approx(5 / 6)),
        ("slow_reader", pytest.approx(1 / 6)),
    ]


def prefix_miss(reason, index):
    return PrefixMiss(reason, index, num_known=70 * (reason is MissReason.EVICTED))


@given(
    st.lists(
        st.tuples(st.sampled_from(list(IntervalKind)), st.floats(1e-4, 10)), min_size=1, max_size=12
    ),
    st.floats(0, 1),
    st.none() | st.builds(prefix_miss, st.sampled_from(MissReason), st.sampled_from([0, 5, 40])),
    st.sampled_from([None, {}, {"threads": 1, "cores": 3}, {"isa": "generic", "best_isa": "avx2"}]),
    st.sampled_from(["memory", "compute", "overhead", "unknown"]),
)
@settings(deadline=None)
@example([(IntervalKind.QUEUE, 2.0)], 0.5, None, None, "unknown")
def test_no_second_is_claimed_twice_and_none_saved_that_is_not_explained(
    pieces, first, miss, config, bound
):
    whole = sum(seconds for _, seconds in pieces)
    known = {} if config is None else {"decode": Efficiency(bound)}
    given = evidence(
        pieces,
        first * whole,
        miss,
        machine=None if config is None else machine(**config),
        known=known,
    )
    found = diagnose(given)
    for one in found:
        if one.lever is not None and one.lever.saved_seconds is not None:
            assert one.seconds is not None and one.lever.saved_seconds <= one.seconds * (1 + 1e-9)
    for lever in explain_evidence(given).levers:
        if lever.saved_seconds is not None:
            assert lever.saved_seconds <= lever.addressed_seconds * (1 + 1e-9)
    for phase in ("prefill", "decode"):
        assert sum(one.share or 0 for one in found if one.phase == phase) <= 1 + 1e-6
    assert all(one.seconds is None or one.seconds >= 0 for one in found)


def test_without_an_engine_nothing_is_predicted():
    found = explain_evidence(
        evidence([(IntervalKind.QUEUE, 1.0), (IntervalKind.PREFILL, 1.0)], machine=None)
    )
    assert found.alone is None and found.error is None and set(found.bounds.values()) == {"unknown"}
    assert [lever.flag for lever in found.levers if lever.saved_seconds is not None] == []


@pytest.mark.parametrize(
    ("bytes_", "linear", "inside", "config", "cause"),
    [
        (900_000, 10, {}, {}, "model_size"),
        (10, 900_000, {}, {}, "model_size"),
        (10, 10, {}, {}, "kernels_below_peak"),
        (900_000, 10, {}, {"ceilings": None}, "unknown_bound"),
        (900_000, 10, {}, {"threads": 1, "cores": 2}, "model_size"),
        (10, 900_000, {}, {"threads": 1, "cores": 4}, "threads"),
        (900_000, 10, {}, {"isa": "generic", "best_isa": "avx2"}, "model_size"),
        (10, 10, {}, {"isa": "generic", "best_isa": "avx2"}, "kernels_below_peak"),
        (900_000, 10, {"executed": 1.0, "cpu_wait": 0.8}, {}, "contention"),
        (900_000, 10, {"executed": 1.0, "rank_wait": 0.8}, {}, "rank_wait"),
        (900_000, 10, {"executed": 1.0, "sampling": 0.8}, {}, "sampling"),
        (900_000, 10, {"executed": 0.2}, {}, "step_overhead"),
    ],
)
def test_what_a_token_waits_for(bytes_, linear, inside, config, cause):
    found = explain(*decoded(bytes_, linear, **inside), machine(shape=LARGE, **config))
    assert causes(found.diagnoses, "decode")[0] == cause


def test_threads_claim_what_they_leave_idle_at_most_and_silence_nothing():
    lived = decoded(10, 900_000)
    idle = {"threads": 1, "cores": 4}
    found = [one for one in explain(*lived, machine(**idle)).diagnoses if one.phase == "decode"]
    shares = {one.cause: one.share for one in found}
    assert shares["threads"] == pytest.approx(0.75) and shares["context_length"] == pytest.approx(
        0.25, rel=0.02
    )
    assert "at best" in found[0].lever.advice and found[0].lever.saved_seconds == pytest.approx(
        0.75
    )
    found = [
        one
        for one in explain(*decoded(900_000), machine(**idle)).diagnoses
        if one.phase == "decode"
    ]
    shares = {one.cause: (one.share, one.lever and one.lever.saved_seconds) for one in found}
    assert shares["threads"] == (None, None)  # memory need not become faster by them
    found = explain(*decoded(900_000), machine(isa="generic", best_isa="avx2")).diagnoses
    assert {one.cause: one.share for one in found if one.phase == "decode"} == {
        "context_length": pytest.approx(1, abs=0.02),
        "isa": None,
    }


def stalled(steps, mixed):
    """Decodes bound by memory, in some of which others' prompts were computed."""
    _, timeline = decoded(450_000, seconds=0.5)
    for index in range(steps - 1):
        prefill, ids = (Cost(900_000, 0, 10), ("other",)) if index < mixed else (Cost(), ())
        at = timeline.end
        seconds = 1.5 if ids else 0.5
        record = StepRecord(
            11 + index, at, at + seconds, 500, 1, prefill, Cost(10, 0, 450_000), ids, 1
        )
        timeline.add_decode(record, 1, 0.5, 0.5)
        timeline.hand_over_tokens(1, timeline.end)
    return RequestCounts("me", 100, steps + 1), timeline


def test_others_prompts_in_its_steps_are_no_work_of_its_decode():
    found = explain(*stalled(9, 7), machine())
    assert found.bounds["decode"] == "memory" and found.efficiency["decode"].mbu == pytest.approx(
        0.9
    )
    assert found.efficiency["decode"].mfu < 0.01  # of the others' 900,000 operations nothing
    assert (
        explain(*stalled(30, 28), machine()).bounds["decode"] == "unknown"
    )  # a fifteenth of it was undisturbed


def test_a_prompt_read_beside_many_decodes_has_no_known_bound():
    def prefilled(decodes):
        timeline = RequestTimeline(0.0)
        work = Cost(900_000, 0, 10), Cost(10, 0, 900_000) if decodes else Cost()
        timeline.add_prefill(
            StepRecord(9, 0.0, 1.0, 100, decodes, *work, ("me",), decodes), 100, 0.5
        )
        return explain(RequestCounts("me", 100), timeline, machine()).bounds["prefill"]

    assert [prefilled(decodes) for decodes in (0, 11)] == ["compute", "unknown"]


def test_no_lever_for_what_a_greedy_request_did_not_ask_for():
    request, timeline = decoded(executed=1.0, sampling=0.8)
    advised = []
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=5),
        SamplingParams(),
    ):
        asked = replace(request, sampling_params=params)
        (found,) = (
            one for one in explain(asked, timeline, machine()).diagnoses if one.cause == "sampling"
        )
        advised.append(found.lever and (found.lever.advice, found.lever.saved_seconds))
    assert advised[0] is None and "logprobs" in advised[1][0] and "sampled values" in advised[2][0]
    assert advised[1][1] is advised[2][1] is None  # greedy decoding too has to choose


def test_loading_is_in_no_gain():
    found = explain_evidence(
        evidence([(IntervalKind.PREFILL, 1.0)], first=1.0, before={"load": 9.0})
    )
    assert found.diagnoses[0].cause == "cold_start" and found.diagnoses[0].share == pytest.approx(
        0.9
    )
    assert found.levers[-1].flag == "twinphase serve" and found.levers[-1].saved_seconds is None


def test_a_prompt_in_the_first_steps_is_one_of_the_first():
    request = RequestCounts("me", 100)
    timeline = RequestTimeline(0.0)
    timeline.add_prefill(StepRecord(3, 0.0, 9.0, 100, 0, Cost(), Cost(), ("me",)), 100, 9.0)
    (found,) = (
        one for one in explain(request, timeline, machine()).diagnoses if one.cause == "cold_start"
    )
    assert "one of the engine's first prompts" in found.evidence
    assert 0 < found.lever.saved_seconds < 9


def test_a_long_context_is_told_from_a_large_model_and_above_the_ceiling_nothing_is_clamped():
    found = explain(
        *decoded(3_000_000), machine()
    )  # 900 bytes of weights, 784 of each of 101 tokens
    assert causes(found.diagnoses, "decode") == ["context_length"]
    assert found.efficiency["decode"].mbu == pytest.approx(3.0)


LIVED = [(IntervalKind.TOKENIZE, 0.5), (IntervalKind.QUEUE, 3.0), (IntervalKind.PREFILL, 1.0)]


def test_had_it_run_alone_is_the_cost_model_without_the_others():
    lived = evidence(
        [*LIVED, (IntervalKind.DECODE, 1.0), (IntervalKind.STALL, 5.0), (IntervalKind.SEND, 0.25)],
        4.5,
    )
    alone = explain_evidence(lived).alone
    assert alone.verdict == "predicted" and alone.ttft == pytest.approx(0.5 + lived.prefill_alone())
    assert alone.seconds == pytest.approx(0.75 + lived.prefill_alone() + lived.decode_step(1, 101))
    assert alone.own_shares == pytest.approx(2.0)


def test_who_was_alone_would_have_taken_no_longer_alone():
    lived = evidence([*LIVED, (IntervalKind.DECODE, 1e-4), (IntervalKind.SEND, 0.25)], first=4.5)
    assert lived.decode_step(1, 101) > 1e-4  # the model would say more than was measured
    found = explain_evidence(lived)
    assert found.alone.verdict == "alone" and found.alone.seconds == pytest.approx(
        found.waterfall.wall_seconds
    )
    assert alone_sentences(found.as_dict()) == [
        "It was alone: no other request was in any of its steps."
    ]


def test_who_only_waited_for_a_seat_would_not_have_waited():
    timeline = RequestTimeline(0.0)
    timeline.queue_until(3.0, "seats")
    timeline.queue_until(3.5, "")  # the engine looks at it
    timeline.mark(IntervalKind.PREFILL, 4.0, 1)
    timeline.hand_over_tokens(1, 4.0)
    found = explain(RequestCounts("me", 100), timeline, machine()).alone
    assert (found.verdict, found.seconds, found.ttft) == (
        "predicted",
        pytest.approx(1.0),
        pytest.approx(1.0),
    )


@pytest.mark.parametrize(("others", "flag"), [(2.0, "--tenant-weight"), (1.0, "--max-num-seqs")])
def test_a_wait_that_was_mostly_for_another_tenants_work_is_told_so(others, flag):
    timeline = RequestTimeline(0.0)
    timeline.queue_until(3.0, "seats", others)
    timeline.mark(IntervalKind.PREFILL, 3.5, 1)
    timeline.hand_over_tokens(1, 3.5)
    found = explain(RequestCounts("me", 100), timeline, machine())
    (queue,) = (one for one in found.diagnoses if one.cause == "queue")
    assert queue.lever.flag == flag
    assert ("for 2.00 s of it while another tenant's requests were computed" in queue.evidence) == (
        others == 2.0
    )


@pytest.mark.parametrize(("off", "verdict"), [(0.5, "unknown"), (2.0, "predicted")])
def test_alone_cannot_be_told_by_a_model_beyond_its_error(off, verdict, monkeypatch):
    lived = evidence([*LIVED, (IntervalKind.DECODE, 1e-3), (IntervalKind.STALL, 5.0)], first=4.5)
    lived.timeline.intervals[2].end = (
        lived.timeline.intervals[2].start + 1e-3
    )  # both less than the model says
    monkeypatch.setattr(
        lived.machine.cost_model, "error", lambda: CostError(9, 0.1, off * predicted_error(lived))
    )
    alone = had_it_run_alone(lived)
    assert alone.verdict == verdict
    told = alone_sentences(
        {"alone": asdict(alone), "error": None, "waterfall": {"wall_seconds": 9.5}}
    )
    if verdict == "unknown":
        assert alone.seconds is None and told[0].startswith("Unknown: the cost model's prediction")
    else:  # within the error, and yet not more than its own shares
        assert alone.seconds == pytest.approx(0.5 + alone.own_shares) and "instead of" in told[0]


def predicted_error(lived):
    own = sum(lived.timeline.seconds(kind) for kind in (IntervalKind.PREFILL, IntervalKind.DECODE))
    return abs(lived.prefill_alone() + lived.decode_step(1, 101) - own) / own


def test_kernels_below_their_peak_are_no_overhead():
    found = explain(*decoded(10, 400_000, executed=0.75), machine()).diagnoses
    seconds = {one.cause: one.seconds for one in found if one.phase == "decode"}
    whole = sum(seconds.values())
    assert seconds["step_overhead"] / whole == pytest.approx(0.25, rel=0.05)
    assert seconds["kernels_below_peak"] / whole == pytest.approx(0.35, rel=0.05)


def test_kernels_below_their_peak_are_what_memory_and_arithmetic_leave():
    given = evidence(
        [(IntervalKind.PREFILL, 1.0), (IntervalKind.DECODE, 2.0)],
        first=1.0,
        machine=None,
        known={"decode": Efficiency("kernels", 0.1, 0.45)},
    )
    found = {one.cause: one for one in diagnose(given) if one.phase == "decode"}
    assert found["model_size"].share == pytest.approx(0.45) and found[
        "kernels_below_peak"
    ].share == pytest.approx(0.55)
    evidence_text = found["kernels_below_peak"].evidence
    assert "took 1.10 s longer" in evidence_text
    assert "of the 2.00 s of its own decoding (MBU 45 %)" in evidence_text
    assert "Reading it at the measured peak" in found["model_size"].evidence


def test_kernels_are_compared_with_the_larger_ceiling_and_without_contention():
    found = explain(*decoded(10, 400_000, executed=1.0, cpu_wait=0.2), machine()).diagnoses
    shares = {one.cause: one.share for one in found if one.phase == "decode"}
    assert shares["contention"] == pytest.approx(0.2)
    assert shares["kernels_below_peak"] == pytest.approx(0.4)
    (below,) = (one for one in found if one.cause == "kernels_below_peak")
    assert "MFU 40 %" in below.evidence
    assert sum(shares.values()) == pytest.approx(1, abs=0.02)


def test_levers_without_a_prediction_come_last():
    levers = [
        Lever("a", ""),
        Lever("b", "", 1.0),
        Lever("c", "", 2.0),
        Lever("b", "worse", 0.5),
        Lever("d", "", None, 9.0),
        Lever("e", "", None, 10.0),
    ]
    ranked = [(lever.flag, lever.saved_seconds) for lever in rank(levers)]
    assert ranked == [("c", 2.0), ("b", 1.0), ("e", None), ("d", None), ("a", None)]


def test_the_page_lists_every_cause_and_tests_that_exist():
    page = (ROOT / "docs" / "explain.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert listed == set(CAUSES) | set(CLIENT_RULES)
    named = re.findall(r"`(test_\w+)`", page)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named and all(f"def {name}(" in tests for name in named)


def test_drafts():
    pieces = [
        (IntervalKind.PREFILL, 1.0),
        (IntervalKind.DRAFTING, 0.5),
        (IntervalKind.DECODE, 2.0),
        (IntervalKind.REJECTED, 1.0),
    ]
    found = evidence(pieces, first=1.0)
    counts = replace(found.request, num_draft_tokens=30, num_accepted_draft_tokens=18)
    explained = explain_evidence(replace(found, request=counts))
    shares = {one.cause: one.share for one in explained.diagnoses if one.phase == "decode"}
    assert shares["drafting"] == pytest.approx(0.5 / 3.5) and shares[
        "rejected_drafts"
    ] == pytest.approx(1 / 3.5)
    assert "Computing 12 rejected drafts took 1.00 s." in str(explained)
