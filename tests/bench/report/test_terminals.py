"""What commands print where there is no terminal: tables are whole, and not cut at a width that nobody asked for."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from twinphase.bench.lab import terminal as lab_terminal
from twinphase.bench.report import terminal as bench_terminal
from twinphase.bench.report.markdown import markdown
from twinphase.bench.report.page import page
from twinphase.bench.report.report import Column, Report, Section, Status, Table, Verdict
from twinphase.bench.roofline import terminal as roofline_terminal
from twinphase.terminal import PLAIN_WIDTH, answers

HEADS = tuple(Column(f"a column of {n} words") for n in range(5))
ROW = tuple(f"cell {n}: 123,456.789" for n in range(5))  # 105 characters, and four gaps


@pytest.fixture
def no_terminal(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)


def test_a_table_is_whole_where_there_is_no_terminal(no_terminal, capsys):
    report = Report(kind="roofline", title="t", verdicts=(), conditions={}, noise=(),
                    sections=(Section(title="s", tables=(Table("t", HEADS, (ROW,)),)),))  # fmt: skip
    drawing = SimpleNamespace(report=report, line=SimpleNamespace(roofs=(), slopes=(), source="measured"), marks=())
    roofline_terminal.show(drawing)
    bench_terminal.show(report)
    shown = capsys.readouterr().out
    assert shown.count("cell 4: 123,456.789") == 2 and "…" not in shown


def test_a_verdict_has_the_same_word_everywhere(no_terminal, capsys):
    verdicts = tuple(Verdict(status, f"text of {status.value}") for status in Status)
    report = Report(kind="roofline", title="t", verdicts=verdicts, conditions={})
    line = SimpleNamespace(roofs=(), slopes=(), source="measured")
    bench_terminal.show(report)
    roofline_terminal.show(SimpleNamespace(report=report, line=line, marks=()))
    shown = capsys.readouterr().out.splitlines()
    html, text = page(report, "{}"), markdown(report)
    for status, word in zip(Status, ("holds", "fails", "undecided", "finding", "void"), strict=True):
        assert shown.count(f"{word.upper():<10}text of {status.value}") == 2
        assert f'<span class="status">{word}</span>' in html and f"**{word}**: text of {status.value}" in text


def test_all_of_them_ask_the_same_place(no_terminal):
    assert answers().width == PLAIN_WIDTH
    assert {one.answers for one in (bench_terminal, lab_terminal, roofline_terminal)} == {answers}


def test_a_terminal_says_its_own_width(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "91")
    assert answers().width == 91
