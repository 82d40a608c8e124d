"""Charts: each kind draws what it is given, in the colours of its phases, and rows stay what they are."""

from __future__ import annotations

import json
import re

import pytest
from tests.bench.sample_report import all_plots, falls, load_result, sample_report

from twinphase.bench.extras import require
from twinphase.bench.load.plots import timeline_plot
from twinphase.bench.report import plots
from twinphase.bench.report.explanation import waterfall_plot
from twinphase.bench.report.report import Plot
from twinphase.bench.report.theme import DARK, LIGHT, Theme, drawable, dressed

SAMPLES = {plot.name: plot for plot in all_plots(sample_report())}
ROWS = [{"n": n, "ms": n * 2.0, "phase": phase} for n in (10, 100, 1000) for phase in ("prefill", "decode")]


def svg(plot: Plot, theme: Theme = LIGHT) -> str:
    drawn: str = require("vl_convert").vegalite_to_svg({"width": 500, "height": 300, **drawable(plot.spec, theme)})
    return drawn


def scene(plot: Plot) -> list[dict]:
    """Every drawn item, with the name and the kind of its mark."""
    found = require("vl_convert").vegalite_to_scenegraph({"width": 500, "height": 300, **drawable(plot.spec, LIGHT)})
    items: list[dict] = []

    def walk(part: dict) -> None:
        for item in part.get("items", ()):
            if part.get("role") == "mark":
                items.append({**item, "mark": part["marktype"]})
            walk(item)

    walk(found["scenegraph"])
    return items


def marks(plot: Plot, kind: str) -> list[dict]:
    return [item for item in scene(plot) if item["mark"] == kind]


def colours(spec: dict) -> list[str]:
    return re.findall(r"#[0-9a-fA-F]{3,8}\b", json.dumps(spec))


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
@pytest.mark.parametrize("name", SAMPLES)
def test_every_kind_is_drawn_in_both_themes(name, theme):
    drawn = svg(SAMPLES[name], theme)
    assert len(re.findall(r"<path ", drawn)) > 5
    assert theme.roles["surface"] in drawn
    assert not re.search(r'(d|transform|fill|stroke)="[^"]*(NaN|role:|undefined)', drawn)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_spec_names_roles_and_no_colours(name):
    spec = dict(SAMPLES[name].spec)
    assert not colours(spec) and "config" not in spec
    assert dressed(dressed(spec)) == dressed(spec)  # so that a report read back draws the same
    assert "width" not in spec  # which is the reader's window's


def test_prefill_and_decode_have_their_colours_whatever_else_there_is():
    for order in (["decode", "prefill"], ["queue", "prefill, 512 tokens", "Decode (ITL)"]):
        rows = [{"n": n, "ms": n, "series": name} for n in (1, 2) for name in order]
        plot = plots.lines("x", "t", rows, ("n", "n"), ("ms", "ms"), series="series")
        scale = dressed(plot.spec)["layer"][0]["encoding"]["color"]["scale"]
        given = dict(zip(scale["domain"], scale["range"], strict=True))
        for name, role in given.items():
            phase = next((phase for phase in ("prefill", "decode") if name.lower().startswith(phase)), None)
            assert role == f"role:{phase}" if phase else role.startswith("role:series")


def test_series_of_one_phase_are_shades_of_it_and_all_series_differ():
    names = [f"decode, batch {n}" for n in (1, 4, 8)] + ["prefill", "queue", "stall", "send"]
    rows = [{"n": 1, "ms": 1, "series": name} for name in names]
    plot = plots.lines("x", "t", rows, ("n", "n"), ("ms", "ms"), series="series")
    scale = dressed(plot.spec)["layer"][0]["encoding"]["color"]["scale"]
    assert scale["range"][:4] == ["role:decode", "role:decode2", "role:decode3", "role:prefill"]
    assert len(set(scale["range"])) == len(names)


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    channels = [value / 255 for value in bytes.fromhex(colour[1:])]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_colours_can_be_seen_and_told_apart(theme):
    surface = theme.roles["surface"]
    assert contrast(theme.roles["text"], surface) >= 7 and contrast(theme.roles["muted"], surface) >= 4.5
    for role, colour in theme.roles.items():
        if role not in ("surface", "grid"):
            # 3 is what WCAG asks of graphics; a fourth shade is never alone, and has a shape of its own.
            assert contrast(colour, surface) >= (2.3 if role[-1] in "234" else 3), role


def test_data_is_never_taken_for_a_role():
    rows = [{"n": 1, "ms": 2, "name": "role:text"}]
    drawn = drawable(plots.lines("x", "t", rows, ("n", "n"), ("ms", "ms")).spec, LIGHT)
    assert drawn["layer"][0]["data"]["values"][0]["name"] == "role:text"


def test_lines_draws_a_point_a_row_an_interval_and_a_band():
    rows = [{**row, "low": row["ms"] * 0.9, "high": row["ms"] * 1.1} for row in ROWS]
    plot = plots.lines("x", "t", rows, ("n", "n"), ("ms", "ms"), series="phase", fitted=rows, log_x=True, log_y=True)
    assert [len(marks(plot, kind)) for kind in ("symbol", "rule")] == [6, 6]
    assert len({item["stroke"] for item in marks(plot, "line")}) == 2 and len(marks(plot, "area")) == 6
    assert {item["fill"] for item in marks(plot, "symbol")} == {LIGHT.roles["prefill"], LIGHT.roles["decode"]}


def test_a_logarithmic_axis_is_labelled_at_1_2_and_5():
    plot = plots.lines("x", "t", ROWS, ("n", "tokens"), ("ms", "ms"), log_x=True)
    labels = re.findall(r">([\d,.]+)</text>", svg(plot))
    shown = [float(label.replace(",", "")) for label in labels]
    assert {10, 20, 50, 100, 200, 500, 1000} <= set(shown) and 30 not in shown


def test_no_rows_draw_nothing_and_break_nothing():
    for plot in (
        plots.lines("x", "t", [], ("n", "n"), ("ms", "ms"), series="phase"),
        plots.scatter("x", "t", [], ("n", "n"), ("ms", "ms")),
        plots.distribution("x", "t", {}, "ms"),
        plots.bars("x", "t", [], ("a", "a"), ("ms", "ms")),
    ):
        svg(plot)


def test_bars_stack_in_the_order_of_their_parts():
    rows = [{"who": "a", "part": part, "s": size} for part, size in (("prefill", 3.0), ("decode", 1.0), ("a", 2.0))]
    found = marks(plots.bars("x", "t", rows, ("who", ""), ("s", "s"), part="part"), "rect")
    found.sort(key=lambda item: item["x"])
    assert [item["fill"] for item in found] == [LIGHT.roles[role] for role in ("prefill", "decode", "series1")]
    assert [round(item["width"] / found[1]["width"]) for item in found] == [3, 1, 2]


def test_grouped_bars_stand_below_each_other_and_each_begins_at_zero():
    rows = [{"who": "a", "part": part, "s": size} for part, size in (("x", 3.0), ("y", 1.0))]
    found = marks(plots.bars("x", "t", rows, ("who", ""), ("s", "s"), part="part", grouped=True), "rect")
    found.sort(key=lambda item: item["y"])
    assert [item["x"] for item in found] == [0, 0] and round(found[0]["width"] / found[1]["width"]) == 3


def test_a_distribution_has_the_share_at_or_below_each_value():
    plot = plots.distribution("x", "t", {"a": [3.0, 1.0, 2.0, 2.0]}, "ms")
    rows = plot.spec["layer"][0]["data"]["values"]
    assert [(row["value"], row["share"]) for row in rows] == [(1.0, 0.25), (2.0, 0.5), (2.0, 0.75), (3.0, 1.0)]
    many = plots.distribution("x", "t", {"a": [float(n) for n in range(100_000)]}, "ms", limit=5e4)
    rows = many.spec["layer"][0]["data"]["values"]
    assert len(rows) == 400 and rows[0]["value"] == 0 and rows[-1] == {"series": "a", "value": 99_999.0, "share": 1.0}
    assert all(row["share"] == (row["value"] + 1) / 100_000 for row in rows)
    assert len(marks(many, "rule")) == 1


def test_a_waterfall_adds_up():
    plot = waterfall_plot(falls([("queue", 1.0), ("prefill", 1.0), ("decode", 1.0)]), "")
    rows = plot.spec["layer"][2]["data"]["values"]
    assert [row["from"] for row in rows] == [0.0, 1000.0, 2000.0, 0.0] and rows[-1]["to"] == 3000.0
    assert round(sum(float(row["share"].split()[0]) for row in rows[:-1]), 1) == 100.0
    assert [item["text"] for item in marks(plot, "text")] == ["33.4 %", "33.3 %", "33.3 %", "100.0 %"]
    assert {LIGHT.roles["prefill"], LIGHT.roles["decode"]} <= {item["fill"] for item in marks(plot, "rect")}


def test_a_timeline_has_a_lane_a_request_and_each_kind_its_colour():
    found = marks(timeline_plot(load_result(7)), "rect")
    assert len({item["y"] for item in found}) == 7
    drawn = {item["fill"]: item for item in found}
    assert set(drawn) == {LIGHT.roles[role] for role in ("prefill", "decode", "neutral", "text")}
    assert drawn[LIGHT.roles["text"]]["y"] == max(item["y"] for item in found)
    for number in (1, 150, 200):
        plot = timeline_plot(load_result(number))
        assert 4 <= plot.spec["height"] / min(number, 150) <= 26 and ("more" in plot.caption) == (number > 150)


def test_tooltips_show_every_key_and_numbers_as_numbers():
    found = {item["field"]: item for item in plots.tooltips([{"n": 1000, "s": 0.123456, "name": "x"}, {"more": None}])}
    assert found["n"]["format"] == "," and found["s"]["format"] == ".4~g"
    assert found["name"]["type"] == "nominal" and "more" in found
