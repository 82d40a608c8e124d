"""Records engines that run step by step, with the code that makes the feed."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path

import msgspec

from twinphase.engine.engine import Engine, StepResult
from twinphase.engine.frontends.outputs import Transcript
from twinphase.engine.process.loop import step_stats
from twinphase.engine.process.messages import (
    Accepted,
    FromEngine,
    RequestUpdate,
    StepUpdates,
    StepView,
)
from twinphase.engine.process.watch import StepWatch
from twinphase.engine.stepped import TimedRequest, Workshop
from twinphase.errors import StorageError
from twinphase.outcome import FinishReason
from twinphase.phases.record import RequestRecord
from twinphase.server.live.events import Clock
from twinphase.server.live.hello import hello
from twinphase.server.live.lanes import Fields, Lanes
from twinphase.server.live.view import View
from twinphase.server.observe import request_timings

FRAME_SECONDS = 0.05
BOOT = "0"


class Lines:
    """The lines of a recording, made from engine messages.

    Attributes:
        lines: lines so far, without line breaks.
        lanes: unfinished requests.
    """

    def __init__(self, origin: float = 0.0) -> None:
        """`origin` is the zero of the recording's clock, in seconds of the engine's clock."""
        self.lines: list[bytes] = []
        self.lanes = Lanes(Clock(origin), self, lambda name, miss: {}, lambda choice: {})
        self._view = View("", BOOT, self.lanes, None)
        self._framed = origin

    @property
    def unfinished(self) -> list[str]:
        return list(self.lanes.lanes)

    def transcript(self, request_id: str) -> Transcript | None:
        """None, since there is no front end."""

    def begin(
        self, fields: Fields, *, num_blocks: int, roles: Mapping[str, str] | None = None
    ) -> None:
        """Write the first line for one engine, or for workers with these names and roles."""
        for name in roles or ():
            self.lanes.worker(name)
        common = {"host": "localhost", "state": "ready", "num_blocks": num_blocks}
        names = (roles or {"engine": "both"}).items()
        rest = {
            "workers": [{"id": name, "role": role, **common} for name, role in names],
            "tenant": "",
            "others": None,
            "lanes": [],
        }
        self.lines.append(msgspec.json.encode({"event": "hello", "t": 0.0, **fields, **rest}))

    def take(self, message: FromEngine, moment: float, record: RequestRecord | None = None) -> None:
        """Take a message as `Lanes.take` does; events close in time are written together."""
        self.lanes.take(message, moment, record)
        if moment - self._framed >= FRAME_SECONDS:
            self.flush(moment)

    def take_step(
        self,
        engine: Engine,
        result: StepResult,
        view: StepView,
        ended: Mapping[str, RequestRecord],
        moment: float,
    ) -> None:
        """Take a step as its engine's process would report it; `ended` maps ids to records."""
        updates = [
            RequestUpdate(
                share.request_id,
                result.output.token_ids.get(share.request_id, []),
                share.num_prefilled,
                share.num_cached_tokens,
                ended=ended.get(share.request_id),
            )
            for share in result.batch.scheduled
        ]
        self.take_updates(StepUpdates(updates, step_stats(engine, result, {}, 0), view), moment)

    def take_updates(self, message: StepUpdates, moment: float) -> None:
        """Take a message, and report the timings of the requests that it ends."""
        lanes = self.lanes.lanes
        ends = [(lanes[one.request_id], one.ended) for one in message.updates if one.ended]
        self.take(message, moment)
        for lane, record in ends:
            found = request_timings(record.timeline, record.counts)
            self.lanes.change(lane, {"timings": found}, after=True)

    def flush(self, moment: float) -> None:
        """Write the events since the last frame."""
        before = self._view.last
        self._view.add(self.lanes.take_changes(), moment)
        data = self._view.after(before, moment)
        self.lines += [one.partition(b"data: ")[2] for one in data.split(b"\n\n") if one]
        self._framed = moment

    def write(self, path: Path, moment: float) -> None:
        """End the recording and write it, gzipped.

        Raises:
            StorageError: the file cannot be written.
        """
        self.flush(moment)
        try:
            path.write_bytes(gzip.compress(b"\n".join([*self.lines, b""]), mtime=0))
        except OSError as error:
            cause = f"The recording cannot be written to {path}: {error.strerror}."
            raise StorageError(cause, "Give another folder.") from None


class Recorder:
    """Records the engines of a workshop, without tokens, for the live page.

    Set it as the `observer` of each `Stepped` to record, while the workshop is idle.

    Attributes:
        num_steps: number of steps recorded so far.
    """

    def __init__(self, workshop: Workshop) -> None:
        """Start the recording."""
        self.num_steps = 0
        self._clock = workshop.stepped.engine.clock
        self._watches: dict[Engine, StepWatch] = {}
        self._records: dict[str, tuple[RequestRecord, TimedRequest]] = {}
        facts = workshop.facts
        model = {"model": workshop.path.stem, "quantization": workshop.quantization}
        about = hello(facts, **model, boot=BOOT, origin=0.0)
        self._lines = Lines(self._clock())
        self._lines.begin(about, num_blocks=facts.config.num_kv_blocks or 0)

    def submitted(self, engine: Engine, timed: TimedRequest) -> None:
        if engine not in self._watches:
            watch = self._watches[engine] = StepWatch(engine)
            self._lines.take(watch.all_blocks(), timed.submitted)
        request = timed.request
        record = RequestRecord(request.counts, timed.timeline)
        self._records[request.request_id] = record, timed
        self._lines.take(Accepted(request.request_id), timed.submitted, record)

    def stepped(self, engine: Engine, result: StepResult) -> None:
        self.num_steps += 1
        watch = self._watches[engine]
        view = watch.step(result)
        ended = {
            request.request_id: self._ended(request.request_id, request.finish_reason)
            for request in result.finished
        }
        self._lines.take_step(engine, result, view, ended, self._clock())
        if (held := watch.blocks()) is not None:
            self._lines.take(held, self._clock())

    def aborted(self, request_id: str) -> None:
        record = self._ended(request_id, FinishReason.ABORT)
        updates = [RequestUpdate(request_id, [], 0, 0, ended=record)]
        self._lines.take_updates(StepUpdates(updates), self._clock())

    def write(self, path: Path) -> None:
        """End the recording and write it as `Lines.write` does; the engines must be idle."""
        for watch in self._watches.values():
            watch.close()
        self._lines.write(path, self._clock())

    def _ended(self, request_id: str, reason: FinishReason | None) -> RequestRecord:
        """A copy of an ended request's record, with the times of its tokens."""
        record, timed = self._records.pop(request_id)
        record = record.copy()
        record.timeline.token_times = list(timed.times)
        record.end(reason or FinishReason.ERROR)
        return record
