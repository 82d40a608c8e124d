"""Claim: the prompt's length decides when the first token comes, the output's length when the last one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinphase.bench.lab.experiment import (
    Estimate,
    Experiment,
    Judged,
    Rule,
    median_of,
    percent,
    ratio_of,
)
from twinphase.bench.lab.figures import shown
from twinphase.bench.lab.workbench import Workbench
from twinphase.bench.report.plots import bars
from twinphase.bench.report.report import Column, Metric, Plot, Table

__all__ = ["RequestShapes"]

TOTAL = (1040, 528, 272, 144, 80)
SHORT = 16
TTFT = Rule(
    "TTFT, long prompt / short prompt",
    "TTFT of the long prompt / TTFT of the short prompt",
    at_least=4,
    fails_from=512,
)
E2E = Rule(
    "E2E, long output / short output",
    "E2E of the long answer / E2E of the long prompt, the same tokens in all",
    at_least=1.5,
    fails_from=512,
)


@dataclass(frozen=True)
class RequestShapes(Experiment):
    """Two requests with the same number of tokens: seconds of each repetition.

    Attributes:
        long, short: tokens of the longer and the shorter half.
        reading: (TTFT, E2E) of the long prompt with a short answer.
        writing: the same of the short prompt with a long answer.
    """

    name = "request-shapes"
    claim = (
        "The prompt's length decides when the first token comes; the output's length decides when the last one does."
    )
    method = "Two requests, each alone, with the same number of tokens: long prompt and short answer, and the reverse."
    rules = (TTFT, E2E)
    meaning = "If the first token is late look at the prompt and the queue; if the answer is slow look at its length."
    share = 1.6

    long: int
    short: int
    reading: list[tuple[float, float]]
    writing: list[tuple[float, float]]

    @classmethod
    def measure(cls, bench: Workbench) -> RequestShapes:
        """Both requests, one after the other."""
        speed = bench.speed
        total = bench.size("tokens of a request", TOTAL, lambda n: speed.prefill(n) + speed.decode(n))
        long, engine = total - SHORT, bench.engine()

        def request(prompt: int, output: int) -> tuple[float, float]:
            ticket = engine.submit(bench.workshop.prompt(prompt), output)
            engine.run()
            return ticket.ttft, ticket.e2e

        found = bench.interleave({"reading": lambda: request(long, SHORT), "writing": lambda: request(SHORT, long)})
        return cls(long, SHORT, found["reading"], found["writing"])

    @property
    def requests(self) -> tuple[tuple[int, int, list[float], list[float]], ...]:
        """(prompt tokens, output tokens, TTFT and E2E of each repetition) of both."""
        both = ((self.long, self.short, self.reading), (self.short, self.long, self.writing))
        return tuple((prompt, out, [t for t, _ in times], [e for _, e in times]) for prompt, out, times in both)

    def estimates(self) -> Mapping[Rule, Estimate]:
        """The long half against the short one, at either end of a request."""
        (_, _, reading_ttft, reading_e2e), (_, _, writing_ttft, writing_e2e) = self.requests
        return {
            TTFT: ratio_of(reading_ttft, writing_ttft).at(self.long),
            E2E: ratio_of(writing_e2e, reading_e2e).at(self.long),
        }

    def why(self, judged: Sequence[Judged]) -> Sequence[str]:
        """How much of either request is prefill."""
        reading, writing = (ratio_of(ttft, e2e).value for _, _, ttft, e2e in self.requests)
        return [
            f"Both requests have {self.long + self.short:,} tokens. With the long prompt {percent(reading)} of the "
            f"time passes before the first token, with the long answer {percent(writing)}.",
            "TTFT = prefill, for a request alone; E2E = TTFT + (output tokens - 1) x TPOT.",
        ]

    def tables(self) -> Sequence[Table]:
        columns = (
            Column("request"),
            Column("TTFT, ms", "first token out - submitted; median and interval"),
            Column("E2E, ms", "last token out - submitted"),
            Column("TPOT, ms", "(last token - first) / (output tokens - 1)"),
        )
        rows = []
        for prompt, output, ttft, e2e in self.requests:
            tpot = [(last - first) / (output - 1) for first, last in zip(ttft, e2e, strict=True)]
            name = f"{prompt:,} tokens in, {output:,} out"
            rows.append((name, shown(ttft, 1e3), shown(e2e, 1e3), shown(tpot, 1e3)))
        return (Table("Two requests of the same number of tokens", columns, tuple(rows)),)

    def plots(self) -> Sequence[Plot]:
        rows = []
        for prompt, output, ttft, e2e in self.requests:
            decode = [last - first for first, last in zip(ttft, e2e, strict=True)]
            for phase, seconds in (("prefill (TTFT)", ttft), ("decode", decode)):
                name = f"{prompt:,} in, {output:,} out"
                rows.append({"request": name, "seconds": median_of(seconds).value, "phase": phase})
        return (
            bars(
                "request_shapes",
                "Same number of tokens, different halves",
                rows,
                ("request", ""),
                ("seconds", "time, s"),
                part="phase",
                order=[str(row["request"]) for row in rows[::2]],
                caption="Medians; each request alone.",
            ),
        )

    def metrics(self) -> Sequence[Metric]:
        (_, _, ttft, _), (_, _, _, e2e) = self.requests
        return [
            Metric("ttft_seconds[long prompt]", "s", "lower", tuple(ttft), "first token - submitted"),
            Metric("e2e_seconds[long output]", "s", "lower", tuple(e2e), "last token - submitted"),
        ]
