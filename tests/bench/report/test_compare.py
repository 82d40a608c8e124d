"""Two results compared: what differs is found, what does not is not, and what cannot be compared says so."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from tests.bench.sample_report import sample_report

from twinphase.bench.report.compare import CANNOT, SAME, compare, compare_reports
from twinphase.bench.report.render import write_report
from twinphase.bench.report.report import Metric, Report, Section, Status, Verdict
from twinphase.bench.report.result import ResultError, result_json


def noisy(centre: float, n: int = 9, seed: int = 0, spread: float = 0.01) -> tuple[float, ...]:
    rng = random.Random(f"{centre} {seed}")
    return tuple(centre * rng.lognormvariate(0, spread) for _ in range(n))


def result(*metrics: Metric, **parts) -> Report:
    return replace(Report("bench", "T", (), {"model": "m", "date": "today"}, metrics=metrics), **parts)


def metric(name: str, values: tuple[float, ...], unit: str = "s", better: str = "lower") -> Metric:
    return Metric(name, unit, better, values, "formula")


def only(a: Metric, b: Metric):
    [found] = compare_reports(result(a), result(b)).data["comparisons"]
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
    found = only(metric("m", noisy(1.0, seed=1), unit, better), metric("m", noisy(factor, seed=2), unit, better))
    assert found.verdict == verdict
    assert found.interval.low <= found.ratio <= found.interval.high
    assert found.interval.low < factor < found.interval.high


def test_the_interval_errs_as_often_as_it_says():
    rng = random.Random(7)
    wrong = 0
    for _ in range(200):
        a, b = (metric("m", tuple(rng.lognormvariate(0, 0.05) for _ in range(8))) for _ in "ab")
        wrong += only(a, b).verdict != SAME
    assert wrong <= 22  # 10 are expected at 95 %; more than 22 have a chance below 0.001


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((1.0, 1.1), "9 and 2 repetitions, 5 needed: --repetitions 5"),
        ((0.0,) * 9, "above 0"),
        ((float("nan"),) * 9, "9 and 0 repetitions"),
        ((), "9 and 0 repetitions"),
    ],
)
def test_what_cannot_be_compared_says_why(values, reason):
    found = only(metric("m", noisy(1.0)), metric("m", values))
    assert found.verdict == CANNOT and reason in found.reason and found.interval is None


def test_too_few_repetitions_are_said_in_the_verdict_with_the_option_and_the_ratio():
    a, b = (result(metric("m[n=1]", values)) for values in ((1.0, 1.1, 1.2), (2.0, 2.2, 2.4)))
    report = compare_reports(a, b)
    [told] = [verdict.text for verdict in report.verdicts if verdict.status is Status.UNKNOWN]
    assert "1 of 1 metrics cannot be compared: 3 repetitions each, 5 needed: --repetitions 5." in told
    [table] = report.sections[0].tables
    cells = dict(zip((column.name for column in table.columns), table.rows[0], strict=True))
    assert (cells["B / A"], cells["95 % interval"], cells["B is"]) == ("2.000", "-", CANNOT)
    assert any("--repetitions 5" in text for text in report.sections[0].paragraphs)


def test_what_a_search_found_cannot_be_repeated_by_an_option():
    found = only(metric("capacity_rate", (4.0,), "req/s", "higher"), metric("capacity_rate", (5.0,), "req/s", "higher"))
    assert found.reason == "1 values each, 5 needed" and found.ratio == 1.25


def test_another_definition_is_the_first_condition_that_differs_and_both_are_shown():
    a = result(metric("m[n=1]", noisy(1.0)), conditions={"model": "m", "date": "x"})
    b = result(replace(a.metrics[0], definition="seen by a client"), conditions={"model": "n", "date": "x"})
    report = compare_reports(a, b)
    [verdict] = [one for one in report.verdicts if "same conditions" in one.text]
    assert verdict.status is Status.FAILS
    assert verdict.reason.startswith("These differ: definition of m, model.")
    assert report.conditions["definition of m (differs)"] == "A: formula; B: seen by a client"
    assert report.sections[0].paragraphs[:2] == ("A: formula.", "B: seen by a client.")


def test_values_that_do_not_vary_have_an_interval_of_no_width():
    found = only(metric("m", (2.0,) * 6), metric("m", (3.0,) * 6))
    assert (found.ratio, found.interval.low, found.interval.high, found.verdict) == (1.5, 1.5, 1.5, "slower")


def test_the_same_files_give_the_same_report(tmp_path):
    paths = []
    for name, slower in (("a", 1.0), ("b", 1.1)):
        paths.append(tmp_path / name / "result.json")
        paths[-1].parent.mkdir()
        paths[-1].write_text(result_json(sample_report(2, slower)))
    assert result_json(compare(paths[0], paths[1].parent)).replace("/b/result.json", "/b") == result_json(
        compare(*paths)
    ).replace("/b/result.json", "/b")


def test_differing_conditions_are_said_first_and_loudly():
    a = result(metric("m", noisy(1.0)))
    b = result(metric("m", noisy(1.0)), conditions={"model": "other", "date": "tomorrow", "threads": "2"})
    report = compare_reports(a, b)
    assert report.verdicts[0].status is Status.FAILS and "model, threads" in report.verdicts[0].reason
    assert list(report.conditions)[2:5] == ["model (differs)", "threads (differs)", "date (differs)"]
    assert report.conditions["threads (differs)"] == "A: not stated; B: 2"
    same = compare_reports(a, replace(b, conditions={"model": "m", "date": "tomorrow"}))
    assert same.verdicts[0].status is Status.HOLDS


@pytest.mark.parametrize("key", ["seed", "seed of prompts and order", "sweep took", "longest prompt", "load average"])
def test_what_differs_between_any_two_runs_is_no_difference_of_conditions(key):
    a, b = (result(metric("m", noisy(1.0)), conditions={"model": "m", key: text}) for text in ("1", "2"))
    first = compare_reports(a, b).verdicts[0]
    assert (first.status, first.reason) == (Status.HOLDS, "")


@pytest.mark.parametrize(
    ("a", "b", "status"),
    [
        ("1.302 tokens a word", "1.297 tokens a word", Status.HOLDS),
        ("1.3 tokens a word", "1.9 tokens a word", Status.FAILS),
        ("1.3 tokens a word", "random token ids", Status.FAILS),
    ],
)
def test_conditions_that_are_measured_may_differ_a_little(a, b, status):
    first, second = (result(metric("m", noisy(1.0)), conditions={"prompts": text}) for text in (a, b))
    assert compare_reports(first, second).verdicts[0].status is status


def test_a_void_measurement_stays_void():
    void = Verdict(Status.VOID, "The run.", "The client was the limit.")
    a = result(metric("m", noisy(1.0)))
    for b in (replace(a, verdicts=(void,)), replace(a, sections=(Section("S", (void,)),))):
        first = compare_reports(a, b).verdicts[0]
        assert (first.status, first.text, first.reason) == (Status.VOID, "B: The run.", void.reason)


def test_nothing_is_dropped():
    a = result(metric("both", noisy(1.0)), metric("only a", noisy(1.0)), metric("unit", noisy(1.0)))
    b = result(metric("both", noisy(1.0)), metric("only b", noisy(2.0)), metric("unit", noisy(1.0), "ms"))
    rows = [row for section in compare_reports(a, b).sections for table in section.tables for row in table.rows]
    assert {row[0] for row in rows} == {"both", "only a", "only b", "unit"}
    assert next(row for row in rows if row[0] == "only a")[2] == "not measured"


def test_a_comparison_is_a_report_that_can_be_written(tmp_path):
    report = compare_reports(sample_report(1), sample_report(2, 1.1))
    written = write_report(report, tmp_path)
    assert [path.name for path in written.plots] == ["ratio-0.png", "ratio-1.png"]
    assert "B is slower in 10 of 40 metrics" in written.markdown.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100000, "not JSON"),
        ("[]", "not a result"),
        ('{"format": "other"}', "not a result"),
        ('{"format": "twinphase-result", "version": 99}', "format version 99; this twinphase reads version 1"),
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


@pytest.mark.parametrize("key", ["kind", "title", "verdicts", "conditions", "noise", "sections", "metrics", "data"])
@pytest.mark.parametrize("value", [None, 3, ["x"], {"x": 3}])
def test_a_damaged_part_is_an_error_and_nothing_worse(tmp_path, key, value):
    found = json.loads(result_json(sample_report()))
    if (key, value) in [("noise", ["x"]), ("data", {"x": 3})]:
        return  # these are sound
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**found, key: value}))
    with pytest.raises(ResultError, match="damaged"):
        compare(path, path)


def test_results_of_different_commands_are_not_compared():
    a = result(metric("m", noisy(1.0)))
    with pytest.raises(ResultError, match="bench.*lab"):
        compare_reports(a, replace(a, kind="lab"))
    with pytest.raises(ResultError, match="no metric in common"):
        compare_reports(a, result(metric("x", noisy(1.0))))
