"""Reads the feed of a running server, and builds from it what a page draws: docs/feed.md."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from running import PATIENCE, RunningServer

Event = dict[str, Any]
PATH = "/v1/engine/events"


class Reader:
    """The events of one connection as they come.

    Attributes:
        events: read so far, each with its `event_id`.
    """

    def __init__(self, lines: Iterator[str]) -> None:
        self.events: list[Event] = []
        self._lines = lines

    @classmethod
    def of_lines(cls, lines: list[str]) -> Reader:
        """A recording that has been read."""
        reader = cls(iter(()))
        reader.events = [json.loads(line) for line in lines]
        return reader

    def __iter__(self) -> Iterator[Event]:
        fields: dict[str, str] = {}
        deadline = time.monotonic() + PATIENCE
        for line in self._lines:
            assert time.monotonic() < deadline, f"it did not come: {self.events}"
            if line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                fields[name] = value
            elif fields:
                event = json.loads(fields["data"])
                assert event["event"] == fields["event"]
                self.events.append({**event, "event_id": fields["id"]})
                fields = {}
                yield self.events[-1]

    def until(self, name: str, **wanted: Any) -> Event:
        """Read on until an event has these fields."""
        for event in self:
            if event["event"] == name and all(
                event.get(key) == value for key, value in wanted.items()
            ):
                return event
        raise AssertionError(f"no {name} with {wanted} came: {self.events}")

    def until_ended(self, count: int = 1) -> None:
        """Read on until that number of own lanes have their timings."""
        seen = 0
        while seen < count:
            seen += "timings" in self.until("lane")

    def of(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]

    def lane(self, number: int) -> Event:
        """A lane's fields, the later ones last."""
        fields: Event = {}
        for event in self.events:
            rows = [event] if event["event"] == "lane" else event.get("lanes", ())
            for row in rows if event["event"] in ("lane", "hello") else ():
                fields |= row if row["lane"] == number else {}
        return fields

    def lane_of(self, request_id: str) -> Event:
        number = next(one["lane"] for one in self.of("lane") if one.get("id") == request_id)
        return self.lane(number)

    def steps_of(self, request_id: str) -> list[Event]:
        """The steps that a request was in."""
        number = self.lane_of(request_id)["lane"]
        rows = self.steps().values()
        return [one for one in rows if number in [e[0] for e in (*one["pre"], *one["dec"])]]

    def steps(self, worker: int = 0) -> dict[int, Event]:
        """Each step by its index, with `end` added."""
        found = {}
        for event in self.of("steps"):
            if event["worker"] != worker:
                continue
            columns = {key: value for key, value in event.items() if isinstance(value, list)}
            for place, row in enumerate(zip(*columns.values(), strict=True)):
                step = dict(zip(columns, row, strict=True))
                index = event["first"] + place
                assert index not in found, f"step {index} came twice"
                found[index] = {**step, "end": step["start"] + step["duration_ms"]}
        return found


@contextmanager
def reading(server: RunningServer, **headers: str) -> Iterator[Reader]:
    """A connection to the feed, which has read `hello`."""
    with (
        httpx.Client(timeout=PATIENCE) as client,
        client.stream("GET", server.url + PATH, headers=headers) as response,
    ):
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Reader(response.iter_lines())
