"""Claim: many short prompts read together are faster than one after the other, and as fast as one long prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twinphase.bench.experiments.experiment import Estimate, Experiment, Judged, Rule, median_of, point, ratio_of, shown
from twinphase.bench.experiments.workbench import Workbench
from twinphase.bench.plots import lines
from twinphase.bench.report import Column, Plot, Table

__all__ = ["EXPERIMENT", "ShortPrompts"]

TOTAL = (512, 256, 128)
SHORTEST, LENGTHS = 8, (8, 16, 32, 64)
APART, TOGETHER = "one after the other", "all in one step"
GAIN, LONG = "time one after the other / together", "time together / one long prompt"


@dataclass(frozen=True)
class ShortPrompts:
    """The same number of prompt tokens, cut differently: seconds of each repetition.

    Attributes:
        total: prompt tokens.
        apart: one prompt after the other, by length of a prompt.
        together: all in one step, by length of a prompt.
        long: one prompt of `total` tokens.
        weight_bytes: that every step reads.
        bandwidth: bytes a second for them; None is unknown.
    """

    total: int
    apart: dict[int, list[float]]
    together: dict[int, list[float]]
    long: list[float]
    weight_bytes: int
    bandwidth: float | None


def _measure(bench: Workbench) -> ShortPrompts:
    speed, workshop = bench.speed, bench.workshop
    room = min(workshop.config.max_num_seqs * SHORTEST, workshop.max_model_len - 8)
    total = bench.size(
        "prompt tokens in all",
        TOTAL,
        lambda n: sum(speed.prefill(n) + n / length * speed.prefill(length) for length in LENGTHS) + speed.prefill(n),
        room,
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
    return ShortPrompts(
        total,
        {n: found[n, False] for n in lengths},
        {n: found[n, True] for n in lengths},
        found[total, True],
        weights,
        bench.ceilings.read_bandwidth(weights) if bench.ceilings else None,
    )


def _estimates(found: ShortPrompts) -> Mapping[str, Estimate]:
    shortest = min(found.apart)
    return {
        GAIN: ratio_of(found.apart[shortest], found.together[shortest]).at(found.total),
        LONG: ratio_of(found.together[shortest], found.long),
    }


def _why(found: ShortPrompts, judged: Sequence[Judged]) -> Sequence[str]:
    shortest = min(found.apart)
    saved = (median_of(found.apart[shortest]).value - median_of(found.together[shortest]).value) * 1e3
    steps = found.total // shortest
    sentences = [
        f"{steps} prompts of {shortest} tokens are {steps} steps one after the other, and each reads all the weights: "
        f"together they saved {saved:,.0f} ms, {saved / (steps - 1):.3g} ms for each step that was not needed."
    ]
    if found.bandwidth:
        each = found.weight_bytes / found.bandwidth * 1e3
        sentences.append(
            f"Reading the weights once takes {each:.3g} ms at the measured bandwidth. The longer the prompts, the less "
            "there is to gain: their arithmetic is then the larger part of a step, and that cannot be shared."
        )
    sentences.append(
        f"Against one prompt of the same {found.total:,} tokens, short ones attend to less, but each wants logits of "
        "its "
        "own: the output head is computed once for every prompt."
    )
    return sentences


def _tables(found: ShortPrompts) -> Sequence[Table]:
    columns = (
        Column("prompts"),
        Column("one after the other, ms", "sum of their steps; median and interval"),
        Column("all in one step, ms"),
        Column("gain", "ratio of the medians"),
    )
    rows = []
    for n in sorted(found.apart):
        gain = median_of(found.apart[n]).value / median_of(found.together[n]).value
        cells = (shown(found.apart[n], 1e3), shown(found.together[n], 1e3), f"{gain:.2f}")
        rows.append((f"{found.total // n} of {n} tokens", *cells))
    rows.append((f"1 of {found.total} tokens", "", shown(found.long, 1e3), ""))
    return (Table(f"{found.total:,} prompt tokens, cut differently", columns, tuple(rows)),)


def _plots(found: ShortPrompts) -> Sequence[Plot]:
    rows = []
    for what, values in ((APART, found.apart), (TOGETHER, {**found.together, found.total: found.long})):
        for n, seconds in sorted(values.items()):
            rates = [found.total / one for one in seconds]
            rows.append({"length": n, **point(rates, "rate"), "what": what})
    return (
        lines(
            "short_prompts",
            "Prefill rate by length of the prompts, apart and together",
            rows,
            ("length", "length of each prompt, tokens"),
            ("rate", "prompt tokens a second"),
            series="what",
            log_x=True,
            caption=f"{found.total:,} prompt tokens each time; the rightmost point is one prompt of that length.",
        ),
    )


EXPERIMENT = Experiment(
    name="short-prompts",
    claim="Short prompts are read faster together than one after the other, as fast as one long prompt.",
    method="The same number of prompt tokens as many short prompts, one after the other or in one step, and as one "
    "prompt.",
    rules=(
        Rule(GAIN, "time of the shortest prompts one after the other / all in one step", at_least=1.3, fails_from=256),
        Rule(LONG, "time of the shortest prompts in one step / one prompt of as many tokens", at_most=1.25),
    ),
    meaning="Send short prompts at the same time (one list to generate, or concurrent requests) instead of one by one.",
    share=1.4,
    measure=_measure,
    estimates=_estimates,
    why=_why,
    tables=_tables,
    plots=_plots,
)
