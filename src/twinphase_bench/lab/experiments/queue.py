"""Claim: a busy queue delays the first token but not the later ones."""

from functools import partial

from twinphase_bench.lab.experiment import Experiment, Figure, Rule, Trial, median_of, ratios
from twinphase_bench.lab.workbench import LEDGER, TPOT, TTFT, Workbench, serve

PROMPT = 96
OUTPUT = 16
SEATS = 2
ALONE = "one request alone"
SEATED = f"a burst, {SEATS} run at once"
TOGETHER = "a burst, all run at once"


@Experiment(
    claim="A busy machine delays the first token and leaves the stream after it alone.",
    method="One request alone; a burst of requests that may all run at once; and the same with "
    f"{SEATS} at once.",
    rules=(
        Rule(
            "TTFT in the burst / alone",
            at_least=2,
            formula="medians; all may run at once",
            fails_from=8,
        ),
        Rule("TPOT in the burst / alone", at_most=1.2, formula="medians; all may run at once"),
    ),
    meaning="Under load look at both: max_num_seqs chooses whether users wait before their stream "
    "or during it.",
    figure=Figure(
        "Where a request's time goes in a burst: the engine's ledger", "load", LEDGER, stacked=True
    ),
    also=(TTFT, TPOT),
    seconds=17,
    sizes=(16, 12, 8, 4),
    sized_in="requests",
)
def queue(bench: Workbench) -> Trial:
    engines = {
        ALONE: bench.engine(),
        SEATED: bench.engine(max_num_seqs=SEATS),
        TOGETHER: bench.engine(),
    }
    prompts = bench.prompts(bench.size, PROMPT)
    runs = bench.interleave(
        {
            load: partial(serve, one, prompts[:1] if load is ALONE else prompts, OUTPUT)
            for load, one in engines.items()
        }
    )
    alone = runs[ALONE]
    seated = runs[SEATED]
    together = runs[TOGETHER]
    spent = {kind: f"{median_of(together[kind]):,.0f} ms" for kind in LEDGER}
    return Trial(
        runs,
        [ratios(together[TTFT], alone[TTFT]), ratios(together[TPOT], alone[TPOT])],
        f"With {SEATS} at once and the others in a queue, TPOT is "
        f"{median_of(ratios(seated[TPOT], alone[TPOT])):.2f} times that of one request alone. "
        "Continuous batching lets a request in as soon as a step has room, so most of the wait for "
        f"the first token is others' prefill ({spent['prefill_wait, ms']} of prefill_wait, "
        f"{spent['queue, ms']} of queue), and those who run pay with their streams: others' "
        f"decodes added {spent['batching, ms']} to each request (batching) and others' prefill "
        f"chunks {spent['stall, ms']} (stall), where its own decode takes {spent['decode, ms']}.",
    )
