"""Reports of requests' times: `timings`, `Server-Timing`, and finished timelines.

Reported times are in milliseconds, as in llama.cpp's `timings`, which these extend.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from time import perf_counter
from typing import Any

import msgspec

from twinphase.errors import RequestNotFoundError
from twinphase.explain.prompt_costs import divide, part_at
from twinphase.phases.cost import CostModel
from twinphase.phases.record import RequestRecord
from twinphase.phases.report import DECODE_KINDS, PREFILL_KINDS
from twinphase.phases.timeline import IntervalKind, RequestTimeline
from twinphase.phases.work import ModelShape
from twinphase.request import RequestCounts
from twinphase.server.answers import Choice

MAX_LISTED_FINISHED = 100


def timings(choice: Choice, shape: ModelShape | None) -> dict[str, Any]:
    """The times of one answer so far; `shape` is the model's.

    Beside the fields of `request_timings`, `ttfo_ms` is the time from the arrival to the first
    token after the thinking part.
    """
    timeline = choice.record.timeline
    request = choice.record.counts
    found = request_timings(timeline, request)
    if choice.job.reader.tags is not None:
        answer = timeline.token_times[choice.num_reasoning_tokens :]
        found["ttfo_ms"] = _ms(answer[0] - timeline.arrival) if answer else None
    runs = choice.prompt.runs
    miss = request.prefix_miss
    if miss is not None:
        part = part_at(runs, miss.token_index)
        found["prefix_miss"] = {"reason": miss.reason.value, "token_index": miss.token_index}
        found["prefix_miss"] |= {"part": part.name} if part else {}
        found["prefix_miss"] |= {"num_known": miss.num_known} if miss.num_known else {}
    prices = choice.record.prices
    if runs and prices and shape is not None:
        costs = CostModel(prices, shape.windowed_share)
        totals = timeline.totals()
        prefill = sum(totals[kind] for kind in PREFILL_KINDS)
        reports = divide(runs, request.num_cached_tokens, prefill, costs, shape)
        found["prompt_parts"] = [
            {
                "kind": report.part.kind,
                "name": report.part.name,
                "tokens": report.tokens,
                "cached_tokens": report.cached_tokens,
                "computed_tokens": report.computed_tokens,
                "prefill_share": round(report.prefill_share, 6),
                "prefill_ms": _ms(report.prefill_seconds),
                "kv_bytes": report.kv_bytes,
            }
            for report in reports
        ]
    return found


def request_timings(timeline: RequestTimeline, request: RequestCounts) -> dict[str, Any]:
    """The times of a request so far.

    `ledger_ms` adds up to `e2e_ms`. From `cache_n` on, the fields are llama.cpp's. `ttft_ms` is
    first token delivered - arrival; `tpot_ms` is (last token - first token) / (output tokens - 1).
    """
    num_prompt = request.num_prompt_tokens
    num_output = request.num_output_tokens
    totals = timeline.totals()
    prefill, decode = (
        sum(totals[kind] for kind in kinds) for kinds in (PREFILL_KINDS, DECODE_KINDS)
    )
    computed = num_prompt - request.num_cached_tokens
    return {
        "cache_n": request.num_cached_tokens,
        "prompt_n": computed,
        "prompt_ms": _ms(prefill),
        "prompt_per_token_ms": _ms(prefill / computed) if computed else None,
        "prompt_per_second": round(computed / prefill, 3) if prefill else None,
        "predicted_n": num_output,
        "predicted_ms": _ms(decode),
        "predicted_per_token_ms": _ms(decode / timeline.decode.tokens)
        if timeline.decode.tokens
        else None,
        "predicted_per_second": round(timeline.decode.tokens / decode, 3) if decode else None,
        **(
            {
                "draft_n": request.num_draft_tokens,
                "draft_n_accepted": request.num_accepted_draft_tokens,
            }
            if request.num_draft_tokens
            else {}
        ),
        **_latencies(timeline),
        "ledger_ms": {kind: _ms(seconds) for kind, seconds in totals.items()},
        "num_preemptions": request.num_preemptions,
        "num_recomputed_tokens": request.num_recomputed_tokens,
    }


def spec_decode_metrics(request: RequestCounts, level: str) -> dict[str, Any]:
    """One answer's drafted and accepted tokens, under vLLM's names; empty at the level "none".

    Histograms count steps by their number of accepted tokens.
    """
    if level == "none":
        return {}
    steps = request.draft_steps
    drafted, accepted = (sum(step[part] for step in steps) for part in (0, 1))
    lengths = sorted({length for length, _ in steps})
    found: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / len(steps) if steps else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": _histogram([right for _, right in steps]),
        "acceptance_histogram_by_draft_length": {
            str(length): _histogram([right for count, right in steps if count == length])
            for length in lengths
        },
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
    }
    if level == "detailed":
        found["per_step_drafted"], found["per_step_accepted"] = (
            [step[part] for step in steps] for part in (0, 1)
        )
    return {"metrics": {"speculative_decoding": found}}


def _histogram(counts: Sequence[int]) -> list[int]:
    found = [0] * (max(counts, default=-1) + 1)
    for count in counts:
        found[count] += 1
    return found


def server_timing(timeline: RequestTimeline) -> str:
    """The Server-Timing header (https://www.w3.org/TR/server-timing) of all intervals."""
    return ", ".join(
        f"{kind};dur={_ms(seconds)}" for kind, seconds in timeline.totals().items() if seconds > 0
    )


class Timelines:
    """The running requests and the last finished ones, by id."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Tenant, list entry and serialized record of finished requests.
        self._finished: OrderedDict[str, tuple[str, dict[str, Any], bytes]] = OrderedDict()
        self._running: dict[str, Choice] = {}

    def begin(self, choice: Choice) -> None:
        self._running[choice.record.request_id] = choice

    def end(self, choice: Choice) -> None:
        """Note that the request has ended, finished or not."""
        record = choice.record
        self._running.pop(record.request_id, None)
        if not record.has_ended:
            return
        counts = record.counts
        miss = counts.prefix_miss
        part = part_at(choice.prompt.runs, miss.token_index) if miss is not None else None
        if miss is not None and part is not None:
            counts.prefix_miss = replace(miss, part=part.kind)
        record.timeline.mark(IntervalKind.SEND, max(perf_counter(), record.timeline.end))
        totals = record.timeline.totals()
        summary = {
            "id": record.request_id,
            "finished": True,
            "prompt_tokens": counts.num_prompt_tokens,
            "output_tokens": counts.num_output_tokens,
            **_latencies(record.timeline),
            "dominant": max(totals, key=totals.__getitem__),
        }
        # Sampling parameters and draft steps may be large.
        counts = replace(counts, sampling_params=None, draft_steps=[])
        packed = msgspec.msgpack.encode(replace(record, counts=counts))
        self._finished[record.request_id] = record.tenant, summary, packed
        while len(self._finished) > self._limit:
            self._finished.popitem(last=False)

    def running(self, request_id: str) -> Choice | None:
        return self._running.get(request_id)

    def phases(self, num_waiting: int) -> dict[str, int]:
        """Numbers of running requests by phase; `num_waiting` of them are queued."""
        decode = sum(bool(choice.stream.transcript.token_ids) for choice in self._running.values())
        waiting = min(num_waiting, len(self._running) - decode)
        prefill = len(self._running) - decode - waiting
        return {"waiting": waiting, "prefill": prefill, "decode": decode}

    def newest(self, tenant: str) -> list[dict[str, Any]]:
        """Summaries of the tenant's requests: running ones, then finished ones, newest first."""
        running = [
            {"id": name, "finished": False}
            for name, choice in reversed(self._running.items())
            if choice.record.tenant == tenant
        ]
        finished = (
            summary for owner, summary, _ in reversed(self._finished.values()) if owner == tenant
        )
        return [*running, *islice(finished, MAX_LISTED_FINISHED)]

    def find(self, tenant: str, request_id: str) -> RequestRecord:
        """A tenant's request, running or finished.

        Raises:
            RequestNotFoundError: the request is unknown, or belongs to another tenant.
        """
        # For a reply with several answers, this finds the first answer.
        for name in (request_id, f"{request_id}-0"):
            record = self._running[name].record if name in self._running else None
            if name in self._finished:
                record = msgspec.msgpack.decode(self._finished[name][-1], type=RequestRecord)
            if record is not None and record.tenant == tenant:
                return record
        raise RequestNotFoundError(
            f"No request {request_id[:80]!r} is known.",
            f"The last {self._limit} finished ones are kept.",
        )


def timeline_json(record: RequestRecord) -> dict[str, Any]:
    """A request's timeline as plain values; times in milliseconds from the request's arrival."""
    timeline = record.timeline

    def since(moment: float) -> float:
        return round(1e3 * (moment - timeline.arrival), 3)

    intervals = []
    for interval in timeline.intervals:
        entry: dict[str, Any] = {"kind": interval.kind.value}
        entry |= {"start_ms": since(interval.start), "end_ms": since(interval.end)}
        if interval.step >= 0:
            entry["step"] = interval.step
        if interval.kind is IntervalKind.STALL:
            entry["prefill_tokens"] = interval.prefill_tokens
        if interval.reason:
            entry["reason"] = interval.reason
        if interval.other_tenants > 0:
            entry["other_tenants_ms"] = _ms(interval.other_tenants)
        intervals.append(entry)
    return {
        "id": record.request_id,
        "finished": record.has_ended,
        "request": {
            name: value
            for name, value in msgspec.to_builtins(record.counts).items()
            if name not in ("request_id", "sampling_params", "draft_steps")
        },
        **_latencies(timeline),
        "ledger_ms": {kind: _ms(seconds) for kind, seconds in timeline.totals().items()},
        "intervals": intervals,
        "token_times_ms": [since(moment) for moment in timeline.token_times],
        "prefill": asdict(timeline.prefill),
        "decode": asdict(timeline.decode),
        "note": "Shares of a step that several requests had come from the measured cost model.",
    }


def _latencies(timeline: RequestTimeline) -> dict[str, float | None]:
    return {
        "ttft_ms": _ms(timeline.ttft),
        "tpot_ms": _ms(timeline.tpot),
        "e2e_ms": _ms(timeline.end - timeline.arrival),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
