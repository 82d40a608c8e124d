"""Claim: more cores help prefill more than decode."""

from functools import partial

from twinphase import TwinphaseError, available_cores
from twinphase_bench.lab.experiment import Experiment, Figure, Rule, Trial, median_of, ratios
from twinphase_bench.lab.workbench import DECODE, PREFILL, Workbench, serve

TOKENS = 17
READ = "prefill of the prompt, ms"
WRITE = f"decode of {TOKENS - 1} tokens, ms"


@Experiment(
    claim="More cores help prefill more than decode.",
    method="The same prefill and decode with one thread and with all: cores bring arithmetic, and "
    "share the bandwidth.",
    rules=(
        Rule("prefill's speed-up", at_least=1.3, formula="time with one thread / with all"),
        Rule("prefill's speed-up / decode's", at_least=1.1),
    ),
    meaning="Cores shorten the wait for the first token; whether they speed up the stream depends "
    "on the memory.",
    figure=Figure("Both phases by number of threads", "threads", (READ, WRITE)),
    seconds=11,
    sizes=(256, 128, 64),
)
def cores(bench: Workbench) -> Trial:
    most = bench.workshop.config.threads or available_cores()
    if most == 1:
        raise TwinphaseError("There is one core only, and nothing to compare.")
    engines = {"one thread": bench.open(threads=1).engine(), f"{most} threads": bench.engine()}
    prompts = bench.prompts(1, bench.size)
    for engine in engines.values():
        serve(engine, prompts, TOKENS)  # Memory is slow on its first use.
    runs = bench.interleave(
        {threads: partial(serve, engine, prompts, TOKENS) for threads, engine in engines.items()}
    )
    for found in runs.values():
        found |= {READ: found[PREFILL], WRITE: [step * (TOKENS - 1) for step in found[DECODE]]}
    one, many = runs.values()
    prefill = ratios(one[READ], many[READ])
    decode = ratios(one[WRITE], many[WRITE])
    return Trial(
        runs,
        [prefill, ratios(prefill, decode)],
        f"From one thread to {most}, prefill became {median_of(prefill):.2f} times as fast and "
        f"decode {median_of(decode):.2f} times. Where decode gains about as much, one core cannot "
        "use all the bandwidth: memory is not yet what these few cores share.",
    )
