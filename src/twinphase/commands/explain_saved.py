"""Reads evidence from a saved ledger.

Four forms are accepted: the output of `twinphase run --json` or of `GET
/v1/requests/{id}/timeline`, an answer's body (or last chunk) with `timings`, and the `timings`
alone. Facts that a form lacks stay unknown. `explain_source.py` opens files, and
`twinphase/explain/loads.py` reads results of loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec

from twinphase.errors import TwinphaseError
from twinphase.explain.evidence import Evidence
from twinphase.explain.waterfall import ROUNDING, TOLERANCE, WaterfallError, check_sum
from twinphase.outcome import PrefixMiss
from twinphase.phases.hardware import Efficiency
from twinphase.phases.timeline import Interval, IntervalKind, PhaseTotals, RequestTimeline
from twinphase.request import RequestCounts

ACCEPTED = (
    "Give what `twinphase run --json` printed, what GET /v1/requests/{id}/timeline or /explain "
    "gave, an answer's body "
    "with `timings`, or a load's result.json."
)
LARGEST_NUMBER = 1e18
MS = 1e-3
# Sums have no order; this is the usual order of the kinds.
ORDER = (
    IntervalKind.TOKENIZE,
    IntervalKind.ROUTE,
    IntervalKind.QUEUE,
    IntervalKind.PREFILL_WAIT,
    IntervalKind.PREFILL,
    IntervalKind.TRANSFER,
    IntervalKind.DETOKENIZE,
    IntervalKind.SEND,
    IntervalKind.UNATTRIBUTED,
    IntervalKind.RECOMPUTE,
    IntervalKind.DRAFTING,
    IntervalKind.DECODE,
    IntervalKind.REJECTED,
    IntervalKind.BATCHING,
    IntervalKind.STALL,
)

Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
Bound = Literal["compute", "memory", "overhead", "kernels", "contention", "ranks", "unknown"]


class SavedLedgerError(TwinphaseError):
    """The JSON is not a ledger, or is damaged."""

    exit_code = 2


def read_ledger(found: Any) -> Evidence:
    """The evidence in the JSON of a file.

    Raises:
        SavedLedgerError: it has none of these forms, or a number in it is impossible.
        WaterfallError: its parts do not add up to its whole.
    """
    if not isinstance(found, Mapping):
        raise SavedLedgerError(
            f"The file holds a JSON {type(found).__name__}, not an object.", ACCEPTED
        )
    try:
        check_numbers(found)
        if "intervals" in found:
            return _of_timeline(found)
        if isinstance(found.get("timing"), Mapping):
            return _of_run(found)
        return _of_timings(found if "ledger_ms" in found else _timings_of(found))
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
    ) as error:  # msgspec's error is a ValueError.
        raise SavedLedgerError(
            f"The ledger is damaged: {type(error).__name__}: {error}.", ACCEPTED
        ) from None


def check_numbers(found: Any) -> None:
    """Refuse numbers that are NaN (which Python writes to JSON), infinite or too large."""
    rest = [found]
    while rest:
        value = rest.pop()
        if isinstance(value, (dict, list)):
            rest += value.values() if isinstance(value, dict) else value
        elif isinstance(value, (int, float)) and not abs(value) <= LARGEST_NUMBER:
            raise ValueError("a number in it is NaN, infinite or too large")


def _timings_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The timings of a body; with several answers, those of the first one."""
    choices = body.get("choices")
    bodies = [body, *(choices if isinstance(choices, list) else [])]
    timings = next(
        (b["timings"] for b in bodies if isinstance(b, Mapping) and b.get("timings")), None
    )
    if timings is None:
        raise SavedLedgerError("The file is JSON, but has no ledger of a request.", ACCEPTED)
    if not isinstance(timings, Mapping) or "ledger_ms" not in timings:
        raise SavedLedgerError(
            "Its `timings` have no `ledger_ms`: they come from another server.", ACCEPTED
        )
    return timings


def _seconds(value: Any, unit: float = 1.0) -> float:
    seconds = unit * msgspec.convert(value, float)
    if seconds < -ROUNDING:
        raise ValueError(f"{seconds} seconds is negative")
    return max(0.0, seconds)


def _maybe(value: Any, unit: float = 1.0) -> float | None:
    return None if value is None else _seconds(value, unit)


def _count(value: Any) -> int:
    return msgspec.convert(value, Tokens)


def _request(
    name: Any, num_prompt: int, num_output: int, facts: Mapping[str, Any]
) -> RequestCounts:
    cached, preemptions, recomputed = (
        _count(facts.get(fact, 0))
        for fact in ("num_cached_tokens", "num_preemptions", "num_recomputed_tokens")
    )
    miss = msgspec.convert(facts.get("prefix_miss"), PrefixMiss | None)
    if miss is not None and min(miss.token_index, miss.num_known) < 0:
        raise ValueError("the prefix miss has a negative number")
    lengths = (num_prompt, num_output, min(num_prompt, cached))
    return RequestCounts(str(name or "saved"), *lengths, miss, preemptions, recomputed)


def _of_sums(
    seconds: Mapping[str, float], ttft: float | None, tpot: float | None, request: RequestCounts
) -> RequestTimeline:
    """A timeline of sums, with the times of its first and last token."""
    timeline = RequestTimeline(0.0)
    num_output = request.num_output_tokens
    unknown = set(seconds) - {kind.value for kind in IntervalKind}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} is not a kind of interval")
    for kind in ORDER:
        timeline.mark(kind, timeline.end + seconds.get(kind.value, 0.0))
    if ttft is not None and num_output:
        timeline.token_times = [min(ttft, timeline.end)]
        if num_output > 1 and tpot is not None:
            timeline.token_times += [ttft + tpot * (num_output - 1)] * (num_output - 1)
    timeline.prefill.tokens = request.num_prompt_tokens - request.num_cached_tokens
    timeline.decode.tokens = max(0, num_output - 1)
    return timeline


def _of_timings(timings: Mapping[str, Any]) -> Evidence:
    cached, computed, num_output = (
        _count(timings[name]) for name in ("cache_n", "prompt_n", "predicted_n")
    )
    request = _request(
        None, cached + computed, num_output, {**timings, "num_cached_tokens": cached}
    )
    seconds = {str(kind): _seconds(spent, MS) for kind, spent in timings["ledger_ms"].items()}
    ttft, tpot = (_maybe(timings.get(name), MS) for name in ("ttft_ms", "tpot_ms"))
    timeline = _of_sums(seconds, ttft, tpot, request)
    check_sum(timeline.end, _seconds(timings["e2e_ms"], MS), len(IntervalKind))
    return Evidence(request, timeline, detailed=False)


def _of_timeline(found: Mapping[str, Any]) -> Evidence:
    timeline = RequestTimeline(0.0)
    for entry in found["intervals"]:
        start = _seconds(entry["start_ms"], MS)
        end = _seconds(entry["end_ms"], MS)
        if abs(start - timeline.end) > ROUNDING or end < start:
            raise WaterfallError(
                f"An interval begins at {1e3 * start:.3f} ms, the one before it ended at "
                f"{1e3 * timeline.end:.3f} ms.",
                "The ledger is damaged, or was cut.",
            )
        facts = {
            name: entry[name]
            for name in ("kind", "step", "prefill_tokens", "reason")
            if name in entry
        }
        timeline.intervals.append(
            msgspec.convert({**facts, "start": timeline.end, "end": end}, Interval)
        )
        timeline.end = end
    check_sum(timeline.end, _seconds(found["e2e_ms"], MS), len(IntervalKind))
    timeline.token_times = [_seconds(moment, MS) for moment in found.get("token_times_ms", [])]
    late = max(len(IntervalKind) * ROUNDING, TOLERANCE * timeline.end)
    for before, after in pairwise([*timeline.token_times, timeline.end + late]):
        if after < before:
            raise ValueError(
                f"a token came at {1e3 * before:.3f} ms, what follows it at {1e3 * after:.3f} ms"
            )
    timeline.prefill, timeline.decode = (
        msgspec.convert(found.get(phase, {}), PhaseTotals) for phase in ("prefill", "decode")
    )
    for *sums, unmixed in map(astuple, (timeline.prefill, timeline.decode)):
        if min(*sums, *unmixed) < 0:
            raise ValueError("a sum over its steps is negative")
    facts = found.get("request", {})
    num_prompt = _count(facts.get("num_prompt_tokens", timeline.prefill.tokens))
    return Evidence(
        _request(found.get("id"), num_prompt, len(timeline.token_times), facts), timeline
    )


def _of_run(found: Mapping[str, Any]) -> Evidence:
    timing = found["timing"]
    usage = found["usage"]
    known = {}
    rows = {
        str(row["name"]): _seconds(row["seconds"]) for row in (*timing["rest"], *timing["phases"])
    }
    kinds = {kind.value for kind in IntervalKind}
    before = {name: spent for name, spent in rows.items() if name not in kinds}
    facts = {
        "num_cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    }
    request = _request(
        None, _count(usage["prompt_tokens"]), _count(usage["completion_tokens"]), facts
    )
    ledger = {name: spent for name, spent in rows.items() if name in kinds}
    timeline = _of_sums(ledger, _maybe(timing.get("ttft")), _maybe(timing.get("tpot")), request)
    check_sum(
        timeline.end, _seconds(timing["wall_seconds"]) - sum(before.values()), len(IntervalKind)
    )
    for row in timing["phases"]:
        value, other = (_maybe(row[name]) for name in ("efficiency", "other_efficiency"))
        both = {"MFU": (value, other), "MBU": (other, value)}
        known[str(row["name"])] = Efficiency(
            msgspec.convert(row["bound"], Bound), *both[row["metric"]]
        )
    return Evidence(request, timeline, before=before, known=known, detailed=False)
