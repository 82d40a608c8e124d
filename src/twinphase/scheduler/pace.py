"""Which gap between tokens running streams keep while prompts are read, and what that costs the prompts.

Chosen from what steps take on this machine: the smaller the chunks, the shorter the gaps, and the
more often the weights are read for the same prompt. Not for cutting a step's chunks (`chunk.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinphase.batch import StepWork
from twinphase.scheduler.chunk import ChunkBudget, StepCost

FULL_RATE = 0.97  # of the tokens per second of a full chunk, that the smallest sensible chunk has
CONTEXT = 256  # tokens of the stream that a prompt is read beside
LONG_PROMPT = 3000  # tokens


@dataclass(frozen=True)
class Pace:
    """The gap that running streams keep.

    Attributes:
        itl_slo_ms: the target, milliseconds; None where there is none.
        chosen: by `Pacing.choose`, not by the user.
        prefill_room: seconds that prefill may add to a step whatever the target.
        gap_ms: predicted for one stream while a prompt is read beside it, milliseconds; with the
            rest by `told`.
        prompt: tokens of the long prompt that the next two are of.
        prompt_seconds, whole_seconds: until it is read beside one stream, at this pace and in whole
            chunks.
    """

    itl_slo_ms: float | None
    chosen: bool
    prefill_room: float = 0.0
    gap_ms: float = 0.0
    prompt: int = 0
    prompt_seconds: float = 0.0
    whole_seconds: float = 0.0


@dataclass(frozen=True)
class Pacing:
    """What a pace is chosen from: step times, and the limits of chunks and contexts in tokens."""

    times: StepCost
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    window: int | None = None

    def choose(self) -> Pace:
        """The decode of one stream, and the time of the smallest sensible chunk: one read nearly as fast as a full one.

        A step has its own time besides that of its tokens: the weights are read, and what passes
        before the next one. Between many decodes a chunk has the same time, so that prompts go on
        at nearly their rate.
        """
        times = self.times
        full = self.max_num_batched_tokens
        empty = times.seconds(StepWork())
        own = empty + min(
            empty, times.slo_seconds(0.0)
        )  # what passes is a fading mean, which one pause can lift
        tokens = max(0.0, times.seconds(StepWork.of_chunk(0, full, False, self.window)) - empty)
        part = FULL_RATE * tokens / (own + tokens)  # that tokens have of a sensible step's time
        room = own * part / (1 - part)
        return Pace(1e3 * times.slo_seconds(times.seconds(self._stream) + room), True, room)

    def told(self, pace: Pace) -> Pace:
        """The same pace, and what it brings and costs."""
        prompt = max(1, min(LONG_PROMPT, self.max_model_len - 1))
        slow, gap = self._read(prompt, pace)
        whole, _ = self._read(prompt, Pace(None, False))
        return replace(
            pace, gap_ms=1e3 * gap, prompt=prompt, prompt_seconds=slow, whole_seconds=whole
        )

    @property
    def _stream(self) -> StepWork:
        return StepWork.of_decodes(1, CONTEXT, self.window)

    def _read(self, prompt: int, pace: Pace) -> tuple[float, float]:
        """Seconds until a prompt is read beside one stream, and the stream's longest gap."""
        total = 0.0
        longest = 0.0
        start = 0
        slo = None if pace.itl_slo_ms is None else pace.itl_slo_ms / 1e3
        while start < prompt:
            room = max(1, self.max_num_batched_tokens - 1)
            budget = ChunkBudget(
                room, self._stream, self.times, slo, self.block_size, self.window, pace.prefill_room
            )
            count = budget.take(start, prompt - start)
            chunk = StepWork.of_chunk(start, count, start + count == prompt, self.window)
            seconds = self.times.seconds(self._stream.plus(chunk))
            total = total + seconds
            longest = max(longest, seconds)
            start = start + count
        return total, longest
