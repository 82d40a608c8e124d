"""An engine of this process that its user drives step by step, with the time of each token.

`Workshop` loads a model once and makes any number of engines for it, each with its own settings;
`Stepped` drives one engine. No text is made, and nothing else runs between two steps.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

from twinphase.backends.base import Backend, Forward, StepInputs
from twinphase.engine.engine import Engine, StepResult
from twinphase.engine.frontends.async_engine import AsyncEngine
from twinphase.engine.frontends.checks import engine_config
from twinphase.engine.loading.ceilings import device_of
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.process.host import ThreadHost
from twinphase.engine.process.loop import engine_facts
from twinphase.engine.process.messages import EngineFacts
from twinphase.engine.recorder import StepRecorder
from twinphase.engine.runner import Runner
from twinphase.errors import TwinphaseError
from twinphase.outcome import FinishReason
from twinphase.phases import latency
from twinphase.phases.timeline import RequestTimeline, StepRecord
from twinphase.request import Request, SamplingParams
from twinphase.scheduler.scheduler import Scheduler
from twinphase.weights.gguf import quantization_name

_NUMBERS = itertools.count()


class StepError(TwinphaseError):
    """A request under measurement failed; the message carries the reason."""


@dataclass
class TimedRequest:
    """One request under measurement; a latency is NaN while the request has too few tokens for it.

    Attributes:
        request: the engine's request.
        timeline: its ledger.
        submitted: when the engine received it, seconds.
        times: when each output token was ready, seconds.
        steps: index of the step that computed each token.
        logprobs: natural log probability of each token, if requested.
    """

    request: Request
    timeline: RequestTimeline
    submitted: float
    times: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return latency.ttft(self.submitted, self.times[0])

    @property
    def e2e(self) -> float:
        return latency.e2e(self.submitted, self.times[-1])

    @property
    def tpot(self) -> float:
        seconds = latency.tpot(self.times[0], self.times[-1], len(self.times))
        return math.nan if seconds is None else seconds

    @property
    def gaps(self) -> list[float]:
        """Seconds before each token but the first; `gaps[i]` ends at `times[i + 1]`."""
        return latency.itl(self.times)

    @property
    def tokens(self) -> list[int]:
        return self.request.output_token_ids


class Observer(Protocol):
    """Sees what a stepped engine does."""

    def submitted(self, engine: Engine, timed: TimedRequest) -> None:
        """A request was queued."""

    def stepped(self, engine: Engine, result: StepResult) -> None:
        """A step is complete."""

    def aborted(self, request_id: str) -> None:
        """A request was ended by its user."""


class Stepped:
    """An engine that its user steps.

    Attributes:
        engine: the engine.
        observer: sees every request and step; may be replaced between two steps.
        records: records of the steps since `clear`, oldest first.
        walls: duration of each `step()` call in seconds, including the bookkeeping after its record
            ends; `walls[i]` belongs to `records[i]`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.observer: Observer | None = None
        self.records: list[StepRecord] = []
        self.walls: list[float] = []
        self._requests: dict[str, TimedRequest] = {}

    def submit(self, prompt: list[int], max_tokens: int, *, logprobs: bool = False) -> TimedRequest:
        """Queue one greedy request that ignores the end of text."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=0 if logprobs else None,
        )
        start = self.engine.clock()
        request = Request(f"stepped-{next(_NUMBERS)}", prompt, params, arrival_time=start)
        timed = TimedRequest(request, self.engine.add_request(request), start)
        self._requests[request.request_id] = timed
        if self.observer is not None:
            self.observer.submitted(self.engine, timed)
        return timed

    def step(self) -> StepResult:
        """Run one step and note the time of each token that it computed.

        Raises:
            StepError: a request failed.
        """
        start = self.engine.clock()
        result = self.engine.step()
        now = self.engine.clock()
        self.records.append(result.record)
        self.walls.append(now - start)
        for request_id, tokens in result.output.token_ids.items():
            timed = self._requests[request_id]
            timed.times.extend([now] * len(tokens))
            timed.steps.extend([result.record.index] * len(tokens))
            logprobs = result.output.logprobs.get(request_id, ())
            timed.logprobs.extend(entry.logprob for entry in logprobs)
        if self.observer is not None:
            self.observer.stepped(self.engine, result)
        for request in result.finished:
            del self._requests[request.request_id]
            if request.finish_reason is FinishReason.ERROR:
                raise StepError(f"A request under measurement failed: {request.counts.error}")
        return result

    def run(self) -> list[StepRecord]:
        """Step until the engine is idle; returns the records of these steps."""
        first = len(self.records)
        self.run_until(lambda: False)
        return self.records[first:]

    def run_until(self, done: Callable[[], bool]) -> None:
        """Step until `done()` is true or the engine is idle."""
        while self.engine.has_work and not done():
            self.step()

    def clear(self) -> None:
        """Abort every unfinished request and drop the records."""
        for request_id in list(self._requests):
            self.engine.abort(request_id)
            if self.observer is not None:
                self.observer.aborted(request_id)
        self._requests.clear()
        self.records.clear()
        self.walls.clear()

    def prefill(self, prompt: list[int]) -> list[StepRecord]:
        """Compute a prompt and its first token on an otherwise idle engine."""
        self.submit(prompt, 1)
        return self.run()


class TimedForward:
    """Times the forward pass of every step; with `in_parts` set, its parts as well.

    Attributes:
        in_parts: read the clock between the parts of the forward pass.
        seconds: duration of the last forward pass.
        parts: seconds by part of the last forward pass; empty if it was not timed in parts.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.in_parts = False
        self.seconds = 0.0
        self.parts: Mapping[str, float] = {}

    def execute(self, forward: Forward, inputs: StepInputs) -> Any:
        start = time.perf_counter()
        if self.in_parts:
            logits, self.parts = self._backend.execute_in_parts(forward, inputs)
        else:
            logits = self._backend.execute(forward, inputs)
            self.parts = {}
        self.seconds = time.perf_counter() - start
        return logits


class Workshop:
    """A loaded model, and engines on it.

    Only one engine at a time may have unfinished requests: all share the memory of the KV cache.

    Attributes:
        config: configuration as resolved for this model; its limits bound those of each engine.
        path: path of the model's file or folder.
        fingerprint: identifies the model's files.
        quantization: usual name of the format of most weights.
        shape, units, blueprint: sizes of the model, its arithmetic units, and its architecture.
        isa: instruction-set path, "" where the backend has no choice.
        stepped: the engine as configured, with its drafter if it has one.
    """

    def __init__(
        self,
        model: str,
        *,
        compile_progress: Callable[[float, int, str], None] | None = None,
        **config: Any,
    ) -> None:
        """Load a model; arguments and errors are those of `LLM`."""
        loaded = LoadedEngine(model, engine_config(config), compile_progress=compile_progress)
        self._loaded = loaded
        self.config = loaded.config
        self.path: Path = loaded.checkpoint.path
        self.fingerprint = loaded.checkpoint.fingerprint
        self.quantization = quantization_name(loaded.checkpoint)
        self.shape = loaded.engine.shape
        self.units = loaded.units
        self.blueprint = loaded.blueprint
        self.isa = device_of(loaded.config).isa
        self.stepped = Stepped(loaded.engine)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self.config.max_model_len or 0

    @property
    def capacity(self) -> int:
        """Tokens that the KV cache holds."""
        return (self.config.num_kv_blocks or 0) * self.config.block_size

    @property
    def facts(self) -> EngineFacts:
        """Facts about the loaded engine, as a server reports them."""
        return engine_facts(self._loaded, None)

    def engine(
        self,
        *,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int | None = None,
        enable_prefix_caching: bool = False,
    ) -> Stepped:
        """A new engine without a drafter; settings as in `EngineConfig`, within its limits."""
        budget = min(max_num_batched_tokens, self.config.max_num_batched_tokens)
        seats = min(max_num_seqs or budget, self.config.max_num_seqs, budget)
        config = replace(
            self.config,
            max_num_batched_tokens=budget,
            max_num_seqs=seats,
            enable_prefix_caching=enable_prefix_caching,
        )
        loaded = self._loaded.engine
        eos = self._loaded.text.tokenizer.eos_token_ids
        fingerprint = self._loaded.backend.kv_fingerprint
        scheduler = Scheduler(config, loaded.cost_model, eos_token_ids=eos, fingerprint=fingerprint)
        return Stepped(
            Engine(
                scheduler,
                loaded.executor,
                StepRecorder(self.shape, loaded.cost_model),
                shape=self.shape,
                vocab_size=self.blueprint.vocab_size,
            )
        )

    def start(self) -> AsyncEngine:
        """Serve the loaded engine from a thread, which owns it from then on."""
        return AsyncEngine(ThreadHost(self._loaded))

    def time_forward(self) -> TimedForward:
        """Time the forward passes of all engines from now on."""
        runner = cast(Runner, self._loaded.engine.executor)
        timed = TimedForward(runner.backend)
        runner.backend = cast(Backend, timed)
        return timed
