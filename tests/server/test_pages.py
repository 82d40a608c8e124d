"""The pages for people, which need no network and no key, and the log that they read."""

import gzip
import json
import logging
import re
import signal
import sys
from datetime import datetime
from pathlib import Path

import httpx
import pytest

import twinphase
from dialects import bearer
from raw_client import until
from twinphase.phases.colours import PAGE_COLOURS
from twinphase.server.live.files import PageFiles
from twinphase.server.logs import JsonFormatter

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PAGE = Path(twinphase.__file__).parent / "server" / "page"
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
    # It runs with --no-page.
    for path in ("/page/page.js", "/v1/engine/events"):
        assert httpx.get(limited.url + path, headers=bearer("one")).status_code == 404


def test_browsers_get_the_page_and_all_others_a_line(server, shared):
    for url in (server.url, shared.url):  # with keys too: the page asks for one
        page = httpx.get(url, headers=BROWSER)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "accept" in page.headers["vary"].lower()
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "data:" not in policy
        assert not re.search(r"<style|style=|<script(?![^>]* src=)|\son\w+=|https?:", page.text)
        named = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
        assert named
        for name in named:
            reply = httpx.get(f"{url}/{name}")
            assert reply.status_code == 200 and reply.headers["cache-control"] == "no-cache"
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert reply.headers["referrer-policy"] == "no-referrer"
            assert reply.headers["cross-origin-opener-policy"] == "same-origin"
            known = {"If-None-Match": reply.headers["etag"]}
            assert httpx.get(f"{url}/{name}", headers=known).status_code == 304
        line = httpx.get(url)
        assert line.text.startswith("twinphase is running\n") and line.headers["vary"] == "Accept"
    assert httpx.get(server.url + "/page/index.html").status_code == 404
    assert f"page       {server.url}/ " in server.log.read_text()
    assert httpx.get(server.url + "/page/..%2Fpages.py").status_code == 404


def test_the_live_page_is_small_and_has_the_phases_colours():
    text = {path.name: path.read_text() for path in PAGE.iterdir()}
    sent = {name: PageFiles().reply(name, {"accept-encoding": "gzip"}).body for name in text}
    assert sum(map(len, sent.values())) < 64_000
    code = gzip.decompress(sent["draw.js"]).decode()
    assert code.count("export function") == text["draw.js"].count("export function") > 3
    for phase, (light, dark) in PAGE_COLOURS.items():
        assert f"--{phase}: light-dark({light}, {dark});" in text["page.css"]
    named = {found for one in text.values() for found in re.findall(r"https?://[\w.]+", one)}
    assert named == {"http://www.w3.org", "https://html.spec.whatwg.org"}  # a namespace, a comment


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


def test_a_json_log_has_an_object_per_line_with_both_phases(start):
    with start("--log-format", "json", "--log-requests", "--api-key", "secret-key") as server:
        for key in ("secret-key", "a-wrong-key"):
            httpx.post(
                f"{server.url}/v1/completions",
                json={"prompt": "the", "max_tokens": 3},
                headers={"Authorization": f"Bearer {key}"},
                timeout=30,
            )
        assert server.stop() == 0
        log = server.log.read_text()
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    [_, ended] = [line for line in lines if line.get("event") == "generation"]
    assert ended["state"] == "ended" and ended["num_output_tokens"] == 3
    assert ended["ledger_ms"]["prefill"] > 0 and ended["ledger_ms"]["decode"] > 0
    [good, bad] = [line for line in lines if line.get("event") == "request"]
    assert (good["status"], bad["status"]) == (200, 401)
    assert good["path"] == "/v1/completions" and good["duration_ms"] > 0
    [refused] = [line for line in lines if line.get("event") == "refused_key"]
    assert refused["client"] == "127.0.0.1" and refused["level"] == "warning"
    assert "secret-key" not in log and "a-wrong-key" not in log


def test_a_failure_in_a_json_log_has_its_traceback():
    try:
        raise ValueError("wrong")
    except ValueError:
        record = logging.LogRecord("name", logging.ERROR, "", 0, "It failed", None, sys.exc_info())
    found = json.loads(JsonFormatter().format(record))
    assert found["message"] == "It failed" and "ValueError: wrong" in found["exception"]
    assert datetime.fromisoformat(found["time"]).timestamp() == pytest.approx(
        record.created, abs=1e-3
    )


def test_a_wrong_method_is_answered_with_those_that_are_right(limited):
    for path, methods in (("/v1/completions", "POST"), ("/v1/models", "GET"), ("/metrics", "GET")):
        reply = httpx.delete(limited.url + path, headers={"Authorization": "Bearer one"})
        assert reply.status_code == 405 and reply.headers["allow"] == methods
