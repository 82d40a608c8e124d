"""What commands print: every verdict, and whole tables at any width."""

from __future__ import annotations

import sys

import pytest

from twinphase.terminal import PLAIN_WIDTH, answers
from twinphase_bench.report.markdown import markdown
from twinphase_bench.report.page import page
from twinphase_bench.report.report import Column, Report, Section, Status, Table, Verdict
from twinphase_bench.report.terminal import show

HEADS = tuple(Column(f"a column of {n} words") for n in range(5))
ROW = tuple(f"cell {n}: 123,456.789" for n in range(5))  # 105 characters, and four gaps


@pytest.fixture
def no_terminal(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)


def report(**parts) -> Report:
    return Report("bench", "title", **{"verdicts": (), "conditions": {}, **parts})


@pytest.mark.parametrize(
    ("tables", "shown"),
    [("none", []), ("short", ["short", "only"]), ("all", ["short", "second", "long", "only"])],
)
def test_tables_are_whole_or_left_to_the_files(no_terminal, capsys, tables, shown):
    found = {title: Table(title, HEADS, (ROW,)) for title in ("short", "second", "only")}
    found["long"] = Table("long", HEADS, (ROW,) * 41)
    sections = (
        Section("a", tables=(found["short"], found["second"])),
        Section("b", tables=(found["long"],)),
        Section("c", tables=(found["only"],)),
    )
    show(report(sections=sections), tables=tables)
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line in found] == shown and "…" not in out
    assert out.count("cell 4: 123,456.789") == sum(len(found[title].rows) for title in shown)
    assert ("report.md" in out) == (tables != "all")


def test_a_verdict_has_the_same_word_everywhere(no_terminal, capsys):
    verdicts = tuple(Verdict(status, f"text of {status.value}", "why " * 60) for status in Status)
    told = report(verdicts=verdicts, noise=("others were quiet",))
    show(told)
    shown = capsys.readouterr().out.splitlines()
    html = page(told, "{}")
    text = markdown(told)
    for status, word in zip(
        Status, ("holds", "fails", "undecided", "finding", "void"), strict=True
    ):
        at = shown.index(f"{word.upper():<10}text of {status.value}")
        assert shown[at + 1].startswith(" " * 10 + "why why") and shown[at + 2].startswith(
            " " * 10 + "why"
        )
        assert (
            f'<span class="status">{word}</span>' in html
            and f"**{word}**: text of {status.value}" in text
        )


def test_a_terminal_says_its_own_width_and_a_file_gets_room_for_tables(no_terminal, monkeypatch):
    assert answers().width == PLAIN_WIDTH
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "91")
    assert answers().width == 91
