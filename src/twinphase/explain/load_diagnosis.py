"""Finds the causes of slow phases in the result of a load, from the client's measurements alone.

A client measures when it sent a prompt and when each piece of the answer arrived, but does not see
the server's steps. The rules here compare requests: on an idle server and on a busy one, with long
and short prompts, and gaps with and without the prefill of another prompt. The seconds are parts of
a TTFT or of a token's time, and do not add up to a whole. `unknown` lists the questions that only
the server can answer. `explain/diagnosis.py` diagnoses ledgers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from statistics import correlation, linear_regression, mean, median
from typing import NamedTuple

from twinphase.errors import ResultError
from twinphase.explain.attribution import MIN_REPORTED_SHARE
from twinphase.explain.diagnosis import Diagnosis
from twinphase.explain.levers import Lever, duration, percent
from twinphase.explain.loads import ObservedLoad
from twinphase.explain.waterfall import Waterfall, WaterfallBar
from twinphase.phases.observation import Observation

# Each side of a comparison needs this many requests.
MIN_REQUESTS = 4
# The effect of prompt length is judged only if the longest prompt is this many times the shortest.
MIN_LENGTH_RATIO = 1.5
MIN_RANK_CORRELATION = 0.5
# The second group counts as larger if it is larger in at least this share of all pairs of one
# request from each group.
MIN_SHARE_OF_PAIRS = 0.8

# Result of a rule: a sentence, and the seconds of a TTFT or a token that it explains.
Found = tuple[str, float] | None

# Questions that only the server can answer, and why.
UNKNOWN = (
    "What bound each phase, MFU, MBU: the server's machine, model and steps cannot be seen from "
    "here.",
    "Cold start: the requests that warmed the server up are not in the result.",
    "Cache pressure, evictions: a preemption cannot be seen from here, only a long gap.",
    "Sampling, detokenizing, sending: they are part of every gap, and cannot be separated.",
    "Had it run alone: there is no cost model of this server; its requests that ran alone are "
    "the nearest to it.",
)


@dataclass(frozen=True)
class ClientExplanation:
    """The conclusions from a client's measurements, and the questions that remain open."""

    # The mean request's time before and after its first token.
    waterfall: Waterfall
    diagnoses: tuple[Diagnosis, ...]
    levers: tuple[Lever, ...]
    # Each open question with its reason.
    unknown: tuple[str, ...]
    num_requests: int
    # A twinphase server's report about itself, which a client cannot verify.
    claims: str = ""


def explain_client(loads: Sequence[ObservedLoad]) -> ClientExplanation:
    """Explain a long TTFT and slow tokens from a client's measurements.

    Raises:
        ResultError: no request took any time.
    """
    everyone = [request for load in loads for request in load.requests]
    found = [
        Diagnosis(cause, rule.phase, *evidence, None, rule.lever)
        for cause, rule in CLIENT_RULES.items()
        if (evidence := rule.find(loads)) is not None
    ]
    found.sort(key=lambda one: (one.phase != "prefill", -(one.seconds or 0.0)))
    until = mean(map(_ttft, everyone))
    after = mean(request.token_times[-1] - request.token_times[0] for request in everyone)
    wall = until + after
    if wall <= 0:
        raise ResultError("No time has passed in this result.", "Its requests have no durations.")
    bars = (("until first token", until, until), ("tokens after it", after, 0.0))
    falls = tuple(
        WaterfallBar(name, spent, spent / wall, early) for name, spent, early in bars if spent > 0
    )
    return ClientExplanation(
        Waterfall(wall, until, falls),
        diagnoses=tuple(found),
        levers=tuple(one.lever for one in found if one.lever),
        unknown=tuple(_unknown(loads, {one.cause for one in found})),
        num_requests=len(everyone),
        claims=_claims(everyone),
    )


def _ttft(request: Observation) -> float:
    return request.ttft or 0.0


def _unknown(loads: Sequence[ObservedLoad], causes: Set[str]) -> Iterator[str]:
    everyone = [request for load in loads for request in load.requests]
    for load in loads:
        for reason in load.void:
            yield f"Everything at {load.name}: that run is void, {reason}."
    if not {"queue", "prompt_length"} & causes:
        yield (
            "What TTFT consists of: neither the load nor the length of prompts varied enough to "
            "tell."
        )
    if all(request.num_prompt_tokens is None for request in everyone):
        yield "Prompt tokens: the server counts none, so that TTFT cannot be related to them."
    if all(request.num_output_tokens is None for request in everyone):
        yield "TPOT: the server counts no output tokens."
    yield from UNKNOWN


def _queue(loads: Sequence[ObservedLoad]) -> Found:
    """Compare TTFT on a busy server with TTFT on an idle one."""
    alone: list[float] = []
    busy: list[float] = []
    for load in loads:
        for request in load.requests:
            (busy if load.others_before(request) else alone).append(_ttft(request))
    if len(loads) > 1 and len(alone) < MIN_REQUESTS:
        # If no request ran alone, the lightest load is the best approximation.
        by_others = sorted(loads, key=lambda load: mean(map(load.others_before, load.requests)))
        alone, busy = (
            [_ttft(one) for one in load.requests] for load in (by_others[0], by_others[-1])
        )
    if len(alone) < MIN_REQUESTS or len(busy) < MIN_REQUESTS:
        return None
    quiet = median(alone)
    loaded = median(busy)
    if not _differ(quiet, loaded):
        return None
    sentence = (
        f"TTFT is {duration(loaded)} (median of {len(busy)}) for requests sent into a busy server, "
        f"{duration(quiet)} (of {len(alone)}) with the least load{_times(quiet, loaded)}: the "
        "rest is queue, or others' prompts."
    )
    return sentence, loaded - quiet


def _prompt_length(loads: Sequence[ObservedLoad]) -> Found:
    """Relate TTFT to computed prompt tokens, preferably of requests that ran alone."""
    pairs = _lengths(loads, alone=True)
    where = "sent while no other ran"
    if len(pairs) < 2 * MIN_REQUESTS:
        pairs = _lengths(loads, alone=False)
        where = "beside any others"
    tokens = [n for n, _ in pairs]
    seconds = [t for _, t in pairs]
    if (
        len(pairs) < 2 * MIN_REQUESTS
        or max(tokens) < MIN_LENGTH_RATIO * max(1, min(tokens))
        or len(set(seconds)) == 1
    ):
        return None
    together = correlation(_ranks(tokens), _ranks(seconds))
    slope = linear_regression(tokens, seconds).slope
    spent = min(mean(seconds), slope * mean(tokens))
    if together < MIN_RANK_CORRELATION or spent < MIN_REPORTED_SHARE * mean(seconds):
        return None
    sentence = (
        f"TTFT grows with the prompt ({len(pairs)} requests {where}, rank correlation "
        f"{together:.2f}): {1e6 * slope:,.0f} µs per token, {duration(spent)} of "
        f"{duration(mean(seconds))} at the mean of {mean(tokens):,.0f} tokens."
    )
    return sentence, spent


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks, with the mean rank for ties, so that their correlation is Spearman's rho."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value)) / 2 for value in values]


def _lengths(loads: Sequence[ObservedLoad], alone: bool) -> list[tuple[int, float]]:
    """(computed prompt tokens, TTFT in seconds) of requests whose server counts tokens."""
    return [
        (max(0, request.num_prompt_tokens - (request.num_cached_tokens or 0)), _ttft(request))
        for load in loads
        for request in load.requests
        if request.num_prompt_tokens is not None and not (alone and load.others_before(request))
    ]


def _stalls(loads: Sequence[ObservedLoad]) -> Found:
    """Gaps during the prefill of another prompt, compared with the other gaps."""
    within: list[float] = []
    without: list[float] = []
    for load in loads:
        for request in load.requests:
            others = load.others_in_prefill(request.token_times[:-1], request.token_times[1:])
            for gap, prefilling in zip(request.itl, others, strict=True):
                (within if prefilling else without).append(gap)
    if len(within) < MIN_REQUESTS or len(without) < MIN_REQUESTS:
        return None
    usual = median(without)
    held = median(within)
    # A gap counts as stalled only by its excess over the usual gap.
    excess = sum(max(0.0, gap - usual) for gap in within)
    excess -= len(within) * mean(max(0.0, gap - usual) for gap in without)
    if excess < MIN_REPORTED_SHARE * (sum(within) + sum(without)) or not _differ(usual, held):
        return None
    sentence = (
        f"The median gap between tokens is {duration(held)} (the longest "
        f"{duration(max(within))}) while a prompt of another request is being computed, "
        f"{duration(usual)} otherwise{_times(usual, held)}: {duration(excess)} more in all."
    )
    return sentence, excess / (len(within) + len(without))


def _decode_batching(loads: Sequence[ObservedLoad]) -> Found:
    """Relate TPOT to the number of other requests decoding at the same time."""
    pairs = sorted(
        (load.others_decoding(r), r.tpot)
        for load in loads
        for r in load.requests
        if r.tpot is not None
    )
    if len(pairs) < 2 * MIN_REQUESTS:
        return None
    quarter = max(MIN_REQUESTS, len(pairs) // 4)
    (few, short) = zip(*pairs[:quarter], strict=True)
    (many, long) = zip(*pairs[-quarter:], strict=True)
    low = median(short)
    high = median(long)
    longer = mean(b > a for a in short for b in long)
    if longer < MIN_SHARE_OF_PAIRS or not _differ(low, high) or mean(many) < 1 + mean(few):
        return None
    sentence = (
        f"TPOT is {duration(low)} beside {mean(few):.1f} other decodes, {duration(high)} beside "
        f"{mean(many):.1f}{_times(low, high)} (longer in {percent(longer)} of the pairs of one of "
        "each)."
    )
    return sentence, high - low


def _claims(everyone: Sequence[Observation]) -> str:
    """A sentence on a twinphase server's own ledgers, which the client cannot verify."""
    totals: Counter[str] = Counter()
    ledgers = [ledger for request in everyone if (ledger := _ledger(request))]
    for ledger in ledgers:
        totals.update(ledger)
    if not ledgers:
        return ""
    whole = sum(totals.values()) or 1.0
    named = ", ".join(f"{percent(spent / whole)} {kind}" for kind, spent in totals.most_common(4))
    return (
        f"By its own ledgers of {len(ledgers)} requests: {named}. `twinphase explain ID` "
        "shows one in full."
    )


def _ledger(request: Observation) -> dict[str, float]:
    """Milliseconds by kind, if a twinphase server reports them."""
    timings = request.claims.get("timings")
    for found in (request.claims, timings if isinstance(timings, dict) else {}):
        ledger = found.get("ledger_ms")
        if isinstance(ledger, dict) and all(
            isinstance(ms, (int, float)) and 0 <= ms < 1e15 for ms in ledger.values()
        ):
            return ledger
    return {}


def _differ(usual: float, more: float) -> bool:
    return more - usual >= MIN_REPORTED_SHARE * more and more > usual


def _times(usual: float, more: float) -> str:
    """The ratio of two times, in words.

    There are no shares, because each rule compares different requests.
    """
    return f", {more / usual:.1f} times as long" if usual > 0 else ""


class ClientRule(NamedTuple):
    """A cause that a client can observe, the phase that it slows down, and the lever."""

    phase: str
    find: Callable[[Sequence[ObservedLoad]], Found]
    lever: Lever


CLIENT_RULES = {
    "queue": ClientRule(
        "prefill",
        _queue,
        Lever(
            "load",
            "Fewer requests at once, more seats or replicas, or a scheduler that admits prompts "
            "sooner.",
        ),
    ),
    "prompt_length": ClientRule(
        "prefill",
        _prompt_length,
        Lever("prompt", "Shorter prompts, or beginnings that are shared and cached."),
    ),
    "stalls": ClientRule(
        "decode",
        _stalls,
        Lever("chunk size", "Smaller prefill chunks, or prefill on other machines."),
    ),
    "decode_batching": ClientRule(
        "decode",
        _decode_batching,
        Lever(
            "batch size",
            "Fewer sequences at once shorten the time per token, and lower the total throughput.",
        ),
    ),
}
