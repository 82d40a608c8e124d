"""Records a simulation for the live page, with the code that makes the live feed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from twinphase import __version__
from twinphase.engine.engine import Engine, StepResult
from twinphase.engine.process.messages import Accepted, Moved
from twinphase.engine.process.watch import StepWatch
from twinphase.outcome import FinishReason
from twinphase.phases.record import RequestRecord, RequestState
from twinphase.request import Request
from twinphase.server.live.events import FORMAT, VERSION
from twinphase.server.live.recorder import BOOT, Lines
from twinphase.simulate.spec import FleetSpec, Outcome


class SimulationRecorder:
    """An `Observer` that records the workers of a simulation from its start."""

    def __init__(self, spec: FleetSpec, model: str) -> None:
        names = spec.names()
        config = spec.workers[0].config
        about = {
            "format": FORMAT,
            "version": VERSION,
            "boot": BOOT,
            "origin": 0.0,
            "twinphase": __version__,
            "model": f"{model} (simulated)",
            "context": config.max_model_len,
            "seats": config.max_num_seqs,
            "block_size": config.block_size,
            "itl_slo_ms": None,
        }
        self._lines = Lines()
        self._single = len(names) == 1
        roles = {name: one.role for name, one in zip(names, spec.workers, strict=True)}
        self._lines.begin(
            about, num_blocks=config.num_kv_blocks or 0, roles=None if self._single else roles
        )
        self._watches: dict[str, StepWatch] = {}
        self._records: dict[str, RequestRecord] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._now = 0.0

    def arrived(self, request: Request, outcome: Outcome, worker: str, reason: str) -> None:
        assert outcome.timeline is not None, "a recorded simulation keeps ledgers"
        name = request.request_id
        is_new = name not in self._records
        record = RequestRecord(request.counts, outcome.timeline)
        record.state = RequestState.QUEUED
        self._records[name] = record
        self._outcomes[name] = outcome
        self._now = max(self._now, outcome.timeline.end)
        if is_new:
            self._lines.take(Accepted(name), self._now, record)
        if not self._single:
            self._lines.take(Moved(name, self._now, worker, reason), self._now, record)

    def moved(self, request: Request, worker: str) -> None:
        name = request.request_id
        message = Moved(name, self._now, worker, is_transfer=True)
        self._lines.take(message, self._now, self._records[name])

    def stepped(self, worker: str, engine: Engine, result: StepResult) -> None:
        if worker not in self._watches:
            self._watches[worker] = StepWatch(engine)
            self._now = max(self._now, result.record.start)
        watch = self._watches[worker]
        self._now = max(self._now, result.record.end)
        view = msgspec.structs.replace(watch.step(result), worker=self._name(worker))
        ended = {
            request.request_id: self._ended(request)
            for request in result.finished
            if len(self._outcomes[request.request_id].token_times) >= self._asked(request)
        }
        self._lines.take_step(engine, result, view, ended, self._now)
        if (held := watch.blocks()) is not None:
            self._lines.take(msgspec.structs.replace(held, worker=self._name(worker)), self._now)

    def write(self, path: Path) -> None:
        """End the recording and write it as a gzip file; raises `StorageError`."""
        for watch in self._watches.values():
            watch.close()
        self._lines.write(path, self._now)

    def _name(self, worker: str) -> str:
        return "" if self._single else worker

    def _asked(self, request: Request) -> int:
        """Output tokens of the whole answer, even if a prefill worker computes only the first."""
        return self._outcomes[request.request_id].num_asked

    def _ended(self, request: Request) -> RequestRecord:
        record = self._records.pop(request.request_id).copy()
        outcome = self._outcomes.pop(request.request_id)
        record.timeline.token_times = list(outcome.token_times)
        record.state = RequestState.DECODING
        record.end(request.finish_reason or FinishReason.LENGTH)
        return record
