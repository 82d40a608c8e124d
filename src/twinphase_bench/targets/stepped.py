"""Our engine in this process, stepped by hand: the moment of every token is seen, and no text is made.

A `Stepped` drives one engine; a `Workshop` holds one loaded model and puts as many engines on it as
experiments want, each with settings of its own. Not for statistics, nor for verdicts (`lab/`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from twinphase.cache.kv_cache_manager import KVCacheManager
from twinphase.engine.engine import Engine, StepResult
from twinphase.engine.loading.ceilings import compute_units
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.recorder import StepRecorder
from twinphase.errors import TwinphaseError
from twinphase.outcome import FinishReason
from twinphase.phases import latency
from twinphase.phases.timeline import RequestTimeline, StepRecord
from twinphase.request import Request, SamplingParams
from twinphase.scheduler.scheduler import Scheduler
from twinphase_bench.load.workload import PromptMaker, Sizing

_IDS = itertools.count()


class StepError(TwinphaseError):
    """A request under measurement failed; the message carries its reason."""


@dataclass
class TimedRequest:
    """One request under measurement; a latency is NaN while it has too few tokens for it.

    Attributes:
        request: the engine's.
        timeline: its ledger.
        submitted: when it was handed to the engine, seconds.
        times: when each output token was out, seconds.
        steps: index of the step that brought each.
        logprobs: natural log probability of each, where they were asked for.
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
        """NaN below two tokens."""
        found = latency.tpot(self.times[0], self.times[-1], len(self.times))
        return math.nan if found is None else found

    @property
    def gaps(self) -> list[float]:
        """Time before each token but the first; `gaps[i]` ends with `times[i + 1]`."""
        return latency.itl(self.times)

    @property
    def tokens(self) -> list[int]:
        return self.request.output_token_ids


class Stepped:
    """An engine stepped by hand.

    Attributes:
        engine: the engine.
        records: of the steps since `clear`, oldest first.
        walls: seconds of each of these `step()` calls, whole: a record ends before its own
            bookkeeping. `walls[i]` belongs to `records[i]`: only `clear` forgets, and both.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.records: list[StepRecord] = []
        self.walls: list[float] = []
        self._tickets: dict[str, TimedRequest] = {}

    def submit(self, prompt: list[int], max_tokens: int, *, logprobs: bool = False) -> TimedRequest:
        """Queue one greedy request whose end of text is ignored."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=0 if logprobs else None,
        )
        start = self.engine.clock()
        request = Request(f"stepped-{next(_IDS)}", prompt, params, arrival_time=start)
        ticket = TimedRequest(request, self.engine.add_request(request), start)
        self._tickets[request.request_id] = ticket
        return ticket

    def step(self) -> StepResult:
        """One step; every token that came out is stamped.

        Raises:
            StepError: a request failed.
        """
        start = self.engine.clock()
        result = self.engine.step()
        now = self.engine.clock()
        self.records.append(result.record)
        self.walls.append(now - start)
        for request_id, tokens in result.output.token_ids.items():
            ticket = self._tickets[request_id]
            ticket.times.extend([now] * len(tokens))
            ticket.steps.extend([result.record.index] * len(tokens))
            ticket.logprobs.extend(
                one.logprob for one in result.output.logprobs.get(request_id, ())
            )
        for request in result.finished:
            del self._tickets[request.request_id]
            if request.finish_reason is FinishReason.ERROR:
                raise StepError(f"A request under measurement failed: {request.counts.error}")
        return result

    def run(self) -> list[StepRecord]:
        """Step until idle; the records of these steps."""
        first = len(self.records)
        while self.engine.has_work:
            self.step()
        return self.records[first:]

    def run_until(self, done: Callable[[], bool]) -> None:
        """Step until `done()`, or idle."""
        while self.engine.has_work and not done():
            self.step()

    def clear(self) -> None:
        """End every unfinished request, and forget the records."""
        for request_id in list(self._tickets):
            self.engine.abort(request_id)
        self._tickets.clear()
        self.records.clear()
        self.walls.clear()

    def prefill(self, prompt: list[int]) -> float:
        """Compute a prompt and its first token alone; seconds of the steps that did it."""
        self.submit(prompt, 1)
        return sum(record.seconds for record in self.run())


class Workshop:
    """One loaded model, and engines on it.

    All engines share the KV memory: only one at a time may have unfinished requests, and what an
    engine's prefix cache holds is valid until another engine computes.
    """

    def __init__(self, model: str, *, max_num_batched_tokens: int = 4096, **config: Any) -> None:
        """Load a model; `max_num_batched_tokens` is the largest step of any engine here.

        Raises:
            TwinphaseError: the model cannot be found, read or run, or a field of the configuration
                is out of range.
        """
        self.loaded = LoadedEngine(model, max_num_batched_tokens=max_num_batched_tokens, **config)
        self.config = self.loaded.config
        self.shape = self.loaded.engine.shape
        self.blueprint = self.loaded.blueprint
        self.units = compute_units(self.loaded.checkpoint, self.config)
        self._prompts = PromptMaker(Sizing(vocab_size=self.blueprint.vocab_size))

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output, tokens."""
        return self.config.max_model_len or 0

    @property
    def capacity(self) -> int:
        """Tokens that the KV cache holds."""
        return (self.config.num_kv_blocks or 0) * self.config.block_size

    def engine(
        self,
        *,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int | None = None,
        enable_prefix_caching: bool = False,
    ) -> Stepped:
        """A new engine on the loaded model; its settings are those of `EngineConfig`, within what was loaded."""
        config = self.config
        model = self.loaded.engine
        if not config.num_kv_blocks:
            raise ValueError("the configuration is not resolved")
        budget = min(max_num_batched_tokens, config.max_num_batched_tokens)
        scheduler = Scheduler(
            KVCacheManager(
                config.num_kv_blocks,
                config.block_size,
                enable_prefix_caching=enable_prefix_caching,
                fingerprint=self.loaded.checkpoint.fingerprint.encode(),
            ),
            max_model_len=self.max_model_len,
            eos_token_ids=self.loaded.text.tokenizer.eos_token_ids,
            times=model.cost_model,
            max_num_batched_tokens=budget,
            max_num_seqs=min(max_num_seqs or config.max_num_seqs, config.max_num_seqs, budget),
            window=self.shape.window,
        )
        return Stepped(
            Engine(
                scheduler,
                model.executor,
                StepRecorder(self.shape, model.cost_model),
                shape=self.shape,
                vocab_size=self.blueprint.vocab_size,
            )
        )

    def prompt(self, num_tokens: int) -> list[int]:
        """Random token ids that no other prompt of this workshop begins with."""
        return list(self._prompts.take(num_tokens).token_ids)
