"""Our engine in this process, stepped by hand: the time of every step is seen, no text is made, no socket in the way.

Not for load (`engine_load.py`), nor for experiments (`stepped.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinphase import __version__
from twinphase.config import available_cores
from twinphase.engine.loading.loading import LoadedEngine
from twinphase.errors import CacheCapacityError, TwinphaseError
from twinphase.weights.gguf import quantization_name
from twinphase_bench.load.workload import PromptMaker, Sizing
from twinphase_bench.targets.stepped import Stepped, TimedRequest
from twinphase_bench.targets.target import DecodeSample, PrefillSample, TargetFacts

PREFILL = (
    "Token ids handed to the idle engine .. the step that gave the first token has returned, as "
    "many steps as the "
    "prompt has chunks. No tokenizing, no queue, no network; prefix cache off."
)
DECODE = (
    "Duration of an engine step that gave each of the batch's sequences one token and "
    "computed nothing else."
)


def engine_facts(
    loaded: LoadedEngine, name: str, prefill: str, decode: str, caching: str
) -> TargetFacts:
    """Facts of a model loaded here; `prefill` and `decode` say what is timed, `caching` names the detail of caching."""
    config = loaded.config
    checkpoint = loaded.checkpoint
    return TargetFacts(
        name=name,
        kind="twinphase",
        engine=f"twinphase {__version__}",
        model=checkpoint.path.name,
        precision=f"{quantization_name(checkpoint)} weights, KV cache {config.kv_cache_dtype}",
        context_length=min(
            config.max_model_len or 0, (config.num_kv_blocks or 0) * config.block_size
        )
        or None,
        prefill_definition=prefill,
        decode_definition=decode,
        details={
            "model fingerprint": checkpoint.fingerprint,
            "threads": str(config.threads or available_cores()),
            "engine configuration": str(config),
            "max_num_batched_tokens": str(config.max_num_batched_tokens),
            caching: "on" if config.enable_prefix_caching else "off",
        },
    )


class EngineTarget:
    """A model loaded by twinphase.

    Attributes:
        facts: what a reader must know.
        loaded: the engine, its model and configuration.
        stepped: the engine's driver.
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
        self.stepped = Stepped(self.loaded.engine)
        self.facts = engine_facts(
            self.loaded, model, PREFILL, DECODE, "prefix caching in the sweep"
        )
        self._prompts = PromptMaker(Sizing(vocab_size=self.loaded.engine.vocab_size), seed)

    def prefill(self, num_tokens: int) -> PrefillSample:
        """Time one prompt's prefill on the idle engine."""
        ticket = self.stepped.submit(self._prompt(num_tokens), 1)
        self.stepped.run()
        self.stepped.clear()
        _refuse_cached([ticket])
        return PrefillSample(num_tokens, ticket.ttft)

    def decode(self, position: int, batch: int, num_tokens: int) -> DecodeSample:
        """Time `num_tokens` steps of `batch` sequences; `gaps` has one entry per step.

        While later prompts are computed the earlier ones decode already: the mean position counts
        that.

        Raises:
            CacheCapacityError: the engine cannot hold so many sequences of that length at once.
        """
        # The first sequences decode already while the chunks of the others' prompts are computed.
        chunks = -(-position // max(1, self.loaded.config.max_num_batched_tokens - batch)) + 1
        room = num_tokens + 1 + (batch - 1) * chunks
        self._check_room(position + room, batch)
        gaps = []
        positions = []
        try:
            tickets = [self.stepped.submit(self._prompt(position), room) for _ in range(batch)]
            self.stepped.run_until(lambda: all(ticket.times for ticket in tickets))
            for _ in range(num_tokens):
                positions.append(
                    sum(ticket.request.num_computed_tokens for ticket in tickets) / batch
                )
                made = self.stepped.step().output.token_ids
                missing = sum(ticket.request.request_id not in made for ticket in tickets)
                if missing:
                    raise CacheCapacityError(
                        f"{missing} of {batch} sequences got no token in a step: they do not all "
                        "fit at once.",
                        "Raise --num-kv-blocks.",
                    )
                gaps.append(self.stepped.walls[-1])
        finally:
            self.stepped.clear()
        _refuse_cached(tickets)
        return DecodeSample(sum(positions) / num_tokens, batch, tuple(gaps))

    def close(self) -> None:
        """Nothing to do: the memory goes with the object."""

    def _check_room(self, length: int, batch: int) -> None:
        config = self.loaded.config
        needed = -(-length // config.block_size) * batch
        blocks = config.num_kv_blocks or 0
        if batch > config.max_num_seqs:
            raise CacheCapacityError(
                f"A batch of {batch} is more than max_num_seqs, {config.max_num_seqs}.",
                "Raise --max-num-seqs.",
            )
        if needed > blocks:
            raise CacheCapacityError(
                f"{batch} sequences of {length:,} tokens need {needed:,} KV blocks; there are "
                f"{blocks:,}.",
                "Raise --num-kv-blocks.",
            )

    def _prompt(self, num_tokens: int) -> list[int]:
        return list(self._prompts.take(num_tokens).token_ids)


def _refuse_cached(tickets: list[TimedRequest]) -> None:
    cached = sum(ticket.request.counts.num_cached_tokens for ticket in tickets)
    if cached:
        raise TwinphaseError(
            f"{cached} prompt tokens came from the prefix cache: that is no prefill.",
            "Measure with it off.",
        )
