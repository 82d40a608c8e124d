"""What more rows of one sequence cost in a step, as verifying drafted tokens has them: by rows and context.

    python benchmarks/rows_of_a_sequence.py smollm2 qwen2.5-coder:0.5b
    python benchmarks/rows_of_a_sequence.py smollm2 --contexts 4096 --steps 99

Row counts are measured in turn within a repetition; medians are printed: milliseconds of the step, of its linear
layers and of its attention. "Apart" is the attention of as many sequences of one row each over the same blocks.
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.table import Table

from twinphase.backends.base import KVCacheSpec, StepInputs
from twinphase.backends.cpu.backend import CpuBackend
from twinphase.models.loader import load_model, open_model
from twinphase.weights.hub import resolve_model

BLOCK = 16


def step(context: int, rows: int, apart: bool) -> StepInputs:
    """Rows at positions `context`, +1, ... of one sequence; `apart` makes each a sequence over the same blocks."""
    positions = np.arange(context, context + rows, dtype=np.int32)
    blocks = np.arange(-(-(context + rows) // BLOCK), dtype=np.int32)
    sequences = rows if apart else 1
    return StepInputs(
        token_ids=(1000 + 37 * positions % 5000).astype(np.int32),
        positions=positions,
        slot_mapping=positions.astype(np.int64),
        query_start=np.linspace(0, rows, sequences + 1, dtype=np.int32),
        block_tables=np.tile(blocks, (sequences, 1)),
        num_decodes=sequences,
        logit_rows=np.arange(rows, dtype=np.int32),
    )


class Measured:
    """A model whose cache holds `most` tokens of one sequence."""

    def __init__(self, name: str, most: int, threads: int | None, dtype: str) -> None:
        self.backend = CpuBackend(threads=threads, kv_cache_dtype=dtype)
        self.model = load_model(open_model(resolve_model(name)), self.backend)
        b = self.model.blueprint
        spec = KVCacheSpec(b.num_layers, b.num_kv_heads, b.head_dim, -(-most // BLOCK), BLOCK)
        self.backend.allocate_kv_cache(spec)
        for start in range(0, most, 256):  # real keys and values, and pages of memory
            self.backend.execute(self.model.forward, step(start, min(256, most - start), False))

    def seconds(self, inputs: StepInputs) -> float:
        """Of a step."""
        start = perf_counter()
        self.backend.execute(self.model.forward, inputs)
        return perf_counter() - start

    def parts(self, inputs: StepInputs) -> tuple[float, float]:
        """Seconds of a step's linear layers and attention."""
        parts = self.backend.execute_in_parts(self.model.forward, inputs)[1]
        return parts["linear"], parts["attention"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--contexts", default="64,512,4096")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=31)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-cache-dtype", default="auto")
    args = parser.parse_args()
    contexts, counts = [int(n) for n in args.contexts.split(",")], range(1, args.rows + 1)
    for name in args.models:
        measured = Measured(name, max(contexts) + args.rows, args.threads, args.kv_cache_dtype)
        table = Table(title=f"{name}: ms of a step by rows of one sequence", title_justify="left")
        for column in ("context", "", *map(str, counts)):
            table.add_column(column, justify="right")
        for context in contexts:
            together = [step(context, rows, False) for rows in counts]
            apart = [step(context, rows, True) for rows in counts]
            times = []
            for _ in range(args.steps):
                seconds = [measured.seconds(inputs) for inputs in together]
                parts = [measured.parts(inputs) for inputs in together + apart]
                linear, attention = zip(*parts, strict=True)
                times.append([*seconds, *linear[: len(counts)], *attention])
            medians = [f"{1e3 * statistics.median(column):.2f}" for column in zip(*times, strict=True)]
            for i, label in enumerate(("step", "linear", "attention", "apart")):
                table.add_row(str(context) if i == 0 else "", label, *medians[i * len(counts) :][: len(counts)])
        Console(width=140).print(table)


if __name__ == "__main__":
    main()
