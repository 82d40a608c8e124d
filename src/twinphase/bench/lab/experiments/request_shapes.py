"""Claim: the prompt's length decides when the first token comes, the output's length when the last one does."""

from functools import partial

from twinphase.bench.lab.experiment import Experiment, Figure, Rule, Trial, median_of, percent, ratios
from twinphase.bench.lab.workbench import E2E, TPOT, TTFT, Workbench, serve

SHORT = 16
BEFORE, AFTER = "prefill (until the first token), ms", "decode (after it), ms"


@Experiment(
    claim=(
        "The prompt's length decides when the first token comes; the output's length decides when the last one does."
    ),
    method="Two requests, each alone, with the same number of tokens: long prompt and short answer, and the reverse.",
    rules=(
        Rule("TTFT, long prompt / short prompt", at_least=4, fails_from=528),
        Rule("E2E, long output / short output", at_least=1.5, fails_from=528),
    ),
    meaning="If the first token is late look at the prompt and the queue; if the answer is slow look at its length.",
    figure=Figure("Same number of tokens, different halves", "request", (BEFORE, AFTER), stacked=True),
    also=(E2E, TPOT),
    seconds=16,
    sizes=(1040, 528, 272, 144, 80),
    sized_in="tokens of a request",
)
def request_shapes(bench: Workbench) -> Trial:
    long, engine = bench.size - SHORT, bench.engine()

    def request(prompt: int, output: int) -> dict[str, float]:
        found = serve(engine, bench.prompts(1, prompt), output)
        return {**found, BEFORE: found[TTFT], AFTER: found[E2E] - found[TTFT]}

    shapes = ((long, SHORT), (SHORT, long))
    runs = bench.interleave({f"{i:,} tokens in, {o:,} out": partial(request, i, o) for i, o in shapes})
    reading, writing = runs.values()
    before, behind = (percent(median_of(ratios(one[TTFT], one[E2E]))) for one in (reading, writing))
    return Trial(
        runs,
        [ratios(reading[TTFT], writing[TTFT]), ratios(writing[E2E], reading[E2E])],
        f"Both requests have {bench.size:,} tokens. With the long prompt {before} of the time passes before the first "
        f"token, with the long answer {behind}: E2E = TTFT + (output tokens - 1) x TPOT.",
    )
