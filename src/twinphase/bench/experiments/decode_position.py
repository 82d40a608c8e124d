"""Claim: decode takes the same time for every token, rising slowly with the position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from twinphase.bench.experiments.experiment import (
    Estimate,
    Experiment,
    Judged,
    Rule,
    median_of,
    point,
    ratio_of,
    shown,
    unknown,
)
from twinphase.bench.experiments.workbench import Workbench, fitted
from twinphase.bench.plots import lines
from twinphase.bench.report import Column, Metric, Plot, Table
from twinphase.bench.statistics import percentile
from twinphase.phases.hardware import Ceilings
from twinphase.phases.work import kv_bytes_per_token

__all__ = ["EXPERIMENT", "DecodePosition"]

FURTHEST = (4096, 2048, 1024, 512, 256, 128)
OUTPUT = (256, 192, 128, 96, 64, 32)
STEPS = 12
FLAT, RISE, SLOPE = "second half / first half", "last position / first", "slope / KV bytes over bandwidth"


@dataclass(frozen=True)
class DecodePosition:
    """Decode of one request alone.

    Attributes:
        seconds: a token, median of the steps of each repetition, by tokens before it.
        gaps: every token of one answer behind a short prompt, by repetition.
        kv_token_bytes: read for each earlier token.
        bandwidth: measured for weights and KV at the last position, bytes/s; None is unknown.
        working_set: bytes that a step there reads.
        attention_flops: of each earlier token.
    """

    seconds: dict[int, list[float]]
    gaps: list[list[float]]
    kv_token_bytes: int
    bandwidth: float | None
    attention_flops: int
    working_set: int

    @property
    def positions(self) -> list[int]:
        """Rising."""
        return sorted(self.seconds)

    @property
    def fits(self) -> list[list[float]]:
        """(a, b) of t = a + b position, one a repetition."""
        rounds = min(map(len, self.seconds.values()))
        return [fitted(self.positions, [self.seconds[p][i] for p in self.positions], 1) for i in range(rounds)]

    @property
    def predicted(self) -> float | None:
        """Seconds a token for each earlier token, if reading its KV were all."""
        return self.kv_token_bytes / self.bandwidth if self.bandwidth else None


def _measure(bench: Workbench) -> DecodePosition:
    speed, shape = bench.speed, bench.workshop.shape
    # Every prompt is read once: its KV stays in the prefix cache for the repetitions.
    furthest = bench.size("last position", FURTHEST, lambda n: speed.prefill(n) / 3 + speed.decode(5 * STEPS + 96))
    length = bench.size("output, tokens", OUTPUT, lambda n: speed.decode(5 * STEPS + n))
    engine = bench.engine(enable_prefix_caching=True)
    positions = [16, *(furthest * i // 4 for i in range(1, 5))]
    prompts = {p: bench.workshop.prompt(p) for p in positions}
    for prompt in prompts.values():
        engine.prefill(prompt)

    def decode(position: int) -> list[float]:
        return [percentile([record.seconds for record in engine.decode([prompts[position]], STEPS)], 50)]

    def answer() -> list[float]:
        ticket = engine.submit(prompts[16], length + 1)
        engine.run()
        return ticket.gaps

    variants = {p: partial(decode, p) for p in positions} | {0: answer}
    found = bench.interleave(variants)
    gaps = found.pop(0)
    used = shape.linear_bytes + shape.head_bytes + furthest * kv_bytes_per_token(shape)
    return DecodePosition(
        {position: [one[0] for one in values] for position, values in found.items()},
        gaps,
        kv_bytes_per_token(shape),
        bench.ceilings.read_bandwidth(used) if bench.ceilings else None,
        4 * shape.num_layers * shape.num_heads * shape.head_dim,
        used,
    )


def _under(found: DecodePosition, ceilings: Ceilings | None) -> DecodePosition:
    return replace(found, bandwidth=ceilings.read_bandwidth(found.working_set) if ceilings else None)


def _estimates(found: DecodePosition) -> Mapping[str, Estimate]:
    half = len(found.gaps[0]) // 2
    first, second = ([sum(gaps[:half]) for gaps in found.gaps], [sum(gaps[-half:]) for gaps in found.gaps])
    near, far = found.seconds[found.positions[0]], found.seconds[found.positions[-1]]
    slopes = [slope for _, slope in found.fits]
    predicted = found.predicted
    return {
        FLAT: ratio_of(second, first),
        RISE: ratio_of(far, near).at(found.positions[-1]),
        SLOPE: median_of([slope / predicted for slope in slopes])
        if predicted
        else unknown("This machine's bandwidth is unknown."),
    }


def _why(found: DecodePosition, judged: Sequence[Judged]) -> Sequence[str]:
    start, slope = (median_of([fit[i] for fit in found.fits]).value for i in range(2))
    sentences = [
        f"A token takes {start * 1e3:.3g} ms, plus {slope * 1e6:.3g} µs for every token before it: a thousand tokens "
        "of "
        f"context cost {slope * 1e6:,.2g} ms more a token."
    ]
    if found.predicted:
        sentences.append(
            f"For each token before it, {found.kv_token_bytes:,} bytes of KV are read: {found.predicted * 1e6:.3g} µs "
            "at "
            f"the {found.bandwidth or 0:.3g} bytes/s measured for that working set. Attention also computes "
            f"{found.attention_flops:,} FLOP for each, and must turn the stored KV back into numbers; where the slope "
            "is "
            "well above the bytes' time, that work and not the reading is what context costs here."
        )
    return sentences


def _tables(found: DecodePosition) -> Sequence[Table]:
    first = median_of(found.seconds[found.positions[0]]).value
    columns = (
        Column("tokens before"),
        Column("ms a token", "median step of a repetition; median of the repetitions and its interval"),
        Column("tokens/s", "1 / median"),
        Column("against the first", "ratio of the medians"),
    )
    rows = tuple(
        (
            f"{p:,}",
            shown(found.seconds[p], 1e3),
            f"{1 / median_of(found.seconds[p]).value:,.0f}",
            f"{median_of(found.seconds[p]).value / first:.2f}",
        )
        for p in found.positions
    )
    return (Table("Decode by position", columns, rows),)


def _plots(found: DecodePosition) -> Sequence[Plot]:
    start, slope = (median_of([fit[i] for fit in found.fits]).value for i in range(2))
    measured, predicted = "decode: a + b position", "prediction: KV bytes / bandwidth"
    rows = [
        {"tokens before": p, **point(found.seconds[p], "milliseconds", 1e3), "what": measured} for p in found.positions
    ]
    ends = (0, found.positions[-1])
    curve = [{"tokens before": p, "milliseconds": (start + slope * p) * 1e3, "what": measured} for p in ends]
    if found.predicted is not None:
        slow = found.predicted
        curve += [{"tokens before": p, "milliseconds": (start + slow * p) * 1e3, "what": predicted} for p in ends]
    totals: list[dict[str, float]] = []
    for at in sorted({len(found.gaps[0]) * i // 8 for i in range(1, 9)}):
        totals.append({"output tokens": at, **point([sum(gaps[:at]) for gaps in found.gaps], "seconds")})
    return (
        lines(
            "decode_total",
            "Decode time by length of the answer",
            [{**row, "what": "decode"} for row in totals],
            ("output tokens", "output, tokens"),
            ("seconds", "time since the first token, s"),
            series="what",
            caption="One request alone behind a prompt of 16 tokens.",
        ),
        lines(
            "decode_position",
            "Time of a token by the number of tokens before it",
            rows,
            ("tokens before", "tokens before it (position)"),
            ("milliseconds", "time of one token, ms"),
            series="what",
            fitted=curve,
            caption="Points: medians with intervals. The prediction counts the reading of KV alone.",
        ),
    )


def _metrics(found: DecodePosition) -> Sequence[Metric]:
    return [
        Metric(
            f"decode_seconds[position={p}]", "s", "lower", tuple(values), "median decode step of a repetition, alone"
        )
        for p, values in found.seconds.items()
    ]


EXPERIMENT = Experiment(
    name="decode-position",
    claim="Every decode token takes the same time, rising slowly with the position as more KV is read.",
    method="One request alone: an answer behind a short prompt, and a few tokens behind prompts of growing length.",
    rules=(
        Rule(FLAT, "time of the answer's second half / first half", 0.85, 1.15),
        Rule(RISE, "time of a token at the last position / at position 16", at_least=1.02, fails_from=FURTHEST[0]),
        Rule(SLOPE, "measured seconds for each earlier token / (its KV bytes / measured bandwidth)", 0.5, 2.0),
    ),
    meaning="The time of an answer is about its length times one number; a long context makes that number larger.",
    share=1.6,
    measure=_measure,
    estimates=_estimates,
    why=_why,
    tables=_tables,
    plots=_plots,
    metrics=_metrics,
    under=_under,
)
