"""A target that drives this project's engine step by step in this process.

There is no text and no network. `engine_load.py` is for loads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinphase import (
    CacheCapacityError,
    TimedRequest,
    TwinphaseError,
    Workshop,
    __version__,
    available_cores,
)
from twinphase_bench.conditions import model_file
from twinphase_bench.load.workload import PromptMaker, Sizing
from twinphase_bench.targets.target import PhaseSample, TargetFacts

PREFILL = (
    "Token ids handed to the idle engine .. the step that gave the first token has returned, as "
    "many steps as the prompt has chunks. No tokenizing, no queue, no network; prefix cache off."
)
DECODE = (
    "Duration of an engine step that gave each of the batch's sequences one token and computed "
    "nothing else."
)


def engine_facts(
    workshop: Workshop, name: str, prefill: str, decode: str, caching: str
) -> TargetFacts:
    """Facts of a model that was loaded here.

    Args:
        workshop: the loaded model.
        name: name of the target.
        prefill: definition of a prefill time.
        decode: definition of a decode time.
        caching: name of the detail that states whether prefixes are cached.
    """
    config = workshop.config
    return TargetFacts(
        name=name,
        kind="twinphase",
        engine=f"twinphase {__version__}",
        model=workshop.path.name,
        precision=f"{workshop.quantization} weights, KV cache {config.kv_cache_dtype}",
        context_length=min(workshop.max_model_len, workshop.capacity) or None,
        prefill_definition=prefill,
        decode_definition=decode,
        details={
            "model fingerprint": workshop.fingerprint,
            "engine configuration": str(config),
            "max_num_batched_tokens": str(config.max_num_batched_tokens),
            caching: "on" if config.enable_prefix_caching else "off",
            **model_file(workshop.path),
            "threads": str(config.threads or available_cores()),
            "instruction set": workshop.isa,
        },
    )


class EngineTarget:
    """A model loaded by twinphase.

    Attributes:
        facts: facts for the report.
        stepped: the engine, driven step by step.
    """

    def __init__(
        self,
        model: str,
        *,
        seed: int = 0,
        compile_progress: Callable[[float, int, str], None] | None = None,
        **config: Any,
    ) -> None:
        """Load a model; arguments and errors as for `LLM`, with the prefix cache off by default."""
        self.workshop = Workshop(
            model, compile_progress=compile_progress, **{"enable_prefix_caching": False, **config}
        )
        self.stepped = self.workshop.stepped
        self.facts = engine_facts(
            self.workshop, model, PREFILL, DECODE, "prefix caching in the sweep"
        )
        self._prompts = PromptMaker(Sizing(vocab_size=self.workshop.blueprint.vocab_size), seed)

    def prefill(self, num_tokens: int) -> PhaseSample:
        """Time one prompt's prefill on the idle engine."""
        ticket = self.stepped.submit(self._prompt(num_tokens), 1)
        self.stepped.run()
        self.stepped.clear()
        _refuse_cached([ticket])
        return PhaseSample(num_tokens, (ticket.ttft,))

    def decode(self, position: int, batch: int, num_tokens: int) -> PhaseSample:
        """Time `num_tokens` steps of `batch` sequences.

        Earlier sequences decode already while later prompts are computed, so the mean position
        includes these tokens.

        Raises:
            CacheCapacityError: the engine cannot hold `batch` sequences of that length at once.
        """
        # The first sequences decode already while the other prompts' chunks are computed.
        chunks = -(-position // max(1, self.workshop.config.max_num_batched_tokens - batch)) + 1
        room = num_tokens + 1 + (batch - 1) * chunks
        self._check_room(position + room, batch)
        times = []
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
                times.append(self.stepped.walls[-1])
        finally:
            self.stepped.clear()
        _refuse_cached(tickets)
        return PhaseSample(sum(positions) / num_tokens, tuple(times), batch)

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""

    def _check_room(self, length: int, batch: int) -> None:
        config = self.workshop.config
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
