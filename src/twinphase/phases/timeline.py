"""Where the time went: one record a step, and per request intervals that partition its life.

All times are seconds on one monotonic clock (`time.perf_counter`). Nothing here reads a clock: whoever knows what just
ended says when. What nobody names is `unattributed`, so that it shows.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from twinphase.batch import Phase
from twinphase.phases.cost import Cost

__all__ = ["Interval", "IntervalKind", "PhaseTotals", "RequestTimeline", "StepRecord"]


class IntervalKind(str, enum.Enum):
    """What a request's time was spent on (the ledger's words)."""

    TOKENIZE = "tokenize"
    QUEUE = "queue"
    PREFILL = "prefill"
    PREFILL_WAIT = "prefill_wait"
    DECODE = "decode"
    DETOKENIZE = "detokenize"
    SEND = "send"
    UNATTRIBUTED = "unattributed"


@dataclass(frozen=True)
class StepRecord:
    """One step of the engine.

    Attributes:
        start: when scheduling began, seconds.
        end: when the new tokens were committed, seconds; sampling is part of the step.
        prefill_tokens: prompt tokens computed.
        decode_tokens: tokens computed for requests that decode.
        prefill: work of the prefills.
        decode: work of the decodes. The weights, read once a step, count here when any request decodes.
    """

    start: float
    end: float
    prefill_tokens: int
    decode_tokens: int
    prefill: Cost
    decode: Cost

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start


@dataclass(frozen=True)
class Interval:
    """A piece of a request's time."""

    kind: IntervalKind
    start: float
    end: float


@dataclass
class PhaseTotals:
    """A request's sums over the steps of one phase."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    flops: int = 0
    bytes: int = 0


@dataclass
class RequestTimeline:
    """Intervals that partition [arrival, end] of one request: no gap and no overlap, by construction.

    Each interval begins where the last one ended. A step in which other requests ran too still counts as this
    request's own; its split into `stall` and `batching` needs the measured cost model.
    """

    arrival: float
    intervals: list[Interval] = field(default_factory=list)
    prefill: PhaseTotals = field(default_factory=PhaseTotals)
    decode: PhaseTotals = field(default_factory=PhaseTotals)
    token_times: list[float] = field(default_factory=list)  # when each output token was handed over

    @property
    def end(self) -> float:
        """End of the last interval."""
        return self.intervals[-1].end if self.intervals else self.arrival

    def mark(self, kind: IntervalKind, until: float) -> None:
        """Everything since the last interval's end, up to `until`, was `kind`."""
        if until < self.end:
            raise ValueError(f"{kind.value} would end at {until}, before {self.end}")
        if until > self.end:
            self.intervals.append(Interval(kind, self.end, until))

    def add_step(self, record: StepRecord, phase: Phase, num_tokens: int, cost: Cost) -> None:
        """A step computed `num_tokens` of this request in `phase`, at its own `cost`.

        Time since the last interval is `queue` before the first step. Later the engine was outside its step, which
        is nobody's named work.
        """
        begun = self.prefill.steps + self.decode.steps > 0
        self.mark(IntervalKind.UNATTRIBUTED if begun else IntervalKind.QUEUE, max(record.start, self.end))
        self.mark(IntervalKind.PREFILL if phase is Phase.PREFILL else IntervalKind.DECODE, record.end)
        totals = self.prefill if phase is Phase.PREFILL else self.decode
        totals.steps += 1
        totals.tokens += num_tokens
        totals.seconds += record.seconds
        totals.flops += cost.flops
        totals.bytes += cost.bytes

    def skip_step(self, record: StepRecord) -> None:
        """A step left this request out: it waited for others between its chunks, or still queues."""
        begun = self.prefill.steps + self.decode.steps > 0
        self.mark(IntervalKind.PREFILL_WAIT if begun else IntervalKind.QUEUE, record.end)

    def hand_over_tokens(self, count: int, now: float) -> None:
        """`count` output tokens were handed to the reader at `now`."""
        self.token_times.extend([now] * count)

    def seconds(self, kind: IntervalKind) -> float:
        """Total time of one kind."""
        return sum(i.end - i.start for i in self.intervals if i.kind is kind)

    def totals(self) -> dict[str, float]:
        """Seconds by kind, every kind present; they add up to `end - arrival`."""
        sums = dict.fromkeys((kind.value for kind in IntervalKind), 0.0)
        for interval in self.intervals:
            sums[interval.kind.value] += interval.end - interval.start
        return sums

    @property
    def ttft(self) -> float | None:
        """First output token handed over - arrival, seconds; queue and tokenizing included."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """(last token - first token) / (output tokens - 1), seconds."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    @property
    def itl(self) -> list[float]:
        """Each gap between consecutive tokens, seconds."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]
