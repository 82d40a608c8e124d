"""Claim: with prompt caching a prefix is computed once, and nothing else changes."""

from functools import partial

from twinphase_bench.lab.experiment import Experiment, Figure, Rule, Trial, median_of, ratios
from twinphase_bench.lab.workbench import Workbench

QUESTION = 16
OUTPUT = 16
COLD = "TTFT, prefill computed, ms"
WARM = "TTFT, prefix cached, ms"
COLD_TPOT = "TPOT, first time, ms"
WARM_TPOT = "TPOT, second time, ms"
COMPUTED = "tokens computed the second time"
OTHER = "other answer"


@Experiment(
    claim="Prompt caching pays for a prefix once: the next request starts at once, and answers the "
    "same.",
    method=f"A fresh prefix and a question of {QUESTION} tokens are sent twice; the prefix cache "
    "is on.",
    rules=(
        Rule("TTFT, first time / second time", at_least=5, fails_from=1024),
        Rule("answers that differ", 0, 0, "", "in a token id, or in a bit of a log probability"),
        Rule("TPOT, second time / first time", 0.8, 1.25),
    ),
    meaning="Put what stays the same (system prompt, documents) first and what changes last: only "
    "the rest is prefilled.",
    figure=Figure(
        "Wait for the first token, the first time and the second", "prefix, tokens", (COLD, WARM)
    ),
    also=(COLD_TPOT, WARM_TPOT, COMPUTED, OTHER),
    seconds=13,
    sizes=(2048, 1024, 512, 256, 128, 64),
    sized_in="tokens of prefix",
    quick=True,
)
def prompt_cache(bench: Workbench) -> Trial:
    engine = bench.engine(enable_prefix_caching=True)

    def visit(length: int) -> dict[str, float]:
        prompt = bench.prompt(length + QUESTION)
        cold = engine.submit(prompt, OUTPUT, logprobs=True)
        engine.run()
        warm = engine.submit(prompt, OUTPUT, logprobs=True)
        computed = sum(record.prefill_tokens for record in engine.run())
        engine.clear()
        return {
            COLD: cold.ttft * 1e3,
            WARM: warm.ttft * 1e3,
            COLD_TPOT: cold.tpot * 1e3,
            WARM_TPOT: warm.tpot * 1e3,
            COMPUTED: computed,
            OTHER: (cold.tokens, cold.logprobs) != (warm.tokens, warm.logprobs),
        }

    longest = bench.size
    runs = bench.interleave({n: partial(visit, n) for n in (longest // 4, longest // 2, longest)})
    last = runs[longest]
    sooner = ratios(last[COLD], last[WARM])
    return Trial(
        runs,
        [
            sooner,
            sum(sum(found[OTHER]) for found in runs.values()),
            ratios(last[WARM_TPOT], last[COLD_TPOT]),
        ],
        f"The second time {last[COMPUTED][0]:,} of {longest + QUESTION:,} prompt tokens were "
        f"computed (those after the last full block), for a first token {median_of(sooner):,.1f} "
        "times sooner: the weights are read for a few tokens all the same. Decode reads as much KV "
        "as before, the very KV of the first time.",
    )
