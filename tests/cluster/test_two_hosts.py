"""Two hosts on one machine: a network namespace whose cable is disconnected."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from children import child, end
from routed import CONFIG, LONG, all_of, mix, read, same, until, whole
from twinphase.cluster.address import KEY_VARIABLE
from twinphase.cluster.remote import RemoteHost
from twinphase.config import EngineConfig
from twinphase.engine.process.host import ProcessHost
from twinphase.phases.timeline import IntervalKind

MOVING = (IntervalKind.ROUTE, IntervalKind.TRANSFER)
KEY = "0123456789abcdef"
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
        command = [
            "ip",
            "netns",
            "exec",
            self.name,
            sys.executable,
            "-m",
            "twinphase.cluster.worker",
        ]
        self.process = subprocess.Popen(
            [*command, "--listen", f"{THERE}:0", "--role", role, "--ends-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, KEY_VARIABLE: KEY},
            text=True,
        )
        self.address = self.process.stdout.readline().split()[-1]

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
        end(host.process)
        ip("netns", "del", host.name)  # and the cable with it


@contextmanager
def child_worker(role):
    """Address of a worker here."""
    command = [
        sys.executable,
        "-m",
        "twinphase.cluster.worker",
        "--listen",
        f"{HERE}:0",
        "--role",
        role,
    ]
    with child(
        [*command, "--ends-with-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, KEY_VARIABLE: KEY},
        text=True,
    ) as process:
        yield process.stdout.readline().split()[-1]


@pytest.mark.slow
def test_a_cable_is_pulled_while_answers_stream_and_plugged_in_again(serve, lone, tiny_path):
    prompts = [[40 + number, 41] for number in range(6)]
    expected = lone.generate(prompts, LONG)
    later = list(mix(7))
    expected_later = lone.generate([prompt for prompt, _ in later], [params for _, params in later])

    with other_host() as there:

        def hosts():
            return {
                "here": ProcessHost(tiny_path, EngineConfig(**CONFIG), silence=2.0),
                "there": RemoteHost(
                    there.address, KEY.encode(), tiny_path, EngineConfig(**CONFIG), 2.0
                ),
            }

        async def body(engine):
            router = engine.host
            await until(lambda: all(one.state == "ready" for one in router.workers()))
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
            await until(lambda: all(one.state == "ready" for one in router.workers()))
            assert all(map(same, await all_of(engine, later), expected_later))
            await whole(engine)

        serve(body, hosts=hosts)


@pytest.mark.slow
def test_prompts_are_read_there_and_answered_here_whatever_becomes_of_the_cable(
    serve, lone, tiny_path
):
    prompts = [[10 + (i * j) % 250 for i in range(180)] for j in (3, 7, 9)]
    expected = lone.generate(prompts, LONG)

    with other_host("prefill") as there, child_worker("decode") as here:

        def hosts():
            return {
                name: RemoteHost(address, KEY.encode(), tiny_path, EngineConfig(**CONFIG), 2.0)
                for name, address in (("there", there.address), ("here", here))
            }

        async def body(engine):
            await until(lambda: engine.is_running)
            router = engine.host
            router.fleet._routing.policy = "random"  # all prompts are read there

            async def reasons():
                found = await all_of(engine, [(prompt, LONG) for prompt in prompts])
                assert all(map(same, found, expected))
                return [one.reason for one in found[0].metrics.intervals if one.kind in MOVING]

            assert "here: 11 of 11 blocks there" in await reasons()
            there.pull()
            assert any(
                reason.startswith("there, which died with 0 tokens") for reason in await reasons()
            )
            assert [one.state for one in router.workers()] != ["ready", "ready"]
            there.plug()
            await until(lambda: all(one.state == "ready" for one in router.workers()))
            assert "here: 11 of 11 blocks there" in await reasons()
            assert not any(view.num_requests for view in router.workers_by_name.values())

        serve(body, hosts=hosts)
