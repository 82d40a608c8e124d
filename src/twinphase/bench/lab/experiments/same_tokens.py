"""Claim: the same request gives the same answer whatever shares the machine with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinphase.bench.lab.experiment import Estimate, Experiment, Judged, Rule, exactly, unknown
from twinphase.bench.lab.workbench import Workbench
from twinphase.bench.report.plots import bars
from twinphase.bench.report.report import Column, Plot, Table
from twinphase.bench.targets.stepped import Ticket
from twinphase.phases.timeline import StepRecord

__all__ = ["SameTokens"]

PROMPT = (192, 96, 48)
PROMPTS, OUTPUT, OTHERS, CHUNK = 4, 16, 6, 24
WAYS = {
    "batched": f"together with up to {OTHERS} others",
    "chunked": f"prompt in chunks of {CHUNK}",
    "cached": "prefix from the cache",
}
TOKENS = Rule("answers with other tokens", "answers with another token than alone", 0, 0, unit="")
BITS = Rule("answers with other log probabilities", "answers with another log probability than alone", 0, 0, unit="")


@dataclass(frozen=True)
class SameTokens(Experiment):
    """What came out against the answer of the request alone.

    Attributes:
        compared: answers compared, by way.
        tokens: how many of them had another token.
        bits: how many had a log probability with other bits.
        output: tokens of an answer.
        happened: in how many of them the request really was batched with others, read in several chunks, or found its
            prefix in the cache.
    """

    name = "same-tokens"
    claim = "The same request gives the same answer alone, batched with others, in chunks, or from the cache."
    method = (
        "Greedy answers of a few prompts, alone and in the three other ways; token ids and log probabilities compared."
    )
    rules = (TOKENS, BITS)
    meaning = "A result can be reproduced here although the load was different; do not count on that with every engine."
    share = 0.6

    compared: dict[str, int]
    tokens: dict[str, int]
    bits: dict[str, int]
    output: int
    happened: dict[str, int]

    @classmethod
    def measure(cls, bench: Workbench) -> SameTokens:
        """Ask for each answer alone, then in every other way."""
        speed, workshop = bench.speed, bench.workshop
        length = bench.size(
            "prompt, tokens", PROMPT, lambda n: (3 + OTHERS) * speed.prefill(n) / 2 + 4 * speed.decode(OUTPUT, 3)
        )
        compared, tokens, bits, happened = (dict.fromkeys(WAYS, 0) for _ in range(4))
        for done in range(PROMPTS):
            bench.progress(bench.title, 100 * done // PROMPTS, 100)
            prompt = workshop.prompt(length)
            alone = bench.engine()
            expected = alone.submit(prompt, OUTPUT, logprobs=True)
            alone.run()
            for way in WAYS:
                ticket, records = _answer(bench, way, prompt)
                compared[way] += 1
                happened[way] += _happened(way, ticket, records)
                tokens[way] += ticket.tokens != expected.tokens
                bits[way] += ticket.logprobs != expected.logprobs
        return cls(compared, tokens, bits, OUTPUT, happened)

    def estimates(self) -> Mapping[Rule, Estimate]:
        """Counts; none where a way did not happen, as nothing is shown by that. A difference is one all the same."""
        tokens, bits = sum(self.tokens.values()), sum(self.bits.values())
        missing = [way for way in WAYS if self.happened[way] < self.compared[way] or not self.compared[way]]
        if missing and not tokens and not bits:
            return dict.fromkeys(
                self.rules, unknown(f"Not shown: {', '.join(missing)} did not happen in every answer.")
            )
        return {TOKENS: exactly(tokens), BITS: exactly(bits)}

    def why(self, judged: Sequence[Judged]) -> Sequence[str]:
        """What makes answers differ elsewhere, or which differed here."""
        counted = (
            f"{sum(self.compared.values())} answers of {self.output} tokens were compared with the same request alone: "
            f"{sum(self.tokens.values())} had other tokens, {sum(self.bits.values())} other bits."
        )
        differed = ", ".join(way for way in WAYS if self.tokens[way] or self.bits[way])
        if differed:
            return [
                counted,
                f"This engine means to give the same bits whatever shares a step: what differed ({differed}) is a bug.",
            ]
        return [
            "Sums of floating-point numbers depend on their order. Many kernels choose it by the size of the batch, "
            "and a close call between two tokens then falls the other way; this engine's keep one order for every row "
            "of a matrix product, whatever rows stand beside it.",
            counted,
        ]

    def tables(self) -> Sequence[Table]:
        columns = (
            Column("against the request alone"),
            Column("answers compared"),
            Column(
                "of these it happened in",
                "decoded in a step with others; prompt computed in several steps; tokens of the prompt found in the "
                "cache",
            ),
            Column("other tokens", "answers with at least one other token id"),
            Column("other bits", "answers with at least one log probability whose bits differ"),
        )
        counts = (self.compared, self.happened, self.tokens, self.bits)
        rows = tuple((words, *(str(count[way]) for count in counts)) for way, words in WAYS.items())
        return (Table("The same request, computed differently", columns, rows),)

    def plots(self) -> Sequence[Plot]:
        rows = []
        for way, words in WAYS.items():
            other = max(self.tokens[way], self.bits[way])
            rows.append({"way": words, "answers": self.compared[way] - other, "result": "the same bits"})
            rows.append({"way": words, "answers": other, "result": "other bits"})
        return (
            bars(
                "same_tokens",
                "Answers against the same request alone",
                rows,
                ("way", ""),
                ("answers", "answers compared"),
                part="result",
                order=list(WAYS.values()),
                caption="Token ids and log probabilities, compared bit for bit.",
            ),
        )


def _answer(bench: Workbench, way: str, prompt: list[int]) -> tuple[Ticket, list[StepRecord]]:
    workshop = bench.workshop
    if way == "chunked":
        engine = bench.engine(max_num_batched_tokens=CHUNK)
    else:
        engine = bench.engine(enable_prefix_caching=way == "cached")
    if way == "batched":
        for number in range(min(OTHERS, workshop.config.max_num_seqs - 1)):
            # Of different lengths, so that they come and go while it runs.
            engine.submit(workshop.prompt(max(1, len(prompt) // (number + 1))), OUTPUT + number)
    if way == "cached":
        engine.prefill(prompt)
    ticket = engine.submit(prompt, OUTPUT, logprobs=True)
    return ticket, engine.run()


def _happened(way: str, ticket: Ticket, records: Sequence[StepRecord]) -> bool:
    """Whether the engine did what the way is about."""
    if way == "batched":
        return any(record.num_decodes > 1 and record.index in ticket.steps for record in records)
    if way == "chunked":
        return sum(ticket.request.request_id in record.prefill_ids for record in records) > 1
    return ticket.request.num_cached_tokens > 0
