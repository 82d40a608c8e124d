"""Both phases on a GPU under its measured peaks, and what fixed sums cost beside cuBLAS, in one run.

    python benchmarks/device.py                                     # Llama-3.1-8B's shape in
    bfloat16, then in 4 bits python benchmarks/device.py --model smollm2 --device cpu --lengths
    64,128 --batches 1,2     # anything, anywhere

Weights are random where no --model is given. MFU and MBU are those of whole steps, Python included;
`host` is the share of a step in which the device waited for it. Beside another engine: `twinphase
bench compare`, over HTTP.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial, reduce
from pathlib import Path
from typing import Any

from random_model import write_model
from rich.console import Console
from rich.table import Table

from twinphase.engine.loading.ceilings import learn_ceilings
from twinphase.engine.stepped import Stepped, Workshop
from twinphase.phases.hardware import Ceilings
from twinphase.phases.roofline import PartWork, ideal_seconds, parts_of_step

SHAPE = "llama-3.1-8b"
KINDS = ("BF16", "Q4_0")
STEPS = 50
PREFILLS = 3
BUDGET = 2048
ROWS = 1, 2048


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="instead of random weights")
    parser.add_argument("--device", help="as for `twinphase run`")
    parser.add_argument(
        "--lengths", default="512,2048,8192", help="tokens of prompts, and behind which to decode"
    )
    parser.add_argument("--batches", default="1,8,64", help="sequences of a decode step")
    parser.add_argument(
        "--layers",
        type=int,
        help="of the random model, to be done sooner; the head weighs more then",
    )
    parser.add_argument("--num-kv-blocks", type=int, help="as for `twinphase run`")
    args = parser.parse_args()
    lengths, batches = (
        [int(one) for one in text.split(",")] for text in (args.lengths, args.batches)
    )
    config = {"backend": "torch", "device": args.device, "num_kv_blocks": args.num_kv_blocks}
    config |= {"max_model_len": needed(max(batches), max(lengths)), "max_num_seqs": max(batches)}
    with tempfile.TemporaryDirectory() as folder:
        for kind in [None] if args.model else KINDS:
            model = args.model or str(
                write_model(SHAPE, kind, Path(folder) / f"{kind}.gguf", args.layers)
            )
            show(Workshop(model, max_num_batched_tokens=BUDGET, **config), lengths, batches)


def needed(batch: int, length: int) -> int:
    """Longest context of so many sequences: who is read first decodes beside the chunks of the others."""
    return length + 2 * STEPS + batch * -(-length // (BUDGET - batch))


def show(workshop: Workshop, lengths: list[int], batches: list[int]) -> None:
    """Print the tables of one model."""
    console = Console()
    ceilings, _ = learn_ceilings(workshop.config)
    title = f"{workshop.path.name}, {ceilings.isa}"
    table = Table("phase", "tokens", "batch", "ms", "tokens/s", "MFU", "MBU", "host", title=title)
    for row in points(workshop, lengths, batches, ceilings):
        table.add_row(*row)
        console.print(" ".join(row), style="dim")
    console.print(table)
    matrices = getattr(
        workshop.stepped.engine.executor.backend, "matrices", None
    )  # of our kernels; plain torch has none
    if matrices:
        prices = Table(
            "outputs x inputs",
            "rows",
            "ours, µs",
            "cuBLAS in 16 bits, µs",
            "ratio",
            title="fixed sums",
        )
        for row in fixed_sums(matrices):
            prices.add_row(*row)
        console.print(prices)


def points(
    workshop: Workshop, lengths: list[int], batches: list[int], ceilings: Ceilings
) -> Iterator[list[str]]:
    """A row for each prefill, and for each batch and length of decode that the KV cache has room for."""
    for length in lengths:
        runs = [prefill(workshop, length, ceilings) for _ in range(1 + PREFILLS)][1:]
        yield ["prefill", f"{length:,}", "1", *cells(runs, length)]
    for batch in batches:
        for length in lengths:
            if batch * needed(batch, length) > workshop.capacity:
                yield ["decode", f"{length:,}", str(batch), "no room"]
            else:
                yield [
                    "decode",
                    f"{length:,}",
                    str(batch),
                    *cells(decode(workshop, batch, length, ceilings), batch),
                ]


Point = tuple[
    float, float, float, float
]  # seconds; those that its FLOP and its bytes take at the peaks; the device's


def prefill(workshop: Workshop, length: int, ceilings: Ceilings) -> Point:
    stepped = workshop.engine(max_num_batched_tokens=BUDGET, max_num_seqs=1)
    stepped.submit(workshop.prompt(length), 1)
    found = []
    while stepped.engine.has_work:
        found.append(timed_step(stepped, workshop, ceilings))
    return tuple(map(sum, zip(*found, strict=True)))  # type: ignore[return-value]


def decode(workshop: Workshop, batch: int, length: int, ceilings: Ceilings) -> list[Point]:
    stepped = workshop.engine(max_num_batched_tokens=BUDGET, max_num_seqs=batch)
    tickets = [
        stepped.submit(workshop.prompt(length), needed(batch, length) - length)
        for _ in range(batch)
    ]
    stepped.run_until(lambda: all(ticket.times for ticket in tickets))
    found = [timed_step(stepped, workshop, ceilings) for _ in range(STEPS)]
    stepped.clear()
    return found


def timed_step(stepped: Stepped, workshop: Workshop, ceilings: Ceilings) -> Point:
    work = reduce(
        PartWork.plus, parts_of_step(workshop.shape, workshop.units, stepped.step().batch.work)
    )
    return (
        stepped.walls[-1],
        *(ideal_seconds(work, ceilings) or (0.0, 0.0)),
        stepped.records[-1].device,
    )


def cells(found: list[Point], tokens: int) -> list[str]:
    """Medians: milliseconds, tokens per second, MFU, MBU, the host's share."""
    seconds, compute, memory, device = (
        statistics.median(values) for values in zip(*found, strict=True)
    )
    shares = [compute / seconds, memory / seconds, 1 - device / seconds]
    return [
        f"{1e3 * seconds:.3f}",
        f"{tokens / seconds:,.0f}",
        *(f"{share:.0%}" for share in shares),
    ]


def fixed_sums(matrices: Any) -> Iterator[list[str]]:
    """Our kernel, which adds every row in one order, beside cuBLAS on dequantized weights, by shape."""
    import torch

    from twinphase.backends.torch.kernels.linear import linear
    from twinphase.backends.torch.tune import cold_seconds

    major, minor = torch.cuda.get_device_capability()
    parts = {
        part.codes.shape: part
        for matrix in matrices
        for part in matrix.parts
        if part.codes.dim() == 2
    }
    for part in parts.values():
        weights = part.values()
        for rows in ROWS:
            x = torch.ones(rows, part.inputs, dtype=part.dtype, device=weights.device)
            calls = (
                partial(linear, x, part, capability=10 * major + minor),
                partial(torch.matmul, x, weights.T),
            )
            ours, theirs = (cold_seconds(x.device, call) for call in calls)
            shape = f"{len(weights):,} x {part.inputs:,}"
            yield [
                shape,
                f"{rows:,}",
                f"{1e6 * ours:.0f}",
                f"{1e6 * theirs:.0f}",
                f"{ours / theirs:.2f}",
            ]


if __name__ == "__main__":
    main()
