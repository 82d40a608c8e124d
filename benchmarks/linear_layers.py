"""What each format of weights costs in linear layers, by rows and by instruction-set path.

python benchmarks/linear_layers.py                      # on each path that this processor has
python benchmarks/linear_layers.py --isa avx2 --formats Q4_K Q6_K --rows 1 4 16 64 512 --reps 15

Four matrices in the shape of a layer of Llama-3.2-1B, with the rounding of their inputs: 512 rows
are a prefill, 4 to 64 a decode step of as many requests. Formats take turns within a repetition, so
that none finds its weights in a cache. Medians of the first format's GOP/s, and of the others'
speed as a multiple of it in the same repetition (range). One thread is timed by its processor time,
several by the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from twinphase.backends.cpu.compiler import compile_kernels, load_kernels
from twinphase.backends.cpu.formats import BY_OUTPUTS, FORMATS, GROUP_INPUTS, STRIP_OUTPUTS
from twinphase.backends.cpu.isa import Isa, available_isas, choose_isa
from twinphase.backends.cpu.linear_operations import LinearOperations, layer_spec
from twinphase.backends.cpu.memory import Arena
from twinphase.backends.cpu.program import Buffer, Program
from twinphase.backends.cpu.threads import ThreadPool
from twinphase.backends.cpu.weights import DENSE_BYTES, Matrix, Part
from twinphase.phases.hardware import processor_name
from twinphase.weights.storage import cache_root

# Outputs by inputs: of queries, keys and values; of attention; of gate and up; of down.
MATRICES = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))
NUM_WEIGHTS = sum(outputs * inputs for outputs, inputs in MATRICES)
FORMAT_NAMES = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_XS", "BF16")
# A run of fewer rows is repeated until it has had as many.
MIN_ROWS_PER_RUN = 32


def random_matrix(rng: np.random.Generator, name: str, shape: tuple[int, int], isa: Isa) -> Matrix:
    """Packed weights of random bytes: their time does not depend on what they are.

    But bits are set and cleared so that each float16 is from 2^-6 to 1, a normal number.
    """
    outputs, inputs = shape
    strip_bytes = STRIP_OUTPUTS * inputs * DENSE_BYTES.get(name, 0)
    groups = inputs
    if name in FORMATS:
        formats = BY_OUTPUTS if isa.takes_bf16(name) else FORMATS
        strip_bytes = formats[name].strip_bytes(inputs)
        groups = inputs // GROUP_INPUTS
    strips = outputs // STRIP_OUTPUTS
    memory = Arena(strips * strip_bytes, "weights").take(strips * strip_bytes)
    memory[:] = rng.integers(0, 256, memory.size, np.uint8) & 0xBF | 0x24
    part = Part(name, memory.ctypes.data, strips, groups, 0, strip_bytes, isa.takes_bf16(name))
    KEEP.append(memory)
    return Matrix((part,), (0,), (outputs,), outputs)


KEEP: list[Any] = []  # what compiled programs know by address


class LinearLayers:
    """The layers in one format, as a program on threads of its own."""

    def __init__(self, name: str, isa: Isa, threads: int, most_rows: int) -> None:
        specs = [layer_spec("linear", name), "run_program", "quantize", "round_rows"]
        specs = specs if isa.takes_bf16(name) else specs[:-1]
        kernels = load_kernels(cache_root() / "kernels", isa, specs)
        self.program = Program(kernels, {"tokens": most_rows})
        unused: Any = None
        operations = LinearOperations(self.program, unused, isa, threads)
        rng = np.random.default_rng(0)
        for outputs, inputs in MATRICES:
            x = Buffer(self.program, "tokens", inputs)
            x.array[:] = rng.standard_normal(x.array.shape, np.float32)
            operations.linear(x, random_matrix(rng, name, (outputs, inputs), isa))
            KEEP.append((x, operations))
        self.pool = ThreadPool(kernels["run_program"], threads, operations.scratch_bytes)
        self.pool.load(self.program.commands)
        self._clock = time.thread_time if threads == 1 else time.perf_counter

    def seconds(self, rows: int) -> float:
        """The time of one run with that number of rows."""
        self.program.cells.update({"tokens": rows})
        runs = -(-MIN_ROWS_PER_RUN // rows)
        begin = self._clock()
        for _ in range(runs):
            self.pool.run()
        return (self._clock() - begin) / runs


def measure(isa: Isa, args: argparse.Namespace) -> Table:
    """The table of a path."""
    specs = [layer_spec("linear", name) for name in args.formats]
    specs += ["run_program", "quantize", *(["round_rows"] if isa.matrix_tiles else [])]
    compile_kernels(cache_root() / "kernels", isa, specs)
    layers = {name: LinearLayers(name, isa, args.threads, max(args.rows)) for name in args.formats}
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for rep in track(range(-1, args.reps), isa.name, console=Console(stderr=True)):
        for rows in args.rows:
            for name, layer in layers.items():
                times[name, rows].append(layer.seconds(rows))
        if rep < 0:
            times.clear()
    table = Table("", *(f"{rows} rows" for rows in args.rows), title=isa.name)
    first, *others = args.formats
    for name in (first, *others):
        cells = []
        for rows in args.rows:
            ratios = [
                base / own for base, own in zip(times[first, rows], times[name, rows], strict=True)
            ]
            speed = 2e-9 * NUM_WEIGHTS * rows / statistics.median(times[name, rows])
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            cells.append(f"{speed:.0f} GOP/s" if name == first else spread)
        table.add_row(name, *cells)
    for layer in layers.values():
        layer.pool.close()
    KEEP.clear()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isa", nargs="+", default=available_isas()[:-1], help="paths")
    parser.add_argument("--formats", nargs="+", default=FORMAT_NAMES, metavar="FORMAT")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16, 64, 512])
    parser.add_argument("--reps", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.formats = list(dict.fromkeys(args.formats))
    console = Console(width=120)
    console.print(f"{processor_name()}, {args.threads} threads, {datetime.now(UTC):%Y-%m-%d}")
    for name in args.isa:
        console.print(measure(choose_isa(name), args))


if __name__ == "__main__":
    main()
