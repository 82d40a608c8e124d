"""An explanation as a report, for `twinphase explain --out`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from twinphase import alone_sentences, duration, percentages
from twinphase.phases.report import FORMULAS
from twinphase_bench.conditions import conditions
from twinphase_bench.report.plots import ROW_PIXELS, spans
from twinphase_bench.report.report import (
    Column,
    Plot,
    Report,
    Section,
    Status,
    Table,
    Verdict,
    table_of,
)
from twinphase_bench.report.theme import colours_of

SYMPTOM = {
    "prefill": "of the time to the first token",
    "decode": "of the time after the first token",
}


def explain_report(found: Mapping[str, Any]) -> Report:
    """The report of an explanation as `commands/explain_source.py` gives it."""
    falls = found["waterfall"]
    verdicts = [_verdict(one, found["kind"]) for one in found["diagnoses"]]
    first = (
        ""
        if falls["first_token"] is None
        else f", first token after {duration(falls['first_token'])}"
    )
    caption = (
        ""
        if found["kind"] == "client"
        else "Shares of steps that several requests had come from the cost model."
    )
    plots = (waterfall_plot(falls, caption),) if falls["bars"] else ()
    sections = [Section("Where the time went", tables=(_waterfall_table(falls),), plots=plots)]
    near = found.get("efficiency")
    if near:
        sections.append(Section("What bound each phase", tables=(_efficiency_table(near),)))
    if found["kind"] != "client":  # of whose engines no cost model is known
        sections.append(Section("Had it run alone", paragraphs=(" ".join(alone_sentences(found)),)))
    if found["levers"]:
        whose = "these requests'" if found["kind"] == "client" else "this request's"
        sections.append(Section("What to change", tables=(_lever_table(found["levers"], whose),)))
    if found.get("claims"):
        sections.append(Section("What the server itself says", paragraphs=(found["claims"],)))
    if found.get("unknown"):
        sections.append(Section("Unknown from outside", paragraphs=found["unknown"]))
    title = f"{found['id']}: {duration(falls['wall_seconds'])} in all{first}"
    return Report("explain", title, verdicts, conditions(), sections=sections, data=dict(found))


def _verdict(one: Mapping[str, Any], kind: str) -> Verdict:
    if kind == "client":  # comparisons, which have no common whole
        return Verdict(Status.INFO, f"{one['cause'].replace('_', ' ')}: {one['evidence']}")
    share = "an unknown share" if one["share"] is None else f"{100 * one['share']:.0f} %"
    cause = one["cause"].replace("_", " ")
    status = Status.UNKNOWN if one["share"] is None else Status.INFO
    return Verdict(status, f"{cause}: {share} {SYMPTOM[one['phase']]}. {one['evidence']}")


def _shares(falls: Mapping[str, Any]) -> list[str]:
    """The share of the wall time of each part, and of all of them."""
    shares = [bar["share"] for bar in falls["bars"]]
    return percentages(shares) + percentages([sum(shares)])


def _waterfall_table(falls: Mapping[str, Any]) -> Table:
    *shares, whole = _shares(falls)
    rows = [
        (bar["name"], duration(bar["seconds"]), share, duration(bar["before_first_token"]))
        for bar, share in zip(falls["bars"], shares, strict=True)
    ]
    rows.append(("all", duration(falls["wall_seconds"]), whole, ""))
    time = Column("time", "seconds of the wall time; the parts add up to all of it")
    columns = ("part", time, Column("share", "of the wall time"), "before the first token")
    return table_of("The ledger", columns, rows)


def waterfall_plot(falls: Mapping[str, Any], caption: str) -> Plot:
    """The parts of a wall time, each beginning where the one before ends, and all of it below."""
    ends = list(itertools.accumulate(1e3 * bar["seconds"] for bar in falls["bars"]))
    *shares, whole = _shares(falls)
    rows = []
    for bar, share, start, end in zip(falls["bars"], shares, [0.0, *ends], ends, strict=False):
        early = round(1e3 * bar["before_first_token"], 3)
        spent = {
            "ms": round(end - start, 3),
            "share": share,
            "of it before the first token, ms": early,
        }
        rows.append({"part": bar["name"], **spent, "from": round(start, 3), "to": round(end, 3)})
    wall = round(1e3 * falls["wall_seconds"], 3)
    rows.append({"part": "all", "ms": wall, "share": whole, "from": 0.0, "to": wall})
    return spans(
        "waterfall",
        "The parts of the wall time",
        rows,
        ("part", ""),
        "time (ms)",
        part="part",
        roles={**colours_of(bar["name"] for bar in falls["bars"]), "all": "neutral"},
        height=ROW_PIXELS * len(rows),
        text="share",
        caption=caption,
    )


def _efficiency_table(near: Mapping[str, Any]) -> Table:
    def cell(value: float | None) -> str:
        return "unknown" if value is None else f"{100 * value:.1f} %"

    rows = (
        (phase, one["bound"], cell(one["mfu"]), cell(one["mbu"])) for phase, one in near.items()
    )
    shares = [Column(share, FORMULAS[share]) for share in ("MFU", "MBU")]
    return table_of("Against the machine's ceilings", ["phase", "bound by", *shares], rows)


def _lever_table(levers: Any, whose: str) -> Table:
    def cell(seconds: float | None, nothing: str) -> str:
        return nothing if seconds is None else duration(seconds)

    rows = (
        (
            cell(one["saved_seconds"], "no prediction"),
            cell(one["addressed_seconds"], "unknown"),
            one["flag"],
            one["advice"],
        )
        for one in levers
    )
    saved = Column("would save", f"of {whose} wall time, by the cost model")
    most = Column("at most", "the time that the lever works on")
    return table_of("Levers", [saved, most, "lever", "how"], rows)
