"""Verdicts on a target from a phase sweep, in sentences with numbers.

The bound of a phase is inferred from its behaviour, because bytes and operations of other engines
are unknown.
"""

from __future__ import annotations

import math

from twinphase.phases.statistics import median_interval
from twinphase_bench.report.report import Status, Verdict
from twinphase_bench.sweep.run import PhaseSweep, SweepPoint

# This is long enough to spread one reading of the weights over many tokens.
REFERENCE_PROMPT_TOKENS = 512
# A chunk that takes as long as this many decode steps does not wait for reading the weights.
MIN_STEPS_PER_CHUNK = 4.0
# A batch that takes less than this share of its sequences' times waits for a shared resource.
MAX_SHARED_RATIO = 0.6
# Smaller batches show too little.
MIN_SHARING_BATCH = 4
# Fewer repetitions have no meaningful spread.
MIN_REPETITIONS = 3
# If a larger share of the measurements was disturbed, this becomes the first verdict.
MAX_QUIET_SHARE = 0.2


def time_text(seconds: float) -> str:
    """Milliseconds with three digits or more."""
    value = seconds * 1000
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f}"


def rate_text(rate: float) -> str:
    """Tokens per second with three digits or more."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}" if rate >= 10 else f"{rate:,.2f}"


def percent(share: float, signed: bool = False) -> str:
    value = share * 100
    digits = 0 if abs(value) >= 10 else 1
    return f"{value:{'+' if signed else ''},.{digits}f} %"


def sweep_verdicts(result: PhaseSweep) -> list[Verdict]:
    """The findings, most important first."""
    found = [_busy(result), _rates(result), _prefill_bound(result), _decode_bound(result)]
    found += [_prefill_growth(result), _decode_growth(result)]
    return [verdict for verdict in found if verdict is not None]


def _busy(result: PhaseSweep) -> Verdict | None:
    share = result.disturbed_share
    if share <= MAX_QUIET_SHARE:
        return None
    return Verdict(
        Status.INFO,
        f"The machine was busy: others used the processor in {percent(share)} of the measurements, "
        "even after disturbed ones were repeated. Times are longer than on a quiet machine.",
    )


def _alone(result: PhaseSweep) -> list[SweepPoint]:
    """Decode points at batch 1, by position."""
    return sorted(
        (point for point in result.points("decode") if point.place.batch == 1),
        key=lambda point: point.tokens,
    )


def _reference(result: PhaseSweep) -> SweepPoint | None:
    """The measured prefill closest to `REFERENCE_PROMPT_TOKENS` tokens."""
    points = result.points("prefill")
    return min(points, key=lambda point: abs(point.tokens - REFERENCE_PROMPT_TOKENS), default=None)


def _rates(result: PhaseSweep) -> Verdict | None:
    prompt = _reference(result)
    alone = _alone(result)
    if prompt is None or not alone:
        return None
    fast = prompt.tokens / prompt.median
    slow = 1 / alone[0].median
    times = fast / slow
    relation = f"{times:.1f} times decode's" if times >= 1 else f"only {times:.2f} times decode's"
    return Verdict(
        Status.INFO,
        f"Prefill runs at {rate_text(fast)} tok/s ({prompt.tokens:,.0f}-token prompt), decode at "
        f"{rate_text(slow)} tok/s for one request after {alone[0].tokens:,.0f} tokens: prefill's "
        f"rate is {relation}. One figure for both would hide which phase was measured.",
    )


def _prefill_bound(result: PhaseSweep) -> Verdict:
    """A verdict on the share of prefill time that reading the weights can take."""
    prompt = _reference(result)
    alone = _alone(result)
    claim = "Prefill does not wait for reading the weights."
    if prompt is None or not alone:
        return Verdict(Status.UNKNOWN, claim, "One of the phases was not measured.")
    if prompt.tokens < REFERENCE_PROMPT_TOKENS / 4:
        return Verdict(
            Status.UNKNOWN,
            claim,
            f"The longest prompt had {prompt.tokens:,.0f} tokens, too few to tell.",
        )
    known_chunks = _chunks(result, prompt.tokens)
    chunks = known_chunks or 1
    steps = prompt.median / alone[0].median
    text = f"A prompt of {prompt.tokens:,.0f} tokens takes as long as {steps:,.1f} decode steps"
    low, high = _ratio(prompt, alone[0])
    if low < MIN_STEPS_PER_CHUNK * chunks <= high:
        return Verdict(Status.UNKNOWN, claim, f"{text}, {_doubt(low, high)}")
    how = (
        "assuming that it was one chunk"
        if known_chunks is None
        else f"in {chunks} chunk{'s'[: chunks != 1]}"
    )
    bound = f"{text}, {how}; a step reads all weights once, and so does a chunk: "
    if steps < MIN_STEPS_PER_CHUNK * chunks:
        share = percent(min(chunks / steps, 1.0))
        return Verdict(Status.UNKNOWN, claim, f"{bound}that may be as much as {share} of the time.")
    reason = (
        f"{bound}that is at most {percent(chunks / steps)} of the time. What the rest is "
        "(arithmetic, unpacking of weights, the program around them) cannot be seen from outside."
    )
    return Verdict(Status.HOLDS, claim, reason)


def _chunks(result: PhaseSweep, num_tokens: float) -> int | None:
    """Number of chunks that the target divides a prompt into; None if it does not report it."""
    limit = result.facts.details.get("max_num_batched_tokens", "")
    if limit.isdigit() and int(limit):
        return math.ceil(num_tokens / int(limit))
    return 1 if result.facts.kind == "transformers" else None


def _decode_bound(result: PhaseSweep) -> Verdict:
    claim = "Decode of one request is not compute-bound: a batch shares what it waits for."
    grid = {(point.place.length, point.place.batch): point for point in result.points("decode")}
    wide = max(
        ((p, b) for p, b in grid if b >= MIN_SHARING_BATCH and (p, 1) in grid),
        key=lambda at: at[1],
        default=None,
    )
    if wide is None:
        return Verdict(
            Status.UNKNOWN, claim, "No batch of four or more was measured beside one request alone."
        )
    position, batch = wide
    alone = grid[position, 1]
    times = grid[wide].median / alone.median
    text = (
        f"A step for {batch} sequences takes {times:.2f} times as long as a step for one (after "
        f"{alone.tokens:,.0f} tokens), with {batch} times the arithmetic: {percent(times / batch)} "
        "of the time per token"
    )
    low, high = _ratio(grid[wide], alone)
    if low < MAX_SHARED_RATIO * batch <= high:
        return Verdict(Status.UNKNOWN, claim, f"{text}, {_doubt(low, high)}")
    return Verdict(
        Status.HOLDS if times < MAX_SHARED_RATIO * batch else Status.FAILS, claim, f"{text}."
    )


def _doubt(low: float, high: float) -> str:
    if math.isinf(high):
        return f"but fewer than {MIN_REPETITIONS} repetitions do not show their noise."
    return f"but given their noise the ratio may be {low:,.1f} to {high:,.1f}."


def _ratio(one: SweepPoint, other: SweepPoint) -> tuple[float, float]:
    """Bounds of one / other from the intervals of their medians; (0, inf) with too few values."""
    if min(len(one.values), len(other.values)) < MIN_REPETITIONS:
        return 0.0, math.inf
    top = median_interval(one.values)
    bottom = median_interval(other.values)
    return top.low / bottom.high, top.high / bottom.low


def _prefill_growth(result: PhaseSweep) -> Verdict | None:
    points = result.points("prefill")
    best = min(points, key=lambda point: point.median / point.tokens, default=None)
    if best is None or len(points) < 2:
        return None
    prices = {
        point.tokens: f"{time_text(point.median / point.tokens)} ms"
        for point in (points[0], best, points[-1])
    }
    by_length = ", ".join(f"{price} at {tokens:,.0f}" for tokens, price in prices.items())
    return Verdict(Status.INFO, f"A prompt token takes {by_length} tokens of prompt.")


def _decode_growth(result: PhaseSweep) -> Verdict | None:
    alone = _alone(result)
    if len(alone) < 2:
        return None
    change = percent(alone[-1].median / alone[0].median - 1, signed=True)
    return Verdict(
        Status.INFO,
        f"A decode step of one request takes {time_text(alone[0].median)} ms at position "
        f"{alone[0].tokens:,.0f} and {time_text(alone[-1].median)} ms at {alone[-1].tokens:,.0f}: "
        f"{change}.",
    )
