"""The page of `explain --out` in a browser: it draws the timeline that it was given."""

from __future__ import annotations

import json

import pytest
from tests.bench.sample_report import HOSTILE

from twinphase.cli import run_app

# As GET /v1/requests/{id}/timeline gives it: the step of the stall ends before its token was
# handed over, and the last two tokens came together.
TIMELINE = {
    "id": "cmpl-1",
    "e2e_ms": 100.003,
    "token_times_ms": [60.117, 80.25, 99.751, 99.751],
    "intervals": [
        {"kind": "queue", "start_ms": 0.0, "end_ms": 10.333, "reason": "seats"},
        {"kind": "prefill", "start_ms": 10.333, "end_ms": 40.701, "step": 3},
        {"kind": "prefill", "start_ms": 40.701, "end_ms": 60.009, "step": 4},
        {"kind": "decode", "start_ms": 60.009, "end_ms": 70.125, "step": 5},
        {"kind": "stall", "start_ms": 70.125, "end_ms": 80.101, "step": 5, "prefill_tokens": 64},
        {"kind": "decode", "start_ms": 80.101, "end_ms": 99.5, "step": 6},
        {"kind": "send", "start_ms": 99.5, "end_ms": 100.003},
    ],
    "prefill": {"steps": 2, "tokens": 84},
    "decode": {"steps": 2, "tokens": 3, "decodes": 4},
    "request": {"num_prompt_tokens": 100, "num_cached_tokens": 16},
}
LEDGER = {"queue": 10.333, "prefill": 49.676, "decode": 29.515, "stall": 9.976, "send": 0.503}
# Notes every rectangle that is painted from now on: colour, left, width.
WATCHED = """(() => {
  globalThis.rectangles = [];
  const fillRect = CanvasRenderingContext2D.prototype.fillRect;
  CanvasRenderingContext2D.prototype.fillRect = function (x, y, width, height) {
    rectangles.push([this.fillStyle, x, width]);
    fillRect.call(this, x, y, width, height);
  };
})()"""
# A colour of the page, as a canvas names it.
COLOUR = """((role) => {
  const context = document.createElement("canvas").getContext("2d");
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(--${role})`;
  context.fillStyle = getComputedStyle(probe).color;
  return context.fillStyle;
})"""


@pytest.fixture
def explained(tmp_path, browser):
    """Opens the page of a saved ledger."""

    def open_page(saved, name="timeline.json"):
        (tmp_path / name).write_text(json.dumps(saved))
        page = tmp_path / "page.html"
        assert run_app(["explain", str(tmp_path / name), "--out", str(page)]) == 0
        browser.look(width=1000)
        browser.open(page, "globalThis.twinphase !== undefined")
        return browser

    return open_page


def test_what_is_drawn_is_the_timeline_digit_for_digit(explained):
    page = explained(TIMELINE)
    lane = page.evaluate(
        "({chunks: twinphase.lane.chunks.map(({start, end}) => [start, end]),"
        " ticks: twinphase.lane.ticks.map(({start, end, tokens}) => [start, end, tokens]),"
        " stalls: twinphase.lane.ticks.map((tick) => tick.stall),"
        " waits: twinphase.lane.waits, first: twinphase.lane.first, end: twinphase.lane.end})"
    )
    assert lane["chunks"] == [[10.333, 40.701], [40.701, 60.009]]
    assert lane["ticks"] == [[60.117, 80.25, 1], [80.25, 99.751, 2]]
    assert lane["stalls"] == [pytest.approx(9.976), 0]
    assert (lane["waits"], lane["first"], lane["end"]) == ([[0, 10.333]], 60.117, 100.003)

    shown = "[...document.querySelectorAll('.fall data')].map((one) => Number(one.value))"
    assert page.evaluate(shown) == [*LEDGER.values(), 100.003]
    headline = page.evaluate(
        "[...document.querySelectorAll('section > p data')].map((d) => d.value)"
    )
    assert headline == ["100.003", "60.117", "13.211"]

    page.evaluate(WATCHED)
    page.look(width=1000, dark=True)  # paints it again
    page.wait("rectangles.length > 0")
    blue, orange = (page.evaluate(f"{COLOUR}('{role}')") for role in ("prefill", "decode"))
    scale = page.evaluate("document.querySelector('canvas').clientWidth") / 100.003
    painted = page.evaluate("rectangles")
    drawn = [(colour, x / scale, width / scale) for colour, x, width in painted]
    for start, end in lane["chunks"]:
        assert (blue, *map(pytest.approx, (start, end - start - 0.7 / scale))) in drawn
    for _, end, _ in lane["ticks"]:
        assert (orange, *map(pytest.approx, (end - 0.7 / scale, 1.4 / scale))) in drawn
    assert (blue, pytest.approx(80.25 - 9.976), pytest.approx(9.976)) in drawn

    assert page.complaints() == [] and len(page.requests()) == 1


def test_a_ledger_without_intervals_has_no_lane_and_its_text_stays_text(explained):
    levers = [{"flag": HOSTILE, "advice": HOSTILE, "saved_seconds": 0.1, "addressed_seconds": 0.1}]
    found = {
        "id": HOSTILE,
        "dominant": "decode",
        "bounds": {},
        "sentences": [],
        "levers": levers,
        "waterfall": {
            "wall_seconds": 0.1,
            "first_token": None,
            "bars": [
                {"name": HOSTILE, "seconds": 0.1, "share": 1.0, "before_first_token": 0.0},
            ],
        },
        "diagnoses": [
            {
                "cause": HOSTILE,
                "phase": "decode",
                "evidence": HOSTILE,
                "share": None,
                "seconds": None,
                "lever": None,
            }
        ],
    }
    page = explained(found)
    assert page.evaluate("document.querySelector('canvas')") is None
    assert page.evaluate("document.title") == page.evaluate("twinphase.found.id") == HOSTILE
    assert page.evaluate("document.querySelectorAll('script').length") == 2
    text = page.evaluate("document.getElementById('explained').innerText")
    assert text.count(HOSTILE.split("\n")[0]) >= 4
    assert page.complaints() == [] and len(page.requests()) == 1


def test_out_is_the_name_of_a_page(tmp_path, capsys):
    (tmp_path / "timeline.json").write_text(json.dumps(TIMELINE))
    assert run_app(["explain", str(tmp_path / "timeline.json"), "--out", str(tmp_path)]) == 2
    assert "ends with .html" in capsys.readouterr().err
