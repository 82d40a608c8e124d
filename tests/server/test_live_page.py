"""The live page in a real browser, drawn from a real server, and equal to what that server says."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import subprocess
import tarfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from tests.bench.browser import Browser, opened_browser

pytestmark = pytest.mark.slow

AXE = "axe-core@4.10.3"
KEYS = ("alice", "bob")
# With a small budget a prompt has several chunks, and two seats make the third request wait.
FLAGS = ("--max-num-batched-tokens", "32", "--max-num-seqs", "3", "--max-queued-requests", "2")
SECRET = "zebra "  # in a prompt of another key
VIEWS = ("chat", "engine", "learn")
ASKED = "twinphase.chat.running !== null"
ANSWERED = "twinphase.chat.running === null && !!twinphase.chat.views.at(-1)?.finished"
# Of the last answer: what is drawn, and what stands beside it.
DRAWN = """(() => {
  const view = twinphase.chat.views.at(-1);
  const { lane } = view.source;
  const values = (selector) =>
    [...view.element.querySelectorAll(selector)].map((one) => Number(one.value));
  return {
    id: view.turn.id,
    timings: view.turn.timings,
    prompt: lane.prompt,
    cached: lane.cached,
    written: lane.written,
    chunks: lane.chunks.map((one) => [one.step.index, one.tokens, one.own, one.step.bookkeeping]),
    ticks: lane.ticks.map((one) =>
      [one.step.index, one.tokens, one.stall, one.step.bookkeeping, one.step.prefill.length]),
    headline: values('.big data'),
    fall: values('.why .fall[aria-label^="Where"] data'),
    words: view.element.querySelector('.lane:nth-child(2)').innerText,
  };
})()"""

# A random model ends its answers at once, and writes what is no text.
WITH_FIELDS = """(fields) => {
  const send = globalThis.fetch;
  globalThis.fetch = (path, options) => {
    if (!options?.body) return send(path, options);
    return send(path, { ...options, body: JSON.stringify({ ...fields, ...JSON.parse(options.body) }) });
  };
}"""


class Page:
    """The page of a server, and what a person does with it."""

    def __init__(self, browser: Browser, url: str, key: str = "") -> None:
        self.browser = browser
        self.url = url
        self.key = key
        self.fields: dict[str, object] = {"ignore_eos": True}  # added to every chat

    def open(self, view: str = "chat", ready: str = "twinphase.engine.hello !== null") -> None:
        if self.key:  # as this tab keeps it
            self.browser.open(f"{self.url}/page/icon.svg", "true")
            self.value(f"sessionStorage.setItem('twinphase-key', {self.key!r})")
        self.browser.open(f"{self.url}/#{view}", f"globalThis.twinphase && {ready}")
        self.value(f"({WITH_FIELDS})({json.dumps(self.fields)})")

    def see(self, expression: str) -> None:
        self.browser.wait(expression)

    def value(self, expression: str):
        return self.browser.evaluate(expression)

    def text(self, selector: str) -> str:
        return self.value(f"document.querySelector({selector!r}).innerText")

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({selector!r}).click()")

    def set(self, **settings: object) -> None:
        """Settings of the chat, by the first words of their labels."""
        self.click("#settings")
        for name, value in settings.items():
            label = name.replace("_", " ")
            self.value(
                "(() => { const input = [...document.querySelectorAll('#panel label')]"
                f".find((one) => one.firstChild.textContent.startsWith({label!r})).lastChild;"
                f"input.value = {str(value)!r}; input.oninput(); }})()"
            )
        self.click("#settings")

    def ask(self, question: str) -> None:
        """Type a question and press Enter."""
        self.value("document.getElementById('prompt').focus()")
        self.browser.call("Input.insertText", text=question)
        self.browser.press("Enter", "\r")

    def ends(self) -> None:
        self.see(ANSWERED)


@pytest.fixture(scope="module")
def browser():
    opened = opened_browser()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def served(start):
    """One whose page shows two keys; no test changes it for the next one."""
    with start(*(f"--api-key={key}" for key in KEYS), *FLAGS) as running:
        yield running


@pytest.fixture
def page(browser, served):
    """The page of the first key, wide and light."""
    browser.look(width=1400)
    found = Page(browser, served.url, KEYS[0])
    found.fields["logit_bias"] = words_bias(served)
    found.open()
    return found


def words_bias(served) -> dict[str, int]:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    found = {}
    for word in (" the", " world", " and"):
        body = {"prompt": word, "add_special_tokens": False}
        reply = httpx.post(f"{served.url}/tokenize", json=body, headers=headers)
        found[str(reply.json()["tokens"][0])] = 20
    return found


def get(served, path: str):
    reply = httpx.get(served.url + path, headers={"Authorization": f"Bearer {KEYS[0]}"})
    assert reply.status_code == 200
    return reply.json()


def complete(served, key: str, prompt: str, max_tokens: int) -> int:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(
        f"{served.url}/v1/completions", json=body, headers=headers, timeout=60
    ).status_code


def test_what_is_drawn_is_what_the_server_measured(browser, page, served):
    page.set(Maximum_tokens=400, Temperature=0)
    page.value("twinphase.chat.attach(new File(['the world and the '.repeat(40)], 'wall.txt'))")
    page.see("!document.getElementById('attached').hidden")
    page.ask("hello world")
    page.see("twinphase.chat.running?.turn.answer.tokens > 3")
    # Another key's long prompt comes while the answer is written.
    other = threading.Thread(target=complete, args=(served, KEYS[1], SECRET * 150, 4))
    other.start()
    page.ends()
    other.join()
    drawn = page.value(DRAWN)
    timings = drawn["timings"]
    timeline = get(served, f"/v1/requests/{drawn['id']}/timeline")
    request = timeline["request"]

    # The lane: every token of the prompt and of the answer is in it once, in the steps that the
    # timeline names, with the times that it has.
    assert drawn["prompt"] == request["num_prompt_tokens"] > 100
    assert drawn["cached"] + sum(tokens for _, tokens, *_ in drawn["chunks"]) == drawn["prompt"]
    assert drawn["written"] == request["num_output_tokens"] == 400
    assert len(drawn["chunks"]) > 2
    intervals = [one for one in timeline["intervals"] if "step" in one]
    ms = Counter()
    for one in intervals:
        ms[one["kind"], one["step"]] += one["end_ms"] - one["start_ms"]
    for step, _, own, bookkeeping in drawn["chunks"]:
        # What follows a step belongs to its last interval, which is this one if it was alone.
        assert min(abs(own + more - ms["prefill", step]) for more in (0, bookkeeping)) < 0.01
    stalls = [one for one in drawn["ticks"] if one[4]]
    assert len(stalls) >= 3
    bookkept = sum(stall + bookkeeping for _, _, stall, bookkeeping, _ in stalls)
    assert bookkept == pytest.approx(timings["ledger_ms"]["stall"], abs=0.01 * len(stalls))
    for step, _, stall, _, _ in stalls:
        assert ("stall", step) in ms and stall > 0

    # The words: digit for digit.
    assert drawn["headline"] == [timings["ttft_ms"], timings["tpot_ms"]]
    shown = Counter(drawn["fall"])
    assert drawn["fall"][-1] == pytest.approx(timings["e2e_ms"], abs=0.05)
    large = [ms for ms in timings["ledger_ms"].values() if ms / timings["e2e_ms"] > 0.005]
    assert large and all(shown[ms] for ms in large)
    assert sum(drawn["fall"][:-1]) == pytest.approx(drawn["fall"][-1], abs=0.01)
    assert timings["e2e_ms"] <= timeline["e2e_ms"]

    # The other key's prompt is named by its load, and nothing of its text is anywhere.
    assert f"{len(stalls)} gaps held up" in drawn["words"] and "another key" in drawn["words"]
    heard = page.value("JSON.stringify(twinphase.engine.recording.events)")
    shown_text = page.value("document.documentElement.outerHTML")
    assert SECRET.strip() not in heard and SECRET.strip() not in shown_text
    assert "bob" not in heard and "wall.txt" not in heard

    # Nothing came from elsewhere, and nothing was complained about.
    assert browser.complaints() == []
    assert all(url.startswith((served.url, "about:")) for url in browser.requests())


def test_a_conversation_is_stopped_retried_edited_kept_and_forgotten(browser, page):
    page.set(Maximum_tokens=1500, Temperature=0)
    page.ask("hello")
    page.see("twinphase.chat.running?.turn.answer.tokens > 3")
    browser.press("Escape")
    page.ends()
    # What was written stays, with the ledger up to there.
    stopped = page.value("JSON.stringify(twinphase.chat.conversation.turns[0])")
    assert json.loads(stopped)["finish"] == "stopped"
    assert "Where" in page.text(".why") and page.text(".answer")
    page.set(Maximum_tokens=5)
    page.click(".asked button:nth-child(2)")
    page.ends()
    assert page.value("twinphase.chat.views.length") == 1
    page.click(".asked button")
    browser.call("Input.insertText", text=" world")
    browser.press("Enter", "\r")
    page.see(f"{ANSWERED} && twinphase.chat.views[0].turn.question == 'hello world'")
    page.ask("and")
    page.see("twinphase.chat.views.length == 2")
    page.ends()
    roles = page.value("twinphase.chat.messages().map((one) => one.role)")
    assert roles == ["user", "assistant", "user", "assistant"]
    written = page.value("document.querySelector('.answer').textContent")

    page.see("twinphase.chat.running === null")
    time.sleep(0.2)  # it is being written down
    page.open()
    page.click("#history")
    page.see("document.querySelector('.past button') !== null")
    assert page.text(".past button") == "hello world" or page.text(".past button") == "hello"
    page.click(".past button")
    page.see("twinphase.chat.views.length == 2")
    assert page.value("document.querySelector('.answer').textContent") == written
    assert "first token" in page.text(".side") and page.value("!!document.querySelector('.fall')")
    page.click("#history")
    page.see("[...document.querySelectorAll('#panel > button')].length == 1")
    page.click("#panel > button")
    page.see("twinphase.chat.views.length == 0 && !document.getElementById('welcome').hidden")
    page.click("#history")
    page.see("document.querySelector('#panel p')?.innerText.startsWith('No conversation')")


def test_a_schema_and_tools_are_sent_and_a_bad_one_is_named(page):
    page.set(JSON_schema='{"type": "object", "properties": {"a": {"type": "integer"}}}')
    page.set(Maximum_tokens=30)
    page.ask("hello")
    page.ends()
    assert page.value("twinphase.chat.views[0].turn.error") is None
    assert page.value("twinphase.chat.views[0].turn.answer.text()").startswith("{")
    page.set(JSON_schema="{")
    page.ask("hello")
    page.ends()
    assert "The JSON schema is not valid JSON" in page.value(
        "twinphase.chat.views.at(-1).problem.innerText"
    )


def test_the_time_line_is_driven_by_keys_and_says_what_it_shows(browser, page, served):
    page.open("engine")
    threads = [
        threading.Thread(target=complete, args=(served, key, "hello world " * 20, 20))
        for key in (KEYS[0], KEYS[1], KEYS[0])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended = "twinphase.engine.recording.lanes.filter((one) => one.end < Infinity).length == 3"
    page.see(f"{ended} && document.querySelectorAll('#lanes button').length >= 3")
    names = page.text("#lanes")
    assert "another key" in names and "Request" in names
    page.value("document.getElementById('line').focus()")
    browser.press("ArrowDown")
    lane = "twinphase.engineView.lane === twinphase.engine.recording.lanes"
    page.see(f"{lane}[0] && !document.getElementById('detail').hidden")
    assert "first token after" in page.text("#say")
    browser.press("ArrowDown")
    page.see(f"{lane}[1]")
    browser.press("ArrowUp")
    browser.press("Enter")
    assert page.value("document.activeElement.id") == "detail"
    browser.press("Escape")
    page.see("document.activeElement.id == 'line' && document.getElementById('detail').hidden")
    browser.press("ArrowRight")
    page.see("twinphase.engineView.step !== null")
    assert page.text("#say").startswith("Step ")
    step = page.value("twinphase.engineView.step.index")
    browser.press("ArrowLeft")
    assert page.value("twinphase.engineView.step.index") < step
    browser.press("Escape")
    spans = []
    for key in ("+", "-", "-"):
        spans.append(page.value("twinphase.engineView.span"))
        browser.press(key, key)
    assert spans[1] < spans[0] and page.value("twinphase.engineView.span") > spans[1]
    playing = page.value("twinphase.engineView.playing")
    browser.press(" ", " ")
    assert page.value("twinphase.engineView.playing") != playing
    browser.press("Home")
    assert page.value("twinphase.engineView.t === twinphase.engine.recording.begin")
    browser.press("End")
    assert page.value("twinphase.engineView.t === twinphase.engine.recording.end")
    # Below: the cache and the blocks at that moment, as the server counts them.
    assert " of 4,096 " not in page.text("#kv-says") and "free, of" in page.text("#kv-says")
    assert "prompt tokens were cached" in page.text("#hits")
    assert browser.complaints() == []


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


def test_a_hostile_recording_is_refused_with_one_sentence(browser, page, served):
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
        "KV block that does not exist": opened(lane, blocks | {"lanes": [[lane["lane"], 0, [[0, 1 << 30]]]]}),
        "wrong `start`": opened(lane, steps | {"start": tag}),
        "nested too deeply": page.value(
            f"{OPENED}({json.dumps(lines[0] + chr(10) + DEEP)})"
        ),
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
    assert browser.complaints() == []


INFINITE = '{"event":"pace","t":1e999,"at":1,"itl_slo_ms":1}'
DEEP = '{"event":"pace","t":1,"x":' + "[" * 20 + "]" * 20 + "}"


def test_each_state_of_the_server_is_seen(browser, start):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Without keys, one seat and one place to wait.
    flags = ("--port", str(port), "--max-num-seqs", "1", "--max-queued-requests", "1")
    with start(*flags, wait=False) as server:
        page = Page(browser, f"http://127.0.0.1:{port}")
        for _ in range(600):
            with socket.socket() as attempt:
                if attempt.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        browser.look(width=1400)
        # Loading: the stage is named, and a question may be asked already.
        page.open(ready="!document.getElementById('notice').hidden")
        assert "The model is not ready" in page.text("#notice")
        page.set(Maximum_tokens=3)
        page.ask("hello")
        page.ends()
        assert page.value("twinphase.chat.views[0].turn.timings.predicted_n") == 3
        assert page.value("document.getElementById('notice').hidden")
        server.wait_until_ready()

        # Idle.
        page.value("location.hash = '#engine'")
        page.see("document.getElementById('state').innerText.startsWith('The engine is idle')")
        page.see("/No step for/.test(document.getElementById('state').innerText)")

        # 429, with the time after which asking again can succeed.
        page.value("location.hash = '#chat'")
        busy = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=60) as client:
            running = []
            for _ in range(2):
                request = client.build_request("POST", f"{page.url}/v1/completions", json=busy)
                running.append(client.send(request, stream=True))
            page.see("twinphase.engine.recording.countsAt(twinphase.engine.now()).queued == 1")
            page.ask("hello")
            page.see("!twinphase.chat.views.at(-1).problem.hidden")
            assert page.value("twinphase.chat.views.at(-1).turn.error.retryAfter") > 0
            assert page.text(".problem:not([hidden]) button").startswith("Ask again")
            for one in running:
                one.close()

        # Behind: what was not sent is named where it is missing.
        page.value(
            "twinphase.engine.hear({event: 'lost', t: twinphase.engine.now(), steps: 1204})"
        )
        assert page.value("twinphase.engine.recording.marks.at(-1).text") == (
            "1,204 steps are not shown"
        )

        # The engine dies while a request runs: its lane ends at the mark, and another engine serves.
        page.set(Maximum_tokens=3000)
        page.ask("hello")
        page.see("twinphase.chat.running?.turn.answer.tokens > 1")
        os.kill(server.engine_pid(), 9)
        page.see("twinphase.engine.recording.marks.at(-1).text == 'restarted'")
        page.ends()
        assert page.value("twinphase.chat.views.at(-1).turn.error !== undefined")
        assert page.value("twinphase.engine.recording.lanes.every((one) => one.end < Infinity)")
        page.set(Maximum_tokens=3)
        page.ask("hello")
        page.see("twinphase.chat.views.at(-1).turn.timings?.predicted_n == 3")
        assert page.value("twinphase.engine.recording.lanes.at(-1).at > twinphase.engine.recording"
                          ".marks.at(-1).at")
    # Gone.
    page.see("/trying again in \\d+ s/.test(document.getElementById('notice').innerText)")
    page.ask("hello")
    page.ends()
    assert "does not answer" in page.value("twinphase.chat.views.at(-1).turn.error.message")


def test_the_key_is_asked_for_and_kept_in_this_tab_only(browser, served):
    page = Page(browser, served.url)
    browser.look(width=1400)
    browser.open(f"{served.url}/page/icon.svg", "true")
    page.value("sessionStorage.clear()")
    browser.open(served.url + "/", "!document.getElementById('key').hidden")
    page.see("document.activeElement.id == 'key-value'")
    assert page.value("!document.getElementById('chat').hidden")
    browser.call("Input.insertText", text=KEYS[0])
    browser.press("Enter", "\r")
    page.see("twinphase.engine.hello !== null && document.getElementById('key').hidden")
    assert page.value("sessionStorage.length == 1 && localStorage.length == 0")
    assert all(KEYS[0] not in url for url in browser.requests())


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
def test_nothing_is_in_anyones_way(browser, page, axe, dark):
    page.set(Maximum_tokens=12)
    page.ask("hello")
    page.ends()
    page.value("twinphase.engineView.pick({ lane: twinphase.engine.recording.lanes.at(-1) })")
    page.click("#settings")
    page.value(axe + ";undefined")
    for view in VIEWS:
        browser.look(width=1400, dark=dark)
        page.value(f"location.hash = '#{view}'")
        page.see(f"!document.getElementById('{view}').hidden")
        assert page.value(AUDIT) == [], view
        for width in (400, 1400, 2560):
            browser.look(width=width, dark=dark)
            assert page.value("document.documentElement.scrollWidth") <= width, (view, width)


def test_less_motion_and_forced_colours_are_honoured(browser, page, served):
    browser.look(width=1400, prefers_reduced_motion="reduce", forced_colors="active")
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
    browser.look(width=1400)


def test_five_lessons_run_on_the_servers_own_model(browser, page, served):
    page.open("learn")
    page.click("#all")
    page.see("twinphase.learn.lessons.every((one) => /^Again/.test(one.button.innerText))")
    found = page.value("twinphase.learn.lessons.map((one) => one.found.innerText)")
    assert "per token" in found[0] and "times the prompt" in found[1]
    shared = page.value("twinphase.learn.shared")
    assert shared["long"]["prompt_n"] > 20 * shared["short"]["prompt_n"]
    lanes = page.value(
        "twinphase.learn.lessons.map((one) => one.rows.map((row) => [row.lane().prompt,"
        "row.lane().cached, row.lane().written, row.faint]))"
    )
    [[prompt, cached, _, _]] = lanes[2]
    assert f"{cached:,} of {prompt:,} tokens were cached" in found[2] and cached > 0.9 * prompt
    assert [row[2] for row in lanes[3][:2]] == [96, 8]
    # The third row is what would have been, and lighter.
    assert [row[3] for row in lanes[3]] == [False, False, True] and "computed whole" in found[3]
    assert "The words are the same, bit for bit." in found[4]
    # While others are served it refuses.
    other = threading.Thread(target=complete, args=(served, KEYS[1], "hello", 1500))
    other.start()
    page.see("twinphase.engine.recording.lanes.some((one) => one.end === Infinity)")
    page.click("#lessons button")
    assert "1 request of others is being served" in page.text(".found")
    other.join()


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
      get: (object, name) => object[name] ?? (name === 'createPattern' ? () => 'pattern' : record(name)),
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
    waits = [(call[1], second[i + 1][1]) for i, call in enumerate(first) if call[0] == "moveTo"
             for second in [first] if second[i + 1][0] == "lineTo"]
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


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a *b* **c** `d*e*` snake_case_word", "<p>a <em>b</em> <strong>c</strong> <code>d*e*</code> snake_case_word</p>"),  # noqa: E501
        ("# Title\ntext\n\n> quoted\n> more", "<h3>Title</h3><p>text</p><blockquote><p>quoted\nmore</p></blockquote>"),  # noqa: E501
        ("1. one\n2. two\n   - inner\n\nafter", '<ol start="1"><li>one</li><li>two<ul><li>inner</li></ul></li></ol><p>after</p>'),  # noqa: E501
        ("<script>alert(1)</script> [x](javascript:alert(1)) &amp;", "<p>&lt;script&gt;alert(1)&lt;/script&gt; [x](javascript:alert(1)) &amp;amp;</p>"),  # noqa: E501
        ("open **bold and `code", "<p>open **bold and `code</p>"),
    ],
)  # fmt: skip
def test_markdown_becomes_nodes(page, text, html):
    assert page.value(f"{MARKED}({json.dumps(text)})") == html


def test_code_tables_and_links_of_an_answer(page):
    text = "```python\nif a < b:\n    *x*\n```\n\n|a|b|\n|-|-:|\n|1|2|\n\n[t](https://a.example/b)"
    html = page.value(f"{MARKED}({json.dumps(text)})")
    assert "<code>if a &lt; b:\n    *x*\n</code>" in html
    assert '<td class="right">2</td>' in html and "<th>a</th>" in html.replace(' class=""', "")
    assert 'href="https://a.example/b"' in html and 'rel="noopener noreferrer nofollow"' in html
    # However hostile, a text is parsed in a moment, and all of it is shown.
    for hostile in ("*a " * 4000, "[" * 4000, "> " * 2000, "`" * 3000, "- " * 1500, "|" * 3000):
        began = time.monotonic()
        page.value(f"{MARKED}({json.dumps(hostile)})")
        assert time.monotonic() - began < 30
