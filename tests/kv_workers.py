"""Engines in threads with ports for KV blocks, and a proxy that damages messages."""

from __future__ import annotations

import random
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from msgspec.structs import replace

from added import make_add
from twinphase.cache.prefix_cache import CachedBlock
from twinphase.cluster.handshake import (
    DIGEST_BYTES,
    GREETING_BYTES,
    NONCE_BYTES,
    ClusterKey,
    receive_exactly,
)
from twinphase.cluster.kv.frames import (
    ENVELOPE,
    Frame,
    checksum,
    decode_header,
    encode_message,
    open_envelope,
)
from twinphase.cluster.kv.port import KVPort
from twinphase.cluster.kv.transport import connect, read_message
from twinphase.config import EngineConfig
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.process.loop import EngineLoop
from twinphase.engine.process.messages import (
    EngineFacts,
    FromEngine,
    Pushed,
    PushTo,
    Refused,
    StepUpdates,
    Stop,
)
from twinphase.phases.record import RequestRecord
from twinphase.request import SamplingParams

KEY = ClusterKey(b"a key of this test")
SECONDS = 20  # that no answer takes


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    num_cached: int = 0
    finished: RequestRecord | None = None
    pushed: Pushed | None = None


class Worker:
    """An engine's loop in a thread; its messages are sorted by request."""

    def __init__(self, model, *, key: ClusterKey = KEY, **config) -> None:
        self.loaded = LoadedEngine(model, EngineConfig(**config))
        self.loop = EngineLoop(self.loaded, self._take)
        self.port = KVPort(self.loop, self._take, key)
        self._answers: dict[str, Answer] = defaultdict(Answer)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()
        self._number = 0

    def _take(self, message: FromEngine) -> None:
        with self._changed:
            if isinstance(message, StepUpdates):
                for update in message.updates:
                    answer = self._answers[update.request_id]
                    answer.tokens += update.token_ids
                    answer.logprobs += update.logprobs
                    answer.num_cached = update.num_cached
                    answer.finished = update.ended
            elif isinstance(message, Pushed):
                self._answers[message.request_id].pushed = message
            elif isinstance(message, Refused):
                raise message.error()
            self._changed.notify_all()

    def begin(
        self, prompt, params: SamplingParams, push_to: PushTo | None = None, salt=None, output=()
    ) -> str:
        self._number += 1
        name = str(self._number)
        self.loop.put(
            make_add(name, prompt, params, salt, push_to=push_to, output_token_ids=list(output))
        )
        return name

    def wait(self, name: str, done: Callable[[Answer], object]) -> Answer:
        with self._changed:
            assert self._changed.wait_for(
                lambda: done(self._answers[name]) or not self._thread.is_alive(), SECONDS
            )
            assert self._thread.is_alive()
            return self._answers[name]

    def ask(
        self, prompt, params: SamplingParams, push_to: PushTo | None = None, salt=None, output=()
    ) -> Answer:
        """The whole answer, or what follows `output` of it; and what became of its blocks."""
        name = self.begin(prompt, params, push_to, salt, output)
        return self.wait(name, lambda answer: answer.finished and (answer.pushed or not push_to))

    def between_steps(self, function):
        """What `function` returns, or raises, on the engine's thread."""
        found: Future = Future()

        def call(engine) -> None:
            try:
                found.set_result(function(engine))
            except BaseException as error:
                found.set_exception(error)

        self.loop.between_steps(call)
        return found.result(SECONDS)

    def check(self) -> None:
        """Assert that no block leaked and no transfer is pending."""
        self.between_steps(lambda engine: engine.scheduler.check_integrity())
        assert self.loaded.engine.scheduler.kv_cache.pool.num_held == 0
        pushes = self.port.pushes
        assert not pushes._pushes and not pushes._frames

    def forget(self) -> None:
        """Empty the prefix cache."""

        def evict(engine):
            pool = engine.scheduler.kv_cache.pool
            pool.release(pool.allocate(pool.num_available))

        self.between_steps(evict)

    def close(self) -> None:
        self.loop.put(Stop())
        self._thread.join(SECONDS)
        self.port.close()


@contextmanager
def workers(model, count: int, **config) -> Iterator[list[Worker]]:
    made: list[Worker] = []
    try:
        for _ in range(count):
            made.append(Worker(model, **config))
        yield made
        for worker in made:
            worker.check()
    finally:
        for worker in made:
            worker.close()


Fault = Callable[[random.Random, list[bytes]], list[bytes] | None]


class FaultProxy:
    """A TCP proxy whose fault gets each message and returns what to send, None to hang up.

    Attributes:
        num_frames: that came by.
        num_spoilt: of them not passed on as they were.
    """

    def __init__(self, address: str, fault: Fault, seed: int = 0) -> None:
        self._target = address
        self._fault = fault
        self._random = random.Random(seed)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._server.getsockname()[1]}"
        self.num_frames = self.num_spoilt = 0
        self._links: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._begin(self._listen)

    def _begin(self, job: Callable[..., None], *args: socket.socket) -> None:
        self._threads.append(threading.Thread(target=job, args=args, daemon=True))
        self._threads[-1].start()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                link, _ = self._server.accept()
                self._links.append(link)
                there = connect(self._target)
                self._links.append(there)
                there.settimeout(None)
                self._begin(self._back, there, link)
                self._begin(self._forth, link, there)

    def _back(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        self._hang_up()

    def _forth(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            for size in (GREETING_BYTES, NONCE_BYTES, DIGEST_BYTES):
                sink.sendall(receive_exactly(source, size))
            while True:
                message, payload = read_message(source, 1 << 30)
                data = [encode_message(message, len(payload)) + bytes(payload)]
                if isinstance(message, Frame):
                    self.num_frames += 1
                    passed = self._fault(self._random, data)
                    self.num_spoilt += passed != data
                    if passed is None:
                        break
                    data = passed
                for part in data:
                    sink.sendall(part)
        self._hang_up()

    def _hang_up(self) -> None:
        for link in self._links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        for thread in self._threads:  # the first is the one that makes more
            self._hang_up()
            thread.join()
        for link in (self._server, *self._links):
            link.close()


def drop(choose, data):
    return [] if choose.random() < 0.3 else data


def duplicate(choose, data):
    return data * choose.randint(1, 3)


def truncate(choose, data):
    return [data[0][: -choose.randint(1, 3000)]] if choose.random() < 0.3 else data


def flip(choose, data):
    if choose.random() < 0.5:
        return data
    spoilt = bytearray(data[0])
    spoilt[choose.randrange(100, len(spoilt))] ^= 1 << choose.randrange(8)
    return [bytes(spoilt)]


def rewritten(change: Callable[[bytes], bytes]) -> Fault:
    """Keys and values that somebody changed who knows which checksum belongs to them."""

    def fault(choose, data):
        (message,) = data
        start = ENVELOPE.size + open_envelope(message[: ENVELOPE.size])[0]
        frame = decode_header(message[ENVELOPE.size : start])
        payload = message[start:]
        head = 4 + int.from_bytes(payload[:4], "little")
        payload = payload[:head] + change(payload[head:])
        block = CachedBlock(frame.block_hash, frame.parent, tuple(frame.token_ids), frame.index)
        frame = replace(frame, checksum=checksum(block, payload))
        return [encode_message(frame, len(payload)) + payload]

    return fault


def one_nan(choose, data):
    """One value of some blocks is no number."""
    return (
        rewritten(lambda bits: bits[:-2] + b"\xff\xff")(choose, data)
        if choose.random() < 0.5
        else data
    )


def hang_up(choose, data):
    return None if choose.random() < 0.2 else data


class Reorder:
    """Holds some messages back until a later one has gone by."""

    def __init__(self):
        self.held = []

    def __call__(self, choose, data):
        if choose.random() < 0.4:
            self.held += data
            return []
        data = data + self.held
        self.held = []
        return data


def delay(choose, data):
    threading.Event().wait(choose.choice([0.0, 0.0, 0.02]))
    return data


FAULTS = {
    "drop": drop,
    "delay": delay,
    "truncate": truncate,
    "duplicate": duplicate,
    "reorder": Reorder(),
    "flip": flip,
    "one_nan": one_nan,
    "hang_up": hang_up,
}


def through(fault: Fault) -> tuple[list[FaultProxy], Callable]:
    """Sends blocks for decode workers of `serve_pools` through proxies; the proxies."""
    proxies: list[FaultProxy] = []

    def heard(name: str, message: FromEngine) -> FromEngine:
        if name not in ("writer", "other") or not isinstance(message, EngineFacts):
            return message
        proxies.append(FaultProxy(message.kv_addresses[-1], fault, len(proxies)))
        return replace(message, kv_addresses=[proxies[-1].address])

    return proxies, heard
