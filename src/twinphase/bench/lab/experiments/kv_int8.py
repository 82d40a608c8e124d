"""Claim: an int8 KV cache makes a context's memory smaller and decode behind it faster, both against the default."""

from functools import partial

from twinphase.bench.lab.experiment import Experiment, Figure, Rule, Trial, median_of, ratios
from twinphase.bench.lab.workbench import DECODE, Workbench, serve
from twinphase.phases.work import kv_bytes_per_token

TOKENS = 17
AUTO, INT8 = "auto: int8 keys, 16-bit values", "int8: keys and values"


@Experiment(
    claim="An int8 KV cache makes a context's memory smaller by a quarter or more, and decode behind it faster.",
    method="The same decode behind the same long context, with this engine's default KV format and with int8.",
    rules=(
        Rule("memory, int8 / default", at_most=0.75, formula="bytes per token as stored"),
        Rule("decode time, default / int8", at_least=1, formula="time per token", fails_from=2048),
    ),
    meaning="Choose the KV format by the memory that long contexts need; measure before expecting speed.",
    figure=Figure("A decode step behind a long context", "KV cache", (DECODE,)),
    seconds=15,
    sizes=(4096, 2048, 1024, 512, 256, 128),
    sized_in="tokens of context",
)
def kv_int8(bench: Workbench) -> Trial:
    blocks = (bench.size + TOKENS) // bench.workshop.config.block_size + 8
    workshops = {AUTO: bench.workshop, INT8: bench.open(kv_cache_dtype="int8", num_kv_blocks=blocks)}
    context = bench.prompts(1, bench.size)
    engines = {name: workshop.engine(enable_prefix_caching=True) for name, workshop in workshops.items()}
    for engine in engines.values():
        serve(engine, context)
    runs = bench.interleave({name: partial(serve, engine, context, TOKENS) for name, engine in engines.items()})
    auto, int8 = (kv_bytes_per_token(workshop.shape) for workshop in workshops.values())
    before, behind = (median_of(found[DECODE]) for found in runs.values())
    return Trial(
        runs,
        [int8 / auto, ratios(runs[AUTO][DECODE], runs[INT8][DECODE])],
        f"A token takes {auto:,} bytes in the default format, which has int8 keys already, and {int8:,} with int8 "
        f"values too: behind {bench.size:,} tokens, {(auto - int8) * bench.size / 1e6:.3g} MB less are read per token. "
        f"A step took {before:.3g} ms and {behind:.3g} ms: values must be scaled back to be summed, so reading less "
        "helps only where reading was the limit.",
    )
