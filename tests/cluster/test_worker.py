"""Workers that were started separately: found by address, authenticated, and reconnected."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from contextlib import contextmanager, suppress

import pytest

from children import end
from routed import (
    CONFIG,
    KEY,
    LONG,
    VOCAB,
    WorkerProcess,
    all_of,
    all_ready,
    check_answers,
    mix,
    num_moved,
    pid_of,
    read,
    remote_host,
    same,
    until,
    whole,
)
from tiny_gguf import write_tiny_gguf
from twinphase.cli import run_app
from twinphase.cluster import remote
from twinphase.cluster.address import KEY_VARIABLE, connect, listen, read_key
from twinphase.cluster.handshake import ClusterKey
from twinphase.cluster.joining import Door
from twinphase.cluster.remote import CalledHost, RemoteHost
from twinphase.cluster.router import Router
from twinphase.cluster.timelines import joined, shifted
from twinphase.config import EngineConfig
from twinphase.engine.frontends.async_engine import AsyncEngine
from twinphase.errors import InvalidRequestError, StorageError
from twinphase.phases.timeline import IntervalKind, RequestTimeline

POOLS = [("127.0.0.1:0", "--role", role) for role in ("prefill", "decode")]


@contextmanager
def started(*workers):
    """Worker processes, each by its address and options; the list's present ones are ended."""
    processes = []
    try:
        for options in workers:
            processes.append(WorkerProcess(*options))
        yield processes
    finally:
        for worker in processes:
            end(worker.process)


def hosts_of(workers, path, silence=2.0):
    return lambda: {
        f"worker-{i}": remote_host(one.address, path, silence) for i, one in enumerate(workers)
    }


def test_workers_by_tcp_and_by_unix_socket_answer_as_one_engine(serve, lone, tiny_path, tmp_path):
    """When the server leaves, they wait for the next one, with the model and the cache."""
    asked = [one for seed in (1, 2) for one in mix(seed)]

    with started((), (f"unix:{tmp_path}/worker",)) as workers:

        async def body(engine):
            await check_answers(engine, asked, lone)
            stream = await engine.submit([10, 11], LONG)
            await until(lambda: stream.transcript.token_ids)
            assert "of its tokens" in str(await engine.explain(stream))
            await engine.abort(stream.request_id)
            await whole(engine)
            assert [one.host for one in engine.host.workers()] == [
                worker.address for worker in workers
            ]

        for _ in range(2):
            serve(body, hosts=hosts_of(workers, tiny_path))
        workers[0].process.stdin.close()
        assert workers[0].process.wait(30) == 0


def test_a_worker_that_stands_still_is_left_and_taken_again_when_it_goes_on(serve, lone, tiny_path):
    prompts = [[30 + number, 31] for number in range(4)]
    expected = lone.generate(prompts, LONG)

    with started((), ()) as workers:

        async def body(engine):
            router = engine.host
            streams = [await engine.submit(prompt, LONG) for prompt in prompts]
            await anext(streams[0])
            stopped = int(router.requests[streams[0].request_id].worker[-1])
            workers[stopped].process.send_signal(signal.SIGSTOP)
            outputs = await asyncio.gather(*map(read, streams))
            assert all(map(same, outputs, expected))
            assert router.num_continued > 0 and "broke" in str(router.last_death)
            workers[stopped].process.send_signal(signal.SIGCONT)
            await all_ready(engine)
            outputs = await all_of(engine, [(prompt, LONG) for prompt in prompts])
            assert all(map(same, outputs, expected))
            await whole(engine)

        serve(body, hosts=hosts_of(workers, tiny_path, silence=1.0))


class BadLine:
    """A proxy that splits and delays the data of connections."""

    def __init__(self, address):
        self._target = address.rpartition(":")
        self._draw = random.Random(1)
        self._server = None

    def address(self):
        if self._server is None:
            raise ConnectionError("the line is not laid yet")
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def lay(self):
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)

    async def cut(self):
        self._server.close()

    async def _join(self, reader, writer):
        there = await asyncio.open_connection(self._target[0], int(self._target[2]))
        await asyncio.gather(self._pass(reader, there[1]), self._pass(there[0], writer))

    async def _pass(self, reader, writer):
        with suppress(OSError):
            while data := await reader.read(self._draw.randint(1, 2000)):
                await asyncio.sleep(self._draw.choice([0.0, 0.002, 0.02]))
                writer.write(data)
        writer.close()


@pytest.mark.slow
def test_lines_that_are_slow_and_cut_messages_anywhere(serve, lone, tiny_path):
    asked = list(mix(5))

    with started(*POOLS) as workers:
        lines = {
            role: BadLine(one.address)
            for role, one in zip(("reader", "writer"), workers, strict=True)
        }

        async def body(engine):
            for line in lines.values():
                await line.lay()
            await all_ready(engine)
            engine.host.fleet.routing.policy = "random"  # all prompts go to the one that reads
            await check_answers(engine, asked, lone)
            assert not engine.host.num_restarts
            for line in lines.values():
                await line.cut()

        serve(
            body,
            waits=False,
            hosts=lambda: {
                name: remote_host(line.address, tiny_path, 5.0) for name, line in lines.items()
            },
        )


def test_a_worker_that_is_not_there_is_not_waited_for_and_taken_when_it_comes(
    serve, tiny_path, caplog
):
    with started((), ()) as workers:
        end(workers[1].process)

        async def body(engine):
            router = engine.host
            assert (
                f"worker-1 cannot be reached yet: {workers[1].address}: Connection refused"
                in caplog.text
            )
            assert [one.state for one in router.workers()][0] == "ready"
            workers[1] = WorkerProcess(workers[1].address)
            await all_ready(engine)
            assert engine.facts.config.max_num_seqs == 128
            await whole(engine)

        serve(body, hosts=hosts_of(workers, tiny_path))


def test_workers_say_their_roles_and_send_each_other_blocks(serve, lone, tiny_path):
    """The prefill worker reports the first token and the decode worker continues."""
    asked = list(mix(3))

    with started(*POOLS) as workers:

        async def body(engine):
            assert [one.role for one in engine.host.workers()] == ["prefill", "decode"]
            engine.host.fleet.routing.policy = "random"  # all prompts go to the one that reads
            found = await check_answers(engine, asked, lone)
            assert num_moved(found, "worker-1") > 5
            reader, writer = engine.host.workers()
            assert [reader.pid, writer.pid] == [worker.process.pid for worker in workers]
            assert (
                reader.transfers == 0
                and reader.blocks_sent > 5
                and reader.bytes_sent
                and not writer.blocks_sent
            )
            assert (
                writer.blocks_received.keys() <= {"stored", "known"} and not reader.blocks_received
            )
            assert 0 < sum(writer.blocks_received.values()) <= reader.blocks_sent
            assert not any(view.num_requests for view in engine.host.workers_by_name.values())

        serve(body, hosts=hosts_of(workers, tiny_path))
        alone = Router(hosts_of(workers[:1], tiny_path)())
        assert "--role decode" in str(refused(workers, tiny_path, host=alone))


def test_a_worker_that_is_told_to_leave_finishes_hands_over_its_cache_and_is_taken_again(
    serve, lone, tiny_path
):
    prompts = [[10 + (i * j) % 250 for i in range(80)] for j in (3, 7)]
    expected = lone.generate(prompts, LONG)

    with started((), ()) as workers:

        async def body(engine):
            router = engine.host
            await until(lambda: len(router.fleet.workers) == 2)
            router.fleet.workers["worker-1"].accepts = False
            stream = await engine.submit(prompts[0], LONG)
            await anext(stream)
            router.fleet.workers["worker-1"].accepts = True
            workers[0].process.send_signal(signal.SIGTERM)
            await until(lambda: not router.fleet.workers["worker-0"].accepts)
            again = await engine.submit(prompts[1], LONG)
            assert router.requests[again.request_id].worker == "worker-1"
            assert same(await read(stream), expected[0]) and same(await read(again), expected[1])
            assert await asyncio.to_thread(workers[0].process.wait, 60) == 0
            assert not router.num_continued
            found = await all_of(engine, [(prompts[0], LONG)])
            assert (
                same(found[0], expected[0]) and found[0].num_cached_tokens == 64
            )  # of 80: the last one is computed
            end(workers[0].process)
            workers[0] = WorkerProcess(workers[0].address)
            await all_ready(engine)
            assert router.num_restarts == 0, "nothing died"
            await whole(engine)

        serve(body, hosts=hosts_of(workers, tiny_path))


def test_a_worker_joins_a_server_that_runs_and_leaves_it_when_it_dies(serve, lone, tiny_path):
    prompts = [[30 + number, 31] for number in range(67)]

    def newcomer(name, address):
        return CalledHost(address, key, tiny_path, EngineConfig(**CONFIG), 60.0)

    key = ClusterKey(KEY.encode())
    door = Door("127.0.0.1:0", key, newcomer)
    join = ("--join", door.address)

    async def body(engine):
        router = engine.host
        assert len(router.workers()) == 1
        with WorkerProcess("0.0.0.0:0", *join) as worker:
            streams = [await engine.submit(prompt, LONG) for prompt in prompts[:3]]
            await until(lambda: len(router.workers()) == 2)
            await all_ready(engine)
            # Held, both keep what they are sent; how soon the newcomer is preferred depends on how
            # fast steps are.
            held = pid_of(engine, "worker-0"), worker.process.pid
            for pid in held:
                os.kill(pid, signal.SIGSTOP)
            try:
                asked = []
                for number in range(3, len(prompts)):
                    asked.append(
                        asyncio.create_task(
                            engine.submit(prompts[number], LONG, request_id=str(number))
                        )
                    )
                    await until(lambda number=number: str(number) in router.requests)
                    if router.requests[str(number)].worker == "worker-1":
                        break
                else:
                    raise AssertionError("worker-1 was sent nothing")
            finally:
                for pid in held:
                    os.kill(pid, signal.SIGCONT)
            worker.process.kill()
            streams += await asyncio.gather(*asked)
            outputs = await asyncio.gather(*map(read, streams))
            expected = await asyncio.to_thread(lone.generate, prompts[: len(outputs)], LONG)
            assert all(map(same, outputs, expected))
            await until(lambda: len(router.workers()) == 1)
        address = router.workers_by_name["worker-1"].host.where
        assert address.startswith("127.0.0.1:")
        with WorkerProcess(address, *join) as again:  # by its name of before
            await until(lambda: len(router.workers()) == 2)
            await all_ready(engine)
            assert list(router.workers_by_name) == ["worker-0", "worker-1"]
            again.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(again.process.wait, 60) == 0
        await until(lambda: len(router.workers()) == 1)
        with WorkerProcess("127.0.0.1:0", *join, key="another key, as long") as stranger:
            assert await asyncio.to_thread(stranger.process.wait, 60) == 1
            assert "another key" in stranger.process.stderr.read()

    serve(body, count=1, door=door, silence=60.0)


def refused(workers, path, key=KEY, host=None):
    """The server's message when no worker accepts it."""

    async def main():
        engine = AsyncEngine(host or remote_host(workers[0].address, path, 1.5, key=key))
        await until(lambda: engine.host.failure is not None)
        assert not engine.is_running
        await asyncio.to_thread(engine.close)
        return engine.host.failure.error()

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_a_wrong_key_another_version_and_another_model_are_refused_in_a_line(
    tiny_path, tmp_path, monkeypatch
):
    with started(()) as workers:
        assert "key" in str(refused(workers, tiny_path, "another key, as long"))
        with connect(workers[0].address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + b"x" * 200)
            assert stranger.recv(1 << 16)  # its greeting, and nothing behind it
        other = write_tiny_gguf(tmp_path / "other.gguf", vocab=VOCAB, context=256)
        host = RemoteHost.__init__

        def of_another(self, *arguments):
            host(self, *arguments)
            self.text.checkpoint = type(self.text).of_model(other).checkpoint

        monkeypatch.setattr(RemoteHost, "__init__", of_another)
        assert "another model" in str(refused(workers, tiny_path))
        monkeypatch.setattr(RemoteHost, "__init__", host)
        monkeypatch.setattr(remote, "__version__", "0.0.1")
        found = str(refused(workers, tiny_path))
        assert "0.0.1" in found and "same version" in found
        monkeypatch.undo()
        assert workers[0].process.poll() is None


@pytest.mark.slow
def test_a_port_for_blocks_that_somebody_else_has_is_refused_in_a_line_and_taken_when_it_is_free(
    serve, tiny_path
):
    holder = socket.create_server(("127.0.0.1", 0))
    port = holder.getsockname()[1]
    with WorkerProcess("127.0.0.1:0", "--kv-port", str(port)) as worker:
        with holder:
            found = str(refused([worker], tiny_path))
        assert f"127.0.0.1:{port}: Address already in use" in found and "another --kv-port" in found

        async def body(engine):
            assert engine.facts.kv_addresses[-1] == f"tcp:127.0.0.1:{port}"

        serve(body, hosts=hosts_of([worker], tiny_path))


def test_bad_keys_and_addresses_are_refused_in_a_line(tmp_path, monkeypatch, capsys, tiny_path):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    for arguments in (
        ["worker"],
        ["serve", str(tiny_path), "--port", "0", "--worker", "127.0.0.1:1"],
    ):
        assert run_app(arguments) == 2
        error = capsys.readouterr().err
        assert "have no key" in error and "openssl" in error and len(error.splitlines()) <= 2
    with pytest.raises(StorageError, match="Cannot read the key"):
        read_key(str(tmp_path / "none"))
    (tmp_path / "short").write_text("abc\n")
    with pytest.raises(InvalidRequestError, match="3 characters"):
        read_key(str(tmp_path / "short"))
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert read_key() == ClusterKey(KEY.encode())
    for address in ("", "host", "host:", ":1", "host:99999", "unix:", "host:x"):
        with pytest.raises(InvalidRequestError, match="not the address"):
            listen(address)
    listener, address = listen("127.0.0.1:0")
    with listener, pytest.raises(StorageError, match="Cannot listen"):
        listen(address)
    assert run_app(["worker", "--role", "reader"]) == 2
    assert "both, prefill, decode" in capsys.readouterr().err
    assert run_app(["serve", str(tiny_path), "--port", "0", "--worker", "nowhere"]) == 2
    assert "not the address of a worker" in capsys.readouterr().err
    assert (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # a server that ends leaves Ctrl-C as it was


@pytest.mark.parametrize("offset", [0.0, 0.2, -0.5, 7.0, -1e6, 1e6])
def test_two_clocks_are_joined_by_durations(offset):
    """A worker's 2 s within the 3 s between sending and the end; its clock cannot add more."""
    before = RequestTimeline(10.0)
    before.mark(IntervalKind.TOKENIZE, 10.5)
    before.mark(IntervalKind.ROUTE, 11.0, reason="why")
    part = RequestTimeline(11.25)
    part.mark(IntervalKind.QUEUE, 12.0)
    part.mark(IntervalKind.PREFILL, 13.25)
    whole = joined(before, shifted(part, offset), 14.0, "why")
    start = min(12.0, max(11.0, 11.25 + offset))
    assert whole.end == whole.intervals[-1].end == pytest.approx(start + 2.0)
    assert whole.seconds(IntervalKind.ROUTE) == pytest.approx(start - 10.5)
    assert whole.seconds(IntervalKind.QUEUE) == pytest.approx(0.75)
    assert whole.seconds(IntervalKind.PREFILL) == pytest.approx(1.25)
    at = whole.arrival
    for interval in whole.intervals:
        assert interval.start == at
        at = interval.end
    assert before.end == 11.0 and len(before.intervals) == 2
