"""Claim: without a KV cache, each token requires the whole sequence again."""

from functools import partial

from twinphase_bench.lab.experiment import Experiment, Figure, Rule, Trial, median_of, ratios
from twinphase_bench.lab.workbench import DECODE, Workbench, fits, growth, serve

TOKENS = 8
ANSWER = 256
WITH = "decode from the KV cache, ms"
WITHOUT = "prefill of all again, ms"
OTHER = "other token"


@Experiment(
    claim="Without a KV cache each token costs the whole sequence again.",
    method="The next token of sequences of growing length: decoded, or by prefilling all again "
    "with nothing cached.",
    rules=(
        Rule(
            "growth without a cache",
            at_least=0.8,
            unit="",
            formula="exponent of the length; 1 is linear",
        ),
        Rule(
            "growth with the cache",
            at_most=0.3,
            unit="",
            formula="exponent of the length; 0 is constant",
        ),
        Rule("time per token without / with, longest", at_least=10, fails_from=512),
        Rule("tokens that differ", 0, 0, ""),
    ),
    meaning="The KV cache trades memory for time: with it, the time of an answer grows little more "
    "than its length.",
    figure=Figure(
        "Time per token with and without a KV cache", "tokens before", (WITH, WITHOUT), log=True
    ),
    also=(OTHER,),
    seconds=9,
    sizes=(1024, 512, 256, 128),
    sized_in="tokens before",
    quick=True,
)
def no_kv_cache(bench: Workbench) -> Trial:
    with_cache = bench.engine(enable_prefix_caching=True)
    without = bench.engine()

    def next_token(prompt: list[int], answer: list[int]) -> dict[str, float]:
        # The number of known answer tokens; the next one is computed in both ways.
        known = bench.rounds % TOKENS
        ticket = without.submit(prompt + answer[:known], 1)
        again = sum(record.seconds for record in without.run())
        decode = serve(with_cache, [prompt], TOKENS)[DECODE]
        return {
            WITH: decode,
            WITHOUT: again * 1e3,
            OTHER: ticket.tokens != answer[known : known + 1],
        }

    variants = {}
    for length in (bench.size >> shift for shift in (3, 2, 1, 0)):
        prompt = bench.prompt(length)
        answer = with_cache.submit(prompt, TOKENS).tokens
        with_cache.run()
        variants[length] = partial(next_token, prompt, answer)
    runs = bench.interleave(variants)
    times = {
        quantity: {n: found[quantity] for n, found in runs.items()} for quantity in (WITH, WITHOUT)
    }
    (start, slope), (start_without, slope_without) = (
        map(median_of, fits(one, 1)) for one in times.values()
    )
    end = bench.size + ANSWER / 2
    return Trial(
        runs,
        [
            growth(times[WITHOUT]),
            growth(times[WITH]),
            ratios(times[WITHOUT][bench.size], times[WITH][bench.size]),
            sum(sum(found[OTHER]) for found in runs.values()),
        ],
        f"Fit: each token before it makes the next one {slope_without * 1e3:.3g} µs slower without "
        f"a cache, and {slope * 1e3:.3g} µs with it. An answer of {ANSWER} tokens after "
        f"{bench.size:,} would take {ANSWER * (start_without + slope_without * end) / 1e3:,.0f} s "
        f"instead of {ANSWER * (start + slope * end) / 1e3:.2g} s.",
    )
