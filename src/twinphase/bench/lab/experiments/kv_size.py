"""Claim: the KV cache grows linearly with the tokens, by a number of bytes that is known beforehand."""

import numpy as np

from twinphase.bench.lab.experiment import Experiment, Figure, Rule, Trial
from twinphase.bench.lab.workbench import Workbench
from twinphase.bench.targets.stepped import Workshop
from twinphase.phases.work import kv_bytes_per_token

OUTPUT = 24
PIECES = 8  # in which the prompt is read, so that its cache is seen to grow
LINE = 64  # bytes that are looked at together
WRITTEN, BLOCKS = "KV cache written, MB", "blocks held"


@Experiment(
    claim="The KV cache grows linearly with the tokens, by a number of bytes that is known beforehand.",
    method="A request grows in a fresh cache; its blocks are counted, and the bytes of memory that changed.",
    rules=(
        Rule("bytes per token, written / expected", 0.97, 1.03, formula="slope of the bytes written in memory"),
        Rule("most blocks held beyond the tokens", at_most=1, unit="", formula="blocks held - tokens / block size"),
    ),
    meaning="Memory for KV, and not the weights, limits how many long requests run at once; it is known beforehand.",
    figure=Figure("Every token keeps its keys and values", "tokens of the request", (WRITTEN,)),
    also=(BLOCKS,),
    seconds=4,
    sizes=(1024,),
    sized_in="tokens of the request",
    quick=True,
)
def kv_size(bench: Workbench) -> Trial:
    workshop = bench.open()  # nothing was written yet into its cache
    block, shape, empty = workshop.config.block_size, workshop.shape, _written(workshop)
    engine = workshop.engine(max_num_batched_tokens=max(1, bench.size // PIECES))
    pool = engine.engine.scheduler.kv_cache.pool
    before, beyond = pool.num_held, 0.0
    runs: dict[int, dict[str, list[float]]] = {}
    ticket = engine.submit(workshop.prompt(max(1, bench.size - OUTPUT)), OUTPUT)
    while not engine.step().finished:  # a finished request gives its blocks back at once
        tokens, blocks = ticket.request.num_computed_tokens, pool.num_held - before
        if ticket.times:  # a prompt gets its blocks before it is read
            beyond = max(beyond, abs(blocks - tokens / block))
        if tokens % block == 0:
            written = {} if empty is None else {WRITTEN: [((_written(workshop) or 0) - empty) / 1e6]}
            runs[tokens] = {**written, BLOCKS: [blocks]}
    token_bytes = kv_bytes_per_token(shape)
    slope: float | str = "The memory of this cache cannot be looked at."
    if empty is not None:
        megabytes = [found[WRITTEN][0] for found in runs.values()]
        slope = float(np.polyfit(list(runs), megabytes, 1)[0]) * 1e6 / token_bytes
    grouped, full = (4 * shape.num_layers * heads * shape.head_dim for heads in (shape.num_kv_heads, shape.num_heads))
    capacity = bench.workshop.capacity
    return Trial(
        runs,
        [slope, beyond],
        f"This cache stores {token_bytes:,} bytes per token, in blocks of {block} tokens, and holds {capacity:,} "
        f"tokens ({capacity * token_bytes / 1e6:,.0f} MB): {capacity / 1024:,.1f} requests of 1,024 tokens, "
        f"{capacity / 8192:,.1f} of 8,192. With 16-bit values a token would take 2 L H_kv d b = {grouped:,} bytes, and "
        f"{full:,} with a KV head per query head (MHA): {shape.num_heads} query heads share {shape.num_kv_heads} here.",
        {"16-bit values (formula)": lambda n: grouped * n / 1e6, "MHA (formula)": lambda n: full * n / 1e6},
    )


def _written(workshop: Workshop) -> int | None:
    """Bytes of the KV cache that are not zero any more, in lines of 64; None if it cannot be looked at."""
    if not workshop.kv_memory:
        return None
    lines = (array.reshape(-1).view(np.uint64).reshape(-1, LINE // 8) for array in workshop.kv_memory)
    return LINE * sum(int(np.count_nonzero(one.any(axis=1))) for one in lines)
