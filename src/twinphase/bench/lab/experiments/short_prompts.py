"""Claim: many short prompts read together are faster than one after the other, and as fast as one long prompt."""

from functools import partial

from twinphase.bench.lab.experiment import Experiment, Figure, Rule, Trial, median_of, ratios
from twinphase.bench.lab.workbench import PREFILL, Workbench, serve

LENGTHS = (8, 16, 32, 64)
APART, TOGETHER = "one after the other, ms", "all in one step, ms"


@Experiment(
    claim="Short prompts are read faster together than one after the other, as fast as one long prompt.",
    method="The same number of prompt tokens as short prompts, one after the other or in one step, and as one prompt.",
    rules=(
        Rule("time one after the other / together", at_least=1.3, formula="of the shortest prompts", fails_from=256),
        Rule("time together / one long prompt", at_most=1.25, formula="shortest prompts / a prompt of all tokens"),
    ),
    meaning="Send short prompts at the same time (one list to generate, or concurrent requests), not one by one.",
    figure=Figure("Prefill time of the same tokens", "length of each prompt, tokens", (APART, TOGETHER), log=True),
    seconds=14,
    sizes=(512, 256, 128),
)
def short_prompts(bench: Workbench) -> Trial:
    total = bench.size
    engine = bench.engine(max_num_batched_tokens=total)

    def read(length: int) -> dict[str, float]:
        prompts = bench.prompts(total // length, length)
        together = serve(engine, prompts)[PREFILL]
        return {TOGETHER: together, APART: sum(serve(engine, [prompt])[PREFILL] for prompt in prompts)}

    runs = bench.interleave({n: partial(read, n) for n in (*LENGTHS, total) if n <= total})
    shortest, long = runs[LENGTHS[0]], runs[total]
    steps = total // LENGTHS[0]
    saved = median_of(shortest[APART]) - median_of(shortest[TOGETHER])
    return Trial(
        runs,
        [ratios(shortest[APART], shortest[TOGETHER]), ratios(shortest[TOGETHER], long[TOGETHER])],
        f"{steps} prompts of {LENGTHS[0]} tokens are {steps} steps one after the other, and each reads all the "
        f"weights: together they saved {saved:,.0f} ms, {saved / (steps - 1):.3g} ms per step that was not needed. "
        "But each prompt wants logits of its own: the output head is computed once per prompt.",
    )
