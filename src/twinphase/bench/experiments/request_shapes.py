"""Claim: the prompt's length decides when the first token comes, the output's length when the last one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinphase.bench.experiments.experiment import Estimate, Experiment, Judged, Rule, point, ratio_of, shown
from twinphase.bench.experiments.workbench import Workbench
from twinphase.bench.plots import bars
from twinphase.bench.report import Column, Metric, Plot, Table

__all__ = ["EXPERIMENT", "RequestShapes"]

TOTAL = (1040, 528, 272, 144, 80)
SHORT = 16
TTFT, E2E = "TTFT, long prompt / short prompt", "E2E, long output / short output"


@dataclass(frozen=True)
class RequestShapes:
    """Two requests with the same number of tokens: seconds of each repetition.

    Attributes:
        long, short: tokens of the longer and the shorter half.
        reading: (TTFT, E2E) of the long prompt with a short answer.
        writing: the same of the short prompt with a long answer.
    """

    long: int
    short: int
    reading: list[tuple[float, float]]
    writing: list[tuple[float, float]]


def _measure(bench: Workbench) -> RequestShapes:
    speed = bench.speed
    total = bench.size("tokens of a request", TOTAL, lambda n: speed.prefill(n) + speed.decode(n))
    long, engine = total - SHORT, bench.engine()

    def request(prompt: int, output: int) -> tuple[float, float]:
        ticket = engine.submit(bench.workshop.prompt(prompt), output)
        engine.run()
        return ticket.ttft, ticket.e2e

    found = bench.interleave({"reading": lambda: request(long, SHORT), "writing": lambda: request(SHORT, long)})
    return RequestShapes(long, SHORT, found["reading"], found["writing"])


def _estimates(found: RequestShapes) -> Mapping[str, Estimate]:
    return {
        TTFT: ratio_of([ttft for ttft, _ in found.reading], [ttft for ttft, _ in found.writing]).at(found.long),
        E2E: ratio_of([e2e for _, e2e in found.writing], [e2e for _, e2e in found.reading]).at(found.long),
    }


def _why(found: RequestShapes, judged: Sequence[Judged]) -> Sequence[str]:
    ttfts = [ratio_of([t for t, _ in one], [e for _, e in one]).value for one in (found.reading, found.writing)]
    return [
        f"Both requests have {found.long + found.short:,} tokens. With the long prompt {ttfts[0]:.0%} of the time "
        "passes "
        f"before the first token, with the long answer {ttfts[1]:.1%}.",
        "TTFT = prefill, for a request alone; E2E = TTFT + (output tokens - 1) x TPOT.",
    ]


def _tables(found: RequestShapes) -> Sequence[Table]:
    columns = (
        Column("request"),
        Column("TTFT, ms", "first token out - submitted; median and interval"),
        Column("E2E, ms", "last token out - submitted"),
        Column("TPOT, ms", "(last token - first) / (output tokens - 1)"),
    )
    rows = []
    for prompt, output, values in (
        (found.long, found.short, found.reading),
        (found.short, found.long, found.writing),
    ):
        tpot = [(e2e - ttft) / (output - 1) for ttft, e2e in values]
        name = f"{prompt:,} tokens in, {output:,} out"
        rows.append((name, *(shown(one, 1e3) for one in ([t for t, _ in values], [e for _, e in values], tpot))))
    return (Table("Two requests of the same number of tokens", columns, tuple(rows)),)


def _plots(found: RequestShapes) -> Sequence[Plot]:
    rows = []
    for prompt, output, values in ((found.long, found.short, found.reading), (found.short, found.long, found.writing)):
        name = f"{prompt:,} in, {output:,} out"
        rows.append({"request": name, "seconds": point([t for t, _ in values], "t")["t"], "phase": "prefill (TTFT)"})
        rows.append({"request": name, "seconds": point([e - t for t, e in values], "t")["t"], "phase": "decode"})
    return (
        bars(
            "request_shapes",
            "Same number of tokens, different halves",
            rows,
            ("request", ""),
            ("seconds", "time, s"),
            part="phase",
            order=[str(rows[0]["request"]), str(rows[2]["request"])],
            caption="Medians; each request alone.",
        ),
    )


def _metrics(found: RequestShapes) -> Sequence[Metric]:
    return [
        Metric(
            "ttft_seconds[long prompt]", "s", "lower", tuple(t for t, _ in found.reading), "first token - submitted"
        ),
        Metric("e2e_seconds[long output]", "s", "lower", tuple(e for _, e in found.writing), "last token - submitted"),
    ]


EXPERIMENT = Experiment(
    name="request-shapes",
    claim="The prompt's length decides when the first token comes; the output's length decides when the last one does.",
    method="Two requests, each alone, with the same number of tokens: long prompt and short answer, and the reverse.",
    rules=(
        Rule(TTFT, "TTFT of the long prompt / TTFT of the short prompt", at_least=4, fails_from=512),
        Rule(
            E2E, "E2E of the long answer / E2E of the long prompt, the same tokens in all", at_least=1.5, fails_from=512
        ),
    ),
    meaning="If the first token is late look at the prompt and the queue; if the answer is slow look at its length.",
    share=1.6,
    measure=_measure,
    estimates=_estimates,
    why=_why,
    tables=_tables,
    plots=_plots,
    metrics=_metrics,
)
