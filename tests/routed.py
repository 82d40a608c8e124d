"""Requests through a router, and what must hold for answers and workers afterwards."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time

from children import end
from twinphase.cluster.address import KEY_VARIABLE
from twinphase.cluster.handshake import ClusterKey
from twinphase.cluster.remote import RemoteHost
from twinphase.config import EngineConfig, module_command
from twinphase.constraint import StructuredOutputsParams
from twinphase.phases.timeline import IntervalKind
from twinphase.request import SamplingParams

CONFIG = {
    "threads": 1,
    "max_num_batched_tokens": 64,
    "num_kv_blocks": 96,
    "block_size": 16,
    "speculative_config": "auto",
}
VOCAB = 320
PATIENCE = 120.0
PREFIXES = [[10 + (7 * i + i * i) % 250 for i in range(96)], [11] * 64, []]
LONG = SamplingParams(temperature=1.5, seed=3, max_tokens=300, ignore_eos=True, logprobs=2)


KEY = "0123456789abcdef"


class WorkerProcess:
    """A worker's process; it ends with the `with` block, or when its stdin closes."""

    def __init__(self, address="127.0.0.1:0", *options, key=KEY, before=()):
        command = [*before, *module_command("twinphase.cli"), "worker", "--ends-with-stdin"]
        self.process = subprocess.Popen(
            [*command, "--listen", address, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, KEY_VARIABLE: key},
            text=True,
        )
        self.address = self.process.stdout.readline().split()[-1]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        end(self.process)


def remote_host(address, path, silence=2.0, *, key=KEY):
    return RemoteHost(address, ClusterKey(key.encode()), path, EngineConfig(**CONFIG), silence)


def pid_of(engine, name):
    return engine.host.workers_by_name[name].host.pid


def kill(engine, name, number=signal.SIGKILL):
    os.kill(pid_of(engine, name), number)


async def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        await asyncio.sleep(0.005)


async def all_ready(engine):
    await until(lambda: all(one.state == "ready" for one in engine.host.workers()))


async def read(stream):
    """The last update, which has the whole answer."""
    updates = [update async for update in stream]
    assert all(not update.finished for update in updates[:-1])
    return updates[-1].output


def same(output, expected):
    """Bit for bit: tokens, text, log probabilities, and why it ended."""
    found = output.outputs[0]
    wanted = expected.outputs[0]
    assert (found.token_ids, found.text, found.finish_reason) == (
        wanted.token_ids,
        wanted.text,
        wanted.finish_reason,
    )
    assert repr((found.logprobs, output.prompt_logprobs)) == repr(
        (wanted.logprobs, expected.prompt_logprobs)
    )
    timeline = output.metrics
    at = timeline.arrival
    for interval in timeline.intervals:
        assert interval.start == at < interval.end, f"{interval} does not begin at {at}"
        at = interval.end
    assert at == timeline.end and timeline.seconds(IntervalKind.ROUTE) > 0
    assert len(timeline.token_times) == len(found.token_ids)
    return True


def mix(seed, count=10):
    """Prompts and parameters with nothing in common except some prefixes."""
    draw = random.Random(seed)
    for number in range(count):
        prompt = draw.choice(PREFIXES)[: draw.choice([16, 33, 96])] + [
            draw.randrange(10, 300) for _ in range(9)
        ]
        form = draw.choice(
            [None, None, {"regex": "(cat|dog|cart){3,9}!"}, {"choice": ["somewhat longer", "no"]}]
        )
        free = (
            {"ignore_eos": True, "min_tokens": 2, "stop": draw.choice([None, ["e", "th"]])}
            if form is None
            else {}
        )
        yield (
            prompt,
            SamplingParams(
                temperature=draw.choice([0.0, 0.7, 1.5]),
                repetition_penalty=draw.choice([1.0, 1.3]),
                frequency_penalty=draw.choice([0.0, 0.3]),
                seed=number,
                logprobs=draw.choice([None, 0, 3]),
                prompt_logprobs=draw.choice([None, None, None, 1]),
                max_tokens=draw.choice([2, 7, 24, 60]),
                structured_outputs=StructuredOutputsParams(**form) if form else None,
                **free,
            ),
        )


async def all_of(engine, asked, **options):
    streams = [await engine.submit(prompt, params, **options) for prompt, params in asked]
    return await asyncio.gather(*map(read, streams))


def reasons(outputs, *kinds):
    """Why intervals of these kinds, or of any, are in the timelines of the answers."""
    return [
        one.reason
        for output in outputs
        for one in output.metrics.intervals
        if one.reason and (not kinds or one.kind in kinds)
    ]


def num_moved(outputs, worker):
    """How often KV blocks moved to a worker of that name."""
    return sum(
        reason.startswith(f"{worker}: ") and "blocks there" in reason for reason in reasons(outputs)
    )


async def check_answers(engine, asked, alone):
    """Answers that are bit for bit those of the engine `alone`."""
    expected = alone.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    found = await all_of(engine, asked)
    assert all(map(same, found, expected))
    return found


async def whole(engine):
    """The workers hold no request and no block, and the router knows of none.

    Workers of roles have a router that sends every prompt to a reader.
    """
    router = engine.host
    await until(
        lambda: not router.requests and not router._questions and engine.num_unfinished == 0
    )
    assert all(
        one.num_decodes == 0 and one.decode_tokens == 0 for one in router.fleet.workers.values()
    )
    assert all(abs(one.prefill_seconds) < 1e-9 for one in router.fleet.workers.values())
    loads = router.fleet.workers
    for name in loads:  # a last step of each says how it stands after it
        for load in loads.values():
            load.accepts = load.name == name or load.role != loads[name].role
        await all_of(engine, [([10, 11, 12], SamplingParams(temperature=0.0, max_tokens=2))])
        stats = router.workers_by_name[name]._stats
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    for load in loads.values():
        load.accepts = True
