"""What a phase sweep says of a target, in sentences with their numbers, each true of what was measured only.

What binds a phase is told from outside, by behaviour: a foreign engine's bytes and operations are not known.
"""

from __future__ import annotations

import math
import statistics

from twinphase.bench.report.report import Status, Verdict
from twinphase.bench.statistics import median_interval
from twinphase.bench.sweep.fit import CONFIDENCE, Fit, Point
from twinphase.bench.sweep.run import HeldOut, SweepResult

__all__ = ["chance_of_misses", "percent", "rate_text", "sweep_verdicts", "time_text"]

REFERENCE_PROMPT = 512  # tokens: long enough that reading the weights once is spread over many
TIMES_A_STEP = (
    4.0  # a chunk of a prompt that takes this many decode steps does not wait for the weights: both read them
)
NEARLY_FREE = 0.6  # a batch that takes less than this share of its sequences one by one waits for something they share
STEADY_BATCH = 4  # sequences from which that can be told
MEANINGFUL = 0.2  # claimed error above which holding it is no feat,
BETTER_THAN_NONE = 2.0  # unless the same points without a law would claim so many times as much,
WORTHLESS = 0.3  # and above this it is none in any case
FEWEST_REPETITIONS = 3  # whose spread tells something
BUSY_SHARE = 0.2  # of disturbed measurements above which it is the first thing to know
CHANCE = 0.05  # below it, that many misses of the claimed interval are no luck


def time_text(seconds: float) -> str:
    """Milliseconds to three digits or more."""
    value = seconds * 1000
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f}"


def rate_text(rate: float) -> str:
    """Tokens a second to three digits or more."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}" if rate >= 10 else f"{rate:,.2f}"


def percent(share: float, signed: bool = False) -> str:
    """A share in per cent."""
    value = share * 100
    digits = 0 if abs(value) >= 10 else 1
    return f"{value:{'+' if signed else ''},.{digits}f} %"


def sweep_verdicts(result: SweepResult) -> list[Verdict]:
    """The findings, most important first."""
    prefill, decode = result.fit("prefill"), result.fit("decode")
    found = [_busy(result), _rates(result), _prefill_bound(result), _decode_bound(result)]
    found += [_growth("prefill", result, prefill), _growth("decode", result, decode)]
    for phase, fitted in (("prefill", prefill), ("decode", decode)):
        if fitted is not None:
            points = result.held_out(phase, fitted)
            found.append(_held_out(phase, fitted, [one for one in points if not one.predicted.extrapolated]))
            found += [_extrapolated(phase, one) for one in points if one.predicted.extrapolated]
            if fitted.bends_otherwise:
                found.append(_misfit(phase, fitted))
    return [verdict for verdict in found if verdict is not None]


def _busy(result: SweepResult) -> Verdict | None:
    share = result.disturbed_share(fewest=1)
    if share <= BUSY_SHARE:
        return None
    return Verdict(
        Status.INFO,
        f"The machine was busy: others used the processor in {percent(share)} of the measurements, repetitions of "
        "disturbed ones included. Times are longer than on a quiet machine.",
    )


def _alone(result: SweepResult) -> list[Point]:
    """Decode at batch 1, by rising position."""
    found = [point for place, point in result.points("decode") if place.batch == 1]
    return sorted(found, key=lambda point: point.x)


def _reference(result: SweepResult) -> Point | None:
    """The measured prefill nearest to `REFERENCE_PROMPT` tokens."""
    points = [point for _, point in result.points("prefill")]
    return min(points, key=lambda point: abs(point.x[0] - REFERENCE_PROMPT), default=None)


def _rates(result: SweepResult) -> Verdict | None:
    prompt, alone = _reference(result), _alone(result)
    if prompt is None or not alone:
        return None
    fast, slow = prompt.x[0] / prompt.median, 1 / alone[0].median
    times = fast / slow
    relation = f"{times:.1f} times decode's" if times >= 1 else f"only {times:.2f} times decode's"
    return Verdict(
        Status.INFO,
        f"Prefill reads {rate_text(fast)} tok/s ({prompt.x[0]:,.0f}-token prompt), decode writes {rate_text(slow)} "
        f"tok/s for one request (behind {alone[0].x[0]:,.0f} tokens): prefill's rate is {relation}. One figure for "
        "both would hide which half was measured.",
    )


def _prefill_bound(result: SweepResult) -> Verdict | None:
    """What is shown from outside: how much of prefill's time reading the weights can be at most, and no more."""
    prompt, alone = _reference(result), _alone(result)
    claim = "Prefill does not wait for reading the weights."
    if prompt is None or not alone:
        return Verdict(Status.UNKNOWN, claim, "One of the phases was not measured.")
    if prompt.x[0] < REFERENCE_PROMPT / 4:
        return Verdict(Status.UNKNOWN, claim, f"The longest prompt had {prompt.x[0]:,.0f} tokens, too few to tell.")
    chunks = _chunks(result, prompt.x[0])
    steps = prompt.median / alone[0].median
    fewest, most = (times / (chunks or 1) for times in _ratio(prompt, alone[0]))
    told = f"A prompt of {prompt.x[0]:,.0f} tokens takes {steps:,.1f} decode steps' time"
    if fewest < TIMES_A_STEP <= most:
        return Verdict(Status.UNKNOWN, claim, f"{told}, {_doubt(fewest * (chunks or 1), most * (chunks or 1))}")
    how = "supposing that it was read in one chunk" if chunks is None else _times("read in", chunks, "chunk")
    share = (chunks or 1) / steps
    bound = f"{told}, {how}; a step reads all weights once, and so does a chunk: "
    if steps / (chunks or 1) < TIMES_A_STEP:
        return Verdict(Status.UNKNOWN, claim, f"{bound}that may be as much as {percent(min(share, 1.0))} of the time.")
    reason = (
        f"{bound}that is {percent(share)} of the time at most. What the rest is (arithmetic, unpacking of weights, the "
        "program around them) cannot be told from outside."
    )
    return Verdict(Status.HOLDS, claim, reason)


def _chunks(result: SweepResult, num_tokens: float) -> int | None:
    """In how many pieces the target reads a prompt; None where it does not say."""
    told = result.facts.details.get("max_num_batched_tokens", "")
    if told.isdigit() and int(told):
        return math.ceil(num_tokens / int(told))
    return 1 if result.facts.kind == "transformers" else None


def _times(verb: str, number: int, noun: str) -> str:
    return f"{verb} {number} {noun}{'' if number == 1 else 's'}"


def _decode_bound(result: SweepResult) -> Verdict | None:
    claim = "Decode of one request is not compute-bound: a batch shares what it waits for."
    grid = {(place.length, place.batch): point for place, point in result.points("decode")}
    wide = max(((p, b) for p, b in grid if b >= STEADY_BATCH and (p, 1) in grid), key=lambda at: at[1], default=None)
    if wide is None:
        return Verdict(Status.UNKNOWN, claim, "No batch of four or more was measured beside one request alone.")
    position, batch = wide
    times = grid[wide].median / grid[position, 1].median
    told = (
        f"A step for {batch} sequences takes {times:.2f} times as long as one for a single sequence (behind "
        f"{grid[position, 1].x[0]:,.0f} tokens), with {batch} times the arithmetic: {percent(times / batch)} of the "
        "time a token."
    )
    fewest, most = _ratio(grid[wide], grid[position, 1])
    if fewest < NEARLY_FREE * batch <= most:
        return Verdict(Status.UNKNOWN, claim, f"{told.rstrip('.')}, {_doubt(fewest, most)}")
    return Verdict(Status.HOLDS if times < NEARLY_FREE * batch else Status.FAILS, claim, told)


def _doubt(fewest: float, most: float) -> str:
    if math.isinf(most):
        return "but so few repetitions do not tell of their noise."
    return f"but by their noise it may be {fewest:,.1f} to {most:,.1f}."


def _ratio(one: Point, other: Point) -> tuple[float, float]:
    """The least and the most that one / other may be, by the intervals of their medians; anything if too few."""
    if min(len(one.values), len(other.values)) < FEWEST_REPETITIONS:
        return 0.0, math.inf
    top, bottom = median_interval(one.values), median_interval(other.values)
    return top.low / bottom.high, top.high / bottom.low


def _growth(phase: str, result: SweepResult, found: Fit | None) -> Verdict:
    if found is None:
        return Verdict(Status.UNKNOWN, f"How {phase} grows.", "Too few points were measured for a fit.")
    values = {one.name: one.value for one in found.coefficients}
    law = _law_text(found)
    if phase == "prefill":
        longest = max(point.x[0] for point in found.points)
        share = values["c"] * longest**2 / found.line((longest, 1))
        text = (
            f"Prefill time is {law} (fitted {found.range_text}): {time_text(values['b'] * 1000)} ms per "
            f"1,000 prompt tokens, and a quadratic part "
            f"that makes {percent(share)} of the time at {longest:,.0f} tokens."
        )
        return Verdict(Status.INFO, text)
    alone = _alone(result)
    rise = alone[-1].median / alone[0].median - 1 if len(alone) > 1 else 0.0
    text = f"Decode time a step is {law} (fitted {found.range_text}; farther out nothing is known)."
    if len(alone) > 1:
        text += (
            f" For one request it changes by {percent(rise, signed=True)} from {alone[0].x[0]:,.0f} to "
            f"{alone[-1].x[0]:,.0f} tokens before."
        )
    return Verdict(Status.INFO, text)


def _law_text(found: Fit) -> str:
    """The law with its numbers, in milliseconds."""
    symbols = {"a": "", "c": " batch", "d": " batch position", "b": " position"}
    if found.law.formula.endswith("n^2"):
        symbols = {"a": "", "b": " n", "c": " n^2"}
    return " + ".join(f"{one.value * 1000:.3g}{symbols[one.name]}" for one in found.coefficients) + " ms"


def _held_out(phase: str, found: Fit, points: list[HeldOut]) -> Verdict | None:
    if not points:
        return Verdict(Status.UNKNOWN, f"The fit of {phase} predicts held-out points.", "None was measured.")
    inside = sum(one.inside for one in points)
    what = "prompt lengths" if phase == "prefill" else "positions and batch sizes"
    worst = max(points, key=lambda one: abs(one.error))
    claimed = (worst.predicted.high - worst.predicted.low) / 2 / worst.measured
    text = (
        f"The fit of {phase} predicts {inside} of {len(points)} held-out {what} within the error it claims "
        f"(±{percent(found.typical_error)} as a rule); its predictions were off by "
        f"{percent(statistics.median(abs(one.error) for one in points))} (median), "
        f"{percent(abs(worst.error))} at most, at a point where it claims ±{percent(claimed)} of what was measured."
    )
    claims = found.typical_error
    if claims > WORTHLESS or (claims > MEANINGFUL and BETTER_THAN_NONE * claims > found.lawless_error):
        return Verdict(
            Status.UNKNOWN, text, "An error so large says nothing: measure on a quieter machine, or more points."
        )
    if chance_of_misses(len(points), len(points) - inside) >= CHANCE:
        return Verdict(Status.HOLDS, text)
    return Verdict(Status.FAILS, text, "So many misses are no luck: the formula or the noise is another there.")


def _extrapolated(phase: str, one: HeldOut) -> Verdict:
    """A single point outside: told with its number, and no claim about others."""
    where = (
        f"{one.x[0]:,.0f} tokens" if phase == "prefill" else f"batch {one.place.batch} behind {one.x[0]:,.0f} tokens"
    )
    return Verdict(
        Status.INFO,
        f"Extrapolated to {where}, outside the fitted range, the law of {phase} is off by "
        f"{percent(one.error, signed=True)} ({time_text(one.predicted.value)} ms for {time_text(one.measured)} ms).",
    )


def chance_of_misses(points: int, misses: int) -> float:
    """Chance of so many misses or more where each point lies inside with `CONFIDENCE`, by the binomial distribution."""
    return sum(
        math.comb(points, k) * (1 - CONFIDENCE) ** k * CONFIDENCE ** (points - k) for k in range(misses, points + 1)
    )


def _misfit(phase: str, found: Fit) -> Verdict:
    noise = found.repetition_noise or 0.0
    return Verdict(
        Status.INFO,
        f"The measured {phase} bends otherwise than {found.law.formula}: the residuals are ±{percent(found.scale)}, "
        f"repetitions differ by only ±{percent(noise)}. The claimed error includes that; do not extrapolate.",
    )
