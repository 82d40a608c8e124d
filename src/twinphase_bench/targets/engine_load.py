"""Our engine in this process as a target for load: no HTTP, no text, token ids in and out.

Not for one phase at a time (`engine.py`).
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from twinphase.config import EngineConfig
from twinphase.engine.frontends.async_engine import AsyncEngine
from twinphase.engine.frontends.outputs import RequestOutput
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.engine.process.host import ThreadHost
from twinphase.errors import TwinphaseError
from twinphase.request import SamplingParams
from twinphase_bench.client.client import SEND_NOW, wait_until
from twinphase_bench.client.observation import Observation
from twinphase_bench.client.sse import broken_off
from twinphase_bench.load.workload import Sizing
from twinphase_bench.targets.engine import engine_facts
from twinphase_bench.targets.target import Prompt

PREFILL = (
    "request alone: intended submit to its first token handed over by the stream, queue in "
    "it, no HTTP"
)
DECODE = "gaps between the tokens that the stream hands over"
SHARED = (
    "client and engine share one Python process: the client's reading delays the engine's "
    "steps a little"
)


class EngineLoadTarget:
    """`AsyncEngine` on a thread of this process; `send` is to be called `lead` seconds before a request is due."""

    lead = 0.003

    def __init__(self, loaded: LoadedEngine, name: str) -> None:
        """Take a loaded engine over; needs no event loop yet."""
        self._engine = AsyncEngine(ThreadHost(loaded))
        self._loaded = loaded
        self.notes = [SHARED]
        self.facts = engine_facts(loaded, name, PREFILL, DECODE, "prefix caching")

    @classmethod
    def open(cls, model: str | Path, **config: Any) -> EngineLoadTarget:
        """Load a model; arguments and errors are those of `LLM`."""
        return cls(LoadedEngine(model, EngineConfig(**config)), str(model))

    async def sizing(self) -> Sizing:
        """Prompts are token ids: their lengths are exact. Given texts become ids of this model."""
        return Sizing(
            vocab_size=self._loaded.blueprint.vocab_size, encode=self._loaded.text.tokenizer.encode
        )

    async def send(
        self, prompt: Prompt, max_tokens: int, intended: float = SEND_NOW
    ) -> Observation:
        """Submit a request at `intended`, and take its whole answer; failures are in the observation."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        await wait_until(intended)
        sent = time.perf_counter()
        seen = Observation("", sent if math.isnan(intended) else intended, sent, status=200)
        last = None
        try:
            async with await self._engine.submit(
                list(prompt.token_ids) or prompt.text, params
            ) as stream:
                seen.request_id = stream.request_id
                async for update in stream:
                    if update.token_ids:
                        seen.token_times.append(time.perf_counter())
                    last = update
            if last is None:
                seen.error = "no output: the engine's stream was empty"
            else:
                _take(seen, last.output)
        except TwinphaseError as error:
            seen.error = f"{type(error).__name__}: {error.cause}"
            seen.status = error.http_status
        except (
            Exception
        ) as error:  # the engine's, whatever it is: this request failed, the load goes on
            seen.error = f"exception: {type(error).__name__}: {error}"
            seen.status = 500
        seen.ended = time.perf_counter()
        return seen

    async def close(self) -> None:
        """Stop the engine."""
        self._engine.close()


def _take(seen: Observation, output: RequestOutput) -> None:
    """What the engine counted, and its claims in the form of our server's `timings`."""
    (completion,) = output.outputs
    timeline = output.metrics
    seen.finished = seen.token_times[-1] if seen.token_times else None
    seen.num_prompt_tokens = len(output.prompt_token_ids)
    seen.num_cached_tokens = output.num_cached_tokens
    seen.num_output_tokens = len(completion.token_ids)
    seen.token_ids = completion.token_ids
    seen.finish_reason = completion.finish_reason or ""
    seen.error = f"engine: {output.error}" if output.error else broken_off(seen.finish_reason)
    seen.claims["timings"] = {
        "prompt_n": seen.num_prompt_tokens - seen.num_cached_tokens,
        "predicted_n": seen.num_output_tokens,
        "ttft_ms": None if timeline.ttft is None else 1e3 * timeline.ttft,
        "tpot_ms": None if timeline.tpot is None else 1e3 * timeline.tpot,
        "e2e_ms": 1e3 * (timeline.end - timeline.arrival),
        "ledger_ms": {str(kind): 1e3 * seconds for kind, seconds in timeline.totals().items()},
    }
