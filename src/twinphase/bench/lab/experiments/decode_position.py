"""Claim: decode takes the same time for every token, rising slowly with the position."""

from functools import partial
from statistics import median

from twinphase.bench.lab.experiment import Experiment, Figure, Rule, Trial, median_of, ratios
from twinphase.bench.lab.workbench import DECODE, Workbench, fits, serve
from twinphase.phases.work import rows_cost

NEAREST, STEPS, OUTPUT = 16, 12, 256


@Experiment(
    claim="Every decode token takes the same time, rising slowly with the position as more KV is read.",
    method="One request alone: an answer behind a short prompt, and a few tokens behind prompts of growing length.",
    rules=(
        Rule("second half / first half", 0.85, 1.15, formula="median time per token in the halves of one answer"),
        Rule("last position / first", at_least=1.02, formula="time per token", fails_from=4096),
    ),
    meaning="The time of an answer is about its length times one number; a long context makes that number larger.",
    figure=Figure("Time per token by the number of tokens before it", "tokens before (position)", (DECODE,)),
    seconds=16,
    sizes=(4096, 2048, 1024, 512, 256, 128),
    sized_in="tokens before",
)
def decode_position(bench: Workbench) -> Trial:
    last, shape = bench.size, bench.workshop.shape
    engine = bench.engine(enable_prefix_caching=True)  # prompts are read once, and found in the cache by repetitions
    prompts = {n: bench.workshop.prompt(n) for n in (NEAREST, *(last * i // 4 for i in range(1, 5)))}
    for prompt in prompts.values():
        engine.prefill(prompt)

    def answer() -> dict[str, float]:
        ticket = engine.submit(prompts[NEAREST], min(OUTPUT, last) + 1)
        engine.run()
        half = len(ticket.gaps) // 2
        return {"first": median(ticket.gaps[:half]), "second": median(ticket.gaps[half:])}

    positions = {n: partial(serve, engine, [prompt], STEPS + 1) for n, prompt in prompts.items()}
    runs = bench.interleave({**positions, 0: answer})
    halves = runs.pop(0)
    start, slope = map(median_of, fits({n: runs[n][DECODE] for n in prompts}, 1))
    curves = {"decode step": lambda n: start + slope * n}
    why = f"A token takes {start:.3g} ms, plus {slope * 1e3:.3g} µs for every token before it."
    kv_bytes = rows_cost(shape, last, 1, 1).bytes
    read = kv_bytes // (last + 1)
    bandwidth = bench.ceilings and bench.ceilings.read_bandwidth(shape.weight_bytes + kv_bytes)
    if bandwidth:
        each = read / bandwidth * 1e3
        curves["KV bytes / bandwidth"] = lambda n: start + each * n
        why += (
            f" Reading the {read:,} bytes of KV of each would take {each * 1e3:.3g} µs at {bandwidth / 1e9:.3g} GB/s; "
            "what is above that is attention's arithmetic, and turning the stored KV back into numbers."
        )
    ends = ratios(runs[last][DECODE], runs[NEAREST][DECODE])
    return Trial(runs, [ratios(halves["second"], halves["first"]), ends], why, curves)
