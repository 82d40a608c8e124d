"""A reader of server-sent events.

The format: https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class EventReader:
    """Takes chunks of bytes, cut anywhere, and returns the data of each event they complete."""

    def __init__(self) -> None:
        self._rest = b""  # Bytes of an unfinished line.
        self._lines: list[bytes] = []  # Data lines of the unfinished event.
        self._after_cr = False  # The last line ended with CR, and a following LF belongs to it.
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
                name, _, value = line.partition(b":")  # A comment has no name.
                if name == b"data":
                    self._lines.append(value.removeprefix(b" "))
            elif self._lines:
                event = b"\n".join(self._lines)
                self._lines = []
                yield event


def read_events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield each event's data, and the time of the bytes that completed it."""
    reader = EventReader()
    for moment, data in pieces:
        for event in reader.feed(data):
            yield moment, event
