"""Where the time went: one record a step, and per request intervals that partition its life.

All times are seconds on one monotonic clock (`time.perf_counter`). Nothing here reads a clock: whoever knows what just
ended says when. What nobody names is `unattributed`, so that it shows. How a shared step divides is `ledger.py`'s.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from twinphase.phases import latency
from twinphase.phases.work import Cost

__all__ = ["Interval", "IntervalKind", "PhaseTotals", "RequestTimeline", "StepRecord"]


class IntervalKind(enum.StrEnum):
    """What a request's time was spent on (the ledger's words)."""

    TOKENIZE = "tokenize"
    QUEUE = "queue"  # not running: before the first step, and after each preemption
    PREFILL = "prefill"  # its own share of the steps that computed its prompt
    PREFILL_WAIT = "prefill_wait"  # the rest of those steps, and the steps between its chunks
    RECOMPUTE = "recompute"  # its own share of prefill that a preemption made necessary once more
    DECODE = "decode"  # its own share of the steps that produced its tokens
    BATCHING = "batching"  # what other requests' decodes added to them
    STALL = "stall"  # what other requests' prefill chunks added to them
    DETOKENIZE = "detokenize"
    SEND = "send"
    UNATTRIBUTED = "unattributed"


# What every decode step brings.
ALTERNATING = {IntervalKind.DECODE, IntervalKind.BATCHING, IntervalKind.DETOKENIZE, IntervalKind.SEND,
               IntervalKind.UNATTRIBUTED}  # fmt: skip


@dataclass(frozen=True)
class StepRecord:
    """One step of the engine.

    Attributes:
        index: number of the step.
        start: when scheduling began, seconds.
        end: when the new tokens were committed, seconds; sampling is part of the step.
        prefill_tokens: prompt tokens computed.
        decode_tokens: tokens computed for requests that decode.
        prefill: work of the prefills.
        decode: work of the decodes. The weights, read once a step, count here when any request decodes.
        prefill_ids: requests with a prefill chunk.
        num_decodes: requests that decoded.
        predicted: what the cost model expected, seconds.
        executed: seconds of it that the executor took; the rest is scheduling and bookkeeping.
        sampling: seconds of `executed` that choosing tokens took.
        cpu_wait: seconds of it in which a thread of the engine's could run and had no processor; 0 where not known.
    """

    index: int
    start: float
    end: float
    prefill_tokens: int
    decode_tokens: int
    prefill: Cost
    decode: Cost
    prefill_ids: tuple[str, ...] = ()
    num_decodes: int = 0
    predicted: float = 0.0
    executed: float = 0.0
    sampling: float = 0.0
    cpu_wait: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class Interval:
    """A piece of a request's time.

    Attributes:
        kind: what it was spent on.
        start, end: seconds.
        step: index of the step it belongs to; -1 for none, or several.
        prefill_tokens: of a stall, the others' prompt tokens in that step.
        caused_by: of a stall, the requests those belong to.
        reason: of queue, what kept the first in line from being let in (`Batch.held_back`).
    """

    kind: IntervalKind
    start: float
    end: float
    step: int = -1
    prefill_tokens: int = 0
    caused_by: tuple[str, ...] = ()
    reason: str = ""


@dataclass
class PhaseTotals:
    """Sums over the steps that a request spent in one phase; the work is all of those steps', not its own alone."""

    steps: int = 0
    tokens: int = 0  # of this request
    decodes: int = 0  # requests that decoded in them, this one included
    seconds: float = 0.0
    linear_flops: int = 0
    attention_flops: int = 0
    bytes: int = 0
    executed: float = 0.0  # seconds; this and the two that follow as in `StepRecord`
    sampling: float = 0.0
    cpu_wait: float = 0.0
    unmixed_steps: int = 0  # those in which no request was in the other phase; the rest is theirs
    unmixed_seconds: float = 0.0
    unmixed_linear_flops: int = 0
    unmixed_attention_flops: int = 0
    unmixed_bytes: int = 0

    def unmixed(self) -> PhaseTotals:
        """Time and work of the steps in which no request was in the other phase."""
        return PhaseTotals(
            steps=self.unmixed_steps,
            seconds=self.unmixed_seconds,
            linear_flops=self.unmixed_linear_flops,
            attention_flops=self.unmixed_attention_flops,
            bytes=self.unmixed_bytes,
        )

    @property
    def flops(self) -> int:
        return self.linear_flops + self.attention_flops


@dataclass
class RequestTimeline:
    """Intervals that partition [arrival, end] of one request: no gap and no overlap, by construction.

    Each interval begins where the last one ended.

    Attributes:
        arrival: when the request came, seconds.
        intervals: in order of time.
        prefill, decode: what the steps of each phase did.
        token_times: when each output token was handed over.
    """

    arrival: float
    intervals: list[Interval] = field(default_factory=list)
    prefill: PhaseTotals = field(default_factory=PhaseTotals)
    decode: PhaseTotals = field(default_factory=PhaseTotals)
    token_times: list[float] = field(default_factory=list)
    end: float = field(init=False)  # of the last interval

    def __post_init__(self) -> None:
        self.end = self.intervals[-1].end if self.intervals else self.arrival

    def mark(self, kind: IntervalKind, until: float, step: int = -1, reason: str = "") -> None:
        """Everything since the last interval's end, up to `until`, was `kind`."""
        if until < self.end:
            raise ValueError(f"{kind.value} would end at {until}, before {self.end}")
        if until > self.end:
            self.intervals.append(Interval(kind, self.end, until, step, reason=reason))
            self.end = until

    def extend(self, kind: IntervalKind, until: float, reason: str = "") -> None:
        """As `mark`, but the last interval grows when it is of the same kind and reason."""
        last = self.intervals[-1] if self.intervals else None
        if last is not None and last.kind is kind and last.reason == reason and until > self.end:
            last.end = self.end = until
        else:
            self.mark(kind, until, reason=reason)

    def queue_until(self, until: float, reason: str) -> None:
        """The request was not running; `reason` is what held the first in line back for most of that time."""
        self.extend(IntervalKind.QUEUE, until, reason)

    def settle(self, until: float) -> None:
        """What the engine wrote down after the last step belongs to that step."""
        if until > self.end and self.intervals:
            self.intervals[-1].end = self.end = until

    def text_until(self, until: float, alone: bool) -> None:
        """Up to `until`, the front end turned tokens into text or sent them: its own if `alone`, else others'."""
        if until <= self.end:
            return
        if alone:
            self.mark(IntervalKind.SEND, until)
        else:
            self.mark(IntervalKind.BATCHING if self.decode.steps else IntervalKind.PREFILL_WAIT, until)

    def reach_step(self, start: float) -> None:
        """A step begins; what went before was nobody's named work."""
        if start > self.end:
            self.extend(IntervalKind.UNATTRIBUTED, start)

    def add_prefill(self, record: StepRecord, num_tokens: int, own: float, again: float = 0.0) -> None:
        """A step computed a chunk of `num_tokens`.

        Args:
            record: the step.
            num_tokens: of the chunk.
            own: this request's share of the step, seconds.
            again: seconds of it that went to tokens computed before a preemption.
        """
        self._begin(record, self.prefill, num_tokens)
        for kind, share in ((IntervalKind.RECOMPUTE, again), (IntervalKind.PREFILL, own)):
            self.mark(kind, min(record.end, max(self.end, record.start + share)), record.index)
        self.mark(IntervalKind.PREFILL_WAIT, record.end, record.index)

    def add_decode(self, record: StepRecord, num_tokens: int, own: float, decodes: float) -> None:
        """A step produced tokens of this request.

        Args:
            record: the step.
            num_tokens: computed for this request.
            own: its share, seconds.
            decodes: what the step would have taken without the prefill chunks in it, seconds.
        """
        self._begin(record, self.decode, num_tokens)
        self.mark(IntervalKind.DECODE, min(record.end, max(self.end, record.start + own)), record.index)
        self.mark(IntervalKind.BATCHING, min(record.end, max(self.end, record.start + decodes)), record.index)
        if record.end > self.end:
            stall = Interval(IntervalKind.STALL, self.end, record.end, record.index, record.prefill_tokens,
                             record.prefill_ids)  # fmt: skip
            self.intervals.append(stall)
            self.end = record.end

    def skip_step(self, record: StepRecord) -> None:
        """A step computed others' chunks only."""
        if record.end > self.end:
            self.extend(IntervalKind.PREFILL_WAIT, record.end)

    def _begin(self, record: StepRecord, totals: PhaseTotals, num_tokens: int) -> None:
        totals.steps += 1
        totals.tokens += num_tokens
        totals.decodes += record.num_decodes
        totals.seconds += record.end - record.start
        totals.executed += record.executed
        totals.sampling += record.sampling
        totals.cpu_wait += record.cpu_wait
        unmixed = not (record.prefill_ids and record.num_decodes)
        totals.unmixed_steps += unmixed
        totals.unmixed_seconds += unmixed * (record.end - record.start)
        for cost in (record.prefill, record.decode):
            totals.linear_flops += cost.linear_flops
            totals.attention_flops += cost.attention_flops
            totals.bytes += cost.bytes
            totals.unmixed_linear_flops += unmixed * cost.linear_flops
            totals.unmixed_attention_flops += unmixed * cost.attention_flops
            totals.unmixed_bytes += unmixed * cost.bytes

    def copy(self) -> RequestTimeline:
        """The same life so far, which goes on by itself; of a timeline that another thread may be growing."""
        intervals = [replace(interval) for interval in self.intervals[:]]
        copied = RequestTimeline(self.arrival, intervals, replace(self.prefill), replace(self.decode))
        copied.token_times = list(self.token_times)
        return copied

    def compact(self) -> None:
        """Join what an answer alternates between, so that a long one's timeline is short.

        The order of `decode` and `batching` within a step is notional anyway. Between stalls, and other intervals that
        stand for themselves, each kind becomes one interval, in the order in which the kinds came; the sums stay.
        """
        joined: list[Interval] = []
        run: dict[IntervalKind, float] = {}

        def close_run(at: float, end: float) -> None:
            for number, (kind, seconds) in enumerate(run.items(), start=1):
                until = end if number == len(run) else min(end, at + seconds)
                if until > at:
                    joined.append(Interval(kind, at, until))
                    at = until
            run.clear()

        start = self.arrival
        for interval in self.intervals:
            if interval.kind in ALTERNATING:
                run[interval.kind] = run.get(interval.kind, 0.0) + interval.end - interval.start
                continue
            close_run(start, interval.start)
            joined.append(interval)
            start = interval.end
        close_run(start, self.end)
        self.intervals = joined

    def hand_over_tokens(self, count: int, now: float) -> None:
        """`count` output tokens were handed to the reader at `now`."""
        self.token_times.extend([now] * count)

    def seconds(self, kind: IntervalKind) -> float:
        return sum(i.end - i.start for i in self.intervals if i.kind is kind)

    def totals(self) -> dict[str, float]:
        """Seconds by kind, every kind present; they add up to `end - arrival`."""
        sums = dict.fromkeys((kind.value for kind in IntervalKind), 0.0)
        for interval in self.intervals:
            sums[interval.kind.value] += interval.end - interval.start
        return sums

    @property
    def ttft(self) -> float | None:
        return latency.ttft(self.arrival, self.token_times)

    @property
    def tpot(self) -> float | None:
        times = self.token_times
        return latency.tpot(times[0], times[-1], len(times)) if times else None

    @property
    def itl(self) -> list[float]:
        return latency.itl(self.token_times)
