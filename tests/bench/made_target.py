"""A target that takes no time and reports times by a law of each phase, with noise."""

from __future__ import annotations

import random
from collections.abc import Callable

from twinphase.errors import ContextLengthError
from twinphase_bench.targets.target import PhaseSample, TargetFacts


def accept_all(phase: str, length: int, batch: int) -> bool:
    return False


class MadeTarget:
    def __init__(
        self,
        noise: float = 0.01,
        seed: int = 0,
        slower: float = 1.0,
        memory_bound: bool = True,
        refuse: Callable[[str, int, int], bool] = accept_all,
    ) -> None:
        self.facts = TargetFacts(
            "made",
            "openai",
            "made 1",
            "none",
            "exact",
            4096,
            "by its law",
            "by its law",
            {"threads": "3"},
        )
        self.random = random.Random(seed)
        self.noise = noise
        self.slower = slower
        self.refuse = refuse
        self.memory_bound = memory_bound
        self.num_asked = 0

    def answer(self, phase: str, length: int, batch: int, seconds: float) -> float:
        """The seconds with noise, unless the target refuses."""
        self.num_asked += 1
        if self.refuse(phase, length, batch):
            raise ContextLengthError(f"{batch} of {length} are too many.")
        return self.slower * seconds * self.random.lognormvariate(0, self.noise)

    def prefill(self, num_tokens: int) -> PhaseSample:
        seconds = 2e-3 + 4e-4 * num_tokens + 2e-8 * num_tokens**2
        return PhaseSample(num_tokens, (self.answer("prefill", num_tokens, 1, seconds),))

    def decode(self, position: int, batch: int, num_tokens: int) -> PhaseSample:
        base, each = (5e-3, 5e-4) if self.memory_bound else (1e-4, 5e-3)
        step = self.answer("decode", position, batch, base + each * batch + 1e-6 * position * batch)
        return PhaseSample(position + (num_tokens - 1) / 2, (step,) * num_tokens, batch)

    def close(self) -> None:
        pass
