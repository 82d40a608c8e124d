"""The live page in a real browser, drawn from a real server, and equal to what that server says."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import Counter

import httpx
import pytest

from live_page import ANSWERED, KEYS, Page, complete, get
from raw_client import until

pytestmark = pytest.mark.slow

SECRET = "zebra "  # in a prompt of another key
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


def test_what_is_drawn_is_what_the_server_measured(page_browser, page, served):
    page.set(Maximum_tokens=1200, Temperature=0)
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
    assert drawn["written"] == request["num_output_tokens"] == 1200
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
    assert page_browser.complaints() == []
    assert all(url.startswith((served.url, "about:")) for url in page_browser.requests())


def test_a_conversation_is_stopped_retried_edited_kept_and_forgotten(page_browser, page):
    page.set(Maximum_tokens=1500, Temperature=0)
    page.ask("hello")
    page.see("twinphase.chat.running?.turn.answer.tokens > 3")
    page_browser.press("Escape")
    page.ends()
    # What was written stays, with the ledger up to there.
    stopped = page.value("JSON.stringify(twinphase.chat.conversation.turns[0])")
    assert json.loads(stopped)["finish"] == "stopped"
    page.reads(".why", "Where")
    assert page.text(".answer")
    page.set(Maximum_tokens=5)
    page.click(".asked button:nth-child(2)")
    page.ends()
    page.see("twinphase.chat.views.length == 1")
    page.click(".asked button")
    page_browser.call("Input.insertText", text=" world")
    page_browser.press("Enter", "\r")
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
    page.reads(".side", "first token")
    page.see("!!document.querySelector('.fall')")
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


def test_the_time_line_is_driven_by_keys_and_says_what_it_shows(page_browser, page, served):
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
    page_browser.press("ArrowDown")
    lane = "twinphase.engineView.lane === twinphase.engine.recording.lanes"
    page.see(f"{lane}[0] && !document.getElementById('detail').hidden")
    page.reads("#say", "first token after")
    page_browser.press("ArrowDown")
    page.see(f"{lane}[1]")
    page_browser.press("ArrowUp")
    page_browser.press("Enter")
    assert page.value("document.activeElement.id") == "detail"
    page_browser.press("Escape")
    page.see("document.activeElement.id == 'line' && document.getElementById('detail').hidden")
    page_browser.press("ArrowRight")
    page.see("twinphase.engineView.step !== null")
    assert page.text("#say").startswith("Step ")
    step = page.value("twinphase.engineView.step.index")
    page_browser.press("ArrowLeft")
    assert page.value("twinphase.engineView.step.index") < step
    page_browser.press("Escape")
    spans = []
    for key in ("+", "-", "-"):
        spans.append(page.value("twinphase.engineView.span"))
        page_browser.press(key, key)
    assert spans[1] < spans[0] and page.value("twinphase.engineView.span") > spans[1]
    playing = page.value("twinphase.engineView.playing")
    page_browser.press(" ", " ")
    assert page.value("twinphase.engineView.playing") != playing
    page_browser.press("Home")
    assert page.value("twinphase.engineView.t === twinphase.engine.recording.begin")
    page_browser.press("End")
    assert page.value("twinphase.engineView.t === twinphase.engine.recording.end")
    # Below: the cache and the blocks at that moment, as the server counts them.
    assert " of 4,096 " not in page.text("#kv-says") and "free, of" in page.text("#kv-says")
    page.reads("#hits", "prompt tokens were cached")
    assert page_browser.complaints() == []


def is_starting(server, port) -> bool:
    """Whether the server takes connections and has an engine."""
    with socket.socket() as attempt:
        if attempt.connect_ex(("127.0.0.1", port)):
            return False
    try:
        return server.engine_pid() > 0
    except StopIteration:
        return False


def test_each_state_of_the_server_is_seen(page_browser, start):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Without keys, one seat and one place to wait.
    flags = ("--port", str(port), "--max-num-seqs", "1", "--max-queued-requests", "1")
    with start(*flags, wait=False) as server:
        page = Page(page_browser, f"http://127.0.0.1:{port}")
        page_browser.look(width=1400)
        until(lambda: is_starting(server, port), 60)
        # Loading: the stage is named, and a question may be asked already. The engine is held, so
        # that it is not ready before the browser looks.
        with server.paused():
            page.open(ready="!document.getElementById('notice').hidden")
            page.reads("#notice", "The model is not ready")
            page.set(Maximum_tokens=3)
            page.ask("hello")
        page.ends()
        assert page.value("twinphase.chat.views[0].turn.timings.predicted_n") == 3
        page.see("document.getElementById('notice').hidden")
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
            page.see("twinphase.chat.views.at(-1).turn.error?.retryAfter > 0")
            assert page.text(".problem:not([hidden]) button").startswith("Ask again")
            for one in running:
                one.close()

        # Behind: what was not sent is named where it is missing.
        page.value("twinphase.engine.hear({event: 'lost', t: twinphase.engine.now(), steps: 1204})")
        assert page.value("twinphase.engine.recording.marks.at(-1).text") == (
            "1,204 steps are not shown"
        )

        # The engine dies while a request runs: its lane ends at the mark.
        page.set(Maximum_tokens=3000)
        page.ask("hello")
        page.see("twinphase.chat.running?.turn.answer.tokens > 1")
        os.kill(server.engine_pid(), 9)
        page.see("twinphase.engine.recording.marks.at(-1).text == 'restarted'")
        page.ends()
        page.see("twinphase.chat.views.at(-1).turn.error !== undefined")
        page.see("twinphase.engine.recording.lanes.every((one) => one.end < Infinity)")
        page.set(Maximum_tokens=3)
        page.ask("hello")
        page.see("twinphase.chat.views.at(-1).turn.timings?.predicted_n == 3")
        page.see(
            "twinphase.engine.recording.lanes.at(-1).at > twinphase.engine.recording"
            ".marks.at(-1).at"
        )
    # Gone.
    page.see("/trying again in \\d+ s/.test(document.getElementById('notice').innerText)")
    page.ask("hello")
    page.ends()
    assert "does not answer" in page.value("twinphase.chat.views.at(-1).turn.error.message")


def test_the_key_is_asked_for_and_kept_in_this_tab_only(page_browser, served):
    page = Page(page_browser, served.url)
    page_browser.look(width=1400)
    page_browser.open(f"{served.url}/page/icon.svg", "true")
    page.value("sessionStorage.clear()")
    page_browser.open(served.url + "/", "!document.getElementById('key').hidden")
    page.see("document.activeElement.id == 'key-value'")
    assert page.value("!document.getElementById('chat').hidden")
    page_browser.call("Input.insertText", text=KEYS[0])
    page_browser.press("Enter", "\r")
    page.see("twinphase.engine.hello !== null && document.getElementById('key').hidden")
    assert page.value("sessionStorage.length == 1 && localStorage.length == 0")
    assert all(KEYS[0] not in url for url in page_browser.requests())


def test_five_lessons_run_on_the_servers_own_model(page_browser, page, served):
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
    # (On a machine this busy the first user may have ended before the second one's chunks.)
    estimated = "computed whole" in found[3]
    assert [row[3] for row in lanes[3]] == [False, False, *([True] if estimated else [])]
    assert "The words are the same, bit for bit." in found[4]
    off = "twinphase.learn.lessons[4].rows[0]"
    assert page.value(f"{off}.text") == "drafts off"
    assert page.value(f"{off}.lane().draftsAt(Infinity)") == {"drafted": 0, "accepted": 0}
    # While others are served it refuses.
    other = threading.Thread(target=complete, args=(served, KEYS[1], "hello", 1500))
    other.start()
    page.see("twinphase.engine.recording.lanes.some((one) => one.end === Infinity)")
    page.click("#lessons button")
    page.reads(".found", "1 request of others is being served")
    other.join()
