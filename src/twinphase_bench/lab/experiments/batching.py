"""Claim: batching decodes multiplies throughput up to a point, and slows each request."""

from functools import partial

from twinphase_bench.lab.experiment import Experiment, Figure, Rule, Trial, median_of, ratios
from twinphase_bench.lab.workbench import DECODE, Workbench, fits, serve

BATCHES = (1, 2, 4, 8, 16, 32)
PROMPT = 48
TOKENS = 12
EACH = "decode, each request, tokens/s"
ALL = "decode, all requests, tokens/s"


@Experiment(
    claim="Batching decodes multiplies throughput, nearly linearly at first, and makes each "
    "request slower.",
    method="1, 2, 4, ... requests with short prompts of their own decode together.",
    rules=(
        Rule("throughput of two / of one", at_least=1.6, formula="tokens/s together; 2 is linear"),
        Rule(
            "throughput of the largest batch / of one",
            at_least=3,
            formula="tokens/s together",
            fails_from=16,
        ),
        Rule("time per token, largest batch / alone", at_least=1.2, fails_from=32),
    ),
    meaning="Serving several users at once costs far less than one after the other, but each gets "
    "a slower stream.",
    figure=Figure(
        "Tokens per second by batch", "requests decoding together", (ALL, EACH), log=True
    ),
    also=(DECODE,),
    seconds=13,
    sizes=(32, 16, 8, 4),
    sized_in="requests",
    quick=True,
)
def batching(bench: Workbench) -> Trial:
    # Prompts are prefilled once; later repetitions find them in the cache.
    engine = bench.engine(enable_prefix_caching=True)
    prompts = bench.prompts(bench.size, PROMPT)
    runs = bench.interleave(
        {b: partial(serve, engine, prompts[:b], TOKENS + b) for b in BATCHES if b <= bench.size}
    )
    for batch, found in runs.items():
        found[EACH] = [1e3 / step for step in found[DECODE]]
        found[ALL] = [batch * rate for rate in found[EACH]]
    fixed, each = map(median_of, fits({b: found[DECODE] for b, found in runs.items()}, 1))
    alone = runs[1]
    two = runs[2]
    most = runs[max(runs)]
    rate = median_of(alone[EACH])
    return Trial(
        runs,
        [
            ratios(two[ALL], alone[ALL]),
            ratios(most[ALL], alone[ALL]),
            ratios(most[DECODE], alone[DECODE]),
        ],
        f"A step takes {fixed:.3g} ms however many requests are in it (above all the weights, read "
        f"once), plus {each:.3g} ms per request: the curve bends where the requests' own part "
        "becomes the larger one.",
        {"ideal: batch x the rate alone": lambda batch: batch * rate},
    )
