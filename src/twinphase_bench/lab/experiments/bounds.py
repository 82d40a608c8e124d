"""Claim: prefill is bound by arithmetic, decode by memory bandwidth."""

from functools import partial

from twinphase import TwinphaseError
from twinphase_bench.lab.experiment import Experiment, Figure, Rule, Trial, median_of, ratios
from twinphase_bench.lab.workbench import DECODE, PREFILL, Workbench, serve

CONTEXT = 16
TOKENS = 25
MFU = "MFU, %"
MBU = "MBU, %"


@Experiment(
    claim="Prefill is bound by arithmetic; decode is bound by memory bandwidth.",
    method="A prompt is prefilled, and tokens are decoded alone: their FLOP and bytes against this "
    "machine's ceilings.",
    rules=(
        Rule(
            "prefill: arithmetic / memory",
            1,
            formula="FLOP / peak over bytes / bandwidth",
            fails_from=256,
        ),
        Rule(
            "prefill's MFU",
            0.5,
            unit="%",
            formula="FLOP / peak over the time taken",
            fails_from=256,
        ),
        Rule("decode: memory / arithmetic", 1, formula="bytes / bandwidth over FLOP / peak"),
        Rule("decode's MBU", 0.5, unit="%", formula="bytes / bandwidth over the time taken"),
    ),
    meaning="A faster processor shortens the wait for the first token; faster memory speeds up the "
    "stream after it.",
    figure=Figure("How much of each ceiling a phase uses", "phase", (MFU, MBU)),
    seconds=8,
    sizes=(512, 256, 128, 64),
)
def bounds(bench: Workbench) -> Trial:
    if bench.ceilings is None:
        raise TwinphaseError("This machine's ceilings are unknown.")
    engine = bench.engine(max_num_batched_tokens=bench.size)
    ideal = {
        PREFILL: bench.ideal_milliseconds(0, bench.size),
        DECODE: bench.ideal_milliseconds(CONTEXT, 1),
    }

    def shares(step: str, prompt: int, output: int) -> dict[str, float]:
        taken = serve(engine, bench.prompts(1, prompt), output)[step]
        return {
            share: one / taken * 100 for share, one in zip((MFU, MBU), ideal[step], strict=True)
        }

    runs = bench.interleave(
        {
            "prefill": partial(shares, PREFILL, bench.size, 1),
            "decode": partial(shares, DECODE, CONTEXT, TOKENS),
        }
    )
    prefill = runs["prefill"]
    decode = runs["decode"]
    return Trial(
        runs,
        [
            ratios(prefill[MFU], prefill[MBU]),
            [share / 100 for share in prefill[MFU]],
            ratios(decode[MBU], decode[MFU]),
            [share / 100 for share in decode[MBU]],
        ],
        f"The weights are read once per step, for {bench.size:,} tokens in prefill and for a "
        f"single one in decode. Arithmetic explains {median_of(prefill[MFU]):.3g} % of prefill's "
        f"time, and memory {median_of(decode[MBU]):.3g} % of decode's; the rest is work that FLOP "
        "and bytes do not count: unpacking weights, quantizing activations, norms, softmax, "
        "waiting between threads.",
    )
