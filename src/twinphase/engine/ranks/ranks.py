"""The processes of a model's ranks: rank 0 starts, watches and directs them.

A rank that dies or makes no progress ends all ranks with one error. The ranks' backends exchange
data within a step (`backends/group.py`).
"""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from twinphase import errors
from twinphase.backends.group import Group, shared_bytes, shared_file
from twinphase.blueprint import Blueprint
from twinphase.config import EngineConfig
from twinphase.engine.process.messages import RankFacts
from twinphase.engine.process.start import how_it_ended, start_process
from twinphase.engine.process.wire import Decoder, encode
from twinphase.engine.ranks.messages import (
    Blocks,
    Failed,
    FromRank,
    LoadShare,
    Read,
    Ready,
    Step,
    ToRank,
)
from twinphase.errors import EngineDeadError, TwinphaseError
from twinphase.models.share import rank_sizes
from twinphase.numa import Place, bound_to, rank_places
from twinphase.weights.checkpoint import Checkpoint

WATCH_INTERVAL_SECONDS = 0.1
RECEIVE_BYTES = 1 << 20
FIX = "Load the model again: a server does so by itself, and requests can be sent again."


@dataclass
class _Watched:
    """State shared by the engine's thread and the thread that watches the ranks."""

    in_step: bool = False
    reason: str = ""


class Ranks:
    """The processes of all ranks but this one.

    Attributes:
        cores: cores that this rank computes on; empty if it is not bound.
    """

    def __init__(self, checkpoint: Checkpoint, blueprint: Blueprint, config: EngineConfig) -> None:
        count = config.tensor_parallel_size
        self.seconds = config.tensor_parallel_timeout
        plain = replace(config, trace_file=None, speculative_config=None)
        cores = [place.cores if place.nodes else frozenset[int]() for place in _places(config)]
        self.cores = cores[0]
        memory = shared_file(shared_bytes(blueprint, config.max_num_batched_tokens))
        self._links: list[_Link] = []
        try:
            self.group = Group(
                0, count, memory, Path(tempfile.gettempdir()) / f"twinphase-{secrets.token_hex(8)}"
            )
            for rank in range(1, count):
                with bound_to(cores[rank]):  # The process begins on these cores.
                    self._links.append(_Link(rank, memory))
                self._links[-1].send(
                    LoadShare(str(checkpoint.path), plain, rank, str(self.group.meeting_place))
                )
        except BaseException:
            for link in self._links:
                link.close()
            raise
        finally:
            os.close(memory)
        self._watched = _Watched()
        self._stop = threading.Event()
        arguments = self._links, self.group, self._watched, self._stop, self.seconds
        self._watcher = threading.Thread(
            target=_watch, args=arguments, name="twinphase-ranks", daemon=True
        )
        self._watcher.start()
        self.close = weakref.finalize(
            self, _close, self._links, self.group, self._stop, self._watcher
        )

    def wait_until_ready(self) -> None:
        """Wait for the ranks' weights without a limit; later answers have a time limit."""
        for link in self._links:
            self._expect(link, Ready)
            link.socket.settimeout(self.seconds)

    def tell(self, message: Step | Read) -> None:
        """Send a message to all other ranks."""
        self.check()
        for link in self._links:
            self.tell_one(link.rank, message)

    def tell_one(self, rank: int, message: ToRank) -> None:
        link = self._links[rank - 1]
        try:
            link.send(message)
        except OSError as error:
            self._fail(link, error)

    def blocks(self) -> list[list[bytes]]:
        """Every other rank's answer to a `Read`."""
        return [self._expect(link, Blocks).frames for link in self._links]

    def step_begins(self) -> None:
        self._watched.in_step = True

    def step_ends(self) -> None:
        self._watched.in_step = False

    def check(self) -> None:
        """Raise EngineDeadError, and end the others, once a rank is missing."""
        if self.group.is_over:
            self.close()
            raise EngineDeadError(self._watched.reason, FIX)

    def given_up(self, error: Exception) -> EngineDeadError:
        """End all ranks after rank 0 left a step for which others wait; returns the error."""
        cause = f"{type(error).__name__}: {error}"
        fix = FIX
        if isinstance(error, TwinphaseError):
            cause = error.cause
            fix = error.fix
        self._watched.reason = f"Rank 0 of {self.group.ranks} failed: {cause.rstrip('.')}."
        self.close()
        return EngineDeadError(self._watched.reason, fix)

    def _expect(self, link: _Link, kind: type[Any]) -> Any:
        message = None
        try:
            message = link.receive()
        except OSError as error:
            self._fail(link, error)
        if isinstance(message, Failed):
            self.close()
            error_type = getattr(errors, message.kind, TwinphaseError)
            raise error_type(message.cause, message.fix)
        if not isinstance(message, kind):
            self._fail(link, ConnectionError())
        return message

    def _fail(self, link: _Link, error: OSError) -> None:
        """Raise EngineDeadError, because a rank does not answer."""
        slow = isinstance(error, TimeoutError)
        how = (
            f"has not answered for {self.seconds:g} s" if slow else how_it_ended(link.process, 1.0)
        )
        self._watched.reason = self._watched.reason or f"{link.name(self.group.ranks)} {how}."
        self.group.end()
        self.check()


def rank_facts(
    checkpoint: Checkpoint, blueprint: Blueprint, config: EngineConfig, kv_bytes: int
) -> list[RankFacts]:
    """Facts about every rank of a resolved configuration; `kv_bytes` is the whole KV cache."""
    count = config.tensor_parallel_size
    if count == 1:
        return []
    sizes = rank_sizes(checkpoint, blueprint, count)
    columns = blueprint.kv_bytes(int)
    places = _places(config)
    return [
        RankFacts(
            config.threads,
            list(place.nodes),
            weights,
            int(kv_bytes * share.kv_bytes(int) / columns),
        )
        for place, (weights, share) in zip(places, sizes, strict=True)
    ]


def _places(config: EngineConfig) -> list[Place]:
    """Bind only the cpu backend's ranks: other libraries start threads before they can be bound."""
    count = config.tensor_parallel_size
    return rank_places(count) if config.backend == "cpu" else [Place((), frozenset())] * count


class _Link:
    """A rank's process and the socket to it."""

    def __init__(self, rank: int, memory: int) -> None:
        self.rank = rank
        self.process, self.socket = start_process("twinphase.engine.ranks.rank", memory)
        self._decoder: Decoder[FromRank] = Decoder(FromRank)

    def name(self, ranks: int) -> str:
        return f"Rank {self.rank} of {ranks}"

    def send(self, message: object) -> None:
        self.socket.sendall(encode(message))

    def receive(self) -> FromRank | None:
        """The next message; None when the connection is closed."""
        while data := self.socket.recv(RECEIVE_BYTES):
            found = list(self._decoder.feed(data))
            if found:
                return found[0]  # The awaited answer; no other message follows it.
        return None

    def close(self) -> None:
        """End the process, even one that is stopped."""
        self.process.kill()
        self.process.wait()
        self.socket.close()


def _watch(
    links: Sequence[_Link], group: Group, watched: _Watched, stop: threading.Event, seconds: float
) -> None:
    """End a step when a rank has died, or when no rank has made progress for `seconds`."""
    looks = 0
    before = group.meetings()
    while not stop.wait(WATCH_INTERVAL_SECONDS):
        now = group.meetings()
        looks = looks + 1 if watched.in_step and now == before else 0
        before = now
        missing = next((link for link in links if link.process.poll() is not None), None)
        if missing is not None:
            watched.reason = f"{missing.name(group.ranks)} {how_it_ended(missing.process, 1.0)}."
        elif looks * WATCH_INTERVAL_SECONDS > seconds:
            watched.reason = (
                f"Rank {now.index(min(now))} of {group.ranks} has come no further "
                f"for {seconds:g} s."
            )
        if watched.reason:
            return group.end()


def _close(
    links: Sequence[_Link], group: Group, stop: threading.Event, watcher: threading.Thread
) -> None:
    stop.set()
    watcher.join()
    group.end()
    for link in links:
        link.close()
    group.meeting_place.unlink(missing_ok=True)
