"""Reading server-sent events.

The format: https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class EventReader:
    """Takes bytes cut anywhere, and gives the data of each event that they complete."""

    def __init__(self) -> None:
        self._rest = b""  # of an unfinished line
        self._lines: list[bytes] = []  # data of the unfinished event
        self._after_cr = False  # the last line ended with CR: a LF that follows belongs to it
        self._begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        if self._after_cr and data:
            self._after_cr = False
            data = data.removeprefix(b"\n")
        data = self._rest + data
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            if not self._begun:
                self._begun = True
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line:
                name, _, value = line.partition(b":")  # a comment has no name
                if name == b"data":
                    self._lines.append(value.removeprefix(b" "))
            elif self._lines:
                event = b"\n".join(self._lines)
                self._lines = []
                yield event


def read_events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Each event's data, with the time of the bytes that completed it."""
    reader = EventReader()
    for moment, data in pieces:
        for event in reader.feed(data):
            yield moment, event
