"""The live page's recordings, pictures and texts, and whether people can use it."""

from __future__ import annotations

import gzip
import html
import json
import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from live_page import KEYS, complete

pytestmark = pytest.mark.slow

AXE = "axe-core@4.10.3"
VIEWS = ("chat", "engine", "learn")


# In the page: opens a text or bytes as a file, and says what came of it.
OPENED = """(async (content) => {
  const { openRecording } = await import('./page/recordings.js');
  try {
    const found = await openRecording(new File([content], 'a.jsonl'));
    return `${found.lanes.length} lanes`;
  } catch (error) {
    return `${error.constructor.name}: ${error.message}`;
  }
})"""


def test_a_recording_is_saved_opened_and_saved_again(page, served):
    page.open("engine")
    assert complete(served, KEYS[0], "hello world " * 30, 8) == 200
    page.see("twinphase.engine.recording.lanes.at(-1)?.timings")
    same = page.value(
        """(async () => {
          const { saveRecording, openRecording, besides } = await import('./page/recordings.js');
          const first = await saveRecording(twinphase.engine.recording);
          const opened = await openRecording(new File([first], 'one.jsonl.gz'));
          const second = await saveRecording(opened);
          twinphase.engineView.show(besides(opened, opened));
          const bytes = async (blob) => [...new Uint8Array(await blob.arrayBuffer())].join();
          return [await bytes(first) === await bytes(second), first.size,
            opened.lanes.length, opened.steps.length,
            twinphase.engine.recording.steps.length, twinphase.engineView.recording.lanes.length];
        })()"""
    )
    equal, size, lanes, steps, live_steps, both = same
    assert equal and size > 200
    assert lanes == 1 and steps == live_steps and both == 2
    page.see("document.querySelectorAll('#lanes button').length == 2")
    page.click("#live")
    page.see("twinphase.engineView.isLive")


def test_a_hostile_recording_is_refused_with_one_sentence(page_browser, page, served):
    assert complete(served, KEYS[0], "hello world " * 30, 2) == 200
    page.see("twinphase.engine.recording.lanes.at(-1)?.timings")
    lines = page.value("twinphase.engine.recording.events.map((one) => JSON.stringify(one))")
    whole = "\n".join(lines)
    events = [json.loads(one) for one in lines]
    steps = next(one for one in events if one["event"] == "steps" and one["pre"][0])
    lane = next(one for one in events if one["event"] == "lane")
    blocks = next(one for one in events if one["event"] == "blocks")
    tag = "<img src=x onerror=alert(1)>"

    def opened(*more, first=lines[0]):
        text = "\n".join([first, *(json.dumps(one) for one in more)])
        return page.value(f"{OPENED}({json.dumps(text)})")

    assert page.value(f"{OPENED}({json.dumps(whole)})") == "1 lanes"
    assert opened(lane | {"unknown": 1}, {"event": "future", "t": 1}) == "1 lanes"
    wrong = {
        "not valid JSON": opened() and page.value(f"{OPENED}({json.dumps(whole[:-9])})"),
        "is not an event": opened({"event": 3, "t": 1}),
        "its first line": opened(first=lines[1]),
        "not finite": page.value(f"{OPENED}({json.dumps(lines[0] + chr(10) + INFINITE)})"),
        "below 0": opened(lane | {"at": -1}),
        "different lengths": opened(lane, steps | {"dec": []}),
        "a request that does not exist": opened(steps),
        "a worker that does not exist": opened(lane, steps | {"worker": 7}),
        "KV block that does not exist": opened(
            lane, blocks | {"lanes": [[lane["lane"], 0, [[0, 1 << 30]]]]}
        ),
        "wrong `start`": opened(lane, steps | {"start": tag}),
        "nested too deeply": page.value(f"{OPENED}({json.dumps(lines[0] + chr(10) + DEEP)})"),
        "a time that is too large": opened(lane | {"at": 1e300}),
        "larger than 32 MiB": page.value(f"{OPENED}(new Uint8Array({33 << 20}))"),
        "larger than 32 MiB when": page.value(
            "(async () => " + OPENED + "(await new Response(new Blob([new Uint8Array("
            f"{33 << 20})]).stream().pipeThrough(new CompressionStream('gzip'))).blob()))()"
        ),
        "cut off": page.value(f"{OPENED}(new Uint8Array({list(gzip.compress(b'x' * 99)[:20])}))"),
        "it is empty": page.value(f"{OPENED}('')"),
    }
    for words, found in wrong.items():
        assert found.startswith("RecordingError: a.jsonl") and words in found, (words, found)
        assert "\n" not in found

    # A name in a file is text, never markup.
    first = json.dumps(events[0] | {"workers": [{"id": tag}, {"id": "b"}], "model": tag})
    text = "\n".join([first, json.dumps(lane | {"id": tag, "route": tag, "own": True})])
    page.value(
        "(async (text) => { location.hash = '#engine';"
        "const { openRecording } = await import('./page/recordings.js');"
        "const found = await openRecording(new File([text], 'a'));"
        "twinphase.engineView.show(found);"
        f"twinphase.engineView.pick({{ lane: found.lanes[0] }}); }})({json.dumps(text)})"
    )
    assert "onerror" in page.text("#detail")
    assert page.value("document.querySelectorAll('#engine img').length") == 0
    assert page_browser.complaints() == []


INFINITE = '{"event":"pace","t":1e999,"at":1,"itl_slo_ms":1}'
DEEP = '{"event":"pace","t":1,"x":' + "[" * 20 + "]" * 20 + "}"


@pytest.fixture(scope="module")
def axe(tmp_path_factory) -> str:
    """axe-core, from npm's cache if it is there. It is never part of this repository."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "twinphase-tests"
    path = cache / f"{AXE.replace('@', '-')}.js"
    if path.is_file():
        return path.read_text()
    folder = tmp_path_factory.mktemp("axe")
    npm = shutil.which("npm")
    command = [npm or "npm", "pack", "--silent", AXE]
    if npm is None or subprocess.run(command, cwd=folder, timeout=120).returncode:
        reason = f"`npm pack {AXE}` is needed and did not work"
        if os.environ.get("TWINPHASE_REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        source = member.read().decode()
    cache.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return source


AUDIT = """axe.run(document, {resultTypes: ['violations'], elementRef: false})
  .then((found) => found.violations.map((one) =>
    `${one.id}: ${one.nodes.slice(0, 3).map((node) => node.target.join(' ')).join(', ')}`))"""


@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_in_anyones_way(page_browser, page, axe, dark):
    page.set(Maximum_tokens=12)
    page.ask("hello")
    page.ends()
    page.value("twinphase.engineView.pick({ lane: twinphase.engine.recording.lanes.at(-1) })")
    page.click("#settings")
    page.value(axe + ";undefined")
    for view in VIEWS:
        page_browser.look(width=1400, dark=dark)
        page.value(f"location.hash = '#{view}'")
        page.see(f"!document.getElementById('{view}').hidden")
        assert page.value(AUDIT) == [], view
        for width in (400, 1400, 2560):
            page_browser.look(width=width, dark=dark)
            assert page.value("document.documentElement.scrollWidth") <= width, (view, width)


def test_less_motion_and_forced_colours_are_honoured(page_browser, page, served):
    page_browser.look(width=1400, prefers_reduced_motion="reduce", forced_colors="active")
    page.open("engine")
    assert page.value("twinphase.engineView.playing") is False
    assert complete(served, KEYS[0], "hello", 3) == 200
    page.see("twinphase.engine.recording.lanes.at(-1)?.end < Infinity")
    page.value("location.hash = '#chat'")
    page.set(Maximum_tokens=3)
    page.ask("hello")
    page.ends()
    animated = "[...document.querySelectorAll('*')].filter((one) => one.getAnimations().length)"
    assert page.value(f"{animated}.length") == 0
    # The bars keep their colours, which are what they say.
    bar = page.value("getComputedStyle(document.querySelector('.track span')).forcedColorAdjust")
    assert bar == "none"
    page_browser.look(width=1400)


# Draws with a context that writes down every call, and gives back the colours of its rectangles.
LOGGED = """(async () => {
  const { drawLane, drawSteps, scaleOf } = await import('./page/draw.js');
  const { Recording } = await import('./page/recording.js');
  const { palette } = await import('./page/dom.js');
  const names = new Map(Object.entries(palette).map(([role, colour]) => [colour, role]));
  const log = () => {
    const calls = [];
    const record = (name) => (...values) => calls.push([name, ...values]);
    const target = { calls, fillRect: (x, y, w, h) => calls.push(
      [names.get(target.fillStyle) ?? 'pattern', x, w, target.globalAlpha]) };
    return new Proxy(target, {
      get: (object, name) => object[name] ??
        (name === 'createPattern' ? () => 'pattern' : record(name)),
      set: (object, name, value) => { object[name] = value; return true; },
    });
  };
  const recording = new Recording();
  for (const event of %s) recording.add(event);
  const scale = scaleOf(0, 1000, 0, 1000);
  const drawn = recording.lanes.map((lane) => {
    const context = log();
    drawLane(context, lane, scale, 0, 24, Infinity);
    return context.calls;
  });
  const context = log();
  drawSteps(context, recording.steps, scale, { y: 100, up: 80, down: 20 },
    { target: 40, now: Infinity, picked: null });
  return { lanes: drawn, steps: context.calls, marks: recording.marks,
    ends: recording.lanes.map((lane) => lane.end) };
})()"""


def made_events() -> list[dict]:
    """Two requests and three steps: a chunk beside an answer, drafts, a transfer, a preemption."""

    def steps(first, start, ms, decode_ms, pre, dec):
        return {
            "event": "steps", "t": start + ms, "worker": 0, "first": first, "start": [start],
            "duration_ms": [ms], "decode_ms": [decode_ms], "pre": [pre], "dec": [dec],
        }  # fmt: skip

    def lane(number, at, **more):
        return {"event": "lane", "t": at, "lane": number, "at": at, **more}

    hello = {
        "event": "hello", "t": 0, "format": "twinphase-recording", "version": 1, "boot": "a",
        "origin": 0, "itl_slo_ms": 40, "workers": [{"id": "engine", "num_blocks": 8}], "lanes": [],
    }  # fmt: skip
    return [
        hello,
        lane(1, 0, own=True, id="a", prompt=10, state="queued"),
        lane(1, 100, state="running", cached=4),
        steps(0, 100, 50, 0, [[1, 6, 50, 1]], []),
        lane(2, 100, own=False, prompt=8, state="queued"),
        lane(2, 200, state="running", cached=0),
        steps(1, 200, 60, 20, [[2, 8, 45, 1]], [[1, 3, 4]]),
        lane(1, 300, state="preempted"),
        lane(1, 400, state="running", cached=0),
        steps(2, 400, 30, 10, [[1, 14, 25, 1]], [[2, 1]]),
        lane(1, 510, state="running", transfer={"start": 450, "end": 500, "blocks": 2}),
        steps(3, 520, 10, 10, [], [[1, 1]]),
        {**hello, "t": 0, "boot": "b", "origin": 600},
    ]


def test_a_drawing_has_what_happened(page):
    drawn = page.value(LOGGED % json.dumps(made_events()))
    first, second = drawn["lanes"]
    rectangles = [call for call in first if call[0] in ("prefill", "decode", "moved", "text")]
    # Its chunks: at 100 ms, whole, and again after the preemption, pale where others' part is.
    assert ["prefill", 100, pytest.approx(49.3), 1] in rectangles
    assert ["prefill", 400, pytest.approx(24.3), 1] in rectangles
    assert ["prefill", 400, pytest.approx(29.3), 0.26] in rectangles
    assert ["text", 149, 2, 1] in rectangles  # the first token
    # The gap until 260 ms: 40 ms of it are the other's prompt, blue inside orange.
    assert ["decode", 150, pytest.approx(110), 0.75] in rectangles
    assert ["prefill", pytest.approx(220), pytest.approx(40), 0.55] in rectangles
    assert sum(call[0] == "arc" for call in first) >= 2  # two accepted drafts
    assert any(call[0] == "neutral" and call[2] == 2 for call in first)  # one rejected
    assert ["moved", 450, 50, 1] in rectangles
    waits = [
        (call[1], second[i + 1][1])
        for i, call in enumerate(first)
        if call[0] == "moveTo"
        for second in [first]
        if second[i + 1][0] == "lineTo"
    ]
    assert (0, 100) in waits and (300, 400) in waits
    # The steps: decode's part below prefill's, in milliseconds of one scale.
    blue = [call for call in drawn["steps"] if call[0] == "prefill"]
    assert len(blue) >= 4
    assert drawn["marks"] == [{"at": 600, "text": "restarted"}]
    assert all(end is not None for end in drawn["ends"])


MARKED = """(async (text) => {
  const { markdown } = await import('./page/markdown.js');
  const box = document.createElement('div');
  box.append(...markdown(text));
  return box.innerHTML;
})"""


HOSTILE = "<script>alert(1)</script> [x](javascript:alert(1)) &amp;"
EMPHASIS = "a <em>b</em> <strong>c</strong> <code>d*e*</code> snake_case_word"
QUOTE = "<blockquote><p>quoted\nmore</p></blockquote>"
NESTED = '<ol start="1"><li>one</li><li>two<ul><li>inner</li></ul></li></ol>'


def test_markdown_becomes_nodes(page):
    expected = {
        "a *b* **c** `d*e*` snake_case_word": f"<p>{EMPHASIS}</p>",
        "# Title\ntext\n\n> quoted\n> more": f"<h3>Title</h3><p>text</p>{QUOTE}",
        "1. one\n2. two\n   - inner\n\nafter": f"{NESTED}<p>after</p>",
        HOSTILE: f"<p>{html.escape(HOSTILE)}</p>",
        "open **bold and `code": "<p>open **bold and `code</p>",
    }
    for text, nodes in expected.items():
        assert page.value(f"{MARKED}({json.dumps(text)})") == nodes


def test_code_tables_and_links_of_an_answer(page):
    text = "```python\nif a < b:\n    *x*\n```\n\n|a|b|\n|-|-:|\n|1|2|\n\n[t](https://a.example/b)"
    found = page.value(f"{MARKED}({json.dumps(text)})")
    assert "<code>if a &lt; b:\n    *x*\n</code>" in found
    assert '<td class="right">2</td>' in found and "<th" in found
    assert 'href="https://a.example/b"' in found and 'rel="noopener noreferrer nofollow"' in found
    # However hostile, a text is parsed in a moment, and all of it is shown.
    for hostile in ("*a " * 4000, "[" * 4000, "> " * 2000, "`" * 3000, "- " * 1500, "|" * 3000):
        began = time.monotonic()
        page.value(f"{MARKED}({json.dumps(hostile)})")
        assert time.monotonic() - began < 30
