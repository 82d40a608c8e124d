"""Claim: prefill time is linear in the prompt, with a quadratic part that grows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twinphase.bench.experiments.experiment import Estimate, Experiment, Judged, Rule, median_of, point, shown
from twinphase.bench.experiments.workbench import Workbench, fitted
from twinphase.bench.plots import lines
from twinphase.bench.report import Column, Metric, Plot, Table
from twinphase.phases.work import Cost

__all__ = ["EXPERIMENT", "PrefillLength"]

LONGEST = (4096, 2048, 1024, 512, 256, 128)
DECIDED_FROM = 1024  # below, attention is a small part: c n² is the bend of kernels that warm up on short prompts
EXPONENT, QUADRATIC = "growth among short prompts", "quadratic share at the longest prompt"


@dataclass(frozen=True)
class PrefillLength:
    """Seconds of each repetition by prompt length, and the FLOP that each length needs."""

    seconds: dict[int, list[float]]
    linear_flops: dict[int, int]
    attention_flops: dict[int, int]

    @property
    def lengths(self) -> list[int]:
        """Prompt lengths, rising."""
        return sorted(self.seconds)

    @property
    def fits(self) -> list[list[float]]:
        """(a, b, c) of t = a + b n + c n^2, one fit a repetition."""
        lengths = self.lengths
        rounds = min(map(len, self.seconds.values()))
        return [fitted(lengths, [self.seconds[n][i] for n in lengths], 2) for i in range(rounds)]

    def quadratic_shares(self, length: int) -> list[float]:
        """c n^2 / (a + b n + c n^2) of each repetition."""
        return [c * length**2 / (a + b * length + c * length**2) for a, b, c in self.fits]

    def attention_share(self, length: int) -> float:
        """Attention's part of the FLOP."""
        return self.attention_flops[length] / (self.attention_flops[length] + self.linear_flops[length])


def _measure(bench: Workbench) -> PrefillLength:
    longest = bench.size(
        "longest prompt, tokens", LONGEST, lambda n: sum(bench.speed.prefill(n >> i) for i in range(6))
    )
    lengths = [longest >> shift for shift in range(5, -1, -1) if longest >> shift >= 4]
    engine, costs = bench.engine(), {}

    def prefill(length: int) -> float:
        engine.submit(bench.workshop.prompt(length), 1)
        records = engine.run()
        costs[length] = sum((record.prefill for record in records), Cost())
        return sum(record.seconds for record in records)

    seconds = bench.interleave({n: partial(prefill, n) for n in lengths})
    return PrefillLength(
        seconds, {n: costs[n].linear_flops for n in lengths}, {n: costs[n].attention_flops for n in lengths}
    )


def _estimates(found: PrefillLength) -> Mapping[str, Estimate]:
    lengths = found.lengths
    low, high = lengths[max(0, len(lengths) - 5)], lengths[max(1, len(lengths) - 3)]
    pairs = zip(found.seconds[low], found.seconds[high], strict=True)
    growth = [math.log(two / one) / math.log(high / low) for one, two in pairs]
    return {EXPONENT: median_of(growth), QUADRATIC: median_of(found.quadratic_shares(lengths[-1])).at(lengths[-1])}


def _why(found: PrefillLength, judged: Sequence[Judged]) -> Sequence[str]:
    longest = found.lengths[-1]
    a, b, c = (median_of([fit[i] for fit in found.fits]).value for i in range(3))
    share, flops = median_of(found.quadratic_shares(longest)), found.attention_share(longest)
    sentences = [
        f"Fit over {len(found.fits)} repetitions: t = {a * 1e3:.3g} ms + {b * 1e6:.4g} µs n + {c * 1e9:.3g} ns n².",
        f"At {longest:,} tokens the quadratic part takes {share.value:.0%} of the time; attention is {flops:.0%} of "
        "the "
        "FLOP there (2 P n for the layers, 2 L H d n² for attention: each token looks back at half of the prompt).",
    ]
    if c > 0 and b > 0:
        sentences.append(f"Both parts would be equal at about n = b / c = {b / c:,.0f} tokens.")
    return sentences


def _tables(found: PrefillLength) -> Sequence[Table]:
    columns = (
        Column("prompt, tokens"),
        Column("prefill, ms", "median of the repetitions and its interval"),
        Column("tokens/s", "prompt tokens / median time"),
        Column("quadratic share of the time", "c n² / (a + b n + c n²)"),
        Column("attention's share of the FLOP", "2 L H d n² / (2 P n + 2 L H d n²)"),
    )
    rows = tuple(
        (
            f"{n:,}",
            shown(found.seconds[n], 1e3),
            f"{n / median_of(found.seconds[n]).value:,.0f}",
            f"{median_of(found.quadratic_shares(n)).value:.1%}",
            f"{found.attention_share(n):.1%}",
        )
        for n in found.lengths
    )
    return (Table("Prefill by prompt length", columns, rows),)


def _plots(found: PrefillLength) -> Sequence[Plot]:
    rows = [{"prompt tokens": n, **point(found.seconds[n], "seconds")} for n in found.lengths]
    a, b, c = (median_of([fit[i] for fit in found.fits]).value for i in range(3))
    longest, curve = found.lengths[-1], []
    for step in range(41):
        n = longest * step / 40
        curve.append({"prompt tokens": n, "seconds": a + b * n + c * n * n, "part": "prefill: a + b n + c n²"})
        curve.append({"prompt tokens": n, "seconds": a + b * n, "part": "linear part: a + b n"})
    return (
        lines(
            "prefill_length",
            "Prefill time by prompt length, and its linear part",
            [{**row, "part": "prefill: a + b n + c n²"} for row in rows],
            ("prompt tokens", "prompt length n, tokens"),
            ("seconds", "prefill time, s"),
            series="part",
            fitted=curve,
            caption="Points: medians with intervals. Lines: the fit, and its linear part alone.",
        ),
    )


def _metrics(found: PrefillLength) -> Sequence[Metric]:
    return [
        Metric(f"prefill_seconds[n={n}]", "s", "lower", tuple(values), "steps that computed the prompt and one token")
        for n, values in found.seconds.items()
    ]


EXPERIMENT = Experiment(
    name="prefill-length",
    claim="Prefill time grows linearly with the prompt, plus a quadratic part from attention.",
    method="Fresh prompts of doubling length, one at a time, nothing cached; t = a + b n + c n² fitted in each "
    "repetition.",
    rules=(
        Rule(EXPONENT, "log(t2 / t1) / log(n2 / n1), where n2 = 4 n1; 1 is linear, 2 quadratic", 0.8, 1.2, ""),
        Rule(
            QUADRATIC,
            "c n² / (a + b n + c n²)",
            at_least=0.05,
            unit="%",
            fails_from=LONGEST[0],
            sized_in="prompt tokens",
            decided_from=DECIDED_FROM,
        ),
    ),
    meaning="A prompt twice as long costs a bit more than twice the wait; cutting a long prompt saves more than its "
    "share.",
    share=2.0,
    measure=_measure,
    estimates=_estimates,
    why=_why,
    tables=_tables,
    plots=_plots,
    metrics=_metrics,
)
