"""A report opened in a real browser: drawn, silent, and without a word to the network."""

from __future__ import annotations

import json
import re

import pytest
from tests.bench.browser import Browser
from tests.bench.sample_report import HOSTILE, all_plots, sample_report

from twinphase.bench.report.render import write_report
from twinphase.bench.report.theme import COLOURS, THEMES

DRAWN = "document.documentElement.dataset.state === 'drawn'"
# Of each chart: its name, whether it was drawn, how many marks with a size it has, its width and its box's.
CHARTS = """[...document.querySelectorAll('figure[data-plot]')].map((figure) => [
  figure.dataset.plot, figure.dataset.state,
  [...figure.querySelectorAll('svg .role-mark path, svg .role-mark line, svg .role-mark rect')].filter((mark) => {
    const box = mark.getBoundingClientRect(); return box.width + box.height > 1;
  }).length,
  figure.querySelector('svg')?.getBoundingClientRect().width ?? 0,
  figure.querySelector('.chart').clientWidth,
])"""

# Names of charts of which a word, a legend's second row for instance, is cut above or below.
CUT = """[...document.querySelectorAll('figure[data-plot]')].filter((figure) => {
  const drawing = figure.querySelector('.chart').getBoundingClientRect();
  return [...figure.querySelectorAll('svg text')].some((word) => {
    const place = word.getBoundingClientRect();
    return word.textContent && (place.top < drawing.top - 1 || place.bottom > drawing.bottom + 1);
  });
}).map((figure) => figure.dataset.plot)"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_report(sample_report(), tmp_path_factory.mktemp("report")).html


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("theme", THEMES)
def test_every_chart_is_drawn_without_a_complaint(browser: Browser, page, width, theme):
    browser.look(width=width, dark=theme == "dark")
    browser.open(page, DRAWN)
    charts = browser.evaluate(CHARTS)
    assert [name for name, *_ in charts] == [plot.name for plot in all_plots(sample_report())]
    for name, state, marks, drawn, room in charts:
        assert state == "drawn", name
        assert marks >= 2, f"{name}: {marks} marks"
        assert room * 0.9 <= drawn <= room + 1, f"{name}: {drawn} of {room} pixels"
    assert browser.evaluate(CUT) == []
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width  # nothing hangs over the edge
    fill = browser.evaluate("document.querySelector('[data-plot=waterfall] svg').outerHTML")
    colours = {role: pair[THEMES.index(theme)] for role, pair in COLOURS.items()}
    assert colours["prefill"] in fill and colours["decode"] in fill
    surface = browser.evaluate("getComputedStyle(document.querySelector('section')).backgroundColor")
    assert surface == "rgb({}, {}, {})".format(*bytes.fromhex(colours["surface"][1:]))


def test_names_fit_when_the_window_becomes_narrow(browser: Browser, page):
    browser.look()
    browser.open(page, DRAWN)
    browser.look(width=400)
    browser.wait(f"Math.max(...{CHARTS}.map((chart) => chart[3])) < 400 && {CUT}.length === 0")
    assert browser.complaints() == []


def test_the_reader_changes_the_theme_and_the_charts_follow(browser: Browser, page):
    browser.look(dark=False)
    browser.open(page, DRAWN)
    browser.evaluate("document.getElementById('theme').click()")
    browser.wait(f"document.documentElement.style.colorScheme === 'dark' && {DRAWN}")
    browser.wait(f"document.querySelector('[data-plot=prefill] svg').outerHTML.includes('{COLOURS['prefill'][1]}')")
    assert browser.complaints() == []


def test_text_from_outside_stays_text(browser: Browser, page):
    browser.look()
    browser.open(page, DRAWN)
    assert HOSTILE in browser.evaluate("document.querySelector('h1').textContent")
    assert browser.evaluate("document.querySelectorAll('h1 script, main script').length") == 0
    browser.evaluate("document.querySelector('[data-plot=targets] details').open = true")
    browser.wait("document.querySelector('[data-plot=targets] details td') !== null")
    cells = browser.evaluate("[...document.querySelectorAll('[data-plot=targets] td')].map((cell) => cell.textContent)")
    assert HOSTILE in cells


@pytest.mark.parametrize(
    ("chart", "number"), [("prefill", r"prompt tokens\s+\d+"), ("roofline", r"balance point, FLOP/byte\s+\d+")]
)
def test_a_point_tells_its_numbers(browser: Browser, page, chart, number):
    browser.look()
    browser.open(page, DRAWN)
    browser.evaluate(f"document.querySelector('[data-plot={chart}]').scrollIntoView({{behavior: 'instant'}})")
    place = f"document.querySelector('[data-plot={chart}] svg .mark-symbol.role-mark path').getBoundingClientRect()"
    box = browser.evaluate(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({place})")
    for step in (4, 0):
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + step, y=box[1])
    browser.wait("document.querySelector('.vg-tooltip.visible') !== null")
    told = browser.evaluate("document.querySelector('.vg-tooltip').innerText")
    assert re.search(number, told) and "NaN" not in told
    assert browser.complaints() == []  # the tooltip's style obeys the page's policy as well


def test_a_hostile_name_in_a_tooltip_stays_text(browser: Browser, page):
    browser.look()
    browser.open(page, DRAWN)
    browser.evaluate("document.querySelector('[data-plot=targets]').scrollIntoView({behavior: 'instant'})")
    bars = "[...document.querySelectorAll('[data-plot=targets] svg .mark-rect.role-mark path')].at(-1)"
    box = browser.evaluate(f"(({{x, y, height}}) => [x + 9, y + height / 2])({bars}.getBoundingClientRect())")
    for step in (4, 0):
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + step, y=box[1])
    browser.wait("document.querySelector('.vg-tooltip.visible')?.textContent.includes('Smol')")
    assert browser.evaluate("document.querySelectorAll('.vg-tooltip script').length") == 0
    assert "<script>alert(1)</script>" in browser.evaluate("document.querySelector('.vg-tooltip').textContent")


def test_the_page_alone_gives_back_the_whole_result(browser: Browser, page):
    browser.look()
    browser.open(page, DRAWN)
    browser.evaluate(
        "new Promise((done) => { const make = URL.createObjectURL; URL.createObjectURL = (blob) => {"
        " blob.text().then((text) => { window.saved = text; }); done(); return make.call(URL, blob); };"
        " HTMLAnchorElement.prototype.click = function () { window.savedName = this.download; };"
        " document.getElementById('download').click(); })"
    )
    browser.wait("window.saved !== undefined")
    assert browser.evaluate("window.savedName") == "result.json"
    saved = json.loads(browser.evaluate("window.saved"))
    assert saved == json.loads((page.parent / "result.json").read_text())


def test_the_policy_stops_what_a_report_does_not_bring(browser: Browser, page, tmp_path):
    # The page with a script and an image that someone put in: proof that these tests would notice.
    text = page.read_text().replace(
        "</main>", "</main><script>window.ran = true</script><img src='http://127.0.0.1:9/x.png'>"
    )
    changed = tmp_path / "report.html"
    changed.write_text(text)
    browser.look()
    browser.open(changed, DRAWN)
    assert browser.evaluate("window.ran") is None
    assert len([line for line in browser.complaints() if "Content Security Policy" in line]) == 2


def test_a_keyboard_reaches_everything_that_can_be_used(browser: Browser, page):
    browser.look()
    browser.open(page, DRAWN)
    unnamed = browser.evaluate(
        "[...document.querySelectorAll('button, summary, a, [tabindex]')].filter((element) =>"
        " element.tabIndex < 0 || !(element.textContent.trim() || element.getAttribute('aria-label'))).length"
    )
    assert unnamed == 0
    missing = browser.evaluate(
        "[...document.querySelectorAll('nav a')].filter((link) => !document.querySelector(link.hash)).length"
    )
    assert missing == 0
    assert browser.evaluate("[...document.querySelectorAll('.chart')].every((chart) => chart.ariaLabel.length > 9)")
    heads = "[...document.querySelectorAll('main table')].every((table) => table.tHead && table.caption)"
    assert browser.evaluate(heads)
