"""Claim: chunked prefill of a long prompt keeps other requests decoding, at a small cost."""

from functools import partial
from statistics import median

from twinphase import Stepped
from twinphase_bench.lab.experiment import Experiment, Figure, Rule, Trial, median_of, ratios
from twinphase_bench.lab.workbench import STEPS, Workbench

DECODES = 4
OWN = 16
BEFORE = 8
PROMPT_CHUNKS = 8
WORST = "longest gap of the decodes, ms"
USUAL = "usual gap, ms"
WAIT = "TTFT of the long prompt, ms"
WHOLE = "whole prompt at once"


@Experiment(
    claim="Prefill of a long prompt in chunks keeps other requests decoding, at a small price.",
    method=f"A long prompt comes while {DECODES} requests decode, with different limits on the "
    "tokens per step.",
    rules=(
        Rule("longest gap, whole prompt / small chunks", at_least=3, fails_from=1024),
        Rule("TTFT of the long prompt, small chunks / whole", at_most=1.5),
    ),
    meaning="If streams stutter when others send long prompts, lower max_num_batched_tokens (or "
    "set itl_slo_ms).",
    figure=Figure(
        "Gaps of decoding requests during the prefill of a long prompt",
        "largest step",
        (WORST, WAIT),
    ),
    also=(USUAL, STEPS),
    seconds=20,
    sizes=(2048, 1024, 512, 256, 128),
)
def chunked_prefill(bench: Workbench) -> Trial:
    length = bench.size
    most = bench.workshop.config.max_num_batched_tokens
    small = max(32, length // PROMPT_CHUNKS)
    steps = {f"{n} tokens per step": n for n in (small, 3 * small)} | {
        WHOLE: min(length + DECODES, most)
    }
    engines = {name: bench.engine(max_num_batched_tokens=n) for name, n in steps.items()}
    runs = bench.interleave(
        {name: partial(_interrupt, bench, engine) for name, engine in engines.items()}
    )
    chunks = next(iter(runs.values()))
    whole = runs[WHOLE]
    return Trial(
        runs,
        [ratios(whole[WORST], chunks[WORST]), ratios(chunks[WAIT], whole[WAIT])],
        "Requests in one step all wait for its end: a step that prefills a whole prompt holds "
        f"every decode up for {median_of(whole[WORST]):,.0f} ms, and with at most {small} tokens "
        f"per step the longest gap is {median_of(chunks[WORST]):,.0f} ms. The prompt pays: each of "
        "its steps carries the decodes, and reads the weights again.",
    )


def _interrupt(bench: Workbench, engine: Stepped) -> dict[str, float]:
    """Send a long prompt while some requests are decoding."""
    decodes = [
        engine.submit(prompt, bench.size // 8 + 160) for prompt in bench.prompts(DECODES, OWN)
    ]
    engine.run_until(lambda: all(ticket.times for ticket in decodes))
    for _ in range(BEFORE):
        engine.step()
    prompt = engine.submit(bench.prompt(bench.size), 4)
    engine.run_until(lambda: len(prompt.times) == 4)
    steps = {
        record.index for record in engine.records if prompt.request.request_id in record.prefill_ids
    }
    engine.clear()
    during = []
    before = []
    for ticket in decodes:
        for gap, at, step in zip(ticket.gaps, ticket.times[1:], ticket.steps[1:], strict=True):
            if step in steps:
                during.append(gap * 1e3)
            elif at <= prompt.submitted:
                before.append(gap * 1e3)
    return {WORST: max(during), USUAL: median(before), WAIT: prompt.ttft * 1e3, STEPS: len(steps)}
