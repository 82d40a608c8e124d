"""Variants of our engine in turn: formats of weights, ranks, instruction sets, any option of `LLM`.

python benchmarks/variants.py smollm2 "smollm2 kv_cache_dtype=int8"
python benchmarks/variants.py "smollm2 threads=2" "smollm2 threads=1 tensor_parallel_size=2"

What each format of weights costs, on random weights:

for F in Q4_0 Q8_0; do python benchmarks/random_model.py llama-3.2-1b $F $F.gguf --layers 4; done
python benchmarks/variants.py Q4_0.gguf Q8_0.gguf

What drafts bring on a text of yours, which the request continues:

python benchmarks/variants.py "smollm2 speculative_config=null" smollm2 --text docs/walk.md

What another program takes that keeps one core busy:

python benchmarks/variants.py smollm2 "smollm2 threads=1" --busy

Each repetition measures one request with every variant: its prefill, and the decode after it. The
ratios are to the first variant in the same repetition: above 1 the variant is faster.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from twinphase.engine.stepped import TimedRequest
from twinphase.models.loader import open_model
from twinphase.tokenizer.tokenizer import Tokenizer
from twinphase.weights.hub import resolve_model
from twinphase_bench.targets.engine import EngineTarget


def options_of(text: str) -> tuple[str, dict[str, Any]]:
    """A model and its options, such as `smollm2 threads=2`."""
    model, *assignments = shlex.split(text)
    options: dict[str, Any] = {}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        options[name] = value
        with suppress(ValueError):  # Words such as int8 are not JSON.
            options[name] = json.loads(value)
    return model, options


def open_variant(text: str) -> EngineTarget:
    """The engine of a model and its options."""
    model, options = options_of(text)
    return EngineTarget(model, **{"max_model_len": 1024, "enable_prefix_caching": False, **options})


def measure(target: EngineTarget, prompt: list[int], num_tokens: int) -> TimedRequest:
    """One request, alone."""
    ticket = target.stepped.submit(prompt, num_tokens)
    for _ in target.stepped.run():
        pass
    target.stepped.clear()
    return ticket


@contextmanager
def beside(busy: bool) -> Iterator[None]:
    """A time during which another process uses a core without end, or none does."""
    if not busy:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def cells(runs: list[TimedRequest], base: list[TimedRequest], phase: str, unit: str) -> list[str]:
    """Median milliseconds, median ratio with its range, and the share of time ranks waited."""
    seconds, first = ([getattr(run, unit) for run in each] for each in (runs, base))
    ratios = [one / own for one, own in zip(first, seconds, strict=True)]
    totals = [getattr(run.timeline, phase) for run in runs]
    waits = statistics.median(total.rank_wait / total.seconds for total in totals)
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return [f"{1e3 * statistics.median(seconds):.2f}", spread, f"{waits:.0%}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="+", metavar="MODEL [OPTION=VALUE ...]")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=48, help="output tokens")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="also beside a busy process")
    parser.add_argument("--text", type=Path, help="file that prompts are cut from")
    args = parser.parse_args()
    targets = {text: open_variant(text) for text in args.variants}
    conditions = {"": False, ", busy": True} if args.busy else {"": False}
    tokens = [300 + 7 * i % 600 for i in range(args.prompt + 31 * args.reps)]
    if args.text:
        checkpoint = open_model(resolve_model(args.variants[0].split()[0]))
        tokens = Tokenizer.from_checkpoint(checkpoint).encode(args.text.read_text())
    runs = defaultdict[str, list[TimedRequest]](list)
    for rep in track(range(args.reps + 1), "repetitions", console=Console(stderr=True)):
        prompt = tokens[31 * rep :][: args.prompt]
        for condition, busy in conditions.items():
            for name, target in targets.items():
                with beside(busy):
                    runs[name + condition].append(measure(target, prompt, args.output))
    columns = ["TTFT, ms", "ratio", "ranks wait", "TPOT, ms", "ratio", "ranks wait"]
    table = Table("variant", *columns, title="medians (range)")
    base = runs[args.variants[0]][1:]  # The first repetition warms up.
    for name, own in runs.items():
        own = own[1:]
        table.add_row(
            name, *cells(own, base, "prefill", "ttft"), *cells(own, base, "decode", "tpot")
        )
    Console().print(table)


if __name__ == "__main__":
    main()
