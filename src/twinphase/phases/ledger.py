"""Divides each step's time among the requests that it affected, by the cost model.

A step that took T and for which the model predicted P is divided as the model divides P,
scaled by T / P:

    drafting      its part of the time that guessing the next tokens took
    decode        what the step would have taken with this request alone
    rejected      what its wrong guesses add to that
    batching      what the other decodes add to that
    stall         what the prefill chunks add to all decodes
    prefill       what the step would have taken with this chunk alone; the rest of it is
    `prefill_wait`

A request that is alone in its step gets all of its time. The engine reads the clocks, and
`explain/` writes the sentences.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from twinphase.batch import Batch, ScheduledRequest, StepOutput, StepTimes, StepWork
from twinphase.phases.cost import CostModel
from twinphase.phases.timeline import IntervalKind, RequestTimeline, StepRecord
from twinphase.phases.work import Cost, ModelShape, step_cost, weight_bytes_read

KEPT_RECORDS = 4096


@dataclass(frozen=True)
class _Wait:
    """Values of the ledger's sums at the moment when a request began to queue."""

    held_back: dict[str, float]
    work: float
    own_work: float  # Work of the request's own tenant.


class Ledger:
    """The timelines of unfinished requests, and the records of the last steps.

    Attributes:
        records: records of the last steps, oldest first.
        seconds: time of finished requests by kind of interval, including `unattributed`.
        num_steps: number of steps so far.
        settled: time when the records of the last step were complete, seconds.
    """

    def __init__(self, shape: ModelShape, cost_model: CostModel) -> None:
        self.shape = shape
        self.timelines: dict[str, RequestTimeline] = {}
        self.records: deque[StepRecord] = deque(maxlen=KEPT_RECORDS)
        self.seconds = dict.fromkeys((kind.value for kind in IntervalKind), 0.0)
        self.num_steps = 0
        self._cost_model = cost_model
        self.settled = 0.0
        self._running: dict[str, RequestTimeline] = {}
        # Seconds by what held the first request in line back, in total and at the time when each
        # request began to wait. So a step costs no time per waiting request.
        self._held_back: dict[str, float] = {}
        self._work: defaultdict[str, float] = defaultdict(float)  # Seconds of steps by tenant.
        self._tenants: dict[str, str] = {}  # Tenants of unfinished requests.
        self._waits: dict[str, _Wait] = {}

    def open(self, request_id: str, timeline: RequestTimeline, tenant: str = "") -> None:
        """Begin the ledger of a request."""
        self.timelines[request_id] = timeline
        self._tenants[request_id] = tenant
        self._begins_to_wait(request_id)

    def close(self, request_id: str, now: float) -> None:
        """End the ledger of a request; from here on its timeline belongs to its reader."""
        timeline = self.timelines.pop(request_id, None)
        if timeline is None:
            return
        if self._running.pop(request_id, None) is None:
            timeline.queue_until(max(now, timeline.end), *self._waited_for(request_id))
        del self._tenants[request_id]
        for kind, seconds in timeline.totals().items():
            self.seconds[kind] += seconds

    def add_step(
        self,
        batch: Batch,
        output: StepOutput,
        start: float,
        end: float,
        work: Mapping[str, float],
    ) -> StepRecord:
        """Add a step from `start` to `end` (seconds) to the timelines of the running requests.

        `work` is each tenant's share of the step, in any unit.
        """
        settled = min(self.settled, start)
        for timeline in self._running.values():
            timeline.settle(settled)
            timeline.reach_step(start)
        for request_id in batch.preempted:
            if self._running.pop(request_id, None) is not None:
                self._begins_to_wait(request_id)
        record = self._record(batch, start, end, output.times)
        self.records.append(record)
        self.num_steps += 1
        if batch.held_back:
            self._held_back[batch.held_back] = (
                self._held_back.get(batch.held_back, 0.0) + record.seconds
            )
        self._let_in(batch, record)
        whole = sum(work.values()) or 1.0
        for tenant, part in work.items():
            self._work[tenant] += record.seconds * part / whole
        self._divide(batch, record, output)
        if len(self._running) > len(batch.decodes) + len(batch.prefills):
            for timeline in self._running.values():
                timeline.skip_step(record)  # This returns at once if the step was written already.
        return record

    def add_decodes(
        self,
        batch: Batch,
        works: Sequence[StepWork],
        starts: Sequence[float],
        ends: Sequence[float],
        gap: float,
    ) -> None:
        """Add steps that each decoded one token of every request in `batch`, and settle them.

        It is equivalent to `add_step` and `settle` for each step, for the requests of the step
        before.

        Args:
            batch: batch of the step before them.
            works: work of each step.
            starts: start of each step, seconds.
            ends: end of each step, seconds.
            gap: seconds between the end of a step and the completion of its records.
        """
        count = len(batch.decodes)
        records = list[StepRecord]()
        first = works[0]
        weights = Cost(bytes=weight_bytes_read(self.shape, first.rows, first.logits))
        for work, start, end in zip(works, starts, ends, strict=True):
            record = StepRecord(
                self.num_steps,
                start,
                end,
                prefill_tokens=0,
                decode_tokens=work.rows,
                prefill=Cost(),
                decode=step_cost(self.shape, work) + weights,
                num_decodes=count,
                predicted=self._cost_model.seconds(work),
                decode_seconds=end - start,
            )
            records.append(record)
            self.num_steps += 1
            self._work[batch.decodes[0].tenant] += record.seconds
        self.records.extend(records)
        predict = self._cost_model.seconds
        fixed = predict(StepWork.of_decodes(1, 0))
        next_token = predict(StepWork.of_decodes(1, 1, self.shape.window))
        for share in batch.decodes:
            timeline = self.timelines[share.request_id]
            timeline.decode.add_decodes(records)
            settled = self.settled
            for later, record in enumerate(records, 2):
                seconds = record.seconds
                scale = seconds / record.predicted if record.predicted > 0 else 0.0
                own = fixed * scale
                per_token = next_token * scale - own
                own = own + self.shape.mean_attended(share.num_computed_tokens + later) * per_token
                timeline.settle(min(settled, record.start))
                timeline.reach_step(record.start)
                own = seconds if count == 1 or own > seconds else own
                timeline.mark_decode(record, own, seconds)
                settled = record.end + gap
        self.settle(ends[-1] + gap)

    def settle(self, now: float) -> None:
        """Note that all records of the last step are complete."""
        self.settled = now

    def begin_text(self, timeline: RequestTimeline, now: float, alone: bool) -> None:
        """The front end begins to process a request's text.

        The time since its step was bookkeeping, which belongs to the step, and then others' text,
        unless the request was `alone` in the step.
        """
        timeline.settle(min(self.settled, now))
        if not alone:
            timeline.text_until(now, alone=False)
        timeline.reach_step(now)

    def end_text(self, now: float, alone: bool) -> None:
        """The front end has delivered a request's text of the step; `alone` as in `begin_text`."""
        settled = min(self.settled, now)
        for timeline in self._running.values():
            timeline.settle(settled)
            timeline.text_until(now, alone)

    def _let_in(self, batch: Batch, record: StepRecord) -> None:
        for share in batch.scheduled:
            timeline = self.timelines.get(share.request_id)
            if timeline is not None and share.request_id not in self._running:
                timeline.queue_until(
                    max(record.start, timeline.end), *self._waited_for(share.request_id)
                )
                self._running[share.request_id] = timeline

    def _begins_to_wait(self, request_id: str) -> None:
        own = self._work[self._tenants[request_id]]
        self._waits[request_id] = _Wait(dict(self._held_back), sum(self._work.values()), own)

    def _waited_for(self, request_id: str) -> tuple[str, float]:
        """What held the first request in line back for most of this request's wait; "" if nothing.

        Also returns the seconds of the wait that were spent on other tenants' work.
        """
        wait = self._waits.pop(request_id, None)
        if wait is None:
            return "", 0.0
        waited = {
            reason: seconds - wait.held_back.get(reason, 0.0)
            for reason, seconds in self._held_back.items()
        }
        reason = max(waited, key=lambda name: waited[name], default="")
        own = self._work[self._tenants[request_id]] - wait.own_work
        return reason if waited.get(reason, 0.0) > 0 else "", sum(
            self._work.values()
        ) - wait.work - own

    def _divide(self, batch: Batch, record: StepRecord, output: StepOutput) -> None:
        seconds = record.seconds
        alone_in_step = len(batch.decodes) + len(batch.prefills) == 1
        predict = self._cost_model.seconds
        window = self.shape.window
        scale = (
            (seconds - record.times.drafting) / record.predicted if record.predicted > 0 else 0.0
        )
        decodes = record.decode_seconds
        # The time of a lone decode is linear in the number of tokens in its context.
        fixed = predict(StepWork.of_decodes(1, 0)) * scale
        per_token = predict(StepWork.of_decodes(1, 1, window)) * scale - fixed
        rows: Counter[str] = Counter()
        for share in batch.prefills:
            rows[share.tenant] += len(share.token_ids)
        drafting = record.times.drafting / max(1, len(batch.decodes))
        for share in batch.decodes:
            context = self.shape.mean_attended(share.num_computed_tokens + 1)
            own = drafting + fixed + context * per_token
            wrong = 0
            rejected = 0.0
            if share.num_drafts:
                wrong = share.num_drafts - output.num_accepted(share)
                whole, right = (
                    predict(self._work_without(share, count)) * scale for count in (0, wrong)
                )
                own = drafting + whole
                rejected = max(0.0, whole - right)
            if alone_in_step or own > decodes:
                known = seconds if alone_in_step else decodes
                rejected = rejected * known / own if own > 0 else 0.0
                own = known
            timeline = self.timelines.get(share.request_id)
            if timeline is not None:
                others = 1 - rows[share.tenant] / rows.total() if rows else 0.0
                timeline.add_decode(
                    record,
                    num_tokens=len(share.token_ids) - wrong,
                    own=own,
                    decodes=decodes,
                    others=others,
                    drafting=drafting,
                    rejected=rejected,
                )
        for share, own in zip(batch.prefills, record.chunk_seconds, strict=True):
            timeline = self.timelines.get(share.request_id)
            if timeline is None:
                continue
            count = len(share.token_ids)
            again = min(count, max(0, share.most_computed_tokens - share.num_computed_tokens))
            timeline.add_prefill(record, count, own, own * again / count)

    def _work_without(self, share: ScheduledRequest, num_rows: int) -> StepWork:
        """The work of a decode alone, without its last `num_rows` rows."""
        kept = share.token_ids[: len(share.token_ids) - num_rows]
        return Batch([replace(share, token_ids=kept)], [], window=self.shape.window).decode_work

    def _record(self, batch: Batch, start: float, end: float, times: StepTimes) -> StepRecord:
        work = batch.work
        weights = Cost(bytes=weight_bytes_read(self.shape, work.rows, work.logits))
        prefill, decode = (
            step_cost(self.shape, part) for part in (batch.prefill_work, batch.decode_work)
        )
        if batch.decodes:
            decode += weights
        else:
            prefill += weights
        predicted = self._cost_model.seconds(work)
        parts = step_parts(
            predicted_parts(self._cost_model, batch), predicted, end - start, times.drafting
        )
        return StepRecord(
            self.num_steps,
            start,
            end,
            prefill_tokens=batch.prefill_work.rows,
            decode_tokens=batch.decode_work.rows,
            prefill=prefill,
            decode=decode,
            prefill_ids=tuple(share.request_id for share in batch.prefills),
            num_decodes=len(batch.decodes),
            predicted=predicted,
            times=times,
            decode_seconds=parts[0],
            chunk_seconds=parts[1],
        )


Parts = tuple[float, tuple[float, ...]]


def predicted_parts(cost_model: CostModel, batch: Batch) -> Parts:
    """Predicted seconds of a step's decodes alone, and of each of its chunks alone.

    The first is 0 without decodes; without chunks there is nothing to divide.
    """
    if not batch.prefills:
        return 0.0, ()
    chunks = (
        StepWork.of_chunk(
            share.num_computed_tokens, len(share.token_ids), share.num_logits, batch.window
        )
        for share in batch.prefills
    )
    decodes = cost_model.seconds(batch.decode_work) if batch.decodes else 0.0
    return decodes, tuple(map(cost_model.seconds, chunks))


def step_parts(parts: Parts, predicted: float, seconds: float, drafting: float) -> Parts:
    """Seconds that a step of `seconds` would have taken for its decodes or each chunk alone."""
    decodes, chunks = parts
    if not chunks:
        return seconds, ()
    if not decodes and len(chunks) == 1:
        return 0.0, (seconds,)
    scale = (seconds - drafting) / predicted if predicted > 0 else 0.0
    alone = min(seconds, drafting + decodes * scale) if decodes else 0.0
    return alone, tuple(min(seconds, chunk * scale) for chunk in chunks)
