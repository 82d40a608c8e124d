"""Claim: prefill time is linear in the prompt, with a quadratic part that grows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twinphase.bench.lab.experiment import Estimate, Experiment, Judged, Rule, median_of, percent
from twinphase.bench.lab.figures import coefficients, metrics_by, points, shown
from twinphase.bench.lab.workbench import Workbench, fits
from twinphase.bench.report.plots import lines
from twinphase.bench.report.report import Column, Metric, Plot, Table
from twinphase.phases.work import Cost

__all__ = ["PrefillLength"]

LONGEST = (4096, 2048, 1024, 512, 256, 128)
GROWTH = Rule(
    "growth among short prompts", "log(t2 / t1) / log(n2 / n1), where n2 = 4 n1; 1 is linear, 2 quadratic", 0.8, 1.2, ""
)
QUADRATIC = Rule(
    "quadratic share at the longest prompt",
    "c n² / (a + b n + c n²)",
    at_least=0.05,
    unit="%",
    fails_from=LONGEST[0],
    sized_in="prompt tokens",
    decided_from=1024,  # below, attention is a small part: c n² is the bend of kernels that warm up on short prompts
)


@dataclass(frozen=True)
class PrefillLength(Experiment):
    """Prompts of doubling length.

    Attributes:
        seconds: of each repetition, by prompt length, rising.
        linear_flops: of the layers' matrices, by prompt length.
        attention_flops: likewise.
    """

    name = "prefill-length"
    claim = "Prefill time grows linearly with the prompt, plus a quadratic part from attention."
    method = "Fresh prompts of doubling length, one at a time, nothing cached; t = a + b n + c n² fitted in each round."
    rules = (GROWTH, QUADRATIC)
    meaning = (
        "A prompt twice as long costs a bit more than twice the wait; cutting a long prompt saves more than its share."
    )
    share = 2.0

    seconds: dict[int, list[float]]
    linear_flops: dict[int, int]
    attention_flops: dict[int, int]

    @classmethod
    def measure(cls, bench: Workbench) -> PrefillLength:
        """Read prompts, one at a time."""
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
        return cls(seconds, {n: costs[n].linear_flops for n in lengths}, {n: costs[n].attention_flops for n in lengths})

    @property
    def longest(self) -> int:
        """Prompt tokens."""
        return max(self.seconds)

    def quadratic_share(self, length: int) -> Estimate:
        """c n^2 / (a + b n + c n^2)."""
        return median_of(
            [c * length**2 / (a + b * length + c * length**2) for a, b, c in fits(self.seconds, 2)],
        )

    def attention_share(self, length: int) -> float:
        """Attention's part of the FLOP."""
        return self.attention_flops[length] / (self.attention_flops[length] + self.linear_flops[length])

    def estimates(self) -> Mapping[Rule, Estimate]:
        """Growth from the second shortest prompt to four times as many tokens, and what bends at the longest."""
        lengths = sorted(self.seconds)
        low, high = lengths[max(0, len(lengths) - 5)], lengths[max(1, len(lengths) - 3)]
        pairs = zip(self.seconds[low], self.seconds[high], strict=True)
        growth = [math.log(two / one) / math.log(high / low) for one, two in pairs]
        return {GROWTH: median_of(growth), QUADRATIC: self.quadratic_share(self.longest).at(self.longest)}

    def why(self, judged: Sequence[Judged]) -> Sequence[str]:
        """The fit, and how far attention's FLOP explain its quadratic part."""
        a, b, c = coefficients(self.seconds, 2)
        rounds, share = len(self.seconds[self.longest]), self.quadratic_share(self.longest)
        sentences = [
            f"Fit over {rounds} repetitions: t = {a * 1e3:.3g} ms + {b * 1e6:.4g} µs n + {c * 1e9:.3g} ns n².",
            f"At {self.longest:,} tokens the quadratic part takes {QUADRATIC.measured(share)} of the time; "
            f"attention is {percent(self.attention_share(self.longest))} of the FLOP there (2 P n for the layers, "
            "2 L H d n² for attention: each token looks back at half of the prompt).",
        ]
        if share.low > 0 and c > 0 and b > 0:
            sentences.append(f"Both parts would be equal at about n = b / c = {b / c:,.0f} tokens.")
        return sentences

    def tables(self) -> Sequence[Table]:
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
                shown(seconds, 1e3),
                f"{n / median_of(seconds).value:,.0f}",
                QUADRATIC.measured(self.quadratic_share(n)),
                percent(self.attention_share(n)),
            )
            for n, seconds in self.seconds.items()
        )
        return (Table("Prefill by prompt length", columns, rows),)

    def plots(self) -> Sequence[Plot]:
        a, b, c = coefficients(self.seconds, 2)
        whole, linear, curve = "prefill: a + b n + c n²", "linear part: a + b n", []
        for n in (self.longest * step / 40 for step in range(41)):
            curve.append({"prompt tokens": n, "seconds": a + b * n + c * n * n, "part": whole})
            curve.append({"prompt tokens": n, "seconds": a + b * n, "part": linear})
        return (
            lines(
                "prefill_length",
                "Prefill time by prompt length, and its linear part",
                points(self.seconds, "prompt tokens", "seconds", part=whole),
                ("prompt tokens", "prompt length n, tokens"),
                ("seconds", "prefill time, s"),
                series="part",
                fitted=curve,
                caption="Points: medians with intervals. Lines: the fit, and its linear part alone.",
            ),
        )

    def metrics(self) -> Sequence[Metric]:
        return metrics_by("prefill_seconds", "n", self.seconds, "steps that computed the prompt and one token")
