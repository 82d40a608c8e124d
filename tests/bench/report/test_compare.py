"""Two results compared: differences, no differences, and what cannot be compared."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest
from tests.bench.sample_report import sample_report

from twinphase.errors import ResultError
from twinphase_bench.report.compare import CANNOT, SAME, Comparison, compare, compare_reports
from twinphase_bench.report.render import write_report
from twinphase_bench.report.report import Metric, Report, Section, Status, Verdict
from twinphase_bench.report.result import result_json


def noisy(centre: float, n: int = 9, seed: int = 0, spread: float = 0.01) -> tuple[float, ...]:
    rng = random.Random(f"{centre} {seed}")
    return tuple(centre * rng.lognormvariate(0, spread) for _ in range(n))


def result(*metrics: Metric, **parts) -> Report:
    return replace(
        Report("bench", "T", (), {"model": "m", "date": "today"}, metrics=metrics), **parts
    )


def metric(name: str, values: tuple[float, ...], unit: str = "s", better: str = "lower") -> Metric:
    return Metric(name, unit, better, values, "formula")


STEADY = result(metric("m", noisy(1.0)))


def only(
    values_a: tuple[float, ...], values_b: tuple[float, ...], *metric_options: str, name: str = "m"
) -> Comparison:
    a, b = (result(metric(name, values, *metric_options)) for values in (values_a, values_b))
    [found] = compare_reports(a, b).data["comparisons"]
    return found


@pytest.mark.parametrize(
    ("unit", "better", "factor", "verdict"),
    [
        ("s", "lower", 1.2, "slower"),
        ("s", "lower", 0.8, "faster"),
        ("tok/s", "higher", 1.2, "faster"),
        ("req/s", "higher", 0.8, "slower"),
        ("bytes", "lower", 0.8, "better"),
        ("%", "higher", 0.8, "worse"),
        ("s", "lower", 1.0, SAME),
    ],
)
def test_a_difference_is_found_and_named(unit, better, factor, verdict):
    found = only(noisy(1.0, seed=1), noisy(factor, seed=2), unit, better)
    assert found.verdict == verdict
    assert found.interval.low <= found.ratio <= found.interval.high
    assert found.interval.low < factor < found.interval.high


def test_the_interval_errs_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr("twinphase_bench.report.compare.RESAMPLES", 999)  # ten times as quick
    rng = random.Random(7)
    wrong = 0
    for _ in range(200):
        a, b = (tuple(rng.lognormvariate(0, 0.05) for _ in range(8)) for _ in "ab")
        wrong += only(a, b).verdict != SAME
    assert wrong <= 22  # 10 are expected at 95 %; more than 22 have a chance below 0.001


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("m", (1.0, 1.1), "9 and 2 repetitions, 5 needed: --repetitions 5"),
        ("m", (0.0,) * 9, "a ratio needs values above 0"),
        ("m", (float("nan"),) * 9, "9 and 0 repetitions, 5 needed: --repetitions 5"),
        ("m", (), "9 and 0 repetitions, 5 needed: --repetitions 5"),
    ],
)
def test_what_cannot_be_compared_says_why(name, values, reason):
    found = only(noisy(1.0), values, name=name)
    assert (found.verdict, found.reason, found.interval) == (CANNOT, reason, None)


def test_too_few_repetitions_are_said_in_the_verdict_with_the_option_and_the_ratio():
    a, b = (result(metric("m[n=1]", values)) for values in ((1.0, 1.1, 1.2), (2.0, 2.2, 2.4)))
    report = compare_reports(a, b)
    [told] = [verdict.text for verdict in report.verdicts if verdict.status is Status.UNKNOWN]
    assert (
        "1 of 1 metrics cannot be compared: 3 repetitions each, 5 needed: --repetitions 5." in told
    )
    [table] = report.sections[0].tables
    cells = dict(zip((column.name for column in table.columns), table.rows[0], strict=True))
    assert (cells["B / A"], cells["95 % interval"], cells["B is"]) == ("2.000", "-", CANNOT)
    assert any("--repetitions 5" in text for text in report.sections[0].paragraphs)


def test_values_that_do_not_vary_have_an_interval_of_no_width():
    found = only((2.0,) * 6, (3.0,) * 6)
    assert (found.ratio, found.interval.low, found.interval.high, found.verdict) == (
        1.5,
        1.5,
        1.5,
        "slower",
    )


def test_another_definition_is_the_first_condition_that_differs_and_both_are_shown():
    a = result(metric("m[n=1]", noisy(1.0)), conditions={"model": "m", "date": "x"})
    b = result(
        replace(a.metrics[0], definition="seen by a client"), conditions={"model": "n", "date": "x"}
    )
    report = compare_reports(a, b)
    [verdict] = [one for one in report.verdicts if "same conditions" in one.text]
    assert verdict.status is Status.FAILS
    assert verdict.reason.startswith("These differ: definition of m, model.")
    assert report.conditions["definition of m (differs)"] == "A: formula; B: seen by a client"
    assert report.sections[0].paragraphs[:2] == ("A: formula.", "B: seen by a client.")


def test_the_same_files_give_the_same_report(tmp_path):
    (tmp_path / "a.json").write_text(result_json(sample_report(2)))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "result.json").write_text(result_json(sample_report(2, 1.1)))
    first, second = (compare(tmp_path / "a.json", tmp_path / b) for b in ("b", "b/result.json"))
    assert result_json(first) == result_json(second).replace("/b/result.json", "/b")


def test_differing_conditions_are_said_first_and_loudly():
    b = replace(STEADY, conditions={"model": "other", "date": "tomorrow", "threads": "2"})
    report = compare_reports(STEADY, b)
    assert (
        report.verdicts[0].status is Status.FAILS and "model, threads" in report.verdicts[0].reason
    )
    assert list(report.conditions)[2:5] == [
        "model (differs)",
        "threads (differs)",
        "date (differs)",
    ]
    assert report.conditions["threads (differs)"] == "A: not stated; B: 2"


@pytest.mark.parametrize(
    ("key", "a", "b", "status"),
    [
        # These differ between any two runs of one command.
        *(
            (key, "1", "2", Status.HOLDS)
            for key in ("date", "command", "seed", "seed of prompts and order")
        ),
        *(
            (key, "1", "2", Status.HOLDS)
            for key in ("sweep took", "longest prompt", "load average")
        ),
        # This one is measured, and may differ a little.
        ("prompts", "1.302 tokens a word", "1.297 tokens a word", Status.HOLDS),
        ("prompts", "1.3 tokens a word", "1.9 tokens a word", Status.FAILS),
        ("prompts", "1.3 tokens a word", "random token ids", Status.FAILS),
    ],
)
def test_some_conditions_may_differ(key, a, b, status):
    found = compare_reports(
        *(replace(STEADY, conditions={"model": "m", key: text}) for text in (a, b))
    ).verdicts[0]
    assert (found.status, found.reason == "") == (status, status is Status.HOLDS)


def test_a_void_measurement_stays_void():
    void = Verdict(Status.VOID, "The run.", "The client was the limit.")
    for b in (
        replace(STEADY, verdicts=(void,)),
        replace(STEADY, sections=(Section("S", (void,)),)),
    ):
        first = compare_reports(STEADY, b).verdicts[0]
        assert (first.status, first.text, first.reason) == (Status.VOID, "B: The run.", void.reason)


def test_nothing_is_dropped():
    a = result(metric("both", noisy(1.0)), metric("only a", noisy(1.0)), metric("unit", noisy(1.0)))
    b = result(
        metric("both", noisy(1.0)), metric("only b", noisy(2.0)), metric("unit", noisy(1.0), "ms")
    )
    rows = [
        row
        for section in compare_reports(a, b).sections
        for table in section.tables
        for row in table.rows
    ]
    assert {row[0] for row in rows} == {"both", "only a", "only b", "unit"}
    assert next(row for row in rows if row[0] == "only a")[2] == "not measured"


def test_a_comparison_is_a_report_that_can_be_written(tmp_path):
    written = write_report(compare_reports(sample_report(1), sample_report(2, 1.1)), tmp_path)
    assert re.search(r"B is slower in (\d+) of \1 metrics", written.markdown.read_text())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100000, "not JSON"),
        ("[]", "not a result"),
        ('{"format": "other"}', "not a result"),
        (
            '{"format": "twinphase-result", "version": 99}',
            "format version 99; this twinphase reads version 1",
        ),
        ('{"format": "twinphase-result", "version": 1}', "damaged"),
        ("\xff\xfe", "not JSON"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(tmp_path, text, message):
    path = tmp_path / "result.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ResultError, match=message) as caught:
        compare(path, path)
    assert str(path) in caught.value.cause and caught.value.exit_code == 2


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ResultError, match="cannot be read"):
        compare(tmp_path / "none.json", tmp_path)


@pytest.mark.parametrize(
    "key", ["kind", "title", "verdicts", "conditions", "noise", "sections", "metrics", "data"]
)
def test_a_damaged_part_is_an_error_and_nothing_worse(tmp_path, key):
    found = json.loads(result_json(STEADY))
    path = tmp_path / "result.json"
    for value in (None, 3, ["x"], {"x": 3}):
        if (key, value) not in [("noise", ["x"]), ("data", {"x": 3})]:  # these are sound
            path.write_text(json.dumps({**found, key: value}))
            with pytest.raises(ResultError, match="damaged"):
                compare(path, path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"kind": "lab"}, "bench.*lab"),
        ({"metrics": (metric("x", noisy(1.0)),)}, "no metric in common"),
    ],
)
def test_results_that_measure_other_things_are_not_compared(other, message):
    with pytest.raises(ResultError, match=message):
        compare_reports(STEADY, replace(STEADY, **other))
