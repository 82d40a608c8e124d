"""Chooses the pace from measured step times, and predicts what it costs prompts.

The smaller the prefill chunks, the shorter the gaps between tokens, and the more often the weights
are read for the same prompt. `chunk.py` cuts the chunks of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinphase.batch import StepWork
from twinphase.scheduler.chunk import ChunkBudget, StepCost
from twinphase.scheduler.pace import DECODE_CONTEXT_TOKENS, Pace

# Text that comes every 50 ms is faster than people read.
SHORTEST_SLO_SECONDS = 0.05
# A step with prefill takes at most this multiple of the time of its decodes alone. Prompts that are
# prefilled beside a stream then take at most a seventh longer than alone.
STEP_FACTOR = 8.0
LONG_PROMPT_TOKENS = 3000


@dataclass(frozen=True)
class Pacing:
    """Chooses a pace from step times, and from the limits of chunks and contexts in tokens."""

    times: StepCost
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int

    def choose(self) -> Pace:
        """The longest gap at which prompts lose at most an eighth of their rate, or 50 ms.

        A step has a fixed time besides that of its tokens: it reads the weights. A chunk that takes
        seven times as long as the decodes beside it leaves prefill seven eighths of the time.

        The gap has no margin for prediction errors. Where it is above 50 ms, chunks are cut by
        `step_factor`; a margin that had fallen since the choice would allow longer steps.
        """
        usual = self.times.seconds(self._decode)
        return Pace(max(SHORTEST_SLO_SECONDS, STEP_FACTOR * usual), STEP_FACTOR, chosen=True)

    def predict(self, pace: Pace) -> Pace:
        """The same pace with its predicted gap and the prefill times of a long prompt."""
        prompt = max(1, min(LONG_PROMPT_TOKENS, self.max_model_len - 1))
        seconds, gap = self._prefill(prompt, pace)
        return replace(
            pace,
            gap_seconds=gap,
            prompt_tokens=prompt,
            prompt_seconds=seconds,
            uncut_prompt_seconds=self._prefill(prompt, Pace())[0],
        )

    @property
    def _decode(self) -> StepWork:
        return StepWork.of_decodes(1, DECODE_CONTEXT_TOKENS, self.times.window)

    def _prefill(self, prompt: int, pace: Pace) -> tuple[float, float]:
        """Seconds that the prefill of a prompt beside one decode takes, and its longest step."""
        steps = list[float]()
        start = 0
        while start < prompt:
            budget = ChunkBudget(
                max(1, self.max_num_batched_tokens - 1),
                self._decode,
                self.times,
                pace,
                self.block_size,
            )
            count = budget.take(start, prompt - start)
            chunk = StepWork.of_chunk(start, count, start + count == prompt, self.times.window)
            steps.append(self.times.seconds(self._decode.plus(chunk)))
            start += count
        return sum(steps), max(steps)
