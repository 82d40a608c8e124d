"""An explanation as a report: what it says, and that its files can be explained again."""

import json

import pytest

from twinphase.cli import run_app
from twinphase.commands.explain_source import from_file
from twinphase_bench.report.explanation import explain_report, waterfall_plot
from twinphase_bench.report.render import write_report
from twinphase_bench.report.result import read_result

TIMINGS = {
    "cache_n": 0,
    "prompt_n": 100,
    "predicted_n": 3,
    "ttft_ms": 60.0,
    "tpot_ms": 20.0,
    "e2e_ms": 100.0,
    "ledger_ms": {"queue": 10.0, "prefill": 50.0, "decode": 30.0, "stall": 10.0},
}


@pytest.fixture
def saved(tmp_path):
    (tmp_path / "timings.json").write_text(json.dumps(TIMINGS))
    return tmp_path / "timings.json"


def test_the_report_says_what_the_terminal_says(saved):
    report = explain_report(from_file(saved))
    assert [verdict.text.partition(":")[0] for verdict in report.verdicts] == [
        "prompt length",
        "queue",
        "unknown bound",
        "stalls",
    ]
    (ledger,) = report.sections[0].tables
    assert ledger.rows[-1][:3] == ("all", "100.0 ms", "100.0 %")
    assert sum(float(row[2].removesuffix(" %")) for row in ledger.rows[:-1]) == pytest.approx(100)
    *drawn, whole = report.sections[0].plots[0].spec["data"]["values"]
    assert sum(row["ms"] for row in drawn) == pytest.approx(100)
    near = next(section for section in report.sections if section.title == "What bound each phase")
    assert {cell for row in near.tables[0].rows for cell in row[1:]} == {"unknown"}


def test_its_files_are_explained_again(saved, tmp_path, capsys):
    pytest.importorskip("vl_convert")
    assert run_app(["explain", str(saved), "--out", str(tmp_path / "report")]) == 0
    shown = capsys.readouterr().out
    assert read_result(tmp_path / "report").kind == "explain"
    assert run_app(["explain", str(tmp_path / "report")]) == 0
    assert capsys.readouterr().out == shown


def test_a_load_is_a_report_too(tmp_path):
    times = [
        {"intended": float(n), "sent": float(n), "token_times": [n + 0.5, n + 0.75]}
        for n in range(3)
    ]
    observations = [{"request_id": "", **one} for one in times]
    result = {"format": "twinphase-result", "version": 1, "data": {"observations": observations}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    report = explain_report(from_file(tmp_path / "result.json"))
    assert report.sections[-1].title == "Unknown from outside" and report.sections[-1].paragraphs
    pytest.importorskip("vl_convert")
    assert write_report(report, tmp_path / "out").html.stat().st_size > 1000


def test_a_wall_time_too_short_for_parts_is_not_drawn(saved):
    falls = {"wall_seconds": 1e-5, "first_token": None, "bars": []}
    saved.write_text(json.dumps(from_file(saved) | {"waterfall": falls}))
    section = explain_report(from_file(saved)).sections[0]
    assert section.plots == () and [row[0] for row in section.tables[0].rows] == ["all"]


def test_the_whole_is_drawn_as_the_table_says_it(saved):
    falls = from_file(saved)["waterfall"] | {"wall_seconds": 0.1001}
    assert waterfall_plot(falls, "").spec["data"]["values"][-1]["ms"] == 100.1
