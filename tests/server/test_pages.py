"""The pages for people, which need no network and no key, and the log that they read."""

import re
import signal

import httpx
import pytest

from raw_client import until

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
DATE = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def test_the_root_says_what_is_there(limited):
    page = httpx.get(limited.url, headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html")
    assert "twinphase is running" in page.text and "<b>a</b> and <b>b</b>" in page.text
    lines = httpx.get(limited.url).text.splitlines()
    assert lines[0] == "twinphase is running"  # Ollama's clients ask for a line
    for path in ("/docs", "/health", "/metrics", "/v1/models"):
        assert f'href="{path[1:]}"' in page.text
        assert any(line.startswith(f"{path} ") for line in lines)
    assert httpx.head(limited.url).status_code == 200


def test_the_docs_need_no_network(limited):
    page = httpx.get(limited.url + "/docs", headers=BROWSER).text
    assert "http:" not in page and "https:" not in page and "url: 'openapi.json'" in page
    named = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(named) == 3
    for name in named:
        reply = httpx.get(f"{limited.url}/{name}")  # without a key
        assert reply.status_code == 200 and len(reply.content) > 1000
    assert httpx.get(limited.url + "/docs/redoc.standalone.js").status_code == 404


def test_the_log_has_a_dated_line_for_start_requests_and_stop(start):
    with start() as server:
        server.post("/v1/completions", {"prompt": "the", "max_tokens": 1})
        server.get("/v1/no%0Athing")
        server.get("/health")
        server.get("/metrics")
        until(lambda: r"no\nthing" in server.log.read_text(), 30)
        assert server.stop(signal.SIGINT) == 0
        log = server.log.read_text()
    patterns = (
        r"INFO twinphase .* starts with the model .*tiny\.gguf$",
        r"INFO Ready after [\d.]+ s: \w+",
        r"INFO POST /v1/completions 200 in \d+ ms$",
        r"INFO GET /v1/no\\nthing 404 in \d+ ms$",
        r"INFO Stopping$",
        r"INFO Stopped$",
    )
    found = [re.search(f"{DATE} {pattern}", log, re.MULTILINE) for pattern in patterns]
    assert all(found), log
    assert "/metrics 200" not in log and "/health 200" not in log


@pytest.mark.parametrize("level, polled", [("warning", False), ("debug", True)])
def test_how_much_is_logged(start, level, polled):
    with start("--log-level", level) as server:
        server.get("/metrics")
        server.post("/v1/completions", {"prompt": "the", "max_tokens": 1})
        assert server.stop() == 0
        log = server.log.read_text()
    assert ("GET /metrics 200" in log) == ("POST /v1/completions 200" in log) == polled
    assert "listening " in log
