"""Claim: prefill time is linear in the prompt length, with a growing quadratic part."""

from functools import partial

from twinphase.phases.work import rows_cost
from twinphase_bench.lab.experiment import Experiment, Figure, Rule, Trial, median_of, percent
from twinphase_bench.lab.workbench import PREFILL, Workbench, fits, growth, serve

# Below this, warm-up effects of kernels distort the curve.
MIN_ATTENTION_TOKENS = 1024


@Experiment(
    claim="Prefill time grows linearly with the prompt, plus a quadratic part from attention.",
    method="Fresh prompts of doubling length, one at a time, nothing cached; a + b n + c n² fitted "
    "to each repetition.",
    rules=(
        Rule("growth among short prompts", 0.8, 1.2, "", "exponent of the length; 1 is linear"),
        Rule(
            "quadratic share, longest prompt",
            0.05,
            unit="%",
            formula="c n² / (a + b n + c n²)",
            fails_from=4096,
        ),
    ),
    meaning="A prompt twice as long costs a bit more than twice the wait; cutting it saves more "
    "than its share.",
    figure=Figure(
        "Prefill time by prompt length, and its linear part", "prompt length n, tokens", (PREFILL,)
    ),
    seconds=20,
    sizes=(4096, 2048, 1024, 512, 256, 128),
)
def prefill_length(bench: Workbench) -> Trial:
    longest = bench.size
    engine = bench.engine()
    lengths = [longest >> shift for shift in range(5, -1, -1) if longest >> shift >= 4]
    runs = bench.interleave({n: partial(serve, engine, bench.prompts(1, n)) for n in lengths})
    times = {n: runs[n][PREFILL] for n in lengths}
    coefficients = fits(times, 2)
    a, b, c = map(median_of, coefficients)
    share = [
        z * longest**2 / (x + y * longest + z * longest**2)
        for x, y, z in zip(*coefficients, strict=True)
    ]
    cost = rows_cost(bench.workshop.shape, 0, longest, 1)
    too_short = f"Too short to see: {longest:,} prompt tokens; it takes {MIN_ATTENTION_TOKENS:,}."
    return Trial(
        runs,
        [
            growth({n: times[n] for n in lengths[-5:-2]}),
            share if longest >= MIN_ATTENTION_TOKENS else too_short,
        ],
        f"Fit: {a:.3g} ms + {b * 1e3:.4g} µs n + {c * 1e6:.3g} ns n². At {longest:,} tokens the "
        f"quadratic part is {percent(median_of(share))} of the time, and attention "
        f"{percent(cost.attention_flops / cost.flops)} of the FLOP: each token looks back at half "
        "of the prompt.",
        {"prefill": lambda n: a + b * n + c * n * n, "prefill, linear part": lambda n: a + b * n},
    )
