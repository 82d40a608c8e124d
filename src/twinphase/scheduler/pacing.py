"""Chooses the pace from measured step times, and predicts what it costs prompts.

The smaller the prefill chunks, the shorter the gaps between tokens, and the more often the weights
are read for the same prompt. `chunk.py` cuts the chunks of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinphase.batch import StepWork
from twinphase.scheduler.chunk import ChunkBudget, StepCost
from twinphase.scheduler.pace import DECODE_CONTEXT_TOKENS, Pace

# The smallest sensible chunk reaches this share of the tokens per second of a full chunk.
MIN_PREFILL_RATE_SHARE = 0.97
LONG_PROMPT_TOKENS = 3000


@dataclass(frozen=True)
class Pacing:
    """What a pace is chosen from: step times, and the limits of chunks and contexts in tokens."""

    times: StepCost
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int

    def choose(self) -> Pace:
        """The gap that one decode and the smallest sensible chunk take together.

        A step has a fixed time besides that of its tokens: it reads the weights, and time passes
        before the next step. Between many decodes a chunk gets the same time, so that prompts
        continue at nearly their full rate.
        """
        times = self.times
        full = self.max_num_batched_tokens
        empty = times.seconds(StepWork())
        # The time between steps is a fading mean, which a single pause can lift: it is bounded.
        fixed = empty + min(empty, times.slo_seconds(0.0))
        tokens = max(0.0, times.seconds(StepWork.of_chunk(0, full, False, times.window)) - empty)
        share = MIN_PREFILL_RATE_SHARE * tokens / (fixed + tokens)
        room = fixed * share / (1 - share)
        slo = times.slo_seconds(times.seconds(self._decode) + room)
        return Pace(slo, room, chosen=True)

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
