"""`twinphase ps` and `twinphase stop`: finding a server of this machine, and ending it."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from twinphase.server.started import StartedServer, noted, started_servers

pytestmark = pytest.mark.usefixtures("cache")


def test_ps_finds_the_only_server_and_stop_ends_it(start, twinphase, cache):
    with start("--served-model-name", "tiny", cache=cache) as running:
        assert [one.url for one in started_servers()] == [running.url]
        head, row = twinphase("ps").text().splitlines()
        assert head.split() == ["model", "size", "context", "waiting", "prefill", "decode", "url"]
        assert row.split()[0] == "tiny" and row.split()[-5:] == ["4,096", "0", "0", "0"] + [
            running.url
        ]
        # Every command finds it in the same way, and by the address.
        assert twinphase("status").text() == twinphase("status", "--url", running.url).text()
        assert running.url in twinphase("stop", "--url", "http://127.0.0.1:1").error()
        assert twinphase("stop").text() == f"{running.url} has ended.\n"
        assert running.process.wait(30) == 0
        assert started_servers() == [] and not [*(cache / "servers").iterdir()]
        assert "No server that you started" in twinphase("stop").error()
        assert "twinphase serve" in twinphase("ps").error()


@pytest.mark.parametrize(("flags", "num_tokens"), [([], 2000), (["--now"], 4000)])
def test_stop_lets_answers_finish_and_now_cuts_them(start, twinphase, cache, flags, num_tokens):
    with start(cache=cache) as running, ThreadPoolExecutor() as pool:
        body = {"prompt": "hello", "max_tokens": num_tokens, "ignore_eos": True}
        asked = pool.submit(running.post, "/v1/completions", body)
        phases = {}
        while not phases.get("decode"):
            assert not asked.done(), "the answer ended before it was seen"
            phases = twinphase("ps", "--json").json()["requests"]
        assert phases == {"waiting": 0, "prefill": 0, "decode": 1}
        assert "has ended" in twinphase("stop", *flags).text()
        status, answer = asked.result()
    finished = status == 200 and answer["choices"][0]["finish_reason"] == "length"
    assert finished is not bool(flags)


def test_files_of_servers_that_are_gone_are_removed(cache):
    with noted("http://127.0.0.1:8123"):
        (here,) = started_servers()
        assert here.pid == os.getpid()
        other = here.pid, "http://127.0.0.1:1", 1
        path = cache / "servers" / "1.json"
        path.write_text(json.dumps(dict(zip(("pid", "url", "ticks"), other, strict=True))))
        path.with_name("2.json").write_text("no JSON")
        assert started_servers() == [here], "the process of that id started at another time"
        assert not path.exists()
    assert started_servers() == []


@pytest.mark.parametrize(
    ("own", "asked", "is_same"),
    [
        ("http://127.0.0.1:8000", "http://localhost:8000", True),
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000/v1", True),
        ("http://[::]:8000", "http://[::1]:8000", True),
        ("http://10.0.0.1:8000", "http://10.0.0.1:8000", True),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8001", False),
        ("http://127.0.0.1:8000", "http://elsewhere:8000", False),
        ("http://127.0.0.1:8000", "http://127.0.0.1:x", False),
    ],
)
def test_a_server_is_known_by_its_address(own, asked, is_same):
    assert StartedServer(1, own, None).answers_at(asked) is is_same
