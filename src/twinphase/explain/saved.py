"""A ledger that was written to a file, read back as evidence.

Four forms are taken: what `twinphase run --json` printed, what `GET /v1/requests/{id}/timeline` gave, an answer's body
(or its last chunk) with `timings`, and the `timings` alone. What a form does not say stays unknown. Not for opening
files, nor for results of loads (`client_loads.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from reprlib import repr
from typing import Any

from twinphase.errors import TwinphaseError
from twinphase.explain.evidence import Efficiency, Evidence
from twinphase.explain.waterfall import ROUNDING, TOLERANCE, WaterfallError
from twinphase.phases.timeline import Interval, IntervalKind, PhaseTotals, RequestTimeline
from twinphase.request import MissReason, PrefixMiss, RequestCounts

__all__ = ["ACCEPTED", "SavedLedgerError", "read_ledger"]

ACCEPTED = (
    "Give what `twinphase run --json` printed, what GET /v1/requests/{id}/timeline or /explain gave, an answer's body "
    "with `timings`, or a load's result.json."
)
MOST_TOKENS = 1 << 24  # of a prompt, so that a wrong number cannot fill the memory
# Sums say nothing of the order in which they came; this is the usual one.
BEFORE_FIRST = (IntervalKind.TOKENIZE, IntervalKind.QUEUE, IntervalKind.PREFILL_WAIT, IntervalKind.PREFILL)
ORDER = (*BEFORE_FIRST, IntervalKind.DETOKENIZE, IntervalKind.SEND, IntervalKind.UNATTRIBUTED,
         IntervalKind.RECOMPUTE, IntervalKind.DECODE, IntervalKind.BATCHING, IntervalKind.STALL)  # fmt: skip
MS = 1e-3
LONGEST = 1e12  # of what is taken for a time, in whatever unit
MOST_WORK = 1 << 63  # steps, operations, bytes
BOUNDS = {"compute", "memory", "overhead", "unknown"}


class SavedLedgerError(TwinphaseError):
    """JSON that is no ledger, or a damaged one."""

    exit_code = 2


def read_ledger(found: Any) -> Evidence:
    """The evidence in the JSON of a file.

    Raises:
        SavedLedgerError: it is none of the forms, or a number in it cannot be.
        WaterfallError: its parts do not add up to its whole.
    """
    if not isinstance(found, Mapping):
        raise SavedLedgerError(f"The file holds a JSON {type(found).__name__}, not an object.", ACCEPTED)
    try:
        if "intervals" in found:
            return _of_timeline(found)
        if isinstance(found.get("timing"), Mapping):
            return _of_run(found)
        timings = found if "ledger_ms" in found else _timings_of(found)
        if timings is None:
            raise SavedLedgerError("The file is JSON, but has no ledger of a request.", ACCEPTED)
        return _of_timings(timings)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise SavedLedgerError(f"The ledger is damaged: {type(error).__name__}: {error}.", ACCEPTED) from None


def _timings_of(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The timings of a body; of several answers the first's."""
    choices = body.get("choices")
    bodies = [body, *(choices if isinstance(choices, list) else [])]
    timings = next((b["timings"] for b in bodies if isinstance(b, Mapping) and b.get("timings")), None)
    if timings is not None and "ledger_ms" not in timings:
        raise SavedLedgerError("Its `timings` have no `ledger_ms`: they are another server's.", ACCEPTED)
    return timings


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -ROUNDING <= value <= LONGEST:
        raise ValueError(f"{repr(value)} is no time")
    return max(0.0, float(value))


def _count(value: Any, most: int = MOST_TOKENS) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{repr(value)} is no number of tokens")
    return value


def _fraction(value: Any) -> float | None:
    """MFU or MBU; above 1 it is wrong, but a number."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LONGEST:
        raise ValueError(f"{repr(value)} is no efficiency")
    return float(value)


def _totals(found: Any) -> PhaseTotals:
    totals = PhaseTotals()
    for name in PhaseTotals.__dataclass_fields__:
        usual = getattr(totals, name)
        value = found.get(name, usual)
        setattr(totals, name, _count(value, MOST_WORK) if isinstance(usual, int) else _seconds(value))
    return totals


def _check_moments(moments: list[float], end: float) -> None:
    """Of tokens: one after the other, and none beyond the end."""
    late = max(len(IntervalKind) * ROUNDING, TOLERANCE * end)
    for before, after in pairwise([0.0, *moments, end + late]):
        if after < before:
            raise ValueError(f"a token came at {1e3 * before:.3f} ms, what follows it at {1e3 * after:.3f} ms")


def _request(name: Any, num_prompt: int, num_output: int, facts: Mapping[str, Any]) -> RequestCounts:
    miss = facts.get("prefix_miss")
    if miss is not None:
        part = str(miss.get("part") or "")
        num_known = _count(miss.get("num_known", 0))
        miss = PrefixMiss(MissReason(miss["reason"]), _count(miss["token_index"]), part, num_known)
    return RequestCounts(
        str(name or "saved"),
        num_prompt,
        num_output,
        num_cached_tokens=min(num_prompt, _count(facts.get("num_cached_tokens", 0))),
        prefix_miss=miss,
        num_preemptions=_count(facts.get("num_preemptions", 0)),
        num_recomputed_tokens=_count(facts.get("num_recomputed_tokens", 0)),
    )


def _check_sum(timeline: RequestTimeline, whole: float) -> None:
    found = timeline.end - timeline.arrival
    if not abs(found - whole) <= max(len(IntervalKind) * ROUNDING, TOLERANCE * whole):
        raise WaterfallError(
            f"The parts of the ledger add up to {1e3 * found:.3f} ms, but {1e3 * whole:.3f} ms passed.",
            "The ledger is damaged, or was cut.",
        )


def _of_sums(seconds: Mapping[str, float], ttft: float | None, num_output: int, end: float | None) -> RequestTimeline:
    """A timeline of sums, with a first token at `ttft`, and the last one at `end` if there were several."""
    timeline = RequestTimeline(0.0)
    unknown = set(seconds) - {kind.value for kind in IntervalKind}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} is no kind of interval")
    for kind in ORDER:
        timeline.mark(kind, timeline.end + _seconds(seconds.get(kind.value, 0.0)))
    if ttft is not None and num_output:
        timeline.token_times = [min(_seconds(ttft), timeline.end)]
        if num_output > 1 and end is not None:
            timeline.token_times += [end] * (num_output - 1)
    return timeline


def _of_timings(timings: Mapping[str, Any]) -> Evidence:
    cached, computed, num_output = (_count(timings[name]) for name in ("cache_n", "prompt_n", "predicted_n"))
    seconds = {str(kind): MS * _seconds(spent) for kind, spent in timings["ledger_ms"].items()}
    ttft = timings.get("ttft_ms")
    tpot = timings.get("tpot_ms")
    first = None if ttft is None else MS * _seconds(ttft)
    last = None if first is None or tpot is None else first + MS * _seconds(tpot) * (num_output - 1)
    timeline = _of_sums(seconds, first, num_output, last)
    timeline.prefill.tokens, timeline.decode.tokens = computed, max(0, num_output - 1)
    _check_sum(timeline, MS * _seconds(timings["e2e_ms"]))
    facts = {**timings, "num_cached_tokens": cached}
    return Evidence(_request(None, cached + computed, num_output, facts), timeline, detailed=False)


def _of_timeline(found: Mapping[str, Any]) -> Evidence:
    timeline = RequestTimeline(0.0)
    for entry in found["intervals"]:
        start, end = MS * _seconds(entry["start_ms"]), MS * _seconds(entry["end_ms"])
        if abs(start - timeline.end) > ROUNDING or end < start:
            raise WaterfallError(
                f"An interval begins at {1e3 * start:.3f} ms, the one before it ended at {1e3 * timeline.end:.3f} ms.",
                "The ledger is damaged, or was cut.",
            )
        kind, step = IntervalKind(entry["kind"]), _count(entry["step"], MOST_WORK) if "step" in entry else -1
        tokens, reason = _count(entry.get("prefill_tokens", 0), MOST_WORK), str(entry.get("reason", ""))
        timeline.intervals.append(Interval(kind, timeline.end, end, step, tokens, reason=reason))
        timeline.end = end
    _check_sum(timeline, MS * _seconds(found["e2e_ms"]))
    timeline.token_times = [MS * _seconds(moment) for moment in found.get("token_times_ms", [])]
    _check_moments(timeline.token_times, timeline.end)
    timeline.prefill, timeline.decode = (_totals(found.get(phase, {})) for phase in ("prefill", "decode"))
    facts = found.get("request", {})
    num_prompt = _count(facts.get("num_prompt_tokens", timeline.prefill.tokens))
    return Evidence(_request(found.get("id"), num_prompt, len(timeline.token_times), facts), timeline)


def _of_run(found: Mapping[str, Any]) -> Evidence:
    timing, usage = found["timing"], found["usage"]
    names = {kind.value for kind in IntervalKind}
    seconds = {row["name"]: _seconds(row["seconds"]) for row in timing["phases"]}
    rest = {row["name"]: _seconds(row["seconds"]) for row in timing["rest"]}
    before = {str(name): spent for name, spent in rest.items() if name not in names}
    seconds |= {name: spent for name, spent in rest.items() if name in names}
    num_prompt, num_output = _count(usage["prompt_tokens"]), _count(usage["completion_tokens"])
    ttft, tpot = timing.get("ttft"), timing.get("tpot")
    last = None if ttft is None or tpot is None else _seconds(ttft) + _seconds(tpot) * (num_output - 1)
    timeline = _of_sums(seconds, ttft, num_output, last)
    _check_sum(timeline, _seconds(timing["wall_seconds"]) - sum(before.values()))
    known = {}
    for row in timing["phases"]:
        values = {
            row["metric"]: row["efficiency"],
            ("MBU" if row["metric"] == "MFU" else "MFU"): row["other_efficiency"],
        }
        if row["bound"] not in BOUNDS:
            raise ValueError(f"{repr(row['bound'])} is no bound")
        known[str(row["name"])] = Efficiency(row["bound"], _fraction(values["MFU"]), _fraction(values["MBU"]))
    cached = _count((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0), num_prompt)
    request = _request(None, num_prompt, num_output, {"num_cached_tokens": cached})
    timeline.prefill.tokens, timeline.decode.tokens = num_prompt - cached, max(0, num_output - 1)
    return Evidence(request, timeline, before=before, known=known, detailed=False)
