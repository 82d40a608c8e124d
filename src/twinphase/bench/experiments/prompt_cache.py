"""Claim: prompt caching pays for a prefix once, and changes nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twinphase.bench.experiments.experiment import (
    Estimate,
    Experiment,
    Judged,
    Rule,
    exactly,
    point,
    ratio_of,
    shown,
)
from twinphase.bench.experiments.workbench import Workbench
from twinphase.bench.plots import lines
from twinphase.bench.report import Column, Metric, Plot, Table

__all__ = ["EXPERIMENT", "PromptCache", "Visit"]

LONGEST = (2048, 1024, 512, 256, 128, 64)
QUESTION, OUTPUT = 16, 16
TTFT, TOKENS, TPOT = "TTFT, first time / second time", "answers that differ", "TPOT, second time / first time"


@dataclass(frozen=True)
class Visit:
    """The same prompt twice.

    Attributes:
        cold, warm: (TTFT, TPOT) of the first and the second time, seconds.
        computed: prompt tokens that the second time computed.
        same: whether both answers have the same tokens and the same log probabilities, bit for bit.
    """

    cold: tuple[float, float]
    warm: tuple[float, float]
    computed: int
    same: bool


@dataclass(frozen=True)
class PromptCache:
    """Visits of each repetition, by length of the prefix."""

    visits: dict[int, list[Visit]]

    @property
    def longest(self) -> list[Visit]:
        """Those of the longest prefix."""
        return self.visits[max(self.visits)]


def _measure(bench: Workbench) -> PromptCache:
    speed = bench.speed
    longest = bench.size(
        "longest prefix, tokens",
        LONGEST,
        lambda n: sum(speed.prefill(n >> i) + 2 * speed.decode(OUTPUT) for i in range(3)),
    )
    engine = bench.engine(enable_prefix_caching=True)

    def visit(length: int) -> Visit:
        prompt = bench.workshop.prompt(length + QUESTION)
        cold = engine.submit(prompt, OUTPUT, logprobs=True)
        engine.run()
        engine.clear()
        warm = engine.submit(prompt, OUTPUT, logprobs=True)
        computed = sum(record.prefill_tokens for record in engine.run())
        same = cold.tokens == warm.tokens and cold.logprobs == warm.logprobs
        return Visit((cold.ttft, cold.tpot), (warm.ttft, warm.tpot), computed, same)

    return PromptCache(bench.interleave({n: partial(visit, n) for n in (longest // 4, longest // 2, longest)}))


def _estimates(found: PromptCache) -> Mapping[str, Estimate]:
    visits = found.longest
    return {
        TTFT: ratio_of([one.cold[0] for one in visits], [one.warm[0] for one in visits]).at(max(found.visits)),
        TPOT: ratio_of([one.warm[1] for one in visits], [one.cold[1] for one in visits]),
        TOKENS: exactly(sum(not one.same for visits in found.visits.values() for one in visits)),
    }


def _why(found: PromptCache, judged: Sequence[Judged]) -> Sequence[str]:
    visits, prompt = found.longest, max(found.visits) + QUESTION
    gain = ratio_of([one.cold[0] for one in visits], [one.warm[0] for one in visits]).value
    return [
        "What is cached is the very KV that the first time computed, so the same bits should come out; decode reads as "
        "much KV as before, so each output token should take as long as before.",
        f"The second time {visits[0].computed:,} of {prompt:,} prompt tokens were computed (those behind the last full "
        f"block of the cache): {prompt / visits[0].computed:,.0f} times fewer, for a first token {gain:,.0f} times "
        "sooner. "
        "A few tokens cost more each than many, because the weights must be read for them all the same.",
    ]


def _tables(found: PromptCache) -> Sequence[Table]:
    columns = (
        Column("prefix, tokens"),
        Column("TTFT, first time, ms", "first token out - submitted; median and interval"),
        Column("TTFT, second time, ms"),
        Column("tokens computed", "the second time"),
        Column("same answer", "token ids and log probabilities, bit for bit"),
    )
    rows = []
    for n, visits in sorted(found.visits.items()):
        cold, warm = ([one.cold[0] for one in visits], [one.warm[0] for one in visits])
        same = f"{sum(one.same for one in visits)} of {len(visits)}"
        rows.append((f"{n:,}", shown(cold, 1e3), shown(warm, 1e3), f"{visits[0].computed:,}", same))
    return (Table("The same prompt twice", columns, tuple(rows)),)


def _plots(found: PromptCache) -> Sequence[Plot]:
    rows = []
    for n, visits in sorted(found.visits.items()):
        for what, values in (
            ("first time: prefill computed", [one.cold[0] for one in visits]),
            ("second time: prefix cached", [one.warm[0] for one in visits]),
        ):
            rows.append({"prefix": n, **point(values, "milliseconds", 1e3), "what": what})
    return (
        lines(
            "prompt_cache",
            "Wait for the first token, the first time and the second",
            rows,
            ("prefix", "prefix, tokens"),
            ("milliseconds", "TTFT, ms"),
            series="what",
            caption=f"A prefix and a question of {QUESTION} tokens, sent twice; medians with intervals.",
        ),
    )


def _metrics(found: PromptCache) -> Sequence[Metric]:
    return [
        Metric(
            "cached_ttft_seconds", "s", "lower", tuple(v.warm[0] for v in found.longest), "TTFT with a cached prefix"
        )
    ]


EXPERIMENT = Experiment(
    name="prompt-cache",
    claim="Prompt caching pays for a prefix once: the next request starts at once, and answers the same.",
    method="A fresh prompt is sent twice; the prefix cache is on.",
    rules=(
        Rule(TTFT, "TTFT of the first time / of the second", at_least=5, fails_from=1024, sized_in="tokens of prefix"),
        Rule(TOKENS, "answers whose token ids or log probabilities are not the same bits", 0, 0, ""),
        Rule(TPOT, "TPOT of the second time / of the first", 0.8, 1.25),
    ),
    meaning="Put what stays the same (system prompt, documents) first and what changes last; then only the rest is "
    "read.",
    share=1.2,
    measure=_measure,
    estimates=_estimates,
    why=_why,
    tables=_tables,
    plots=_plots,
    metrics=_metrics,
)
