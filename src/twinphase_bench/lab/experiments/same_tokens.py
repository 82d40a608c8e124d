"""Claim: the same request gives the same answer under any other load."""

from collections.abc import Sequence

from twinphase import TimedRequest
from twinphase.phases.timeline import StepRecord
from twinphase_bench.lab.experiment import Experiment, Figure, Rule, Trial
from twinphase_bench.lab.workbench import Workbench

PROMPTS = 4
OUTPUT = 16
OTHERS = 6
CHUNK = 24
BATCHED = f"together with up to {OTHERS} others"
CHUNKED = f"prompt in chunks of {CHUNK}"
CACHED = "cached prefix"
COMPARED = "answers compared"
HAPPENED = "it happened in"
TOKENS = "other tokens"
BITS = "other bits"


@Experiment(
    claim="The same request gives the same answer alone, batched with others, in chunks, or from "
    "the cache.",
    method="Greedy answers of a few prompts, alone and in three other ways; token ids and log "
    "probabilities compared.",
    rules=(
        Rule("answers with other tokens", 0, 0, "", "than alone"),
        Rule("answers with other log probabilities", 0, 0, "", "than alone, in any bit"),
    ),
    meaning="A result can be reproduced here under another load; do not count on that with every "
    "engine.",
    figure=Figure(
        "Answers against the same request alone", "the same request", (COMPARED, TOKENS, BITS)
    ),
    also=(HAPPENED,),
    seconds=6,
    sizes=(192,),
    quick=True,
)
def same_tokens(bench: Workbench) -> Trial:
    ways = (BATCHED, CHUNKED, CACHED)
    counts = {way: dict.fromkeys((COMPARED, HAPPENED, TOKENS, BITS), 0) for way in ways}
    for prompt in bench.prompts(PROMPTS, bench.size):
        alone = bench.engine()
        expected = alone.submit(prompt, OUTPUT, logprobs=True)
        alone.run()
        for way, count in counts.items():
            ticket, records = _answer(bench, way, prompt)
            count[COMPARED] += 1
            count[HAPPENED] += _happened(way, ticket, records)
            count[TOKENS] += ticket.tokens != expected.tokens
            count[BITS] += ticket.logprobs != expected.logprobs
        if bench.left <= 0:
            break
    tokens, bits = (sum(count[key] for count in counts.values()) for key in (TOKENS, BITS))
    missing = [way for way, count in counts.items() if count[HAPPENED] < count[COMPARED]]
    why = (
        "Sums of floating-point numbers depend on their order. Many kernels choose it by the size "
        "of the batch; this engine's keep one order for every row of a matrix product, regardless "
        "of the other rows."
    )
    if tokens or bits:
        differed = ", ".join(way for way, count in counts.items() if count[TOKENS] or count[BITS])
        why = f"This engine means to give the same bits in any batch: a bug ({differed})."
    return Trial(
        {way: {key: [number] for key, number in count.items()} for way, count in counts.items()},
        # A difference counts in any case; equality counts only if the other path was used.
        [tokens, bits]
        if tokens or bits or not missing
        else [f"Not in every answer: {', '.join(missing)}."] * 2,
        why,
    )


def _answer(bench: Workbench, way: str, prompt: list[int]) -> tuple[TimedRequest, list[StepRecord]]:
    budget = {"max_num_batched_tokens": CHUNK} if way is CHUNKED else {}
    engine = bench.engine(enable_prefix_caching=way is CACHED, **budget)
    if way is BATCHED:
        for number in range(min(OTHERS, bench.workshop.config.max_num_seqs - 1)):
            # The lengths differ, so that these requests start and end while the measured one runs.
            engine.submit(bench.prompt(max(1, len(prompt) // (number + 1))), OUTPUT + number)
    if way is CACHED:
        engine.prefill(prompt)
    ticket = engine.submit(prompt, OUTPUT, logprobs=True)
    return ticket, engine.run()


def _happened(way: str, ticket: TimedRequest, records: Sequence[StepRecord]) -> bool:
    """Whether the engine really did what the variant tests."""
    if way is BATCHED:
        return any(record.num_decodes > 1 and record.index in ticket.steps for record in records)
    if way is CHUNKED:
        return sum(ticket.request.request_id in record.prefill_ids for record in records) > 1
    return ticket.request.counts.num_cached_tokens > 0
