"""The step log, one JSON object per line, and its replay through a fresh scheduler.

The scheduler and the cost model are deterministic: the same requests, tokens and times give the
same decisions. A log thus explains each step on any machine and without the model; a replay that
differs shows that the code now decides differently.

    header    the configuration and the prices the cost model started from
    add       a request: prompt, sampling values, priority, salt, tenant and its weight; output that
        it came with
    accept    KV blocks that came from another engine, and the outcome for each
    finish    an abort, or a stop string that the front end found
    step      the drafts, the decision (`decision`) and the resulting tokens
    observe   the time of the step, from which the cost model learns; its start, its drafting, and
              its wait for processors that other programs had
    pace      the SLO and the room for prefill from here on, if the engine chose them itself
    bound     the most prompt tokens of a step from here on

The log contains the prompts: protect it as you protect them.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from twinphase.batch import Batch, StepOutput
from twinphase.cache.prefix_cache import Acceptance, CachedBlock
from twinphase.config import EngineConfig
from twinphase.errors import InvalidRequestError, TwinphaseError
from twinphase.outcome import FinishReason
from twinphase.phases.cost import CostModel
from twinphase.phases.ledger import predicted_parts
from twinphase.request import Request, SamplingParams
from twinphase.scheduler.pace import Pace
from twinphase.scheduler.scheduler import Scheduler

VERSION = 7
Drafts = Mapping[str, Sequence[int]]


def decision(batch: Batch) -> dict[str, Any]:
    """Everything the scheduler decided in a step, as plain values."""
    return {
        "decodes": [
            [s.request_id, s.num_computed_tokens, s.num_drafts, s.block_ids[:]]
            for s in batch.decodes
        ],
        "prefills": [
            [s.request_id, s.num_computed_tokens, len(s.token_ids), s.block_ids[:]]
            for s in batch.prefills
        ],
        "preempted": list(batch.preempted),
        "held_back": batch.held_back,
    }


def _step(drafts: Drafts, batch: Batch, output: StepOutput) -> dict[str, Any]:
    return {
        "drafts": drafts,
        **decision(batch),
        "token_ids": output.token_ids,
        "errors": output.errors,
    }


def _pace(pace: Pace) -> dict[str, Any]:
    return {"slo_seconds": pace.slo_seconds, "step_factor": pace.step_factor}


def _acceptance(blocks: Sequence[CachedBlock], verdicts: Sequence[Acceptance]) -> dict[str, Any]:
    rows = [
        [block.block_hash.hex(), block.parent.hex(), block.token_ids, block.index]
        for block in blocks
    ]
    return {"blocks": rows, "verdicts": list(verdicts)}


def trace_header(scheduler: Scheduler, cost_model: CostModel) -> dict[str, Any]:
    """The header's values, from which a replay is built."""
    return {
        "version": VERSION,
        "config": asdict(scheduler.config),
        "eos_token_ids": sorted(scheduler.eos_token_ids),
        "fingerprint": scheduler.kv_cache.prefix_cache.fingerprint.decode(),
        **_pace(scheduler.pace),
        "usual_output": scheduler.usual_output,
        "prices": list(cost_model.prices),
        "windowed_share": cost_model.windowed_share,
        "window": cost_model.window,
    }


class TraceWriter:
    """Appends to a log; each step is on disk when it is done.

    Attributes:
        error: the reason why the log ended early, if it did.
    """

    def __init__(self, file: IO[str], header: dict[str, Any]) -> None:
        """Write the header from `trace_header`, before any step; the writer closes `file`."""
        self._file = file
        self.error: OSError | None = None
        weakref.finalize(self, file.close)
        self._write("header", header)

    def add(self, request: Request) -> None:
        """A request was accepted; its seed is known."""
        names = [
            "request_id",
            "prompt_token_ids",
            "sampling_params",
            "priority",
            "cache_salt",
            "tenant",
            "weight",
        ]
        names += [name for name in ("output_token_ids", "fresh") if getattr(request, name)]
        values = {name: getattr(request, name) for name in names}
        self._write("add", {**values, "sampling_params": asdict(request.sampling_params)})

    def accept(self, blocks: Sequence[CachedBlock], verdicts: Sequence[Acceptance]) -> None:
        self._write("accept", _acceptance(blocks, verdicts))

    def finish(self, request_id: str, reason: FinishReason) -> None:
        self._write("finish", {"request_id": request_id, "reason": reason.value})

    def step(self, drafts: Drafts, batch: Batch, output: StepOutput) -> None:
        self._write("step", _step(drafts, batch, output))

    def pace(self, pace: Pace) -> None:
        self._write("pace", _pace(pace))

    def read_at_most(self, num_tokens: int | None) -> None:
        self._write("bound", {"num_tokens": num_tokens})

    def observe(
        self, seconds: float, gap: float, *, start: float, drafting: float, cpu_wait: float
    ) -> None:
        """Log the seconds of a step: without drafting, the gap before it, and its other times.

        Python's floats read back the same.
        """
        times = {"start": start, "drafting": drafting, "cpu_wait": cpu_wait}
        self._write("observe", {"seconds": seconds, "gap": gap, **times})

    def _write(self, event: str, values: dict[str, Any]) -> None:
        if self.error is not None:
            return
        try:
            self._file.write(_line({"event": event, **values}))
            if event in ("header", "observe"):
                self._file.flush()
        except OSError as error:  # A full disk ends the log, not the engine.
            self.error = error
            logging.getLogger("twinphase").warning(
                "The step log ends here, it could not be written: %s", error
            )


@dataclass(frozen=True)
class Replay:
    """Result of a replay.

    Attributes:
        num_steps: number of repeated decisions.
        difference: number of the first line that differs, the logged line and the new one; None if
            all lines are the same, byte for byte.
    """

    num_steps: int
    difference: tuple[int, str, str] | None


def replay(
    path: Path, watch: Callable[[dict[str, Any], Replaying], None] = lambda event, state: None
) -> Replay:
    """Replay a log through a fresh scheduler and compare the decisions byte for byte.

    `watch` is called after each event, with the event and the state after it.

    Raises:
        InvalidRequestError: the file is not a step log, or is incomplete; the message names the
            line.
    """
    replaying: Replaying | None = None
    for number, line, event in _events(path):
        try:
            if replaying is None:
                replaying = Replaying(dict(event))
                watch(event, replaying)
                continue
            new = replaying.take(dict(event))
            watch(event, replaying)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            TwinphaseError,
        ) as error:
            why = (
                error.cause
                if isinstance(error, TwinphaseError)
                else f"{type(error).__name__}: {error}."
            )
            cause = f"Line {number} of {path} cannot be replayed. {why}"
            raise InvalidRequestError(cause, "Is it a step log, whole and unchanged?") from None
        if new is not None and new != line:
            return Replay(replaying.num_steps - 1, (number, line.rstrip("\n"), new.rstrip("\n")))
    if replaying is None:
        raise InvalidRequestError(f"{path} is empty.", "Write a step log with --trace-file.")
    return Replay(replaying.num_steps, None)


class Replaying:
    """A fresh scheduler and cost model that repeat a log's events.

    Attributes:
        batch, output, finished: batch, output and finished requests of the last step.
        cost_model: learns from the logged step times, as the original cost model did.
        predicted, parts: seconds of the last step as predicted before it, and of its decodes and
            each of its chunks alone.
    """

    def __init__(self, header: dict[str, Any]) -> None:
        if header.get("event") != "header" or header.get("version") != VERSION:
            raise InvalidRequestError(f"This is not the header of a step log of version {VERSION}.")
        self.num_steps = 0
        self.cost_model = CostModel(header["prices"], header["windowed_share"], header["window"])
        self.scheduler = Scheduler(
            EngineConfig(**header["config"]),
            self.cost_model,
            eos_token_ids=header["eos_token_ids"],
            fingerprint=header["fingerprint"],
        )
        self.scheduler.pace = Pace(header["slo_seconds"], header["step_factor"])
        self.scheduler.usual_output = header["usual_output"]
        self.batch = Batch([], [])
        self.output = StepOutput()
        self.finished: list[Request] = []
        self.predicted = 0.0
        self.parts: tuple[float, tuple[float, ...]] = (0.0, ())

    def take(self, event: dict[str, Any]) -> str | None:
        """Apply an event; for a step, returns the line that would be logged now."""
        kind = event.pop("event", None)
        scheduler = self.scheduler
        if kind == "add":
            params = SamplingParams(**_int_keys(event.pop("sampling_params")))
            scheduler.add(Request(sampling_params=params, arrival_time=0.0, **event))
        elif kind == "finish":
            scheduler.finish(event["request_id"], FinishReason(event["reason"]))
        elif kind == "pace":
            scheduler.pace = Pace(**event)
        elif kind == "bound":
            scheduler.max_prefill_tokens = event["num_tokens"]
        elif kind == "observe":
            self.cost_model.observe(self.batch.work, event["seconds"], event["gap"])
        elif kind == "step":
            drafts = event["drafts"]
            output = StepOutput(token_ids=event["token_ids"], errors=event["errors"])
            batch = scheduler.schedule(drafts)
            line = _line(
                {"event": "step", **_step(drafts, batch, output)}
            )  # The commit changes the batch's lists.
            self.batch = batch
            self.output = output
            self.predicted = self.cost_model.seconds(batch.work)
            self.parts = predicted_parts(self.cost_model, batch)
            self.finished = scheduler.commit(batch, output)
            self.num_steps += 1
            return line
        elif kind == "accept":
            blocks = [
                CachedBlock(
                    bytes.fromhex(block_hash), bytes.fromhex(parent), tuple(token_ids), index
                )
                for block_hash, parent, token_ids, index in event["blocks"]
            ]
            verdicts = scheduler.kv_cache.accept(blocks, lambda block_ids, which: None)
            return _line({"event": "accept", **_acceptance(blocks, verdicts)})
        else:
            raise InvalidRequestError(f"The event {kind!r} is not known.")
        return None


def _events(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(number, text, object) of each line."""
    try:
        # Bytes that are not UTF-8 are refused below, since they are not JSON.
        file = open(path, encoding="utf-8", errors="replace")  # noqa: SIM115
    except OSError as error:
        raise InvalidRequestError(
            f"Cannot read {path}: {error.strerror}.", "Give a step log."
        ) from None
    with file:
        for number, line in enumerate(file, start=1):
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if not isinstance(event, dict):
                raise InvalidRequestError(
                    f"Line {number} of {path} is not a JSON object.", "Is it a step log?"
                )
            yield number, line, event


def _int_keys(params: dict[str, Any]) -> dict[str, Any]:
    """Turn keys back into integers: JSON's keys are strings, but token ids are not."""
    bias = params.get("logit_bias")
    return (
        params
        if bias is None
        else {**params, "logit_bias": {int(key): value for key, value in bias.items()}}
    )


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"), ensure_ascii=True) + "\n"
