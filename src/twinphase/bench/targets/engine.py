"""Our engine in this process, stepped by hand: the time of every step is seen, no text is made, no socket in the way.

Not for load (`engine_load.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from twinphase import __version__
from twinphase.bench.targets.prompts import FreshIds
from twinphase.bench.targets.target import DecodeSample, PrefillSample, TargetFacts
from twinphase.config import available_cores
from twinphase.engine.load import LoadedEngine
from twinphase.errors import CacheCapacityError, TwinphaseError
from twinphase.request import Request, SamplingParams
from twinphase.weights.gguf import quantization_name

__all__ = ["EngineTarget"]

PREFILL = (
    "Token ids handed to the idle engine .. the step that gave the first token has returned, as many steps as the "
    "prompt has chunks. No tokenizing, no queue, no network; prefix cache off."
)
DECODE = "Duration of an engine step that gave each of the batch's sequences one token and computed nothing else."


class EngineTarget:
    """A model loaded by twinphase.

    Attributes:
        facts: what a reader must know.
        loaded: the engine, its model and configuration.
    """

    def __init__(
        self,
        model: str,
        *,
        seed: int = 0,
        compile_progress: Callable[[int, int, str], None] | None = None,
        **config: Any,
    ) -> None:
        """Load a model; arguments and errors as for `LLM`, but that the prefix cache is off unless switched on."""
        self.loaded = LoadedEngine(
            model, compile_progress=compile_progress, **{"enable_prefix_caching": False, **config}
        )
        self._engine = self.loaded.engine
        self._ids = FreshIds(self._engine.vocab_size, seed)
        self._names = count()
        resolved, checkpoint = self.loaded.config, self.loaded.checkpoint
        self.facts = TargetFacts(
            name=model,
            kind="twinphase",
            engine=f"twinphase {__version__}",
            model=checkpoint.path.name,
            precision=f"{quantization_name(checkpoint)} weights, KV cache {resolved.kv_cache_dtype}",
            context_length=resolved.max_model_len,
            prefill_definition=PREFILL,
            decode_definition=DECODE,
            details={
                "model fingerprint": checkpoint.fingerprint,
                "threads": str(resolved.threads or available_cores()),
                "engine configuration": str(resolved),
                "max_num_batched_tokens": str(resolved.max_num_batched_tokens),
                "prefix caching in the sweep": "on" if resolved.enable_prefix_caching else "off",
            },
        )

    def prefill(self, num_tokens: int) -> PrefillSample:
        """Time one prompt's prefill on the idle engine."""
        prompt = self._ids.take(num_tokens)
        start = time.perf_counter()
        request = self._submit(prompt, 1)
        while not request.output_token_ids:
            self._step()
        seconds = time.perf_counter() - start
        self._finish()
        self._refuse_cached([request])
        return PrefillSample(num_tokens, seconds)

    def decode(self, position: int, batch: int, num_tokens: int) -> DecodeSample:
        """Time `num_tokens` steps of `batch` sequences; `gaps` has one entry a step.

        While later prompts are read the earlier ones decode already: their share of the mean position is what it is.

        Raises:
            CacheCapacityError: the engine cannot hold so many sequences of that length at once.
        """
        config = self.loaded.config
        chunks = -(-position // max(1, config.max_num_batched_tokens - batch)) + 1
        room = num_tokens + 1 + (batch - 1) * chunks  # the first ones decode while the others are read
        self._check_room(position + room, batch)
        try:
            requests = [self._submit(self._ids.take(position), room) for _ in range(batch)]
            while not all(request.output_token_ids for request in requests):
                self._step()
            gaps, positions = [], []
            for _ in range(num_tokens):
                positions.append(sum(request.num_computed_tokens for request in requests) / batch)
                start = time.perf_counter()
                self._step(requests)
                gaps.append(time.perf_counter() - start)
        finally:
            self._finish()
        self._refuse_cached(requests)
        return DecodeSample(sum(positions) / len(positions), batch, tuple(gaps))

    def close(self) -> None:
        """Nothing to let go of: the memory goes with the object."""

    def _submit(self, prompt: list[int], max_tokens: int) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(str(next(self._names)), prompt, params)
        self._engine.add_request(request)
        return request

    def _step(self, together: Sequence[Request] = ()) -> None:
        """One step; each of `together` must get a token."""
        result = self._engine.step()
        for request in result.finished:
            if request.error:
                raise TwinphaseError(f"The engine failed: {request.error}")
        missing = [request for request in together if request.request_id not in result.output.token_ids]
        if missing:
            raise CacheCapacityError(
                f"{len(missing)} of {len(together)} sequences got no token in a step: they do not all fit at once.",
                "Raise --num-kv-blocks.",
            )

    def _finish(self) -> None:
        for request_id in list(self._engine.timelines):
            self._engine.abort(request_id)

    def _check_room(self, length: int, batch: int) -> None:
        config = self.loaded.config
        block_size, num_blocks = config.block_size, config.num_kv_blocks or 0
        needed = -(-length // block_size) * batch
        if batch > config.max_num_seqs:
            raise CacheCapacityError(
                f"A batch of {batch} is more than max_num_seqs, {config.max_num_seqs}.", "Raise --max-num-seqs."
            )
        if needed > num_blocks:
            raise CacheCapacityError(
                f"{batch} sequences of {length:,} tokens need {needed:,} KV blocks; there are {num_blocks:,}.",
                "Raise --num-kv-blocks.",
            )

    def _refuse_cached(self, requests: list[Request]) -> None:
        cached = sum(request.num_cached_tokens for request in requests)
        if cached:
            raise TwinphaseError(
                f"{cached} prompt tokens came from the prefix cache: that is no prefill.", "Measure with it off."
            )
