"""Charts: each kind draws its rows, unchanged, in the colours of their phases."""

from __future__ import annotations

import json
import re

import pytest
from tests.bench.sample_report import all_plots, load_result, sample_report

from twinphase.phases.colours import PAGE_COLOURS
from twinphase_bench.extras import require
from twinphase_bench.load.plots import timeline_plot
from twinphase_bench.report import plots
from twinphase_bench.report.report import Plot
from twinphase_bench.report.theme import COLOURS, THEMES, colour, colours_of, config

SAMPLES = {plot.name: plot for plot in all_plots(sample_report())}
ROWS = [{"n": n, "ms": n * 2.0, "phase": phase} for n in (10, 100, 1000) for phase in PAGE_COLOURS]
LIGHT = {role: pair[0] for role, pair in COLOURS.items()}


def svg(plot: Plot, theme: str = "light") -> str:
    drawn: str = require("vl_convert").vegalite_to_svg(
        {"width": 500, "height": 300, **plot.spec}, config=config(theme)
    )
    return drawn


def marks(plot: Plot, kind: str) -> list[dict]:
    """Every drawn item whose mark is of the kind."""
    spec = {"width": 500, "height": 300, **plot.spec}
    found = require("vl_convert").vegalite_to_scenegraph(spec, config=config("light"))
    items: list[dict] = []

    def walk(part: dict) -> None:
        for item in part.get("items", ()):
            if part.get("role") == "mark" and part["marktype"] == kind:
                items.append(item)
            walk(item)

    walk(found["scenegraph"])
    return items


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", SAMPLES)
def test_every_kind_is_drawn_in_both_themes(name, theme):
    drawn = svg(SAMPLES[name], theme)
    assert len(re.findall(r"<path ", drawn)) > 5
    assert COLOURS["surface"][THEMES.index(theme)] in drawn
    assert not re.search(r'(d|transform|fill|stroke)="[^"]*(NaN|expr|undefined)', drawn)


def test_a_spec_names_roles_and_leaves_looks_to_whoever_draws_it():
    for name, plot in SAMPLES.items():
        assert not re.search(r"#[0-9a-fA-F]{3,8}\b", json.dumps(plot.spec)), name
        assert not {"config", "width", "$schema"} & set(plot.spec), name
    with pytest.raises(ValueError, match="not a role"):
        colour("blue")


def test_series_have_their_phases_colour_or_a_shade_of_it_and_all_differ():
    assert colours_of(["queue", "Decode (ITL)", "prefill, 512 tokens"]) == {
        "queue": "series1",
        "Decode (ITL)": "decode",
        "prefill, 512 tokens": "prefill",
    }
    names = [
        "decode, batch 1",
        "decode, batch 4",
        "decode, batch 8",
        "prefill",
        "queue",
        "stall",
        "send",
    ]
    rows = [{"n": 1, "ms": 1, "series": name} for name in names]
    plot = plots.lines("x", "t", rows, ("n", "n"), ("ms", "ms"), series="series")
    fills = [item["fill"] for item in marks(plot, "symbol")]
    assert fills[:4] == [LIGHT[role] for role in ("decode", "decode2", "decode3", "prefill")]
    assert len(set(fills)) == len(names)


def test_both_phases_have_their_colours_under_the_roofline():
    fills = {item["fill"] for item in marks(SAMPLES["roofline"], "symbol")}
    assert {LIGHT["prefill"], LIGHT["decode"]} <= fills


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    channels = [value / 255 for value in bytes.fromhex(colour[1:])]
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in channels
    ]
    return sum(
        weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True)
    )


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=THEMES)
def test_colours_can_be_seen_and_told_apart(theme):
    colours = {role: pair[theme] for role, pair in COLOURS.items()}
    surface = colours["surface"]
    assert contrast(colours["text"], surface) >= 7 and contrast(colours["muted"], surface) >= 4.5
    for role, shown in colours.items():
        if role not in ("surface", "grid"):
            # 3 is what WCAG asks of graphics; a fourth shade is never alone, and has a shape of its
            # own.
            assert contrast(shown, surface) >= (2.3 if role[-1] in "234" else 3), role


def test_lines_draws_a_point_and_an_interval_per_row_and_a_line_per_series():
    rows = [{**row, "low": row["ms"] * 0.9, "high": row["ms"] * 1.1} for row in ROWS]
    plot = plots.lines(
        "x",
        "t",
        rows,
        ("n", "n"),
        ("ms", "ms"),
        series="phase",
        fitted=rows,
        log_x=True,
        log_y=True,
    )
    assert [len(marks(plot, kind)) for kind in ("symbol", "rule")] == [6, 6]
    assert len({item["stroke"] for item in marks(plot, "line")}) == 2
    assert {item["fill"] for item in marks(plot, "symbol")} == {LIGHT["prefill"], LIGHT["decode"]}
    alone = plots.lines("decode-x", "t", rows[:1], ("n", "n"), ("ms", "ms"))
    assert marks(alone, "symbol")[0]["fill"] == LIGHT["decode"]


def test_a_logarithmic_axis_is_labelled_at_1_2_and_5():
    plot = plots.lines("x", "t", ROWS, ("n", "tokens"), ("ms", "ms"), log_x=True)
    labels = re.findall(r">([\d,.]+)</text>", svg(plot))
    shown = [float(label.replace(",", "")) for label in labels]
    assert {10, 20, 50, 100, 200, 500, 1000} <= set(shown) and 30 not in shown


def test_no_rows_draw_nothing_and_break_nothing():
    for plot in (
        plots.lines("x", "t", [], ("n", "n"), ("ms", "ms"), series="phase"),
        plots.distribution("x", "t", {}, "ms"),
        plots.bars("x", "t", [], ("a", "a"), ("ms", "ms")),
    ):
        svg(plot)


def test_bars_stack_in_the_order_of_their_parts():
    rows = [
        {"who": "a", "part": part, "s": size}
        for part, size in (("prefill", 3.0), ("decode", 1.0), ("a", 2.0))
    ]
    found = marks(plots.bars("x", "t", rows, ("who", ""), ("s", "s"), part="part"), "rect")
    found.sort(key=lambda item: item["x"])
    assert [item["fill"] for item in found] == [
        LIGHT[role] for role in ("prefill", "decode", "series1")
    ]
    assert [round(item["width"] / found[1]["width"]) for item in found] == [3, 1, 2]


def test_grouped_bars_stand_below_each_other_and_each_begins_at_zero():
    rows = [{"who": "a", "part": part, "s": size} for part, size in (("x", 3.0), ("y", 1.0))]
    found = marks(
        plots.bars("x", "t", rows, ("who", ""), ("s", "s"), part="part", grouped=True), "rect"
    )
    found.sort(key=lambda item: item["y"])
    assert [item["x"] for item in found] == [0, 0] and round(
        found[0]["width"] / found[1]["width"]
    ) == 3


def test_bars_named_after_phases_have_their_colours_and_intervals():
    rows = [{"phase": phase, "ms": 2.0, "low": 1.0, "high": 3.0} for phase in PAGE_COLOURS]
    plot = plots.bars("x", "t", rows, ("phase", ""), ("ms", "ms"))
    assert [item["fill"] for item in marks(plot, "rect")] == [LIGHT["prefill"], LIGHT["decode"]]
    assert len(marks(plot, "rule")) == 2 and "chosen" not in json.dumps(plot.spec)


def test_a_distribution_has_the_share_at_or_below_each_value():
    plot = plots.distribution("x", "t", {"a": [3.0, 1.0, 2.0, 2.0]}, "ms")
    rows = plot.spec["data"]["values"]
    assert [(row["value"], row["share"]) for row in rows] == [
        (1.0, 0.25),
        (2.0, 0.5),
        (2.0, 0.75),
        (3.0, 1.0),
    ]
    many = plots.distribution("x", "t", {"a": [float(n) for n in range(100_000)]}, "ms", limit=5e4)
    rows = many.spec["data"]["values"]
    assert (
        len(rows) == 400
        and rows[0]["value"] == 0
        and rows[-1] == {"series": "a", "value": 99_999.0, "share": 1.0}
    )
    assert all(row["share"] == (row["value"] + 1) / 100_000 for row in rows)
    assert len(marks(many, "rule")) == 1


def test_a_timeline_has_one_lane_per_request_and_each_part_its_colour():
    found = marks(timeline_plot(load_result(7)), "rect")
    assert len({item["y"] for item in found}) == 7
    drawn = {item["fill"]: item for item in found}
    assert set(drawn) == {LIGHT[role] for role in ("prefill", "decode", "neutral", "text")}
    assert drawn[LIGHT["text"]]["y"] == max(item["y"] for item in found)
    for number in (1, 150, 200):
        plot = timeline_plot(load_result(number))
        assert 4 <= plot.spec["height"] / min(number, 150) <= 26 and ("more" in plot.caption) == (
            number > 150
        )


def test_tooltips_show_every_key_and_numbers_as_numbers():
    rows = [{"n": 1000, "s": 0.123456, "name": "x"}, {"n": 1, "s": 1, "more": None}]
    spec = plots.lines("x", "t", rows, ("n", "n"), ("s", "s")).spec
    found = {item["field"]: item for item in spec["layer"][-1]["encoding"]["tooltip"]}
    assert found["n"]["format"] == "," and found["s"]["format"] == ".4~g"
    assert found["name"]["type"] == "nominal" and "more" in found
