"""Claim: many short prompts read together are faster than one after the other, and as fast as one long prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twinphase.bench.lab.experiment import Estimate, Experiment, Judged, Rule, median_of, ratio_of
from twinphase.bench.lab.figures import points, shown
from twinphase.bench.lab.workbench import Workbench
from twinphase.bench.report.plots import lines
from twinphase.bench.report.report import Column, Plot, Table

__all__ = ["ShortPrompts"]

TOTAL = (512, 256, 128)
SHORTEST, LENGTHS = 8, (8, 16, 32, 64)
GAIN = Rule(
    "time one after the other / together",
    "time of the shortest prompts one after the other / all in one step",
    at_least=1.3,
    fails_from=256,
)
LONG = Rule(
    "time together / one long prompt",
    "time of the shortest prompts in one step / one prompt of as many tokens",
    at_most=1.25,
)


@dataclass(frozen=True)
class ShortPrompts(Experiment):
    """The same number of prompt tokens, cut differently: seconds of each repetition.

    Attributes:
        total: prompt tokens.
        apart: one prompt after the other, by length of a prompt, rising.
        together: all in one step, by length of a prompt, rising.
        long: one prompt of `total` tokens.
        weight_bytes: that every step reads.
        bandwidth: bytes a second for them; None is unknown.
    """

    name = "short-prompts"
    claim = "Short prompts are read faster together than one after the other, as fast as one long prompt."
    method = (
        "The same number of prompt tokens as many short prompts, one after the other or in one step, and as one prompt."
    )
    rules = (GAIN, LONG)
    meaning = (
        "Send short prompts at the same time (one list to generate, or concurrent requests) instead of one by one."
    )
    share = 1.4

    total: int
    apart: dict[int, list[float]]
    together: dict[int, list[float]]
    long: list[float]
    weight_bytes: int
    bandwidth: float | None

    @classmethod
    def measure(cls, bench: Workbench) -> ShortPrompts:
        """Read as many tokens, cut in every way."""
        speed, workshop = bench.speed, bench.workshop
        total = bench.size(
            "prompt tokens in all",
            TOTAL,
            lambda n: (
                sum(speed.prefill(n) + n / length * speed.prefill(length) for length in LENGTHS) + speed.prefill(n)
            ),
            room=min(workshop.config.max_num_seqs * SHORTEST, workshop.max_model_len - 8),
        )
        engine = bench.engine(max_num_batched_tokens=total)

        def read(length: int, together: bool) -> float:
            seconds = 0.0
            for _ in range(total // length):
                engine.submit(workshop.prompt(length), 1)
                if not together:
                    seconds += sum(record.seconds for record in engine.run())
            seconds += sum(record.seconds for record in engine.run())
            engine.clear()
            return seconds

        lengths = [n for n in LENGTHS if n <= total // 2]
        variants = {(n, together): partial(read, n, together) for n in lengths for together in (False, True)}
        found = bench.interleave({**variants, (total, True): partial(read, total, True)})
        weights = workshop.shape.linear_bytes + workshop.shape.head_bytes
        return cls(
            total,
            {n: found[n, False] for n in lengths},
            {n: found[n, True] for n in lengths},
            found[total, True],
            weights,
            bench.ceilings.read_bandwidth(weights) if bench.ceilings else None,
        )

    @property
    def shortest(self) -> int:
        """Tokens of the shortest prompts."""
        return min(self.apart)

    def estimates(self) -> Mapping[Rule, Estimate]:
        """Of the shortest prompts, where there is most to gain."""
        apart, together = self.apart[self.shortest], self.together[self.shortest]
        return {GAIN: ratio_of(apart, together).at(self.total), LONG: ratio_of(together, self.long)}

    def why(self, judged: Sequence[Judged]) -> Sequence[str]:
        """What a step costs whatever is in it, and what a prompt costs whatever its length."""
        apart, together = self.apart[self.shortest], self.together[self.shortest]
        saved = (median_of(apart).value - median_of(together).value) * 1e3
        steps = self.total // self.shortest
        sentences = [
            f"{steps} prompts of {self.shortest} tokens are {steps} steps one after the other, and each reads all the "
            f"weights: together they saved {saved:,.0f} ms, {saved / (steps - 1):.3g} ms for each step that was not "
            "needed."
        ]
        if self.bandwidth:
            each = self.weight_bytes / self.bandwidth * 1e3
            sentences.append(
                f"Reading the weights once takes {each:.3g} ms at the measured bandwidth. The longer the prompts, the "
                "less there is to gain: their arithmetic is then the larger part of a step, and that cannot be shared."
            )
        sentences.append(
            f"Against one prompt of the same {self.total:,} tokens, short ones attend to less, but each wants logits "
            "of its own: the output head is computed once for every prompt."
        )
        return sentences

    def tables(self) -> Sequence[Table]:
        columns = (
            Column("prompts"),
            Column("one after the other, ms", "sum of their steps; median and interval"),
            Column("all in one step, ms"),
            Column("gain", "median of the ratios, and its interval"),
        )
        rows = [
            (
                f"{self.total // n} of {n} tokens",
                shown(self.apart[n], 1e3),
                shown(self.together[n], 1e3),
                GAIN.measured(ratio_of(self.apart[n], self.together[n])),
            )
            for n in self.apart
        ]
        rows.append((f"1 of {self.total} tokens", "", shown(self.long, 1e3), ""))
        return (Table(f"{self.total:,} prompt tokens, cut differently", columns, tuple(rows)),)

    def plots(self) -> Sequence[Plot]:
        ways = {"one after the other": self.apart, "all in one step": {**self.together, self.total: self.long}}
        rows = []
        for what, values in ways.items():
            rates = {n: [self.total / one for one in seconds] for n, seconds in values.items()}
            rows += points(rates, "length", "rate", what=what)
        return (
            lines(
                "short_prompts",
                "Prefill rate by length of the prompts, apart and together",
                rows,
                ("length", "length of each prompt, tokens"),
                ("rate", "prompt tokens a second"),
                series="what",
                log_x=True,
                caption=f"{self.total:,} prompt tokens each time; the rightmost point is one prompt of that length. "
                "Medians with intervals.",
            ),
        )
