"""Claim: reading a long prompt in chunks protects the tokens of those who are decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from twinphase.bench.experiments.experiment import Estimate, Experiment, Judged, Rule, median_of, point, ratio_of, shown
from twinphase.bench.experiments.workbench import Workbench
from twinphase.bench.plots import lines
from twinphase.bench.report import Column, Metric, Plot, Table
from twinphase.bench.statistics import percentile
from twinphase.bench.stepped import Stepped

__all__ = ["EXPERIMENT", "ChunkedPrefill", "Interruption"]

PROMPT = (2048, 1024, 512, 256, 128)
DECODES, OWN, BEFORE = 4, 16, 8
WORST, PRICE = "worst gap, whole prompt / small chunks", "TTFT of the long prompt, small chunks / whole"


@dataclass(frozen=True)
class Interruption:
    """Running decodes into which a long prompt came; seconds.

    Attributes:
        worst: the longest gap between two tokens of a decode while the prompt was read.
        before: the median gap before it came.
        ttft: of the long prompt.
        gaps: (time since the prompt came, gap) of one decode.
        steps: that computed a part of the prompt.
    """

    worst: float
    before: float
    ttft: float
    gaps: list[tuple[float, float]]
    steps: int


@dataclass(frozen=True)
class ChunkedPrefill:
    """Interruptions of each repetition, by largest chunk (`max_num_batched_tokens`)."""

    prompt: int
    found: dict[int, list[Interruption]]

    @property
    def chunks(self) -> list[int]:
        """Rising; the last one takes the whole prompt at once."""
        return sorted(self.found)


def _interrupt(bench: Workbench, engine: Stepped, length: int) -> Interruption:
    """Let some requests decode, and send a long prompt into them."""
    decodes = [engine.submit(bench.workshop.prompt(OWN), length // 8 + 160) for _ in range(DECODES)]
    engine.run_until(lambda: all(ticket.times for ticket in decodes))
    for _ in range(BEFORE):
        engine.step()
    prompt = engine.submit(bench.workshop.prompt(length), 4)
    engine.records.clear()
    engine.run_until(lambda: len(prompt.times) == 4)
    steps = {record.index for record in engine.records if prompt.request.request_id in record.prefill_ids}
    before, within = [], []
    for ticket in decodes:
        for gap, at, step in zip(ticket.gaps, ticket.times[1:], ticket.steps[1:], strict=True):
            if step in steps:
                within.append(gap)
            elif at <= prompt.submitted:
                before.append(gap)
    shape = [(at - prompt.submitted, gap) for gap, at in zip(decodes[0].gaps, decodes[0].times[1:], strict=True)]
    engine.clear()
    return Interruption(max(within), percentile(before, 50), prompt.ttft, shape, len(steps))


def _measure(bench: Workbench) -> ChunkedPrefill:
    speed = bench.speed
    most = bench.workshop.config.max_num_batched_tokens - DECODES
    length = bench.size(
        "long prompt, tokens",
        PROMPT,
        lambda n: 3 * (speed.prefill(n) + speed.prefill(DECODES * OWN) + speed.decode(BEFORE + 4)),
        min(most, bench.workshop.max_model_len // 2),
    )
    small = max(32, length // 16)
    engines = {n: bench.engine(max_num_batched_tokens=n) for n in (small, 4 * small, length + DECODES)}
    return ChunkedPrefill(
        length, bench.interleave({n: partial(_interrupt, bench, e, length) for n, e in engines.items()})
    )


def _estimates(found: ChunkedPrefill) -> Mapping[str, Estimate]:
    small, whole = found.found[found.chunks[0]], found.found[found.chunks[-1]]
    return {
        WORST: ratio_of([one.worst for one in whole], [one.worst for one in small]).at(found.prompt),
        PRICE: ratio_of([one.ttft for one in small], [one.ttft for one in whole]),
    }


def _why(found: ChunkedPrefill, judged: Sequence[Judged]) -> Sequence[str]:
    small, whole = found.chunks[0], found.chunks[-1]
    worst = [median_of([one.worst for one in found.found[n]]).value * 1e3 for n in (small, whole)]
    return [
        "Requests in one step all wait for its end, so a step that reads a whole prompt holds every decode up for as "
        "long "
        f"as the prompt takes: {worst[1]:,.0f} ms here. With at most {small} tokens a step the longest gap is "
        f"{worst[0]:,.0f} ms.",
        "The prompt pays: each of its steps carries the decodes too, and small chunks read the weights, and the KV of "
        "what was read before, more often.",
    ]


def _label(found: ChunkedPrefill, chunk: int) -> str:
    return "whole prompt at once" if chunk == found.chunks[-1] else f"{chunk} tokens a step"


def _tables(found: ChunkedPrefill) -> Sequence[Table]:
    columns = (
        Column("largest step", "max_num_batched_tokens: prompt tokens and decodes together"),
        Column("usual gap, ms", "median gap of the decodes before the long prompt came"),
        Column("worst gap, ms", "longest gap of any decode while it was read; median and interval"),
        Column("TTFT of the long prompt, ms", "first token out - submitted"),
        Column("steps", "that computed a part of the prompt"),
    )
    rows = []
    for chunk in found.chunks:
        values = found.found[chunk]
        cells = [shown([getattr(one, name) for one in values], 1e3) for name in ("before", "worst", "ttft")]
        rows.append((_label(found, chunk), *cells, str(values[0].steps)))
    title = f"{DECODES} decodes, and a prompt of {found.prompt:,} tokens comes"
    return (Table(title, columns, tuple(rows)),)


def _plots(found: ChunkedPrefill) -> Sequence[Plot]:
    rows: list[dict[str, Any]] = []
    for chunk in found.chunks:
        middle = sorted(found.found[chunk], key=lambda one: one.worst)[len(found.found[chunk]) // 2]
        until = max(one.ttft for values in found.found.values() for one in values) * 1.05
        rows += [
            {"seconds": at, "gap": gap * 1e3, "what": _label(found, chunk)} for at, gap in middle.gaps if at <= until
        ]
    # A gap is drawn as long as it lasts.
    spans = [{**row, "seconds": at} for row in rows for at in (row["seconds"] - row["gap"] / 1e3, row["seconds"])]
    trade = [
        {
            "worst": median_of([one.worst for one in values]).value * 1e3,
            **point([one.ttft for one in values], "ttft", 1e3),
            "what": _label(found, chunk),
        }
        for chunk, values in sorted(found.found.items())
    ]
    return (
        lines(
            "chunked_prefill",
            "What a decode feels while a long prompt is read",
            rows,
            ("seconds", "time since the long prompt came, s"),
            ("gap", "gap before a token, ms"),
            series="what",
            fitted=spans,
            log_y=True,
            caption="A line lasts as long as the gap: one running decode, in the repetition with the median worst gap.",
        ),
        lines(
            "chunked_prefill_price",
            "Worst gap of the decodes against the wait of the long prompt",
            trade,
            ("worst", "worst gap of the decodes, ms"),
            ("ttft", "TTFT of the long prompt, ms"),
            series="what",
            log_x=True,
            caption="Medians; bars are the intervals of the TTFT.",
        ),
    )


def _metrics(found: ChunkedPrefill) -> Sequence[Metric]:
    return [
        Metric(f"worst_gap_seconds[chunk={n}]", "s", "lower", tuple(one.worst for one in values), "longest gap")
        for n, values in found.found.items()
    ]


EXPERIMENT = Experiment(
    name="chunked-prefill",
    claim="Reading a long prompt in chunks protects the tokens of those who are decoding, at a small price.",
    method="A long prompt comes while others decode, with different limits on the tokens of a step.",
    rules=(
        Rule(
            WORST,
            "longest gap of a decode, whole prompt in one step / small chunks",
            at_least=3,
            fails_from=1024,
            sized_in="prompt tokens",
        ),
        Rule(PRICE, "TTFT of the long prompt in small chunks / in one step", at_most=1.5),
    ),
    meaning="If streams stutter when others send long prompts, lower max_num_batched_tokens (or set itl_slo_ms).",
    share=2.0,
    measure=_measure,
    estimates=_estimates,
    why=_why,
    tables=_tables,
    plots=_plots,
    metrics=_metrics,
)
