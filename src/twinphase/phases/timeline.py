"""Records of steps, and timelines whose intervals partition each request's life.

All times are seconds on one monotonic clock (`time.perf_counter`). This file reads no clock;
callers pass the end of each interval. Time without a known cause is `unattributed`, so that reports
show it. `ledger.py` divides shared steps.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

from twinphase.batch import StepTimes
from twinphase.phases import latency
from twinphase.phases.work import Cost


class IntervalKind(enum.StrEnum):
    """What a request's time was spent on."""

    TOKENIZE = "tokenize"
    # Choosing a worker, messages in both directions, and work of a worker that died.
    ROUTE = "route"
    # Sending KV blocks to the decode worker, unless it overlaps with a prefill chunk.
    TRANSFER = "transfer"
    # Not running: before the first step, and after each preemption.
    QUEUE = "queue"
    # The request's own share of the steps that prefilled its prompt.
    PREFILL = "prefill"
    # The rest of those steps, and the steps between its chunks.
    PREFILL_WAIT = "prefill_wait"
    # The request's own share of prefill that was repeated after a preemption.
    RECOMPUTE = "recompute"
    # The request's own share of drafting.
    DRAFTING = "drafting"
    # The request's own share of the steps that computed its tokens.
    DECODE = "decode"
    # Time added by the request's rejected drafts.
    REJECTED = "rejected"
    # Time that other requests' decodes added to those steps.
    BATCHING = "batching"
    # Time that other requests' prefill chunks added to those steps.
    STALL = "stall"
    DETOKENIZE = "detokenize"
    SEND = "send"
    UNATTRIBUTED = "unattributed"


# Kinds that occur in every decode step.
ALTERNATING = {
    IntervalKind.DRAFTING,
    IntervalKind.DECODE,
    IntervalKind.REJECTED,
    IntervalKind.BATCHING,
    IntervalKind.DETOKENIZE,
    IntervalKind.SEND,
    IntervalKind.UNATTRIBUTED,
}


@dataclass(frozen=True)
class StepRecord:
    """One step of the engine.

    Attributes:
        start: start of scheduling, seconds.
        end: commit of the new tokens, seconds; sampling is part of the step.
        prefill_tokens, decode_tokens: number of tokens computed in each phase.
        prefill, decode: work by phase. The weights, read once per step, count as decode when any
            request decodes.
        prefill_ids: requests with a prefill chunk.
        predicted: seconds that the cost model predicted.
        times: times measured within the step.
        decode_seconds: seconds that the step would have taken without its prefill chunks; 0 without
            decodes. The rest of the step stalled the decodes.
        chunk_seconds: seconds that the step would have taken for each chunk of `prefill_ids` alone.
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
    times: StepTimes = field(default_factory=StepTimes)
    decode_seconds: float = 0.0
    chunk_seconds: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class Interval:
    """A piece of a request's time.

    Attributes:
        start, end: seconds.
        step: index of its step; -1 for none or several.
        prefill_tokens: number of other requests' prompt tokens in the step of a stall.
        caused_by: requests whose prompt tokens caused a stall.
        reason: why the first request in line was not admitted (`Batch.held_back`), for queue; why
            that worker was chosen, for route.
        other_tenants: seconds of a queue or stall interval that were spent on other tenants' work.
    """

    kind: IntervalKind
    start: float
    end: float
    step: int = -1
    prefill_tokens: int = 0
    caused_by: tuple[str, ...] = ()
    reason: str = ""
    other_tenants: float = 0.0


@dataclass
class StepTotals(StepTimes):
    """Sums over steps, with the work of all requests in them."""

    steps: int = 0
    decodes: int = 0  # Number of requests that decoded in the steps.
    seconds: float = 0.0
    linear_flops: int = 0
    attention_flops: int = 0
    bytes: int = 0

    @property
    def flops(self) -> int:
        return self.linear_flops + self.attention_flops

    @property
    def outside(self) -> float:
        """Seconds without a kernel of the model: scheduling, building inputs, sampling."""
        if self.device:
            return max(0.0, self.seconds - self.device)
        around = max(0.0, self.seconds - self.executed) if self.executed else 0.0
        return around + self.building + self.sampling

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.decodes += record.num_decodes
        self.seconds += record.seconds
        self.add_times(record.times)
        for cost in (record.prefill, record.decode):
            self.linear_flops += cost.linear_flops
            self.attention_flops += cost.attention_flops
            self.bytes += cost.bytes


@dataclass
class PhaseTotals(StepTotals):
    """Sums over the steps that a request spent in one phase."""

    tokens: int = 0  # Tokens of this request.
    # Sums over the steps without a request in the other phase.
    unmixed: StepTotals = field(default_factory=StepTotals)

    def add_decodes(self, records: Sequence[StepRecord]) -> None:
        """Add steps that each decoded one token of this request, without prefill."""
        self.tokens += len(records)
        for totals in (self, self.unmixed):
            totals.steps += len(records)
            for record in records:
                totals.decodes += record.num_decodes
                totals.seconds += record.seconds
                totals.linear_flops += record.decode.linear_flops
                totals.attention_flops += record.decode.attention_flops
                totals.bytes += record.decode.bytes


@dataclass
class RequestTimeline:
    """Intervals that partition one request's [arrival, end] without gap or overlap.

    Each interval begins at the end of the previous one.

    Attributes:
        arrival: time of the request's arrival, seconds.
        token_times: time when each output token was delivered, seconds.
    """

    arrival: float
    intervals: list[Interval] = field(default_factory=list)
    prefill: PhaseTotals = field(default_factory=PhaseTotals)
    decode: PhaseTotals = field(default_factory=PhaseTotals)
    token_times: list[float] = field(default_factory=list)
    end: float = field(init=False)  # End of the last interval.

    def __post_init__(self) -> None:
        self.end = self.intervals[-1].end if self.intervals else self.arrival

    def mark(self, kind: IntervalKind, until: float, step: int = -1, reason: str = "") -> None:
        """Attribute the time since the last interval's end, up to `until`, to `kind`."""
        if until < self.end:
            raise ValueError(f"{kind.value} would end at {until}, before {self.end}")
        if until > self.end:
            self.intervals.append(Interval(kind, self.end, until, step, reason=reason))
            self.end = until

    def extend(self, kind: IntervalKind, until: float, reason: str = "") -> None:
        """Mark an interval, or extend the last one if it has the same kind and reason."""
        last = self.intervals[-1] if self.intervals else None
        if last is not None and last.kind is kind and last.reason == reason and until > self.end:
            last.end = self.end = until
        else:
            self.mark(kind, until, reason=reason)

    def queue_until(self, until: float, reason: str, other_tenants: float = 0.0) -> None:
        """The request queued; `reason` held the first request in line back for most of that time.

        `other_tenants` is the seconds of it that were spent on other tenants' work.
        """
        waited = until - self.end
        self.extend(IntervalKind.QUEUE, until, reason)
        if waited > 0:
            self.intervals[-1].other_tenants += min(waited, max(0.0, other_tenants))

    def settle(self, until: float) -> None:
        """Attribute the engine's bookkeeping after the last step to that step."""
        if until > self.end and self.intervals:
            self.intervals[-1].end = self.end = until

    def text_until(self, until: float, alone: bool) -> None:
        """Attribute text processing up to `until` to this request if `alone`, else to others."""
        if until <= self.end:
            return
        if alone:
            self.mark(IntervalKind.SEND, until)
        else:
            self.mark(
                IntervalKind.BATCHING if self.decode.steps else IntervalKind.PREFILL_WAIT, until
            )

    def reach_step(self, start: float) -> None:
        """Mark the time since the last interval as unattributed."""
        if start > self.end:
            self.extend(IntervalKind.UNATTRIBUTED, start)

    def add_prefill(
        self, record: StepRecord, num_tokens: int, own: float, again: float = 0.0
    ) -> None:
        """Add a step that computed a chunk of `num_tokens` of the prompt.

        The request's share of the step is `own` seconds, `again` of them for tokens computed before
        a preemption.
        """
        self._begin(record, self.prefill, num_tokens)
        for kind, share in ((IntervalKind.RECOMPUTE, again), (IntervalKind.PREFILL, own)):
            self.mark(kind, min(record.end, max(self.end, record.start + share)), record.index)
        self.mark(IntervalKind.PREFILL_WAIT, record.end, record.index)

    def add_decode(
        self,
        record: StepRecord,
        num_tokens: int,
        own: float,
        decodes: float,
        others: float = 0.0,
        drafting: float = 0.0,
        rejected: float = 0.0,
    ) -> None:
        """Add a step that decoded `num_tokens`; `own` seconds of the step are the request's share.

        `drafting` seconds of the share were spent on drafting, and `rejected` seconds on rejected
        drafts. Without its prefill chunks the step would have taken `decodes` seconds; the fraction
        `others` of the chunks' tokens belongs to other tenants.
        """
        self._begin(record, self.decode, num_tokens)
        self.mark_decode(record, own, decodes, others, drafting, rejected)

    def mark_decode(
        self,
        record: StepRecord,
        own: float,
        decodes: float,
        others: float = 0.0,
        drafting: float = 0.0,
        rejected: float = 0.0,
    ) -> None:
        """Mark the intervals of `add_decode` without adding to its sums."""
        for kind, seconds in (
            (IntervalKind.DRAFTING, drafting),
            (IntervalKind.DECODE, own - rejected),
            (IntervalKind.REJECTED, own),
            (IntervalKind.BATCHING, decodes),
        ):
            until = min(record.end, record.start + seconds)
            if until > self.end:  # Two of the four intervals are nearly always empty.
                self.mark(kind, until, record.index)
        if record.end > self.end:
            stall = Interval(
                IntervalKind.STALL,
                self.end,
                record.end,
                record.index,
                record.prefill_tokens,
                record.prefill_ids,
                other_tenants=others * (record.end - self.end),
            )
            self.intervals.append(stall)
            self.end = record.end

    def skip_step(self, record: StepRecord) -> None:
        """Add a step that computed only other requests' chunks."""
        if record.end > self.end:
            self.extend(IntervalKind.PREFILL_WAIT, record.end)

    def _begin(self, record: StepRecord, totals: PhaseTotals, num_tokens: int) -> None:
        totals.tokens += num_tokens
        totals.add(record)
        if not (record.prefill_ids and record.num_decodes):
            totals.unmixed.add(record)

    def copy(self) -> RequestTimeline:
        """An independent copy, safe while another thread extends this timeline."""
        intervals = [replace(interval) for interval in self.intervals[:]]
        return RequestTimeline(
            self.arrival,
            intervals,
            deepcopy(self.prefill),
            deepcopy(self.decode),
            list(self.token_times),
        )

    def compact(self) -> None:
        """Merge the intervals that decode steps alternate between, to keep long timelines short.

        The order of `decode` and `batching` within a step has no meaning. Between intervals of
        other kinds, such as stalls, each kind becomes one interval, in the order of the kinds'
        first occurrence; the sums do not change.
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
        """Note that `count` output tokens were delivered to the reader at `now`."""
        self.token_times.extend([now] * count)

    def seconds(self, kind: IntervalKind) -> float:
        return sum(i.end - i.start for i in self.intervals if i.kind is kind)

    def totals(self) -> dict[str, float]:
        """Seconds of every kind; they add up to `end - arrival`."""
        sums = dict.fromkeys((kind.value for kind in IntervalKind), 0.0)
        for interval in self.intervals:
            sums[interval.kind.value] += interval.end - interval.start
        return sums

    @property
    def ttft(self) -> float | None:
        return latency.ttft(self.arrival, self.token_times[0]) if self.token_times else None

    @property
    def tpot(self) -> float | None:
        times = self.token_times
        return latency.tpot(times[0], times[-1], len(times)) if times else None

    @property
    def itl(self) -> list[float]:
        return latency.itl(self.token_times)
