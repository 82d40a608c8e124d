"""Claim: prompt caching pays for a prefix once, and changes nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from twinphase.bench.lab.experiment import Estimate, Experiment, Judged, Rule, exactly, ratio_of
from twinphase.bench.lab.figures import points, shown
from twinphase.bench.lab.workbench import Workbench
from twinphase.bench.report.plots import lines
from twinphase.bench.report.report import Column, Metric, Plot, Table

__all__ = ["PromptCache", "Visit"]

LONGEST = (2048, 1024, 512, 256, 128, 64)
QUESTION, OUTPUT = 16, 16
TTFT = Rule(
    "TTFT, first time / second time",
    "TTFT of the first time / of the second",
    at_least=5,
    fails_from=1024,
    sized_in="tokens of prefix",
)
ANSWERS = Rule(
    "answers that differ", "answers whose token ids or log probabilities are not the same bits", 0, 0, unit=""
)
TPOT = Rule("TPOT, second time / first time", "TPOT of the second time / of the first", 0.8, 1.25)


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
class PromptCache(Experiment):
    """Visits of each repetition, by length of the prefix, rising."""

    name = "prompt-cache"
    claim = "Prompt caching pays for a prefix once: the next request starts at once, and answers the same."
    method = "A fresh prompt is sent twice; the prefix cache is on."
    rules = (TTFT, ANSWERS, TPOT)
    meaning = (
        "Put what stays the same (system prompt, documents) first and what changes last; then only the rest is read."
    )
    share = 1.2

    visits: dict[int, list[Visit]]

    @classmethod
    def measure(cls, bench: Workbench) -> PromptCache:
        """Send a prompt that nobody sent before, and again."""
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

        return cls(bench.interleave({n: partial(visit, n) for n in (longest // 4, longest // 2, longest)}))

    @property
    def cold_ttft(self) -> dict[int, list[float]]:
        """Of the first time, by length of the prefix."""
        return {n: [one.cold[0] for one in visits] for n, visits in self.visits.items()}

    @property
    def warm_ttft(self) -> dict[int, list[float]]:
        """Of the second time, by length of the prefix."""
        return {n: [one.warm[0] for one in visits] for n, visits in self.visits.items()}

    def estimates(self) -> Mapping[Rule, Estimate]:
        """Times of the longest prefix, answers of all."""
        longest = max(self.visits)
        visits = self.visits[longest]
        return {
            TTFT: ratio_of(self.cold_ttft[longest], self.warm_ttft[longest]).at(longest),
            ANSWERS: exactly(sum(not one.same for many in self.visits.values() for one in many)),
            TPOT: ratio_of([one.warm[1] for one in visits], [one.cold[1] for one in visits]),
        }

    def why(self, judged: Sequence[Judged]) -> Sequence[str]:
        """What is cached, and why the wait does not shrink as much as the work."""
        prompt, computed = max(self.visits) + QUESTION, self.visits[max(self.visits)][0].computed
        return [
            "What is cached is the very KV that the first time computed, so the same bits should come out; decode "
            "reads as much KV as before, so each output token should take as long as before.",
            f"The second time {computed:,} of {prompt:,} prompt tokens were computed (those behind the last full block "
            f"of the cache): {prompt / computed:,.0f} times fewer, for a first token "
            f"{self.estimates()[TTFT].value:,.1f} times sooner. A few tokens cost more each than many, because the "
            "weights must be read for them all the same.",
        ]

    def tables(self) -> Sequence[Table]:
        columns = (
            Column("prefix, tokens"),
            Column("TTFT, first time, ms", "first token out - submitted; median and interval"),
            Column("TTFT, second time, ms"),
            Column("tokens computed", "the second time"),
            Column("same answer", "token ids and log probabilities, bit for bit"),
        )
        rows = tuple(
            (
                f"{n:,}",
                shown(self.cold_ttft[n], 1e3),
                shown(self.warm_ttft[n], 1e3),
                f"{visits[0].computed:,}",
                f"{sum(one.same for one in visits)} of {len(visits)}",
            )
            for n, visits in self.visits.items()
        )
        return (Table("The same prompt twice", columns, rows),)

    def plots(self) -> Sequence[Plot]:
        return (
            lines(
                "prompt_cache",
                "Wait for the first token, the first time and the second",
                [
                    *points(self.cold_ttft, "prefix", "milliseconds", 1e3, what="first time: prefill computed"),
                    *points(self.warm_ttft, "prefix", "milliseconds", 1e3, what="second time: prefix cached"),
                ],
                ("prefix", "prefix, tokens"),
                ("milliseconds", "TTFT, ms"),
                series="what",
                caption=f"A prefix and a question of {QUESTION} tokens, sent twice; medians with intervals.",
            ),
        )

    def metrics(self) -> Sequence[Metric]:
        warm = tuple(self.warm_ttft[max(self.visits)])
        return [Metric("cached_ttft_seconds", "s", "lower", warm, "TTFT with a cached prefix")]
