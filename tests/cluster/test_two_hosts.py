"""Two hosts on one machine: a network namespace whose cable is disconnected."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from contextlib import contextmanager, suppress

import pytest

from children import end
from routed import (
    CONFIG,
    LONG,
    WorkerProcess,
    all_ready,
    check_answers,
    mix,
    read,
    reasons,
    remote_host,
    same,
    until,
    whole,
)
from twinphase.cluster.handshake import DEMANDED
from twinphase.config import EngineConfig
from twinphase.engine.process.host import ProcessHost
from twinphase.phases.timeline import IntervalKind

MOVING = (IntervalKind.ROUTE, IntervalKind.TRANSFER)
ALL_PROTOCOLS = 3
HERE = "10.231.77.1"
THERE = "10.231.77.2"


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class OtherHost:
    """A namespace with a worker in it, and the cable to it."""

    def __init__(self, role):
        self.name = f"tp{os.getpid()}"
        self.cable = f"tp{os.getpid()}v"
        ip("netns", "add", self.name)
        ip("link", "add", self.cable, "type", "veth", "peer", "name", "cable", "netns", self.name)
        ip("addr", "add", f"{HERE}/24", "dev", self.cable)
        ip("link", "set", self.cable, "up")
        ip("-n", self.name, "addr", "add", f"{THERE}/24", "dev", "cable")
        ip("-n", self.name, "link", "set", "cable", "up")
        self.worker = WorkerProcess(
            f"{THERE}:0", "--role", role, before=("ip", "netns", "exec", self.name)
        )
        self.address = self.worker.address

    def pull(self):
        ip("link", "set", self.cable, "down")

    def plug(self):
        ip("link", "set", self.cable, "up")


@contextmanager
def other_host(role="both"):
    try:
        host = OtherHost(role)
    except (OSError, subprocess.CalledProcessError) as error:
        subprocess.run(["ip", "netns", "del", f"tp{os.getpid()}"], capture_output=True)
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        yield host
    finally:
        end(host.worker.process)
        # The end of a namespace removes its cable too, but later: the next test makes one like it.
        ip("link", "del", host.cable)
        ip("netns", "del", host.name)


@pytest.mark.slow
def test_a_cable_is_pulled_while_answers_stream_and_plugged_in_again(serve, lone, tiny_path):
    prompts = [[40 + number, 41] for number in range(6)]
    expected = lone.generate(prompts, LONG)
    later = list(mix(7))

    with other_host() as there:

        def hosts():
            return {
                "here": ProcessHost(tiny_path, EngineConfig(**CONFIG), silence=2.0),
                "there": remote_host(there.address, tiny_path),
            }

        async def body(engine):
            router = engine.host
            await all_ready(engine)
            router.fleet.routing.policy = "random"  # A busy host could be predicted to be slow.
            streams = [await engine.submit(prompt, LONG) for prompt in prompts]
            await until(lambda: all(stream.transcript.token_ids for stream in streams))
            assert {sent.worker for sent in router.requests.values()} == {"here", "there"}
            there.pull()
            assert all(
                [
                    same(await read(stream), wanted)
                    for stream, wanted in zip(streams, expected, strict=True)
                ]
            )
            assert router.num_continued
            assert [one.state for one in router.workers() if one.id == "there"] != ["ready"]
            there.plug()
            await all_ready(engine)
            await check_answers(engine, later, lone)
            await whole(engine)

        serve(body, hosts=hosts)


@contextmanager
def captured(cable):
    """All bytes that go over a cable."""
    seen = bytearray()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) as link:
        link.bind((cable, 0))
        link.settimeout(0.1)
        done = threading.Event()

        def listen():
            while not done.is_set():
                with suppress(TimeoutError):
                    seen.extend(link.recv(1 << 17))

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield seen
        finally:
            done.set()
            thread.join()


@pytest.mark.slow
def test_nobody_on_the_cable_can_read_a_prompt_or_its_blocks(serve, lone, tiny_path):
    # As token ids of MessagePack, which has a byte for each, it is the text itself.
    text = b"attack at dawn, from the hills by the river."
    decode = ("--role", "decode")
    with other_host("prefill") as there, WorkerProcess(f"{HERE}:0", *decode) as here:

        def hosts():
            return {
                name: remote_host(host.address, tiny_path)
                for name, host in (("there", there), ("here", here))
            }

        async def body(engine):
            await all_ready(engine)
            engine.host.fleet.routing.policy = "random"
            with captured(there.cable) as seen:
                answers = await check_answers(engine, [(list(text), LONG)], lone)
                assert "here: 2 of 2 blocks there" in reasons(answers, *MOVING)
            assert DEMANDED in seen and len(seen) > 10_000
            assert text[:16] not in seen

        serve(body, hosts=hosts)


@pytest.mark.slow
def test_prompts_are_read_there_and_answered_here_whatever_becomes_of_the_cable(
    serve, lone, tiny_path
):
    asked = [([10 + (i * j) % 250 for i in range(180)], LONG) for j in (3, 7, 9)]

    with other_host("prefill") as there, WorkerProcess(f"{HERE}:0", "--role", "decode") as here:

        def hosts():
            return {
                name: remote_host(host.address, tiny_path)
                for name, host in (("there", there), ("here", here))
            }

        async def body(engine):
            router = engine.host
            router.fleet.routing.policy = "random"  # all prompts are read there

            async def moves():
                return reasons((await check_answers(engine, asked, lone))[:1], *MOVING)

            assert "here: 11 of 11 blocks there" in await moves()
            there.pull()
            assert any(
                reason.startswith("there, which died with 0 tokens") for reason in await moves()
            )
            assert [one.state for one in router.workers()] != ["ready", "ready"]
            there.plug()
            await all_ready(engine)
            assert "here: 11 of 11 blocks there" in await moves()
            assert not any(view.num_requests for view in router.workers_by_name.values())

        serve(body, hosts=hosts)
