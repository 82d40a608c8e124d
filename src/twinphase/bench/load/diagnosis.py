"""What a client alone can tell of a server's phases, from the result of a load: the same causes, by other evidence.

A client sees when it sent a prompt and when each piece of the answer came, nothing of the steps in between. Rules here
compare requests with each other: those sent into an idle server with those sent into a busy one, long prompts with
short ones, gaps in which somebody else's prompt was being read with gaps in which none was. Each has its own ratio; the
seconds are those of a request's TTFT, or of a token, and no share of one whole is claimed. What takes the server's own
word is `unknown`. Not for ledgers (`diagnosis.py`), nor for taking such measurements (bench/).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from twinphase.bench.load.results import Load
from twinphase.explain.diagnosis import Diagnosis
from twinphase.explain.levers import WORTH_NAMING, Lever, duration
from twinphase.explain.saved import SavedLedgerError
from twinphase.explain.waterfall import Bar, Waterfall

__all__ = ["CLIENT_RULES", "ClientExplanation", "explain_client"]

FEW = 4  # requests on each side of a comparison, below which nothing is concluded
SPREAD = 1.5  # longest prompt over the shortest, below which nothing is said about length
FIRM = 0.5  # rank correlation, below which two quantities are not said to go together
MOSTLY = 0.8  # of pairs of one request of each group, in which the second's value must be the larger one

# What only the server knows, and why a client does not.
UNKNOWN = (
    "What bound each phase, MFU, MBU: the server's machine, model and steps are not seen from here.",
    "Cold start: the requests that warmed the server up are not in the result.",
    "Cache pressure, evictions: no preemption is seen from here, only a long gap.",
    "Sampling, detokenizing, sending: part of every gap, and not told apart.",
    "Had it run alone: there is no cost model of this server; its requests that ran alone are the nearest to it.",
)


@dataclass(frozen=True)
class ClientExplanation:
    """What can be told from outside, and what cannot.

    Attributes:
        waterfall: of the mean request: until its first token, and after it.
        diagnoses: as for a ledger.
        levers: of the diagnoses.
        unknown: what cannot be told, each with the reason.
        num_requests: that it was told from.
        claims: what the server itself says, where it is ours; nothing here was seen by the client.
    """

    waterfall: Waterfall
    diagnoses: tuple[Diagnosis, ...]
    levers: tuple[Lever, ...]
    unknown: tuple[str, ...]
    num_requests: int
    claims: str = ""


def explain_client(loads: Sequence[Load]) -> ClientExplanation:
    """What the loads tell of a bad TTFT and of bad tokens a second, seen from outside.

    Raises:
        SavedLedgerError: no request took any time.
    """
    everyone = [request for load in loads for request in load.requests]
    found = []
    for rule in CLIENT_RULES.values():
        diagnosis = rule(loads)
        if diagnosis is not None:
            found.append(diagnosis)
    found.sort(key=lambda one: (one.phase != "prefill", one.seconds is None, -(one.seconds or 0.0)))
    until = mean(request.ttft for request in everyone)
    after = mean(request.times[-1] - request.times[0] for request in everyone)
    wall = until + after
    if wall <= 0:
        raise SavedLedgerError("No time has passed in this result.", "Its requests have no durations.")
    bars = tuple(
        Bar(name, spent, spent / wall, spent if name == "until first token" else 0.0)
        for name, spent in (("until first token", until), ("tokens after it", after))
        if spent > 0
    )
    levers = tuple(one.lever for one in found if one.lever)
    return ClientExplanation(
        Waterfall(wall, until, bars), tuple(found), levers, _unknown(loads, found), len(everyone), _claims(loads)
    )


def _unknown(loads: Sequence[Load], found: Sequence[Diagnosis]) -> tuple[str, ...]:
    causes = {one.cause for one in found}
    lines = [f"Everything at {load.name}: that run is void, {reason}." for load in loads for reason in load.void]
    if not {"queue", "prompt_length"} & causes:
        lines.append("What TTFT consists of: neither the load nor the length of prompts varied enough to tell.")
    everyone = [request for load in loads for request in load.requests]
    if all(request.num_prompt is None for request in everyone):
        lines.append("Prompt tokens: the server counts none, so that TTFT is not put in relation to them.")
    if all(request.num_output is None for request in everyone):
        lines.append("TPOT: the server counts no output tokens.")
    return (*lines, *UNKNOWN)


def _queue(loads: Sequence[Load]) -> Diagnosis | None:
    """TTFT of those sent into a busy server, against those that were alone."""
    alone: list[float] = []
    busy: list[float] = []
    for load in loads:
        for request in load.requests:
            (busy if load.others_before(request) else alone).append(request.ttft)
    if len(loads) > 1 and len(alone) < FEW:  # nobody was alone: the lightest load is the nearest to it
        by_others = sorted(loads, key=lambda load: mean(map(load.others_before, load.requests)))
        alone, busy = ([one.ttft for one in load.requests] for load in (by_others[0], by_others[-1]))
    if len(alone) < FEW or len(busy) < FEW:
        return None
    quiet, loaded = median(alone), median(busy)
    if not _differ(quiet, loaded):
        return None
    sentence = (
        f"TTFT is {duration(loaded)} (median of {len(busy)}) for requests sent into a busy server, "
        f"{duration(quiet)} (of {len(alone)}) with the least load{_times(quiet, loaded)}: the rest is queue, or "
        "others' prompts."
    )
    lever = Lever("load", "Fewer requests at once, more seats or replicas, or a scheduler that lets prompts in sooner.")
    return Diagnosis("queue", "prefill", sentence, loaded - quiet, None, lever)


def _prompt_length(loads: Sequence[Load]) -> Diagnosis | None:
    """TTFT by prompt tokens computed, among those that were alone if there are enough."""
    pairs = [(r.num_prompt, r.ttft) for load in loads for r in load.requests
             if r.num_prompt is not None and not load.others_before(r)]  # fmt: skip
    where = "sent when no other ran"
    if len(pairs) < 2 * FEW:
        pairs = [(r.num_prompt, r.ttft) for load in loads for r in load.requests if r.num_prompt is not None]
        where = "whatever else ran"
    if len(pairs) < 2 * FEW or max(n for n, _ in pairs) < SPREAD * max(1, min(n for n, _ in pairs)):
        return None
    together = _rank_correlation(pairs)
    middle_n, middle = mean(n for n, _ in pairs), mean(t for _, t in pairs)
    slope = sum((n - middle_n) * (t - middle) for n, t in pairs) / sum((n - middle_n) ** 2 for n, _ in pairs)
    if together < FIRM or slope <= 0:
        return None
    spent = min(middle, slope * middle_n)
    if spent < WORTH_NAMING * middle:
        return None
    sentence = (
        f"TTFT grows with the prompt ({len(pairs)} requests {where}, rank correlation {together:.2f}): "
        f"{1e6 * slope:,.0f} µs a token, {duration(spent)} of {duration(middle)} at the mean of {middle_n:,.0f} tokens."
    )
    lever = Lever("prompt", "Shorter prompts, or beginnings that are shared and cached.")
    return Diagnosis("prompt_length", "prefill", sentence, spent, None, lever)


def _stalls(loads: Sequence[Load]) -> Diagnosis | None:
    """Gaps in which somebody else's prompt was being read, against gaps in which none was."""
    within: list[float] = []
    without: list[float] = []
    for load in loads:
        for request in load.requests:
            for begin, end in zip(request.times, request.times[1:], strict=False):
                (within if load.others_reading(begin, end) > 0 else without).append(end - begin)
    if len(within) < FEW or len(without) < FEW:
        return None
    usual, num_gaps = median(without), len(within) + len(without)
    excess = sum(max(0.0, gap - usual) for gap in within) - len(within) * mean(
        max(0.0, gap - usual) for gap in without
    )  # what such gaps exceed the usual by anyway is no stall
    if excess < WORTH_NAMING * (sum(within) + sum(without)) or not _differ(usual, median(within)):
        return None
    sentence = (
        f"Gaps between tokens are {duration(median(within))} in the middle (longest {duration(max(within))}) while a "
        f"prompt of another request is being read, {duration(usual)} otherwise{_times(usual, median(within))}: "
        f"{duration(excess)} more in all."
    )
    lever = Lever("chunk size", "Smaller prefill chunks, or prefill on other machines.")
    return Diagnosis("stalls", "decode", sentence, excess / num_gaps, None, lever)


def _decode_batching(loads: Sequence[Load]) -> Diagnosis | None:
    """TPOT by how many others decoded beside."""
    pairs = [(load.others_decoding(r), r.tpot) for load in loads for r in load.requests if r.tpot is not None]
    if len(pairs) < 2 * FEW:
        return None
    pairs.sort()
    quarter = max(FEW, len(pairs) // 4)
    few, many = pairs[:quarter], pairs[-quarter:]
    low, high = median(t for _, t in few), median(t for _, t in many)
    longer = mean(b > a for _, a in few for _, b in many)
    if longer < MOSTLY or not _differ(low, high) or mean(n for n, _ in many) < 1 + mean(n for n, _ in few):
        return None
    sentence = (
        f"TPOT is {duration(low)} beside {mean(n for n, _ in few):.1f} other decodes, {duration(high)} beside "
        f"{mean(n for n, _ in many):.1f}{_times(low, high)} (longer in {longer:.0%} of the pairs of one of each)."
    )
    lever = Lever("batch size", "Fewer sequences at once shorten each token, and lower the tokens a second of all.")
    return Diagnosis("decode_batching", "decode", sentence, high - low, None, lever)


def _claims(loads: Sequence[Load]) -> str:
    """What the server itself says, where it is ours: its word, and no cause that was seen from outside."""
    ledgers = [request.ledger for load in loads for request in load.requests if request.ledger]
    if not ledgers:
        return ""
    kinds = {kind for ledger in ledgers for kind in ledger}
    totals = {kind: sum(ledger.get(kind, 0.0) for ledger in ledgers) for kind in kinds}
    whole = sum(totals.values()) or 1.0
    most = sorted(kinds, key=lambda kind: -totals[kind])[:4]
    named = ", ".join(f"{totals[kind] / whole:.0%} {kind}" for kind in most)
    return f"By its own ledgers of {len(ledgers)} requests: {named}. `twinphase explain ID` has one whole."


def _differ(usual: float, more: float) -> bool:
    return more - usual >= WORTH_NAMING * more and more > usual


def _times(usual: float, more: float) -> str:
    """A ratio. Each rule compares other requests with each other, so that shares of them would not add up."""
    return f", {more / usual:.1f} times as long" if usual > 0 else ""


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's, with mean ranks for ties; 0 where one of both does not vary."""

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [(bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2 for value in values]

    x, y = ranks([a for a, _ in pairs]), ranks([b for _, b in pairs])
    mx, my = mean(x), mean(y)
    spread = math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


CLIENT_RULES: dict[str, Callable[[Sequence[Load]], Diagnosis | None]] = {
    "queue": _queue,
    "prompt_length": _prompt_length,
    "stalls": _stalls,
    "decode_batching": _decode_batching,
}
