"""Claim: the same request gives the same answer whatever shares the machine with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinphase.bench.experiments.experiment import Estimate, Experiment, Judged, Rule, exactly, unknown
from twinphase.bench.experiments.workbench import Workbench
from twinphase.bench.plots import bars
from twinphase.bench.report import Column, Plot, Table
from twinphase.bench.stepped import Ticket
from twinphase.phases.timeline import StepRecord

__all__ = ["EXPERIMENT", "SameTokens"]

PROMPT = (192, 96, 48)
PROMPTS, OUTPUT, OTHERS, CHUNK = 4, 16, 6, 24
WAYS = ("batched", "chunked", "cached")
TOKENS, BITS = "answers with other tokens", "answers with other log probabilities"


@dataclass(frozen=True)
class SameTokens:
    """What came out against the answer of the request alone.

    Attributes:
        compared: answers compared, by way.
        tokens: how many of them had another token.
        bits: how many had a log probability with other bits.
        output: tokens of an answer.
        happened: in how many of them the request really was batched with others, read in several chunks, or found its
            prefix in the cache.
    """

    compared: dict[str, int]
    tokens: dict[str, int]
    bits: dict[str, int]
    output: int
    happened: dict[str, int]

    @property
    def missing(self) -> list[str]:
        """Ways that did not happen in every answer."""
        return [way for way in WAYS if self.happened[way] < self.compared[way] or not self.compared[way]]


def _measure(bench: Workbench) -> SameTokens:
    speed, workshop = bench.speed, bench.workshop
    length = bench.size(
        "prompt, tokens", PROMPT, lambda n: (3 + OTHERS) * speed.prefill(n) / 2 + 4 * speed.decode(OUTPUT, 3)
    )
    compared, tokens, bits, happened = (dict.fromkeys(WAYS, 0) for _ in range(4))
    found = SameTokens(compared, tokens, bits, OUTPUT, happened)
    others = min(OTHERS, workshop.config.max_num_seqs - 1)
    for done in range(PROMPTS):
        bench.progress(bench.title, 100 * done // PROMPTS, 100)
        prompt = workshop.prompt(length)
        alone = bench.engine()
        expected = alone.submit(prompt, OUTPUT, logprobs=True)
        alone.run()
        for way in WAYS:
            ticket, records = _answer(bench, way, prompt, others)
            found.compared[way] += 1
            found.happened[way] += _happened(way, ticket, records)
            found.tokens[way] += ticket.tokens != expected.tokens
            found.bits[way] += ticket.logprobs != expected.logprobs
    return found


def _answer(bench: Workbench, way: str, prompt: list[int], others: int) -> tuple[Ticket, list[StepRecord]]:
    if way == "chunked":
        engine = bench.engine(max_num_batched_tokens=CHUNK)
    else:
        engine = bench.engine(enable_prefix_caching=way == "cached")
    if way == "batched":
        for number in range(others):  # of different lengths, so that they come and go while it runs
            engine.submit(bench.workshop.prompt(max(1, len(prompt) // (number + 1))), OUTPUT + number)
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


def _estimates(found: SameTokens) -> Mapping[str, Estimate]:
    tokens, bits = sum(found.tokens.values()), sum(found.bits.values())
    if found.missing and not tokens and not bits:  # a difference is one, whatever did not happen
        note = f"Not shown: {', '.join(found.missing)} did not happen in every answer."
        return dict.fromkeys((TOKENS, BITS), unknown(note))
    return {TOKENS: exactly(tokens), BITS: exactly(bits)}


def _why(found: SameTokens, judged: Sequence[Judged]) -> Sequence[str]:
    counted = (
        f"{sum(found.compared.values())} answers of {found.output} tokens were compared with the same request alone: "
        f"{sum(found.tokens.values())} had other tokens, {sum(found.bits.values())} other bits."
    )
    if any(found.tokens.values()) or any(found.bits.values()):
        ways = ", ".join(way for way in WAYS if found.tokens[way] or found.bits[way])
        return [
            counted,
            f"This engine means to give the same bits whatever shares a step: what differed ({ways}) is a bug.",
        ]
    return [
        "Sums of floating-point numbers depend on their order. Many kernels choose it by the size of the batch, and a "
        "close call between two tokens then falls the other way; this engine's keep one order for every row of a "
        "matrix "
        "product, whatever rows stand beside it.",
        counted,
    ]


def _tables(found: SameTokens) -> Sequence[Table]:
    columns = (
        Column("against the request alone"),
        Column("answers compared"),
        Column(
            "of these it happened in",
            "decoded in a step with others; prompt computed in several steps; tokens of the prompt found in the cache",
        ),
        Column("other tokens", "answers with at least one other token id"),
        Column("other bits", "answers with at least one log probability whose bits differ"),
    )
    names = {
        "batched": f"together with up to {OTHERS} others",
        "chunked": f"prompt in chunks of {CHUNK}",
        "cached": "prefix from the cache",
    }
    counts = (found.compared, found.happened, found.tokens, found.bits)
    rows = tuple((names[way], *(str(count[way]) for count in counts)) for way in WAYS)
    return (Table("The same request, computed differently", columns, rows),)


def _plots(found: SameTokens) -> Sequence[Plot]:
    rows = []
    for way in WAYS:
        same = found.compared[way] - max(found.tokens[way], found.bits[way])
        rows.append({"way": way, "answers": same, "result": "the same bits"})
        rows.append({"way": way, "answers": found.compared[way] - same, "result": "other bits"})
    return (
        bars(
            "same_tokens",
            "Answers against the same request alone",
            rows,
            ("way", ""),
            ("answers", "answers compared"),
            part="result",
            order=WAYS,
            caption="Token ids and log probabilities, compared bit for bit.",
        ),
    )


EXPERIMENT = Experiment(
    name="same-tokens",
    claim="The same request gives the same answer alone, batched with others, in chunks, or from the cache.",
    method="Greedy answers of a few prompts, alone and in the three other ways; token ids and log probabilities "
    "compared.",
    rules=(
        Rule(TOKENS, "answers with another token than alone", 0, 0, ""),
        Rule(BITS, "answers with another log probability than alone", 0, 0, ""),
    ),
    meaning="A result can be reproduced here although the load was different; do not count on that with every engine.",
    share=0.6,
    measure=_measure,
    estimates=_estimates,
    why=_why,
    tables=_tables,
    plots=_plots,
)
