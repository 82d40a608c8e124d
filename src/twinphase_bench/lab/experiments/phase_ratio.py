"""Claim: prefill processes tokens many times faster than decode."""

from functools import partial

from twinphase_bench.lab.experiment import Experiment, Figure, Rule, Trial, ratios
from twinphase_bench.lab.workbench import DECODE, PREFILL, Workbench, serve

RATE = "rate, tokens/s"


@Experiment(
    claim="Prefill handles tokens ten times faster than decode, or more.",
    method="One request alone: its prompt is prefilled, then its answer decoded.",
    rules=(
        Rule(
            "prefill's token rate / decode's",
            at_least=10,
            formula="tokens / time of each",
            fails_from=256,
        ),
    ),
    meaning="Count prompt tokens and output tokens apart: an output token costs as much as several "
    "prompt tokens.",
    figure=Figure("Tokens per second of each phase, one request alone", "phase", (RATE,)),
    seconds=7,
    sizes=(512, 256, 128, 64),
    quick=True,
)
def phase_ratio(bench: Workbench) -> Trial:
    found = bench.interleave(
        {"request": partial(serve, bench.engine(), bench.prompts(1, bench.size), 25)}
    )["request"]
    prefill = [bench.size * 1e3 / time for time in found[PREFILL]]
    decode = [1e3 / time for time in found[DECODE]]
    ideal_prefill, ideal_decode = (
        max(bench.ideal_milliseconds(*step)) for step in ((0, bench.size), (bench.size, 1))
    )
    return Trial(
        {"prefill": {RATE: prefill}, "decode": {RATE: decode}},
        [ratios(prefill, decode)],
        f"Prefill reads the weights once for {bench.size:,} tokens, decode once per token. With "
        "both phases at this machine's ceilings the ratio would be "
        f"{bench.size * ideal_decode / ideal_prefill:.3g}: its balance of arithmetic and bandwidth "
        "with these weights. An accelerator does 100 to 300 operations in the time of reading a "
        "byte, hence the ratios of 100 and more that people quote; fewer bits per weight make the "
        "ratio smaller.",
    )
