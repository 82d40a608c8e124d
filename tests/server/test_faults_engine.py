"""Faults of the engine: full caches and queues, signals, dead or stuck processes, damaged files."""

import os
import resource
import signal
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import gguf
import numpy as np
import openai
import pytest

from dialects import ANTHROPIC, OLLAMA, PATHS, ask, message, parts, turn, user
from raw_client import (
    LONG,
    ONE,
    PATH,
    PROBE,
    connect,
    events,
    read_reply,
    send,
    surviving,
    tokens,
    until,
)
from running import PATIENCE
from tiny_gguf import write_tiny_gguf
from twinphase.server.config import ServerConfig
from twinphase.server.service import Service

OTHERS = [ANTHROPIC, OLLAMA]
POISON = 77  # the token whose embedding is not finite


def at_once(server, bodies):
    """Status and body of each request, all sent together."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: server.post(PATH, body), bodies))


# A sampler's error.


@pytest.fixture(scope="module")
def poisoned(start, tmp_path_factory):
    """A model that computes NaN from one token."""
    path = tmp_path_factory.mktemp("poisoned") / "tiny.gguf"
    write_tiny_gguf(path, tensor_type="F32", tied=False, context=4096)
    embedding = next(
        tensor
        for tensor in gguf.GGUFReader(str(path)).tensors
        if tensor.name == "token_embd.weight"
    )
    with open(path, "r+b") as file:
        file.seek(int(embedding.data_offset + embedding.n_bytes // 320 * POISON))
        file.write(np.float32(np.nan).tobytes())
    with start("--num-kv-blocks", "24", "--max-model-len", "256", model=path) as server:
        yield server


def test_logits_that_are_not_finite_fail_one_request(poisoned):
    sound = {**PROBE, "prompt": [5] * 40, "max_tokens": 200}
    with surviving(poisoned):
        alone = tokens(poisoned.post(PATH, sound)[1])
        bad = {**PROBE, "prompt": [5, 6, 7] * 30 + [POISON]}
        (status, body), *rest = at_once(poisoned, [bad, sound, {**sound, "cache_salt": "a"}])
        assert status == 500 and "not finite" in body["error"]["message"]
        assert [tokens(body) for _, body in rest] == [alone, alone]
        for scored in (
            {"prompt_logprobs": 0},
            {"prompt_logprobs": 2, "prompt": [5, POISON] + [7] * 200},
        ):
            status, body = poisoned.post(PATH, {**bad, **scored})
            assert status == 500 and "not finite" in body["error"]["message"]
        with send(poisoned, PATH, {**bad, "stream": True}) as client:
            error, last = events(client)
            assert "not finite" in error["error"]["message"] and last == "[DONE]"
        text = poisoned.post("/detokenize", {"tokens": [POISON]})[1]["prompt"]
        begun = [user("hello"), turn("assistant", text)]
        for dialect, path, body in (
            (OLLAMA, "/api/generate", {"prompt": text, "raw": True}),
            (ANTHROPIC, PATHS[ANTHROPIC], {"messages": begun, "max_tokens": 9}),
        ):
            body |= {"model": poisoned.model, "stream": False}
            status, reply = poisoned.post(path, body)
            assert status == 500 and "not finite" in message(dialect, reply)
            with send(poisoned, path, {**body, "stream": True}) as client:
                *_, error = parts(client)
                assert "not finite" in message(dialect, error)
        # In the blocks that held what is not finite, as anywhere.
        for salt in "abc":
            assert tokens(poisoned.post(PATH, {**sound, "cache_salt": salt})[1]) == alone


def test_a_grammar_that_cannot_go_on_fails_one_request(server):
    bad = {
        "prompt": "a",
        "max_tokens": 50,
        "guided_grammar": 'start: "a" b\nb: b "c"',
    }  # b never ends
    sound = {**LONG, "max_tokens": 500}
    with surviving(server):
        alone = tokens(server.post(PATH, sound)[1])
        (status, body), (_, other) = at_once(server, [bad, sound])
        assert status == 400 and "no token can follow" in body["error"]["message"]
        assert tokens(other) == alone


# Too much at once.


def test_a_full_kv_cache_preempts_and_everybody_is_served(start, server):
    body = {**LONG, "max_tokens": 150}
    prompts = [[i + 5] * 20 for i in range(12)]
    _, with_room = server.post(PATH, {**body, "prompt": prompts})
    with (
        start("--num-kv-blocks", "24", "--max-num-seqs", "16", "--max-model-len", "256") as small,
        surviving(small),
    ):
        # After the short answer of the probe, room is kept for short ones.
        before = small.metric("step_tokens_total")
        _, together = small.post(PATH, {**body, "prompt": prompts})
        for choice, expected in zip(together["choices"], with_room["choices"], strict=True):
            assert choice["token_ids"] == expected["token_ids"]
        assert small.metric("num_preemptions_total") > 0
        # No thrash: what was computed twice is less than what had to be computed.
        assert small.metric("step_tokens_total") - before < 2 * len(prompts) * (20 + 150)


def test_prompt_tokens_that_wait_are_bounded(limited):
    with surviving(limited, **ONE):
        running = send(limited, PATH, {**LONG, "stream": True}, **ONE)
        next(events(running))
        with limited.paused():
            waiting = send(limited, PATH, {**PROBE, "prompt": [5] * 90}, **ONE)
            until(lambda: limited.get("/health")[1]["running"] == 2)
            with send(limited, PATH, {**PROBE, "prompt": [6] * 20}, **ONE) as refused:
                status, headers, _ = read_reply(refused)
                assert status == 429 and "retry-after" in headers
            for dialect in OTHERS:
                with send(
                    limited, PATHS[dialect], ask(dialect, "a", "hello " * 20), **ONE
                ) as refused:
                    status, headers, reply = read_reply(refused)
                    assert (
                        status == 429
                        and "retry-after" in headers
                        and "overloaded" in message(dialect, reply)
                    )
            running.close()
        with waiting:
            assert len(tokens(read_reply(waiting)[2])) == PROBE["max_tokens"]


# The end.


def test_sigterm_lets_running_requests_finish(start):
    body = {**LONG, "max_tokens": 2000}
    with (
        start() as server,
        send(server, PATH, body) as whole,
        send(server, PATH, {**body, "stream": True}) as streamed,
    ):
        coming = events(streamed)
        received = [next(coming)]
        with server.paused():
            until(lambda: server.get("/health")[1]["running"] == 2)
            server.process.send_signal(signal.SIGTERM)
            until(
                lambda: server.get("/health/ready") == (503, {"status": "draining", "running": 2})
            )
            with (
                server.client() as client,
                pytest.raises(openai.InternalServerError, match="shutting down") as refused,
            ):
                client.completions.create(model=server.model, prompt="a")
            assert (refused.value.status_code, refused.value.code) == (503, "unavailable")
            assert refused.value.response.headers["retry-after"]
            for dialect in OTHERS:
                status, reply = server.post(PATHS[dialect], ask(dialect, server.model))
                assert status == 503 and "shutting down" in message(dialect, reply)
        *rest, last = coming
        got = [token for event in received + rest for token in event["choices"][0]["token_ids"]]
        assert last == "[DONE]" and len(got) == 2000
        assert tokens(read_reply(whole)[2]) == got
        assert server.process.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("flags", "signals"), [(("--drain-timeout", "0.3"), 1), ((), 2)], ids=["time", "signal"]
)
def test_what_outlasts_the_drain_and_a_second_sigterm_end_requests_with_an_error(
    start, flags, signals
):
    with (
        start(*flags) as server,
        in_other_apis(server) as others,
        send(server, PATH, {**LONG, "n": 16, "stream": True}) as streamed,
        send(server, PATH, LONG) as whole,
    ):
        until(lambda: server.metric("num_requests_running") == 17 + len(others))
        engine = server.engine_pid()
        for _ in range(signals):
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.get("/health")[0] != 200)
        *_, error, last = events(streamed)
        assert error["error"]["code"] == "unavailable" and last == "[DONE]"
        status, headers, _ = read_reply(whole)
        assert status == 503 and "retry-after" in headers
        expect_errors(others, "shutting down")
        assert server.process.wait(PATIENCE) == 0
        until(lambda: not is_alive(engine))
        assert "Traceback" not in server.log.read_text()


@contextmanager
def in_other_apis(server):
    """A stream and a whole answer of each, under way: (dialect, whether it streams, connection)."""
    with ExitStack() as stack:
        found = []
        for dialect in OTHERS:
            body = ask(dialect, server.model)
            path = PATHS[dialect]
            assert (
                server.post(path, ask(dialect, server.model, max_tokens=1))[0] == 200
            )  # its grammar is kept
            for stream in (True, False):
                found.append(
                    (
                        dialect,
                        stream,
                        stack.enter_context(send(server, path, {**body, "stream": stream})),
                    )
                )
        yield found


def expect_errors(others, part):
    for dialect, stream, client in others:
        if stream:
            *_, error = parts(client)
        else:
            status, headers, error = read_reply(client)
            assert status == 503 and "retry-after" in headers
        assert part in message(dialect, error)


def test_an_engine_does_not_outlive_its_server(start):
    with start() as server, send(server, PATH, LONG):
        until(lambda: server.metric("num_requests_running") == 1)
        engine = server.engine_pid()
        server.process.kill()
        server.process.wait()
        until(lambda: not is_alive(engine))


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# An engine that dies or stands still.


def test_requests_of_a_dead_engine_get_an_error_to_retry_on_and_it_is_started_again(start):
    limit = (
        10 * PATIENCE
    )  # longer than any answer is waited for: it is not by standing still that the death is noticed
    with (
        start("--stall-timeout", str(limit)) as server,
        surviving(server, restarts=True),
        in_other_apis(server) as others,
        send(server, PATH, {**LONG, "stream": True}) as streamed,
        send(server, PATH, {**LONG, "n": 2}) as whole,
    ):
        until(lambda: server.metric("num_requests_running") == 3 + len(others))
        os.kill(server.engine_pid(), signal.SIGKILL)
        expect_retryable(streamed, whole)
        expect_errors(others, "engine")
        log = server.log.read_text()
        assert f"was killed by signal {signal.SIGKILL:d}" in log and "made no step" not in log


STALL = 5  # seconds: more than a busy machine takes for a step


@pytest.mark.slow
def test_an_engine_that_stands_still_is_started_again(start):
    with (
        start("--stall-timeout", str(STALL)) as mortal,
        surviving(mortal, restarts=True),
        send(mortal, PATH, {**LONG, "stream": True}) as streamed,
        send(mortal, PATH, LONG) as whole,
    ):
        until(lambda: mortal.metric("num_requests_running") == 2)
        os.kill(mortal.engine_pid(), signal.SIGSTOP)
        expect_retryable(streamed, whole)
        assert f"The engine made no step for {STALL} s" in mortal.log.read_text()


class FakeHost:
    """Replaces an engine's process, and counts how often it was killed."""

    text = SimpleNamespace()
    num_killed = num_restarts = 0
    last_death = failure = None
    totals_last = False

    def kill(self):
        self.num_killed += 1


def test_an_engine_that_stands_still_is_unhealthy_and_ended():
    """With the test's own clock: in a running server the moment is too short to observe."""
    host = FakeHost()
    service = Service(host, "m", ServerConfig(stall_timeout=2.0))
    engine = service.engine = SimpleNamespace(
        is_running=True, num_unfinished=1, stats=None, host=host, progress=None, last_embedded=0.0
    )

    def seen_at(now):
        service._watch_engine(engine, now)
        return service.stage, int(
            service.metrics.expose(None)[0].decode().rpartition("engine_up{")[2].split()[1][0]
        )

    assert seen_at(10.0) == seen_at(11.9) == ("ready", 1)
    assert host.num_killed == 0
    assert seen_at(12.1) == seen_at(12.2) == ("stalled", 0)
    assert host.num_killed == 1
    engine.stats = SimpleNamespace(end=12.0)  # a step, after all
    assert seen_at(13.9) == ("ready", 1) and seen_at(14.1) == ("stalled", 0)
    engine.is_running = False  # ended
    assert seen_at(14.2) == ("starting", 0)
    # without work it may stand still
    engine.is_running = True
    engine.num_unfinished = 0
    assert seen_at(99.0) == ("ready", 1)


def expect_retryable(streamed, whole):
    *_, error, last = events(streamed)
    assert error["error"]["code"] == "engine_restarted" and last == "[DONE]"
    status, headers, body = read_reply(whole)
    assert (
        status == 503 and body["error"]["code"] == "engine_restarted" and "retry-after" in headers
    )


@pytest.mark.slow
def test_an_engine_that_cannot_be_started_again_yet_is_tried_until_it_can(
    start, tiny_path, tmp_path
):
    model = tmp_path / "model.gguf"
    os.link(tiny_path, model)
    with start(model=model) as server:
        with surviving(server, restarts=True):  # without its file
            model.unlink()
            os.kill(server.engine_pid(), signal.SIGKILL)
            until(lambda: server.metric("engine_restarts_total") >= 2)
            assert server.get("/health/ready")[0] == 503
            status, body = server.post(PATH, PROBE)
            assert status == 503 and body["error"]["code"] == "unavailable"
            os.link(tiny_path, model)
        with surviving(server, restarts=True), connect(server) as client:  # without descriptors

            def status():
                client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                return read_reply(client)[2]["status"]

            assert status() == "ready"
            limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
            engine = server.engine_pid()
            resource.prlimit(
                server.process.pid, resource.RLIMIT_NOFILE, (3, limits[1])
            )  # no new ones
            os.kill(engine, signal.SIGKILL)
            until(lambda: "Too many open files" in status())
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)


# Model files.


def test_a_damaged_model_file_ends_the_server_with_a_line_and_its_exit_code(
    start, tiny_path, tmp_path
):
    """Each kind of damage is tests/weights/test_gguf.py's business."""
    path = tmp_path / "damaged.gguf"
    content = tiny_path.read_bytes()
    path.write_bytes(
        content[:8] + struct.pack("<Q", 2**63 - 1) + content[16:]
    )  # the number of tensors
    with start(model=path, wait=False) as server:
        assert server.process.wait(PATIENCE) == 4
    log = server.log.read_text()
    assert "damaged.gguf" in log and "Traceback" not in log and len(log.splitlines()) <= 3
