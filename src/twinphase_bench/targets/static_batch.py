"""Measures both phases of engines that run one batch at a time: transformers and llama.cpp.

Such an engine only generates tokens; this file separates prefill and decode. This project's own
engine mixes phases in a step (`engine.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from twinphase_bench.load.workload import PromptMaker, Sizing
from twinphase_bench.targets.target import PhaseSample, TargetFacts


@dataclass(frozen=True)
class Generated:
    """One batch: its start, the end of each step, and the last token of each sequence.

    The first step prefills all prompts and computes the first tokens.
    """

    began: float
    step_ends: list[float]
    last_tokens: list[int]


class Generator(Protocol):
    """An engine that decodes greedily and ignores the end of text."""

    facts: TargetFacts
    vocab_size: int

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Generated:
        """Decode `num_tokens` for each uncached prompt; all prompts have the same length."""

    def close(self) -> None:
        """Free the model."""


class StaticBatchTarget:
    """A `Target` that uses a `Generator`."""

    def __init__(self, engine: Generator, seed: int = 0) -> None:
        self.engine = engine
        self.facts = engine.facts
        self._prompts = PromptMaker(Sizing(vocab_size=engine.vocab_size), seed)

    def prefill(self, num_tokens: int) -> PhaseSample:
        run = self._generate(1, num_tokens, 1)
        return PhaseSample(num_tokens, (run.step_ends[0] - run.began,))

    def decode(self, position: int, batch: int, num_tokens: int) -> PhaseSample:
        run = self._generate(batch, position, num_tokens + 1)
        gaps = tuple(end - begin for begin, end in pairwise(run.step_ends))
        return PhaseSample(position + (num_tokens - 1) / 2, gaps, batch)

    def close(self) -> None:
        self.engine.close()

    def _generate(self, batch: int, length: int, num_tokens: int) -> Generated:
        return self.engine.generate(
            [list(self._prompts.take(length).token_ids) for _ in range(batch)], num_tokens
        )
