"""An engine that a test steps by hand until a request meets the cause to diagnose."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twinphase.batch import Batch, StepOutput
from twinphase.engine.frontends.llm import LLM
from twinphase.explain.explanation import Explanation
from twinphase.phases.timeline import RequestTimeline
from twinphase.request import Request, SamplingParams

Life = tuple[Request, RequestTimeline]


def usual_seconds(batch: Batch) -> float:
    """A step of a small model: it reads the weights, then computes and attends row by row."""
    contexts = batch.work.prefill_contexts + batch.work.decode_contexts
    return 2e-3 + 1e-4 * batch.work.rows + 2e-8 * contexts + 1e-4 * batch.work.logits


class Engine:
    """The reference backend on a small model, with requests whose tokens are time-stamped.

    Args:
        seconds: what a step takes on the engine's clock, which nothing else moves; None keeps the
            real clock. What other programs take of the processors is left out in both cases:
            `cpu_wait` says nothing.
    """

    def __init__(
        self,
        model: Path,
        seed: int = 0,
        *,
        seconds: Callable[[Batch], float] | None = usual_seconds,
        **config: Any,
    ) -> None:
        self.llm = LLM(model, **{"backend": "reference", "max_model_len": 2048, **config})
        self.engine = self.llm.engine
        self.engine.recorder.cpu_wait = lambda: 0.0
        self.script = None if seconds is None else Script(self.engine, seconds)
        self._lives: dict[str, Life] = {}
        self._random = random.Random(seed)

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(5, 300) for _ in range(num_tokens)]

    def add(
        self, prompt: list[int], max_tokens: int, *, cache_salt: str | None = None, **params: Any
    ) -> Life:
        wanted = SamplingParams(
            **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params}
        )
        name = str(len(self._lives))
        request = Request(
            name, prompt, wanted, arrival_time=self.engine.clock(), cache_salt=cache_salt
        )
        self._lives[name] = request, self.engine.add_request(request)
        return self._lives[name]

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Step until the engine is idle, or until the test's condition is met."""
        while self.engine.has_work and not until():
            result = self.engine.step()
            now = self.engine.clock()
            for name, tokens in result.output.token_ids.items():
                self._lives[name][1].hand_over_tokens(len(tokens), now)

    def serve(self, prompt: list[int], max_tokens: int = 4, **wishes: Any) -> Life:
        """One request alone, to its end, some time after the last."""
        if self.script is not None:
            self.script.now += 0.01
        life = self.add(prompt, max_tokens, **wishes)
        self.run()
        return life

    def warm(self) -> Engine:
        """Let the cost model learn both phases, so that nothing is cold."""
        longest = (self.llm.config.max_model_len or 0) - 8
        for length in (40, 150, 600):
            self.serve(self.prompt(min(length, longest)), 8)
        return self

    def explain(self, life: Life) -> Explanation:
        request, timeline = life
        return self.llm._loaded.explain(request.counts, timeline)

    def causes(self, life: Life, phase: str) -> list[str]:
        """Names of the causes of one symptom, first the largest."""
        return [found.cause for found in self.explain(life).diagnoses if found.phase == phase]


class Script:
    """Steps of scripted length: only they advance the engine's clock."""

    def __init__(
        self,
        engine: Any,
        seconds: Callable[[Batch], float],
        sampling: float = 0.0,
        cpu_wait: Callable[[Batch], float] = lambda batch: 0.0,
    ) -> None:
        """Replace the clock, the executor's time, and what the system says of waiting.

        Args:
            engine: an `engine.engine.Engine`; one that is scripted already obeys the newest script.
            seconds: of a step.
            sampling: of those, what choosing tokens took.
            cpu_wait: of those, what passed without a processor.
        """
        self.now = self.waited = 0.0
        execute = engine.executor.execute
        older = getattr(execute, "__self__", None)
        self._execute = older._execute if isinstance(older, Script) else execute
        self._seconds = seconds
        self._sampling = sampling
        self._cpu_wait = cpu_wait
        engine.recorder.clock = lambda: self.now
        engine.recorder.cpu_wait = lambda: self.waited
        engine.executor.execute = self._scripted

    def _scripted(self, batch: Batch) -> StepOutput:
        output: StepOutput = self._execute(batch)
        self.now += self._seconds(batch)
        self.waited += self._cpu_wait(batch)
        output.times.sampling = self._sampling
        return output
