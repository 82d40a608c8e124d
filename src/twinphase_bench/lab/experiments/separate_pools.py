"""Claim: separate pools keep prefill from delaying decode."""

import asyncio
from dataclasses import replace
from functools import partial
from itertools import pairwise
from time import perf_counter

from twinphase import (
    AsyncEngine,
    ClusterConfig,
    SamplingParams,
    TwinphaseError,
    available_cores,
    make_host,
)
from twinphase.phases.statistics import percentile
from twinphase_bench.lab.experiment import Experiment, Figure, Rule, Trial, median_of, ratios
from twinphase_bench.lab.workbench import Workbench

STREAMS = 4
OWN = 16
BEFORE = 8
PROMPTS = 2
ONE = "one engine"
POOLS = "1 prefill and 1 decode worker"
WORST = "99th percentile of the gaps, ms"
USUAL = "usual gap, ms"
WAIT = "TTFT of the prompts, ms"


@Experiment(
    claim="Separate pools keep prefill out of decode's way.",
    method=f"{PROMPTS} long prompts come one after the other while {STREAMS} requests decode: on "
    "one engine with all threads, which cuts its chunks as a server does by itself, and on an "
    "engine that reads prompts and one that answers, with half of the threads each (`serve "
    "--prefill-workers 1 --decode-workers 1`).",
    rules=(
        Rule(
            "99th percentile of the gaps, one engine / separate pools",
            at_least=1.5,
            fails_from=1024,
        ),
    ),
    meaning="If streams must not stutter during prefill, give them cores of their own; prompts "
    "wait longer.",
    figure=Figure(
        "Gaps of decoding requests during the prefill of long prompts", "engines", (WORST, WAIT)
    ),
    also=(USUAL,),
    seconds=11,
    sizes=(1024,),
)
def separate_pools(bench: Workbench) -> Trial:
    threads = bench.workshop.config.threads or available_cores()
    if threads == 1:
        raise TwinphaseError("There is one core only, and nothing to separate.")
    pools = ClusterConfig(prefill_workers=1, decode_workers=1, threads_per_worker=threads // 2)
    with asyncio.Runner() as runner:
        engines = runner.run(_start(bench, {ONE: ClusterConfig(), POOLS: pools}, threads))

        def interrupt(engine: AsyncEngine) -> dict[str, float]:
            return runner.run(_interrupt(bench, engine))

        try:
            for engine in engines.values():  # This touches the memory and chooses the chunk size.
                interrupt(engine)
            runs = bench.interleave(
                {name: partial(interrupt, engine) for name, engine in engines.items()}
            )
        finally:
            for engine in engines.values():
                engine.close()
    one = runs[ONE]
    apart = runs[POOLS]
    return Trial(
        runs,
        [ratios(one[WORST], apart[WORST])],
        f"During prefill, 99 % of the gaps between tokens were below {median_of(one[WORST]):,.0f} "
        f"ms on one engine, and below {median_of(apart[WORST]):,.0f} ms in pools. The prompts pay, "
        f"with half of the cores: their TTFT was {median_of(one[WAIT]):,.0f} ms on one engine, and "
        f"{median_of(apart[WAIT]):,.0f} ms in pools.",
    )


async def _start(
    bench: Workbench, clusters: dict[str, ClusterConfig], threads: int
) -> dict[str, AsyncEngine]:
    workshop = bench.workshop
    blocks = (PROMPTS * bench.size + STREAMS * (OWN + bench.size)) // workshop.config.block_size + 8
    config = replace(
        workshop.config, speculative_config=None, itl_slo_ms="auto", num_kv_blocks=blocks
    )
    engines = {}
    for name, cluster in clusters.items():
        own = replace(config, threads=None if cluster.is_cluster else threads)
        engines[name] = AsyncEngine(make_host(str(workshop.path), own, cluster, stall=60.0))
    while not all(engine.is_running for engine in engines.values()):
        for engine in engines.values():
            if engine.host.failure is not None:
                raise engine.host.failure.error()
        await asyncio.sleep(0.02)
    return engines


async def _times(
    engine: AsyncEngine, prompt: list[int], count: int, times: list[float], enough: asyncio.Event
) -> None:
    """Decode up to `count` tokens; `times` gets the time of each."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    async for update in await engine.submit(prompt, params):
        times += [perf_counter()] * len(update.token_ids)
        if enough.is_set():
            return  # This ends the request.


async def _interrupt(bench: Workbench, engine: AsyncEngine) -> dict[str, float]:
    """Send long prompts while some requests are decoding."""
    enough = asyncio.Event()
    streams = [list[float]() for _ in range(STREAMS)]
    ask = partial(_times, engine, enough=enough)
    tasks = [
        asyncio.create_task(ask(prompt, bench.size, times))
        for prompt, times in zip(bench.prompts(STREAMS, OWN), streams, strict=True)
    ]
    while not all(len(times) > BEFORE for times in streams):
        await asyncio.sleep(1e-3)
    begin = perf_counter()
    waits = list[float]()
    for prompt in bench.prompts(PROMPTS, bench.size):
        sent = perf_counter()
        times = list[float]()
        await ask(prompt, 2, times)
        waits.append(times[0] - sent)
    end = perf_counter()
    enough.set()
    await asyncio.gather(*tasks)
    gaps = [(before, after - before) for times in streams for before, after in pairwise(times)]
    during = [gap for before, gap in gaps if begin < before + gap and before < end]
    return {
        WORST: 1e3 * percentile(during, 99),
        USUAL: 1e3 * percentile([gap for before, gap in gaps if before + gap <= begin], 50),
        WAIT: 1e3 * median_of(waits),
    }
