"""A target for loads that runs this project's engine in this process, with token ids.

There is no HTTP and no text. `engine.py` measures one phase at a time.
"""

from __future__ import annotations

import math
import time
from typing import Any

from twinphase import RequestOutput, SamplingParams, TwinphaseError, Workshop
from twinphase.phases.observation import Observation
from twinphase_bench.client.client import SEND_NOW, wait_until
from twinphase_bench.client.sse import broken_off
from twinphase_bench.load.workload import Sizing
from twinphase_bench.targets.engine import engine_facts
from twinphase_bench.targets.target import LoadTarget, Prompt

PREFILL = (
    "request alone: intended submit to its first token handed over by the stream, queue in it, no "
    "HTTP"
)
DECODE = "gaps between the tokens that the stream hands over"
SHARED = (
    "client and engine share one Python process: the client's reading delays the engine's steps a "
    "little"
)


class EngineLoadTarget(LoadTarget):
    """`AsyncEngine` on a thread of this process."""

    lead = 0.003

    def __init__(self, model: str, **config: Any) -> None:
        """Load a model; arguments and errors are those of `LLM`. No event loop is needed yet."""
        workshop = Workshop(model, **config)
        self._engine = workshop.start()
        self._vocab_size = workshop.blueprint.vocab_size
        self.notes = [SHARED]
        self.facts = engine_facts(workshop, model, PREFILL, DECODE, "prefix caching")

    async def sizing(self) -> Sizing:
        """Prompts are token ids of exact lengths; given texts are encoded with this model."""
        return Sizing(vocab_size=self._vocab_size, encode=self._engine.text.tokenizer.encode)

    async def send(
        self, prompt: Prompt, max_tokens: int, intended: float = SEND_NOW
    ) -> Observation:
        """Submit a request at `intended` and wait for its answer."""
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
        except Exception as error:  # This request failed, and the load continues.
            seen.error = f"exception: {type(error).__name__}: {error}"
            seen.status = 500
        seen.ended = time.perf_counter()
        return seen

    async def close(self) -> None:
        """Stop the engine."""
        self._engine.close()


def _take(seen: Observation, output: RequestOutput) -> None:
    """Copy the engine's counts, and its claims in the form of the server's `timings`."""
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
