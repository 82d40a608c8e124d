"""A report opened in a real browser: drawn, silent, and without a word to the network."""

from __future__ import annotations

import json
import re

import pytest
from tests.bench.browser import Browser
from tests.bench.sample_report import HOSTILE, all_plots, sample_report

from twinphase_bench.report.theme import COLOURS, THEMES

DRAWN = "document.documentElement.dataset.state === 'drawn'"
# Of each chart: its name, whether it was drawn, how many marks with a size it has, its width and
# its box's.
CHARTS = """[...document.querySelectorAll('figure[data-plot]')].map((figure) => [
  figure.dataset.plot, figure.dataset.state,
  [...figure.querySelectorAll('svg .role-mark :is(path, line, rect)')].filter((mark) => {
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
def page(written):
    return written.html


@pytest.fixture
def opened(browser, page) -> Browser:
    """The page in a wide, light window; whoever changes it opens it anew."""
    browser.look()
    if browser.evaluate("location.href") != page.as_uri():
        browser.open(page, DRAWN)
    return browser


@pytest.mark.parametrize(
    ("width", "theme"),
    [
        (1280, "light"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((400, "light"), (1280, "dark"), (400, "dark"))
        ),
    ],
)
def test_every_chart_is_drawn_without_a_complaint(browser, page, width, theme):
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
    assert (
        browser.evaluate("document.documentElement.scrollWidth") <= width
    )  # nothing hangs over the edge
    colours = {role: pair[THEMES.index(theme)] for role, pair in COLOURS.items()}
    fill = browser.evaluate(
        "[...document.querySelectorAll('[data-plot] svg')].map((one) => one.outerHTML).join()"
    )
    assert colours["prefill"] in fill and colours["decode"] in fill
    surface = browser.evaluate(
        "getComputedStyle(document.querySelector('section')).backgroundColor"
    )
    assert surface == "rgb({}, {}, {})".format(*bytes.fromhex(colours["surface"][1:]))


@pytest.mark.slow
def test_the_charts_follow_the_window_and_the_theme(browser, page):
    browser.look()
    browser.open(page, DRAWN)
    browser.look(width=400)
    browser.wait(f"Math.max(...{CHARTS}.map((chart) => chart[3])) < 400 && {CUT}.length === 0")
    browser.evaluate("document.getElementById('theme').click()")
    browser.wait(f"document.documentElement.style.colorScheme === 'dark' && {DRAWN}")
    dark = COLOURS["prefill"][THEMES.index("dark")]
    browser.wait(
        f"document.querySelector('[data-plot=prefill-time] svg').outerHTML.includes('{dark}')"
    )
    assert browser.complaints() == []
    browser.open(page, DRAWN)  # in its first theme, for the tests below


def test_text_from_outside_stays_text(opened):
    assert HOSTILE in opened.evaluate("document.querySelector('h1').textContent")
    assert opened.evaluate("document.querySelectorAll('h1 script, main script').length") == 0
    opened.evaluate("document.querySelector('[data-plot=targets] details').open = true")
    opened.wait("document.querySelector('[data-plot=targets] details td') !== null")
    cells = opened.evaluate(
        "[...document.querySelectorAll('[data-plot=targets] td')].map((cell) => cell.textContent)"
    )
    assert HOSTILE in cells


SYMBOL = ".mark-symbol.role-mark path"
BAR = ".mark-rect.role-mark path"


@pytest.mark.parametrize(
    ("chart", "mark", "told"),
    [
        ("prefill-time", SYMBOL, r"prompt tokens\s+\d+"),
        ("roofline", SYMBOL, r"balance point, FLOP/byte\s+\d+"),
        ("targets", BAR, r"<script>alert\(1\)</script>"),
    ],
)
def test_a_tooltip_tells_numbers_and_hostile_names_as_text(opened, chart, mark, told):
    opened.evaluate(
        f"document.querySelector('[data-plot={chart}]').scrollIntoView({{behavior: 'instant'}})"
    )
    marks = f"[...document.querySelectorAll('[data-plot={chart}] svg {mark}')]"
    place = f"{marks}.at({0 if mark == SYMBOL else -1}).getBoundingClientRect()"
    width = "width / 2" if mark == SYMBOL else "9"
    box = opened.evaluate(f"(({{x, y, width, height}}) => [x + {width}, y + height / 2])({place})")
    for step in (4, 0):
        opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + step, y=box[1])
    opened.wait(
        f"/{told.replace('/', chr(92) + '/')}/"
        ".test(document.querySelector('.vg-tooltip.visible')?.innerText)"
    )
    shown = opened.evaluate("document.querySelector('.vg-tooltip').innerText")
    assert re.search(told, shown) and "NaN" not in shown
    assert opened.evaluate("document.querySelectorAll('.vg-tooltip script').length") == 0
    assert opened.complaints() == []  # the tooltip's style obeys the page's policy as well


def test_the_page_alone_gives_back_the_whole_result(opened, written):
    opened.evaluate(
        "new Promise((done) => { const make = URL.createObjectURL; URL.createObjectURL = (blob) "
        "=> {"
        " blob.text().then((text) => { window.saved = text; }); done(); return make.call(URL, "
        "blob); };"
        " HTMLAnchorElement.prototype.click = function () { window.savedName = this.download; };"
        " document.getElementById('download').click(); })"
    )
    opened.wait("window.saved !== undefined")
    assert opened.evaluate("window.savedName") == "result.json"
    assert json.loads(opened.evaluate("window.saved")) == json.loads(written.json.read_text())


def test_a_keyboard_reaches_everything_that_can_be_used(opened):
    unnamed = opened.evaluate(
        "[...document.querySelectorAll('button, summary, a, [tabindex]')].filter((element) =>"
        " element.tabIndex < 0 || !(element.textContent.trim() || "
        "element.getAttribute('aria-label'))).length"
    )
    assert unnamed == 0
    missing = opened.evaluate(
        "[...document.querySelectorAll('nav a')].filter((link) => "
        "!document.querySelector(link.hash)).length"
    )
    assert missing == 0
    assert opened.evaluate(
        "[...document.querySelectorAll('.chart')].every((chart) => chart.ariaLabel.length > 9)"
    )
    heads = "[...document.querySelectorAll('main > section table')].every((table) => table.tHead)"
    assert opened.evaluate(heads)
    assert opened.evaluate(
        "[...document.querySelectorAll('.table table')].every((table) => table.caption)"
    )


def test_the_policy_stops_what_a_report_does_not_bring(browser, page, tmp_path):
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
