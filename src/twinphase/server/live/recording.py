"""Reads a recording, a file of the feed's events (docs/feed.md), as untrusted input."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from twinphase.errors import TwinphaseError
from twinphase.server.live.events import FORMAT, VERSION
from twinphase.server.live.lanes import Fields
from twinphase.server.live.view import OTHERS

MAX_BYTES = 32 << 20
GZIP = b"\x1f\x8b"
BEGINNINGS = (GZIP, b'{"event":"hello"')
WINDOW_BITS_OF_GZIP = 31
COLUMNS = ("start", "duration_ms", "predicted_ms", "decode_ms", "pre", "dec")


class RecordingError(TwinphaseError):
    """The file is not a recording, or is damaged."""

    exit_code = 2


@dataclass
class Recording:
    """The content of a recording.

    Attributes:
        hello: the first `hello` event.
        lanes: all fields of each lane, by boot and lane number, in order of arrival.
        num_steps: number of steps of all workers.
    """

    hello: Fields
    lanes: dict[tuple[str, int], Fields] = field(default_factory=dict)
    num_steps: int = 0


def is_recording(path: Path) -> bool:
    """Whether a file begins like a recording; its content may still be invalid."""
    try:
        with path.open("rb") as file:
            return file.read(max(map(len, BEGINNINGS))).startswith(BEGINNINGS)
    except OSError:
        return False


def read_recording(path: Path) -> Recording:
    """Read and check a whole recording.

    Raises:
        RecordingError: the file cannot be read, is too large, or is malformed; the message names
            the line.
    """
    recording: Recording | None = None
    reader = _Reader()
    number = 0
    for number, line in enumerate(_lines(path), start=1):
        try:
            recording = reader.take(line)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise RecordingError(
                f"Line {number} of {path} does not belong to a recording: {error!s:.120}.",
                "Save it again.",
            ) from None
    if recording is None:
        raise RecordingError(f"{path} is empty.", "Save a recording on the page of a server.")
    return recording


class _Reader:
    """Collects the events of a recording."""

    def __init__(self) -> None:
        self._recording: Recording | None = None
        self._boot = ""
        self._num_workers = 0

    def take(self, line: bytes) -> Recording:
        event = msgspec.json.decode(line)
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise ValueError("it is not an event")
        _check_numbers(event)
        if not isinstance(event.get("t"), (int, float)):
            raise ValueError("its `t` is not a number")
        name = event["event"]
        if self._recording is None or name == "hello":
            self._hello(event)
        assert self._recording is not None, "the first line has made it"
        if name == "totals":
            self._num_workers = max(self._num_workers, len(event.get("workers", ())))
        elif name == "lane":
            self._lane(event)
        elif name == "steps":
            self._steps(event)
        elif name == "blocks":
            self._check_worker(event["worker"])
            for lane, *_ in event["lanes"]:
                self._check_lane(lane)
        return self._recording

    def _hello(self, event: Fields) -> None:
        if (event["event"], event.get("format"), event.get("version")) != (
            "hello",
            FORMAT,
            VERSION,
        ):
            raise ValueError(f"it is not the `hello` of a {FORMAT} of version {VERSION}")
        self._recording = self._recording or Recording(event)
        self._boot = str(event["boot"])
        self._num_workers = len(event["workers"])
        self._has_sum = event.get("others") == "sum"
        for lane in event["lanes"]:
            self._lane(lane)

    def _lane(self, event: Fields) -> None:
        assert self._recording is not None, "hello came first"
        number = event["lane"]
        if not isinstance(number, int) or ("prompt" in event and number == OTHERS):
            raise ValueError("its lane is not a number from 1 on")
        lanes = self._recording.lanes
        if (self._boot, number) not in lanes and "prompt" not in event:
            raise ValueError(f"lane {number} was not introduced")
        lanes.setdefault((self._boot, number), {}).update(event)

    def _steps(self, event: Fields) -> None:
        assert self._recording is not None, "hello came first"
        self._check_worker(event["worker"])
        lengths = {len(value) for value in event.values() if isinstance(value, list)}
        if len(lengths) != 1 or not all(isinstance(event[name], list) for name in COLUMNS):
            raise ValueError("its columns have different lengths")
        for entries in (*event["pre"], *event["dec"]):
            for lane, tokens, *_ in entries:
                self._check_lane(lane)
                if not isinstance(tokens, int):
                    raise ValueError("a number of tokens is none")
        self._recording.num_steps += lengths.pop()

    def _check_worker(self, number: Any) -> None:
        if not isinstance(number, int) or number >= self._num_workers:
            raise ValueError(f"worker {number!r} does not exist")

    def _check_lane(self, number: Any) -> None:
        assert self._recording is not None, "hello came first"
        is_sum = self._has_sum and number == OTHERS
        if not is_sum and (self._boot, number) not in self._recording.lanes:
            raise ValueError(f"lane {number!r} was not introduced")


def _check_numbers(value: Any) -> None:
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, (dict, list)):
            rest += one.values() if isinstance(one, dict) else one
        elif isinstance(one, (int, float)) and not 0 <= one < float("inf"):
            raise ValueError("a number is below 0 or not finite")


def _lines(path: Path) -> Iterator[bytes]:
    too_large = RecordingError(
        f"{path} is larger than {MAX_BYTES >> 20} MiB.", "Record a shorter time."
    )
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecordingError(
            f"{path} cannot be read: {error.strerror}.", "Check the path."
        ) from None
    if len(data) > MAX_BYTES:
        raise too_large
    if data.startswith(GZIP):
        unpacking = zlib.decompressobj(WINDOW_BITS_OF_GZIP)
        try:
            data = unpacking.decompress(data, MAX_BYTES)
        except zlib.error as error:
            raise RecordingError(f"{path} is damaged: {error}.", "Save it again.") from None
        if unpacking.unconsumed_tail:
            raise too_large
        if not unpacking.eof:
            raise RecordingError(f"{path} is cut off.", "Save it again.")
    yield from data.splitlines()
