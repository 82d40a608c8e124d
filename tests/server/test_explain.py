"""Explaining a request of a running server: the routes, who may ask, and the command."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from dialects import bearer, turn, user
from raw_client import until
from twinphase.cli import run_app
from twinphase.commands.explain_saved import read_ledger

BODY = {"prompt": "hello world", "max_tokens": 20, "ignore_eos": True}
ALICE = bearer("alice")
BOB = bearer("bob")


@pytest.fixture
def explained(capsys):
    """Runs the command; its exit code, stdout and stderr."""

    def run(*arguments):
        code = run_app(["explain", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def test_the_timeline_and_the_explanation_have_everything(server):
    server.wait_until_idle()  # Steps shared with a request that another test left say less.
    _, body = server.post("/v1/completions", BODY)
    _, timeline = server.get(f"/v1/requests/{body['id']}/timeline")
    ends = [interval["end_ms"] for interval in timeline["intervals"]]
    assert [interval["start_ms"] for interval in timeline["intervals"]] == [0.0, *ends[:-1]]
    assert ends[-1] == timeline["e2e_ms"] and len(timeline["token_times_ms"]) == 20
    assert timeline["ttft_ms"] == timeline["token_times_ms"][0] == body["timings"]["ttft_ms"]
    _, found = server.get(f"/v1/requests/{body['id']}/explain")
    assert (
        found["id"] == body["id"]
        and found["sentences"]
        and found["dominant"] in timeline["ledger_ms"]
    )
    falls = found["waterfall"]
    assert sum(bar["seconds"] for bar in falls["bars"]) == pytest.approx(
        falls["wall_seconds"], abs=1e-6
    )
    assert sum(bar["share"] for bar in falls["bars"]) == pytest.approx(1)
    assert sum(bar["before_first_token"] for bar in falls["bars"]) == pytest.approx(
        falls["first_token"], abs=1e-6
    )
    assert (
        falls["first_token"]
        == found["ttft"]
        == pytest.approx(body["timings"]["ttft_ms"] / 1e3, abs=2e-6)
    )
    assert found["tpot"] == pytest.approx(body["timings"]["tpot_ms"] / 1e3, abs=2e-6)
    for phase in ("prefill", "decode"):
        near = found["efficiency"][phase]
        assert (
            near["bound"] == found["bounds"][phase] != "unknown"
            and near["mfu"] > 0
            and near["mbu"] > 0
        ), (phase, found["efficiency"], found["bounds"])
    assert (
        found["alone"]["seconds"] > 0 and found["error"]["steps"] > 0 and found["formulas"]["MFU"]
    )
    saved = [lever["saved_seconds"] for lever in found["levers"]]
    known = [seconds for seconds in saved if seconds is not None]
    assert known == sorted(known, reverse=True) and saved[: len(known)] == known
    for phase in ("prefill", "decode"):
        shares = [
            one["share"]
            for one in found["diagnoses"]
            if one["phase"] == phase and one["share"] is not None
        ]
        assert shares == sorted(shares, reverse=True) and sum(shares) <= 1 + 1e-6


def test_requests_are_listed_newest_first(limited):
    key = bearer("lister")
    listed = limited.get("/v1/requests", **key)
    assert (listed[0], listed[1]["data"]) == (200, [])
    names = [
        limited.post("/v1/completions", {**BODY, "max_tokens": n + 1}, **key)[1]["id"]
        for n in range(5)
    ]
    listed = limited.get("/v1/requests", **key)[1]["data"]
    assert [one["id"] for one in listed] == names[:1:-1]
    assert [one["output_tokens"] for one in listed] == [5, 4, 3] and all(
        one["finished"] for one in listed
    )
    newest = listed[0]
    timeline = limited.get(f"/v1/requests/{names[-1]}/timeline", **key)[1]
    assert all(newest[name] == timeline[name] for name in ("e2e_ms", "ttft_ms", "tpot_ms"))
    assert (
        newest["dominant"] == limited.get(f"/v1/requests/{names[-1]}/explain", **key)[1]["dominant"]
    )


def test_who_stalled_it_is_nobody_elses_business(shared):
    with ThreadPoolExecutor(7) as pool:
        ask = partial(pool.submit, shared.post, "/v1/completions")
        with shared.paused():  # hers is there first, and theirs before she has a token
            hers = ask({**BODY, "prompt": "a b", "max_tokens": 200}, **ALICE)
            until(lambda: shared.get("/health")[1]["running"] == 1)
            prompts = [[100 + number, *range(5, 205)] * 15 for number in range(6)]
            asked = [ask({**BODY, "prompt": prompt, "max_tokens": 1}, **BOB) for prompt in prompts]
            until(lambda: shared.get("/health")[1]["running"] == 7)
        bobs = [one.result()[1]["id"] for one in asked]
        name = hers.result()[1]["id"]
    status, found = shared.get(f"/v1/requests/{name}/explain", **ALICE)
    [stalls] = [one for one in found["diagnoses"] if one["cause"] == "stalls"]
    assert status == 200 and "other request" in stalls["evidence"]
    _, timeline = shared.get(f"/v1/requests/{name}/timeline", **ALICE)
    assert not [bob for bob in bobs if bob in json.dumps([found, timeline])]


def test_what_the_miss_lay_in_is_known(server):
    system = "the " * 200
    for word in ("hello", "world"):
        messages = [
            turn("system", system),
            user(f"{word} " * 150),
        ]
        _, body = server.post(
            "/v1/chat/completions", {"messages": messages, "max_tokens": 2, "ignore_eos": True}
        )
    _, timeline = server.get(f"/v1/requests/{body['id']}/timeline")
    assert timeline["request"]["prefix_miss"]["reason"] == "diverged"
    assert timeline["request"]["prefix_miss"]["part"] == "question"
    _, found = server.get(f"/v1/requests/{body['id']}/explain")
    assert "missed_prefix" not in [
        one["cause"] for one in found["diagnoses"]
    ]  # a question is expected to be new


def test_the_command_explains_a_request(server, explained, tmp_path):
    name = server.post("/v1/completions", BODY)[1]["id"]
    code, shown, _ = explained(name, "--url", server.url + "/v1")
    assert (
        code == 0 and shown.startswith(f"{name}: ") and "100.0 %" in shown and "\x1b" not in shown
    )
    assert "Had it run alone" in shown and "MFU" in shown
    code, last, _ = explained("--last", "--url", server.url, "--json")
    assert code == 0 and json.loads(last)["id"] == name
    (tmp_path / "saved.json").write_text(last)
    code, again, _ = explained(tmp_path / "saved.json")
    assert (code, again) == (0, shown)


def test_saved_forms_agree_with_the_server(server, explained, tmp_path):
    _, body = server.post(
        "/v1/chat/completions",
        {"messages": [user("hello")], "max_tokens": 30, "ignore_eos": True},
    )
    _, timeline = server.get(f"/v1/requests/{body['id']}/timeline")
    _, truth = server.get(f"/v1/requests/{body['id']}/explain")
    by_kind = {bar["name"]: bar["seconds"] for bar in truth["waterfall"]["bars"]}
    for number, saved in enumerate((timeline, body, body["timings"])):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(saved))
        code, shown, _ = explained(path, "--json")
        found = json.loads(shown)
        assert code == 0 and found["alone"] is None and set(found["bounds"].values()) == {"unknown"}
        for bar in found["waterfall"]["bars"]:
            if bar["name"] != "send":  # a body is written before it is sent
                assert bar["seconds"] == pytest.approx(by_kind[bar["name"]], abs=1e-5)
        assert all(
            lever["saved_seconds"] is None or lever["flag"] in ("client", "sampling", "machine")
            for lever in found["levers"]
        )
        assert "Unknown: there is no cost model" in explained(path)[1]
    assert read_ledger(timeline).request.num_cached_tokens == body["timings"]["cache_n"]


def test_what_goes_wrong_is_said(server, shared, explained):
    code, shown, error = explained("nonsense", "--url", server.url)
    assert code == 2 and not shown and "No request 'nonsense' is known" in error
    code, _, error = explained("nonsense", "--url", "http://127.0.0.1:9")
    assert code == 1 and "No server answers at http://127.0.0.1:9" in error and "--url" in error
    assert explained("a", "--url", "ftp://127.0.0.1")[0] == 2
    code, _, error = explained("a", "--url", shared.url, "--api-key", "carol")
    assert code == 2 and "API key is not known" in error and "carol" not in error
    code, _, error = explained("--last", "--url", shared.url, "--api-key", "newcomer")
    assert code == 2 and "finished no request" in error
    assert explained()[0] == explained("a", "--last")[0] == 2


def test_run_gives_a_file_that_is_explained(tiny_path, tmp_path, explained):
    command = [
        sys.executable,
        "-m",
        "twinphase.cli",
        "run",
        str(tiny_path),
        "hello",
        "--json",
        "--explain",
        "--max-tokens",
        "5",
        "--ignore-eos",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "run.json").write_text(done.stdout)
    code, shown, _ = explained(tmp_path / "run.json", "--json")
    found = json.loads(shown)
    assert code == 0 and {"start", "load", "prefill", "decode"} <= {
        bar["name"] for bar in found["waterfall"]["bars"]
    }
    wall = json.loads(done.stdout)["timing"]["wall_seconds"]
    assert sum(bar["seconds"] for bar in found["waterfall"]["bars"]) == pytest.approx(
        wall, rel=1e-4
    )
    assert found["diagnoses"][0]["cause"] == "cold_start"  # loading took longer than five tokens
    assert (
        found["alone"]["prefill_seconds"] > 0
        and "cold start" in explained(tmp_path / "run.json")[1]
    )


def test_a_grammar_that_takes_long_is_the_cause(server):
    body = {**BODY, "ignore_eos": False, "max_tokens": 4}
    server.post("/v1/completions", body)
    causes = []
    for attempt in range(10):  # on a machine that does other things too
        choices = [f"{'the hello world ' * 3}{attempt} {number}" for number in range(1000)]
        _, plain = server.post("/v1/completions", body)
        _, slow = server.post(
            "/v1/completions", {**body, "structured_outputs": {"choice": choices}}
        )
        for answer in (plain, slow):
            _, found = server.get(f"/v1/requests/{answer['id']}/explain")
            causes.append([one["cause"] for one in found["diagnoses"] if one["phase"] == "prefill"])
        assert "grammar" not in causes[-2]
        if causes[-1][:1] == ["grammar"]:
            return
    raise AssertionError(causes)
