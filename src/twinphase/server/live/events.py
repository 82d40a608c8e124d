"""Encodes the feed's events as bytes (docs/feed.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

FORMAT = "twinphase-recording"
VERSION = 1
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True)
class Clock:
    """Converts times to milliseconds since `origin`, which is in seconds of the engines' clock."""

    origin: float

    def ms(self, moment: float) -> float:
        return round(1e3 * (moment - self.origin), 3)


def duration_ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def event_bytes(ident: str, name: str, moment: float, fields: Mapping[str, Any]) -> bytes:
    """One event of the stream; `moment` is in milliseconds on the feed's clock."""
    data = _ENCODER.encode({"event": name, "t": moment, **fields})
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (ident.encode(), name.encode(), data)


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as ranges (first, count), in order; consecutive numbers share a range."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][0] + found[-1][1] == number:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found
