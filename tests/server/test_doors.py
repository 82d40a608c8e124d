"""The names that a server accepts, and the pages that may call it: raw requests and a browser."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from tests.bench.browser import opened_browser

from dialects import ANTHROPIC, OLLAMA, bearer, message
from raw_client import connect, read_reply
from twinphase.errors import TwinphaseError
from twinphase.server.config import ServerConfig
from twinphase.server.doors import Doors

EVIL = "evil.example"
FRIEND = "friend.example"
KNOWN = ["127.0.0.1", "127.0.0.1:80", "[::1]:8000", "10.1.2.3", "localhost", "LOCALHOST:1"]
STRANGE = [EVIL, f"{EVIL}:8000", "", "localhost.evil.example", "127.0.0.1.evil.example", "127.1"]
STRANGE += ["a@127.0.0.1", "127.0.0.1/a", "127.0.0.1:x", "[::1", "xlocalhost", "127.0.0.1?"]


def passes(name, origin=None, **settings):
    try:
        Doors(ServerConfig(**settings)).check(name, origin)
    except TwinphaseError:
        return False
    return True


def test_a_name_has_to_be_known_unless_there_are_keys():
    assert all(passes(host) for host in KNOWN) and passes(None)
    assert not any(passes(host) for host in STRANGE)
    assert passes(EVIL, api_keys=("k",))
    assert not passes(EVIL, api_keys=("k",), allowed_hosts=(FRIEND,))
    assert passes(f"{FRIEND}:1", allowed_hosts=("Friend.example",))
    assert passes(EVIL, allowed_hosts=("*",)) and passes(EVIL, host=EVIL)
    below = {"allowed_hosts": ("*.friend.example",)}
    assert passes(f"a.{FRIEND}", **below)
    assert not passes(FRIEND, **below) and not passes(f"x{FRIEND}", **below)


def test_a_page_is_the_servers_own_or_has_to_be_allowed():
    assert passes("localhost:1", "http://localhost:1") and passes("10.0.0.1", "https://10.0.0.1")
    for origin in ("http://localhost:2", "null", f"http://{EVIL}", "", "app://x"):
        assert not passes("localhost:1", origin)
        assert passes("localhost:1", origin, allowed_origins=(origin,))
        assert passes("localhost:1", origin, allowed_origins=("*",))
        assert passes("localhost:1", origin, api_keys=("k",))
    assert not passes(EVIL, f"http://{EVIL}", allowed_origins=("*",))


def ask(server, path, **headers):
    with connect(server) as client:
        lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        return read_reply(client)


def test_what_is_refused_says_so_in_every_dialect(server, shared):
    for path, dialect in (("/v1/requests", ""), ("/v1/messages", ANTHROPIC), ("/api/tags", OLLAMA)):
        for headers, option in (
            ({"Host": EVIL}, "--allowed-hosts"),
            ({"Host": "localhost", "Origin": f"http://{EVIL}"}, "--allowed-origins"),
        ):
            status, found, body = ask(server, path, **headers)
            told = message(dialect, body) if dialect else body["error"]["message"]
            assert status == 403 and EVIL in told and option in told
            assert found["x-content-type-options"] == "nosniff"
    assert ask(server, "/health", Host=EVIL)[0] == 403
    assert ask(shared, "/health", Host=EVIL)[0] == 200  # it has keys


@pytest.mark.parametrize("path", ["/docs/", "/v1/requests/", "//evil.example/docs/"])
def test_a_slash_too_many_leads_to_no_other_host(shared, path):
    for host in (EVIL, "127.0.0.1"):
        status, headers, _ = ask(shared, path, Host=host, Authorization="Bearer alice")
        assert EVIL not in headers.get("location", "") and status in (307, 404)
        assert (status == 307) == (not path.startswith("//"))
    assert httpx.get(shared.url + "/docs/", follow_redirects=True).url.path == "/docs"


def test_metrics_name_tenants_to_those_with_a_key_only(shared):
    assert "tenant" not in shared.get("/metrics")[1]
    assert 'tenant="key1"' in shared.get("/metrics", **bearer("alice"))[1]
    assert shared.get("/metrics", **bearer("nobody"))[0] == 401


# In a browser.


class Site(ThreadingHTTPServer):
    """An empty page on every path."""

    def __init__(self):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(b"<!doctype html><title>a page</title>")

            def log_message(self, *arguments):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever).start()

    def stop(self):
        self.shutdown()
        self.server_close()


@pytest.fixture(scope="module")
def site():
    running = Site()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def browser():
    names = ", ".join(f"MAP {name} 127.0.0.1" for name in (EVIL, FRIEND))
    opened = opened_browser(f"--host-resolver-rules={names}")
    yield opened
    opened.close()


def visit(browser, url):
    browser.events.clear()
    browser.call("Page.navigate", url=url)
    browser.wait(f"location.href == {url!r} && document.readyState == 'complete'")


def fetched(browser, url, **options):
    """Status and text of what a page's script reads, or why it cannot."""
    return browser.evaluate(
        f"fetch({url!r}, {json.dumps(options)}).then(async r => [r.status, await r.text()], "
        "error => [0, String(error)])"
    )


def test_a_rebound_name_reads_nothing(browser, server):
    port = server.url.rpartition(":")[2]
    visit(browser, f"http://{EVIL}:{port}/v1/requests")  # a page of the name, from this server
    for path in ("/v1/requests", "/v1/models", "/metrics", "/docs"):
        status, text = fetched(browser, path)
        assert status == 403 and "--allowed-hosts" in text


def test_only_pages_that_are_allowed_read_answers(browser, site, start, server):
    post = {"method": "POST", "body": '{"prompt": "a", "max_tokens": 1}'}
    typed = post | {"headers": {"Content-Type": "application/json"}}
    friend, evil = (f"http://{name}:{site.server_port}" for name in (FRIEND, EVIL))
    with start("--allowed-origins", friend) as allowing:
        for page, asked, reads in (
            (friend, allowing, True),
            (evil, allowing, False),
            (friend, server, False),
        ):
            visit(browser, f"{page}/")
            before = asked.metric("generation_tokens_total")
            for options in ({}, typed):
                path = "/v1/completions" if options else "/v1/models"
                assert fetched(browser, asked.url + path, **options)[0] == (200 if reads else 0)
            # Without a type a browser asks nobody before it sends.
            fetched(browser, asked.url + "/v1/completions", **post, mode="no-cors")
            assert asked.metric("generation_tokens_total") - before == int(reads)


def test_the_servers_own_pages_obey_their_policy_and_try_routes(browser, server):
    visit(browser, f"{server.url}/")
    assert browser.evaluate("document.styleSheets[0].cssRules.length") > 10
    assert browser.complaints() == []
    visit(browser, f"{server.url}/docs")
    browser.wait("document.querySelectorAll('.opblock').length > 10")
    assert browser.complaints() == []
    post = {"method": "POST", "body": '{"prompt": "a"}'}
    post["headers"] = {"Content-Type": "application/json"}
    assert fetched(browser, "/tokenize", **post)[0] == 200
    refused = browser.evaluate(
        "new Promise(done => { document.addEventListener('securitypolicyviolation', e => "
        "done(e.effectiveDirective)); const s = document.createElement('script'); "
        "s.textContent = 'window.bad = 1'; document.body.append(s); })"
    )
    assert refused.startswith("script-src") and browser.evaluate("window.bad") is None
