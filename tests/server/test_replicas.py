"""`twinphase serve --replicas`: two engines do what one does, and report themselves."""

import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from children import descendants
from raw_client import LONG, PATH, PROBE, events, read_reply, send, tokens, until
from twinphase.cli import run_app
from twinphase.config import EngineConfig
from twinphase.engine.process.messages import EngineFacts
from twinphase.engine.process.status import WorkerStatus, limits_of


def test_a_worker_dies_in_the_middle_of_a_stream_and_its_reader_sees_the_same_text(
    replicas, server, capsys
):
    body = {**LONG, "max_tokens": 1500, "temperature": 1.5, "seed": 5, "logprobs": 1}
    expected = server.post(PATH, body)[1]["choices"][0]
    with send(replicas, PATH, {**body, "stream": True}) as stream:
        coming = events(stream)
        got = [next(coming)]
        (busy,) = [
            one
            for one in replicas.get("/v1/cluster")[1]["workers"]
            if one["running"] or one["waiting"]
        ]
        os.kill(busy["pid"], signal.SIGKILL)
        *rest, last = coming
    chunks = [event["choices"][0] for event in [*got, *rest] if event.get("choices")]
    assert (
        last == "[DONE]"
        and [token for chunk in chunks for token in chunk["token_ids"]] == expected["token_ids"]
    )
    assert "".join(chunk["text"] for chunk in chunks) == expected["text"]
    found = [
        value for chunk in chunks for value in (chunk["logprobs"] or {}).get("token_logprobs", [])
    ]
    assert found == expected["logprobs"]["token_logprobs"]
    name = got[0]["id"]
    _, explained = replicas.get(f"/v1/requests/{name}/explain")
    assert f"{busy['id']}, which died with" in " ".join(explained["sentences"])
    kinds = [
        (one["kind"], one.get("reason"))
        for one in replicas.get(f"/v1/requests/{name}/timeline")[1]["intervals"]
    ]
    assert (
        kinds[0][0] == "tokenize" and kinds[1][0] == "route" and kinds[1][1].startswith(busy["id"])
    )
    until(lambda: all(one["state"] == "ready" for one in replicas.get("/v1/cluster")[1]["workers"]))
    until(lambda: replicas.metric("engine_restarts_total") == 1)
    assert (
        "killed by signal 9" in replicas.log.read_text()
        and "other workers continue its 1 requests" in replicas.log.read_text()
    )
    replicas.wait_until_idle()
    assert replicas.metric("worker_up") == 2
    assert replicas.metric("worker_step_seconds_total", phase="decode") > 0
    assert run_app(["status", replicas.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["id", "role", "host"] and [
        line.split()[0] for line in lines[1:3]
    ] == ["worker-0", "worker-1"]


def test_while_the_decode_pool_stands_still_no_more_is_let_in_than_it_has_seats_and_nothing_is_lost(
    start,
):
    """The prefill worker could continue, but the KV of its prompts would need a place."""
    bodies = [
        {**PROBE, "prompt": [[10 + (number * i) % 300 for i in range(200)]]} for number in range(7)
    ]
    flags = (
        "--prefill-workers",
        "1",
        "--decode-workers",
        "1",
        "--threads-per-worker",
        "1",
        "--max-num-seqs",
        "3",
    )
    with (
        start(*flags, "--max-queued-requests", "2", "--worker-silence", "3600") as running,
        ExitStack() as clients,
    ):
        expected = [tokens(running.post(PATH, body)[1]) for body in bodies]
        (writer,) = [
            one["pid"]
            for one in running.get("/v1/cluster")[1]["workers"]
            if one["role"] == "decode"
        ]
        clients.callback(os.kill, writer, signal.SIGCONT)
        os.kill(writer, signal.SIGSTOP)
        accepted = [clients.enter_context(send(running, PATH, body)) for body in bodies[:5]]
        until(lambda: running.get("/health")[1]["running"] == 5)
        for body in bodies[5:]:
            with send(running, PATH, body) as client:
                status, headers, reply = read_reply(client)
            assert (
                status == 429
                and "overloaded" in reply["error"]["message"]
                and "retry-after" in headers
            )
        os.kill(writer, signal.SIGCONT)
        assert [tokens(read_reply(client)[2]) for client in accepted] == expected[:5]
        assert [tokens(running.post(PATH, body)[1]) for body in bodies[5:]] == expected[5:]
        running.wait_until_idle()


@pytest.mark.slow
def test_the_server_outlives_ray_and_has_its_workers_again_when_ray_is_back(start):
    """Answers continue without Ray until it is restarted; open requests can then be sent again."""
    pytest.importorskip("ray")
    flags = ("--replicas", "1", "--threads-per-worker", "1", "--ray-address", "local")
    with start(*flags, path=Path(__file__).parent / "impatient") as running:
        expected = tokens(running.post(PATH, LONG)[1])
        (raylet,) = descendants(
            running.process.pid, lambda words: words.split(b"\0")[0].endswith(b"/raylet")
        )
        os.kill(raylet, signal.SIGKILL)

        def is_refused():
            with send(running, PATH, LONG) as client:
                status, headers, body = read_reply(client)
            if status == 200:
                assert tokens(body) == expected
            else:
                assert (
                    status == 503
                    and body["error"]["code"] == "engine_restarted"
                    and "retry-after" in headers
                )
            return status == 503

        until(is_refused)
        # A worker that Ray had just started may end with it once more.
        until(lambda: running.get("/health/ready")[0] == 200 and not is_refused())


def test_a_lone_server_is_a_cluster_of_one(server, capsys):
    assert tokens(server.post(PATH, PROBE)[1])
    (engine,) = server.get("/v1/cluster")[1]["workers"]
    assert (engine["id"], engine["pid"]) == ("engine", server.engine_pid())
    # What holds now is known after a step, and what nothing knows is null.
    assert engine["itl_slo_seconds"] == server.metric("itl_slo_seconds") > 0
    assert engine["chunk_tokens"] == server.metric("prefill_chunk_tokens") >= 16
    assert engine["ceilings"]["int8_ops"] == server.metric("ceiling_per_second", of="int8_ops")
    assert engine["prefill_seconds"] > 0 and engine["cached_blocks"] is None
    assert run_app(["status", f"{server.url}/v1"]) == 0
    told = capsys.readouterr().out
    assert "engine  both" in told and " ms " in told and "TOPS int8" in told


def test_limits_that_nothing_knows_are_null():
    facts = EngineFacts(EngineConfig(), None, None, 0, None, None)
    for limits in (limits_of(None, None, "localhost"), limits_of(facts, None, "localhost")):
        status = WorkerStatus("engine", "both", "localhost", None, "starting", **limits)
        assert status.itl_slo_seconds is status.chunk_tokens is status.ceilings is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--replicas", "0"], "replicas"),
        (["--replicas", "two"], "replicas"),
        (
            ["--replicas", "2", "--threads", "1", "--threads-per-worker", "1"],
            "--threads-per-worker",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(tiny_path, flags, words, capsys):
    assert run_app(["serve", str(tiny_path), "--port", "0", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) <= 2 and "Traceback" not in error


def test_status_of_nobody_is_one_line(capsys):
    assert run_app(["status", "http://127.0.0.1:9"]) != 0
    assert "No server answers" in capsys.readouterr().err
    assert run_app(["status", "--url", "nowhere"]) == 2


@pytest.mark.slow
def test_kills_and_changes_of_roles_leave_no_descriptor_and_no_memory(start):
    """Six of each: afterwards both processes hold the same resources as before."""
    flags = ("--prefill-workers", "2", "--decode-workers", "2", "--elastic-roles")
    flags += ("--threads-per-worker", "1", "--num-kv-blocks", "256", "--kept-timelines", "8")
    with start(*flags) as running:

        def workers():
            return {one["id"]: one for one in running.get("/v1/cluster")[1]["workers"]}

        def ask():
            until(lambda: all(one["state"] == "ready" for one in workers().values()))
            for number in range(8):
                prompt = [10 + (number * 7 + at) % 250 for at in range(300)]
                assert running.post(PATH, {**PROBE, "prompt": prompt})[0] == 200

        def held():
            pids = running.process.pid, workers()["decode-0"]["pid"]
            return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]

        def resident():
            status = Path(f"/proc/{running.process.pid}/status").read_text()
            return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # MiB

        def kill(*names):
            found = workers()
            for name in names:
                os.kill(found[name]["pid"], signal.SIGKILL)
            restarts = [found[name]["restarts"] for name in names]
            until(
                lambda: all(
                    workers()[n]["restarts"] > r for n, r in zip(names, restarts, strict=True)
                )
            )
            ask()

        ask()
        kill("prefill-0")
        before = held()
        memory = resident()
        roles = set()
        for number in range(6):
            others = [one for one in workers().values() if one["id"] != "decode-0"]
            readers = [one["id"] for one in others if one["role"] == "prefill"]
            # Without prefill workers, a decode worker takes their place.
            kill(*(readers if number % 2 else [others[number % 3]["id"]]))
            roles |= {(name, one["role"]) for name, one in workers().items()}
        assert len(roles) > 4
        until(
            lambda: all(now <= then for now, then in zip(held(), before, strict=True))
        )  # Unused connections are closed in half a minute.
        assert resident() < memory + 16
