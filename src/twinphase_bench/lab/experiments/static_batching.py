"""Claim: continuous batching serves more tokens per second than static batching."""

import random
from functools import partial

from twinphase_bench.lab.experiment import Experiment, Figure, Rule, Trial, median_of, ratios
from twinphase_bench.lab.workbench import STEPS, Workbench

SEATS = 8
PROMPT = 16
MEAN = 16
LONGEST = 96
RATE = "rate, tokens/s"
CONTINUOUS = "continuous"
STATIC = "static"
PADDED = "static, padded to the longest answer"


@Experiment(
    claim="Continuous batching serves more tokens per second than static batching where answers "
    "differ in length.",
    method=(
        f"Requests with answers of different lengths (exponential, {MEAN} tokens on average), "
        f"{SEATS} at once: the next starts when one ends; or in groups, where each group waits for "
        "the longest answer of the group before."
    ),
    rules=(
        Rule("tokens/s, continuous / static", at_least=1.2, fails_from=24),
        Rule("steps, static / continuous", at_least=1.2, fails_from=24),
    ),
    meaning="Serve with an engine that lets requests in at every step; do not collect them into "
    "groups yourself.",
    figure=Figure("Tokens per second that were asked for", "batching", (RATE,)),
    also=(STEPS,),
    seconds=12,
    sizes=(32, 24, 16, 8),
    sized_in="requests",
    quick=True,
)
def static_batching(bench: Workbench) -> Trial:
    engine = bench.engine(max_num_seqs=SEATS)
    generator = random.Random(0)  # The lengths are the same in every run.
    lengths = [
        min(LONGEST, max(1, round(generator.expovariate(1 / MEAN)))) for _ in range(bench.size)
    ]
    groups = [lengths[i : i + SEATS] for i in range(0, len(lengths), SEATS)]

    def play(groups: list[list[int]]) -> dict[str, float]:
        for group in groups:
            for output in group:
                engine.submit(bench.prompt(PROMPT), output)
            engine.run()
        seconds = sum(record.seconds for record in engine.records)
        steps = len(engine.records)
        engine.clear()
        return {RATE: sum(lengths) / seconds, STEPS: steps}

    ways = {
        CONTINUOUS: [lengths],
        STATIC: groups,
        PADDED: [[max(group)] * len(group) for group in groups],
    }
    runs = bench.interleave({way: partial(play, order) for way, order in ways.items()})
    continuous, static, padded = (runs[way] for way in ways)
    return Trial(
        runs,
        [ratios(continuous[RATE], static[RATE]), static[STEPS][0] / continuous[STEPS][0]],
        f"{bench.size} requests took {continuous[STEPS][0]:.0f} steps with seats filled again at "
        f"once, and {static[STEPS][0]:.0f} in groups, where the seats of short answers stay empty "
        "until the longest one ends. An empty seat costs no more than the step that all share; "
        "where it is computed as padding, continuous batching is "
        f"{median_of(ratios(continuous[RATE], padded[RATE])):.2f} times as fast.",
    )
