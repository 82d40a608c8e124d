"""A report as files: complete, escaped, readable back."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import json
import math
import re
import stat
import sys
import threading
from dataclasses import replace
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from tests.bench.sample_report import HOSTILE, all_plots, sample_report

from twinphase.errors import StorageError
from twinphase.installed import install_command
from twinphase_bench.extras import MissingExtraError, note_missing_plots, require
from twinphase_bench.report.markdown import markdown
from twinphase_bench.report.page import page
from twinphase_bench.report.plots import lines
from twinphase_bench.report.render import png, write_report
from twinphase_bench.report.report import (
    Column,
    Metric,
    Plot,
    Report,
    Section,
    Status,
    Table,
    Verdict,
)
from twinphase_bench.report.result import read_result, result_json


def small(**parts) -> Report:
    return replace(
        Report("bench", "Title", (Verdict(Status.HOLDS, "It holds."),), {"machine": "m"}), **parts
    )


class Page(HTMLParser):
    """Elements, attributes, and the text of each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.code: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.cdata_elem is not None:  # inside a script or a style
            self.code.append((*self.elements[-1], data))


def test_all_files_are_there(written):
    assert written.html.name == "report.html" and written.json.name == "result.json"
    assert [path.stem for path in written.plots] == [
        plot.name for plot in all_plots(sample_report())
    ]
    for path in written.plots:
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    for path in (written.html, written.markdown, written.json, *written.plots):
        assert path.stat().st_mode & stat.S_IRGRP, (
            path
        )  # a report is there to be read, by a web server too
    assert not list(written.html.parent.rglob("*.part"))


def test_a_report_reads_back_as_it_was_and_is_written_the_same(written):
    report = sample_report()
    back = read_result(written.json)
    text = written.json.read_text()
    assert read_result(written.json.parent) == back
    assert result_json(report) == text == result_json(back)
    assert (
        page(back, text) == written.html.read_text()
        and markdown(back) == written.markdown.read_text()
    )


def test_json_is_strict_and_takes_what_measurements_hold(tmp_path):
    data = {
        "nan": math.nan,
        "array": np.arange(3),
        "scalar": np.float32(0.5),
        "path": Path("a"),
        1: Status.VOID,
    }
    metric = Metric("m", "s", "lower", (1.0, math.inf))
    path = tmp_path / "result.json"
    path.write_text(result_json(small(data=data, metrics=(metric,))))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(path.read_text(), parse_constant=refuse)
    assert found["data"] == {
        "nan": None,
        "array": [0, 1, 2],
        "scalar": 0.5,
        "path": "a",
        "1": "void",
    }
    assert math.isnan(read_result(path).metrics[0].values[1])
    with pytest.raises(TypeError, match="object"):
        result_json(small(data={"x": object()}))


def test_text_from_outside_is_escaped_everywhere(written):
    text = written.html.read_text()
    assert "<script>alert" not in text and html.escape(HOSTILE, quote=False)[:20] in text
    parsed = Page(text)
    scripts = [
        (attributes.get("type"), attributes.get("id"))
        for tag, attributes in parsed.elements
        if tag == "script"
    ]
    assert scripts == [
        ("application/json", "result"),
        ("application/json", "themes"),
        (None, None),
        (None, None),
    ]
    assert not [
        name for _, attributes in parsed.elements for name in attributes if name.startswith("on")
    ]
    carried = next(
        code for tag, attributes, code in parsed.code if attributes.get("id") == "result"
    )
    assert json.loads(carried) == json.loads(
        written.json.read_text()
    )  # "</script><!--" among its text


def test_the_policy_lets_nothing_in_but_what_is_there(written):
    parsed = Page(written.html.read_text())
    policy = next(
        a["content"]
        for tag, a in parsed.elements
        if a.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and "connect-src" not in rules
    assert "unsafe" not in policy and "http" not in policy
    code = [
        (tag, text)
        for tag, attributes, text in parsed.code
        if attributes.get("type") != "application/json"
    ]
    for rule, kind in (("script-src", "script"), ("style-src", "style")):
        digests = [
            base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            for tag, text in code
            if tag == kind
        ]
        assert rules[rule].split() == [f"'sha256-{digest}'" for digest in digests]
    for tag, attributes in parsed.elements:
        for name in ("src", "href", "action", "data", "poster"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)


def test_the_page_has_verdicts_noise_numbers_and_conditions_in_that_order(written):
    text = written.html.read_text()
    places = [
        text.index(f'<section id="{name}"')
        for name in ("verdicts", "noise", "section-1", "conditions")
    ]
    assert places == sorted(places)
    for verdict in sample_report().verdicts:
        assert html.escape(verdict.text) in text and html.escape(verdict.reason) in text
    assert "prefill: prompt tokens / time." in text


def test_a_table_has_heads_and_numbers_to_the_right():
    rows = (("a", "1,024.5 ms", "yes"), ("b", "unknown", "3 of them"), ("c", "-0.4 %", "no"))
    table = Table("T", (Column("name"), Column("time", "the definition"), Column("remark")), rows)
    text = page(small(sections=(Section("S", tables=(table,)),)), "{}")
    assert re.findall(r'<th scope="col"( class="number")?>', text) == ["", ' class="number"', ""]
    assert '<td class="number">1,024.5 ms</td>' in text and "<td>3 of them</td>" in text
    assert '<th scope="row">a</th>' in text and "<dd>the definition</dd>" in text


def test_markdown_can_be_pasted():
    table = Table("T", (Column("a|b", "def"), Column("c")), (("x|y\nz", "<img>"),))
    report = small(title="T\n# x", sections=(Section("S", tables=(table,)),), noise=("calm",))
    lines = markdown(report).splitlines()
    assert lines[0] == "# T \\# x"
    assert lines.index("## Noise") < lines.index("## S") < lines.index("## Conditions")
    assert "- **holds**: It holds." in lines
    assert (
        "| a\\|b | c |" in lines and "| x\\|y z | &lt;img> |" in lines and "- *a\\|b*: def" in lines
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        *(([name], "not a valid file name") for name in ("../x", "", "a/b", ".hidden", "x" * 101)),
        (["x", "X"], "two plots"),
    ],
)
def test_a_plot_name_that_cannot_be_a_file_of_its_own_is_refused(tmp_path, names, message):
    plots = tuple(Plot(name, "t", {"data": {"values": []}, "mark": "point"}) for name in names)
    with pytest.raises(ValueError, match=message):
        write_report(small(sections=(Section("S", plots=plots),)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_is_an_error_with_a_fix(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Give another folder") as caught:
        write_report(small(), tmp_path / "file" / "report")
    assert caught.value.exit_code == 7


def test_without_the_extra_there_are_tables_but_no_plots(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "altair", None)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    rows = [{"length": 1.0, "time": 2.0}]
    plot = lines("p", "Title", rows, ("length", "x"), ("time", "y"), caption="Words.")
    assert plot == Plot("p", "Title", {}, "Words.")
    written = write_report(small(sections=(Section("S", plots=(plot,)),)), tmp_path / "new")
    assert written.html is None and not written.plots
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "report.md",
        "result.json",
    ]
    assert "plots/p.png" not in written.markdown.read_text()
    note_missing_plots()
    assert f"no plots and no HTML page. For those: {install_command('bench')}" in (
        capsys.readouterr().err
    )
    with pytest.raises(MissingExtraError, match="needs the bench extra: altair is not installed"):
        require("altair")


def test_a_package_that_is_there_and_broken_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_one.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        require("broken_one")
    with pytest.raises(MissingExtraError, match="needs not_there_at_all.*pip install something"):
        require("not_there_at_all.part", "something")
    assert require("json.decoder") is sys.modules["json.decoder"]


def test_a_chart_that_wants_the_network_is_not_drawn(tmp_path):
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/data.csv"
        with contextlib.suppress(ValueError):
            png(
                Plot(
                    "x",
                    "t",
                    {"data": {"url": url}, "mark": "point", "encoding": {"x": {"field": "a"}}},
                )
            )
        server.shutdown()
    assert asked == []


def test_progress_names_the_page_and_every_plot(tmp_path):
    told = []
    report = small(
        sections=(Section("S", plots=(Plot("x", "t", {"data": {"values": []}, "mark": "point"}),)),)
    )
    write_report(report, tmp_path, lambda *step: told.append(step))
    assert told == [("writing the report", 0, 0), ("drawing x", 0, 1)]
