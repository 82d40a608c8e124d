"""Claim: decode takes the same time for every token, rising slowly with the position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from twinphase.bench.lab.experiment import (
    OTHER_BANDWIDTH,
    Estimate,
    Experiment,
    Judged,
    Rule,
    median_of,
    ratio_of,
    unknown,
)
from twinphase.bench.lab.figures import coefficients, metrics_by, points, shown
from twinphase.bench.lab.workbench import Workbench, fits
from twinphase.bench.report.plots import lines
from twinphase.bench.report.report import Column, Metric, Plot, Table
from twinphase.phases.hardware import Ceilings
from twinphase.phases.work import kv_bytes_per_token

__all__ = ["DecodePosition"]

NEAREST = 16
FURTHEST = (4096, 2048, 1024, 512, 256, 128)
OUTPUT = (256, 192, 128, 96, 64, 32)
STEPS = 12
FLAT = Rule("second half / first half", "time of the answer's second half / first half", 0.85, 1.15)
RISE = Rule(
    "last position / first",
    f"time of a token at the last position / at position {NEAREST}",
    at_least=1.02,
    fails_from=FURTHEST[0],
)
SLOPE = Rule(
    "slope / KV bytes over bandwidth",
    "measured seconds for each earlier token / (its KV bytes / measured bandwidth)",
    0.5,
    2.0,
    margin=OTHER_BANDWIDTH,
    disturbed="moves",  # others slow all positions, and the bandwidth is the whole machine's
)


@dataclass(frozen=True)
class DecodePosition(Experiment):
    """Decode of one request alone.

    Attributes:
        seconds: a token, median of the steps of each repetition, by tokens before it, rising.
        gaps: every token of one answer behind a short prompt, by repetition.
        kv_token_bytes: read for each earlier token.
        bandwidth: measured for weights and KV at the last position, bytes/s; None is unknown.
        attention_flops: of each earlier token.
        working_set: bytes that a step at the last position reads.
    """

    name = "decode-position"
    claim = "Every decode token takes the same time, rising slowly with the position as more KV is read."
    method = "One request alone: an answer behind a short prompt, and a few tokens behind prompts of growing length."
    rules = (FLAT, RISE, SLOPE)
    meaning = "The time of an answer is about its length times one number; a long context makes that number larger."
    share = 1.6
    uses_ceilings = True

    seconds: dict[int, list[float]]
    gaps: list[list[float]]
    kv_token_bytes: int
    bandwidth: float | None
    attention_flops: int
    working_set: int

    @classmethod
    def measure(cls, bench: Workbench) -> DecodePosition:
        """Decode behind prompts that are read once: their KV stays in the prefix cache for the repetitions."""
        speed, shape = bench.speed, bench.workshop.shape
        furthest = bench.size("last position", FURTHEST, lambda n: speed.prefill(n) / 3 + speed.decode(5 * STEPS + 96))
        length = bench.size("output, tokens", OUTPUT, lambda n: speed.decode(5 * STEPS + n))
        engine = bench.engine(enable_prefix_caching=True)
        positions = [NEAREST, *(furthest * i // 4 for i in range(1, 5))]
        prompts = {p: bench.workshop.prompt(p) for p in positions}
        for prompt in prompts.values():
            engine.prefill(prompt)

        def steps(position: int) -> list[float]:
            return [record.seconds for record in engine.decode([prompts[position]], STEPS)]

        def answer() -> list[float]:
            ticket = engine.submit(prompts[NEAREST], length + 1)
            engine.run()
            return ticket.gaps

        found = bench.interleave({p: partial(steps, p) for p in positions} | {0: answer})
        gaps = found.pop(0)
        kv_token_bytes = kv_bytes_per_token(shape)
        used = shape.linear_bytes + shape.head_bytes + furthest * kv_token_bytes
        return cls(
            {position: [median(one) for one in values] for position, values in found.items()},
            gaps,
            kv_token_bytes,
            None,
            4 * shape.num_layers * shape.num_heads * shape.head_dim,
            used,
        ).under(bench.ceilings)

    def under(self, ceilings: Ceilings | None) -> DecodePosition:
        """With the bandwidth of these ceilings."""
        return replace(self, bandwidth=ceilings.read_bandwidth(self.working_set) if ceilings else None)

    @property
    def furthest(self) -> int:
        """The last position."""
        return max(self.seconds)

    @property
    def predicted(self) -> float | None:
        """Seconds a token for each earlier token, if reading its KV were all."""
        return self.kv_token_bytes / self.bandwidth if self.bandwidth else None

    def estimates(self) -> Mapping[Rule, Estimate]:
        """Within one answer, from the first position to the last, and against the bytes."""
        half = len(self.gaps[0]) // 2
        slope = unknown("This machine's bandwidth is unknown.")
        if self.predicted:
            slope = median_of([slope / self.predicted for _, slope in fits(self.seconds, 1)])
        return {
            FLAT: ratio_of([sum(gaps[-half:]) for gaps in self.gaps], [sum(gaps[:half]) for gaps in self.gaps]),
            RISE: ratio_of(self.seconds[self.furthest], self.seconds[NEAREST]).at(self.furthest),
            SLOPE: slope,
        }

    def why(self, judged: Sequence[Judged]) -> Sequence[str]:
        """What a token of context costs, and what reading its KV alone would."""
        start, slope = coefficients(self.seconds, 1)
        sentences = [
            f"A token takes {start * 1e3:.3g} ms, plus {slope * 1e6:.3g} µs for every token before it: a thousand "
            f"tokens of context cost {slope * 1e6:,.2g} ms more a token."
        ]
        if self.bandwidth and self.predicted:
            sentences.append(
                f"For each token before it, {self.kv_token_bytes:,} bytes of KV are read: {self.predicted * 1e6:.3g} "
                f"µs at the {self.bandwidth / 1e9:.3g} GB/s measured for that working set. Attention also computes "
                f"{self.attention_flops:,} FLOP for each, and must turn the stored KV back into numbers; where the "
                "slope is well above the bytes' time, that work and not the reading is what context costs here."
            )
        return sentences

    def tables(self) -> Sequence[Table]:
        columns = (
            Column("tokens before"),
            Column("ms a token", "median step of a repetition; median of the repetitions and its interval"),
            Column("tokens/s", "1 / median"),
            Column("against the first", "ratio of the medians"),
        )
        medians = {p: median_of(seconds).value for p, seconds in self.seconds.items()}
        rows = tuple(
            (f"{p:,}", shown(self.seconds[p], 1e3), f"{1 / one:,.0f}", f"{one / medians[NEAREST]:.2f}")
            for p, one in medians.items()
        )
        return (Table("Decode by position", columns, rows),)

    def plots(self) -> Sequence[Plot]:
        start, slope = coefficients(self.seconds, 1)
        measured, curve = "decode: a + b position", []
        for what, each in ((measured, slope), ("prediction: KV bytes / bandwidth", self.predicted)):
            if each is not None:
                for p in (0, self.furthest):
                    curve.append({"tokens before": p, "milliseconds": (start + each * p) * 1e3, "what": what})
        lengths = sorted({len(self.gaps[0]) * i // 8 for i in range(1, 9)})
        totals = {at: [sum(gaps[:at]) for gaps in self.gaps] for at in lengths}
        return (
            lines(
                "decode_total",
                "Decode time by length of the answer",
                points(totals, "output tokens", "seconds", what="decode"),
                ("output tokens", "output, tokens"),
                ("seconds", "time since the first token, s"),
                series="what",
                caption=f"One request alone behind a prompt of {NEAREST} tokens; medians with intervals.",
            ),
            lines(
                "decode_position",
                "Time of a token by the number of tokens before it",
                points(self.seconds, "tokens before", "milliseconds", 1e3, what=measured),
                ("tokens before", "tokens before it (position)"),
                ("milliseconds", "time of one token, ms"),
                series="what",
                fitted=curve,
                caption="Points: medians with intervals. The prediction counts the reading of KV alone.",
            ),
        )

    def metrics(self) -> Sequence[Metric]:
        return metrics_by("decode_seconds", "position", self.seconds, "median decode step of a repetition, alone")
