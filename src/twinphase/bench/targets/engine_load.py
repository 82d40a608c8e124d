"""Our engine in this process as a target for load: no HTTP, no text, token ids in and out.

Not for one phase at a time (`engine.py`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from twinphase import __version__
from twinphase.bench.client.client import SEND_NOW, wait_until
from twinphase.bench.client.observation import Observation
from twinphase.bench.client.sse import broken_off
from twinphase.bench.load.workload import Sizing
from twinphase.bench.targets.target import Prompt, TargetFacts
from twinphase.engine.async_engine import AsyncEngine
from twinphase.engine.host import ThreadHost
from twinphase.engine.load import LoadedEngine
from twinphase.errors import TwinphaseError
from twinphase.request import SamplingParams

__all__ = ["EngineLoadTarget"]

PREFILL = "request alone: intended submit to its first token handed over by the stream, queue in it, no HTTP"
DECODE = "gaps between the tokens that the stream hands over"


class EngineLoadTarget:
    """`AsyncEngine` on a thread of this process; client and engine share one interpreter.

    Attributes:
        facts: what a reader must know.
        notes: for the report.
        lead: seconds before its moment at which `send` is to be called.
    """

    lead = 0.003

    def __init__(self, loaded: LoadedEngine, name: str, *, timeout: float = 600.0) -> None:
        """Take a loaded engine over; needs no event loop yet. `timeout` is not used: the engine is in this process."""
        config = loaded.config
        self._loaded = loaded
        self._engine = AsyncEngine(ThreadHost(loaded))
        self._vocab_size = loaded.model_config.vocab_size
        self.notes = [
            "client and engine share one Python process: the client's reading delays the engine's steps a little"
        ]
        limit = min(config.max_model_len or 0, (config.num_kv_blocks or 0) * config.block_size)
        details = {
            "threads": str(config.threads or "all cores"),
            "max_num_seqs": str(config.max_num_seqs),
            "max_num_batched_tokens": str(config.max_num_batched_tokens),
            "prefix caching": "on" if config.enable_prefix_caching else "off",
        }
        weights = sorted({str(info.type) for info in loaded.checkpoint.tensors.values() if len(info.shape) == 2})
        precision = f"weights {', '.join(weights)}; KV cache {config.kv_cache_dtype}"
        engine = f"twinphase {__version__}"
        self.facts = TargetFacts(name, "twinphase", engine, name, precision, limit or None, PREFILL, DECODE, details)

    @classmethod
    def open(cls, model: str | Path, **config: Any) -> EngineLoadTarget:
        """Load a model; arguments and errors are those of `LLM`."""
        return cls(LoadedEngine(model, **config), str(model))

    async def sizing(self) -> Sizing:
        """Prompts are token ids: their lengths are exact. Texts of others become the ids of this model."""
        return Sizing(vocab_size=self._vocab_size, encode=self._loaded.text.tokenizer.encode)

    async def send(self, prompt: Prompt, max_tokens: int, intended: float = SEND_NOW) -> Observation:
        """Submit a request at `intended`, and take its whole answer; failures are written into the observation."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        asked = list(prompt.token_ids) or prompt.text
        await wait_until(intended)
        sent = time.perf_counter()
        seen = Observation("", sent if intended != intended else intended, sent, status=200)
        last = None
        try:
            async with await self._engine.submit(asked, params) as stream:
                seen.request_id = stream.request_id
                async for update in stream:
                    if update.token_ids:
                        seen.token_times.append(time.perf_counter())
                    last = update
            seen.finished = seen.token_times[-1] if seen.token_times else None
            if last is None:
                seen.error = "no output: the engine's stream was empty"
                seen.ended = time.perf_counter()
                return seen
            request = last.transcript.request
            seen.num_prompt_tokens = len(request.prompt_token_ids)
            seen.num_cached_tokens = request.num_cached_tokens
            seen.num_output_tokens = len(request.output_token_ids)
            seen.token_ids = list(request.output_token_ids)
            seen.finish_reason = request.finish_reason.value if request.finish_reason else ""
            seen.error = f"engine: {request.error}" if request.error else broken_off(seen.finish_reason)
            timeline = last.transcript.timeline
            seen.claims["timings"] = {
                "prompt_n": seen.num_prompt_tokens - request.num_cached_tokens,
                "predicted_n": seen.num_output_tokens,
                "ttft_ms": 1e3 * timeline.ttft if timeline.ttft is not None else None,
                "tpot_ms": 1e3 * timeline.tpot if timeline.tpot is not None else None,
                "e2e_ms": 1e3 * (timeline.end - timeline.arrival),
                "ledger_ms": {str(kind): 1e3 * seconds for kind, seconds in timeline.totals().items()},
            }
        except TwinphaseError as error:
            seen.error = f"{type(error).__name__}: {error.cause}"
            seen.status = error.http_status
        except Exception as error:  # the engine's, whatever it is: this request failed, the load goes on
            seen.error, seen.status = f"exception: {type(error).__name__}: {error}", 500
        seen.ended = time.perf_counter()
        return seen

    async def close(self) -> None:
        """Stop the engine."""
        self._engine.close()
