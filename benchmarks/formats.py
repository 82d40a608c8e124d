"""What each format of weights costs: prefill and decode as a share of Q4_0's, on random weights in one shape.

    python benchmarks/formats.py                 # four layers in the shape of Llama 3.2 1B
    python benchmarks/formats.py --types Q5_0,Q6_K --reps 9

Formats are measured in turn within a repetition; medians and ranges of the ratios are printed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from random_model import BLOCKS, write_model
from rich.console import Console
from rich.progress import track
from rich.table import Table

from twinphase_bench.targets.engine import EngineTarget

PROMPT = 512
NEW = 48
BASE = "Q4_0"


def measure(target: EngineTarget, rep: int) -> tuple[float, float]:
    """Seconds of a prefill of `PROMPT` tokens, and per token of the decode behind it."""
    prompt = [300 + (7 * i + 31 * rep) % 600 for i in range(PROMPT)]
    ticket = target.stepped.submit(prompt, NEW)
    for _ in target.stepped.run():
        pass
    target.stepped.clear()
    return ticket.times[0] - ticket.submitted, (ticket.times[-1] - ticket.times[0]) / (NEW - 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--types", default=",".join(BLOCKS))
    parser.add_argument("--reps", type=int, default=5)
    args = parser.parse_args()
    names = list(dict.fromkeys([BASE, *args.types.split(",")]))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        targets = {}
        sizes = {}
        for name in track(names, "models", console=Console(stderr=True)):
            path = write_model(
                args.shape, name, Path(folder) / f"{name}.gguf", args.layers, vocab=1000
            )
            sizes[name] = path.stat().st_size
            targets[name] = EngineTarget(str(path), max_model_len=1024, enable_prefix_caching=False)
            measure(targets[name], 0)  # warm
        for rep in track(range(args.reps), "repetitions", console=Console(stderr=True)):
            for name, target in targets.items():
                seconds[name].append(measure(target, rep + 1))
    table = Table(
        title=f"{args.shape}, {args.layers} layers: speed as a share of {BASE}'s, medians (range)"
    )
    for column in ("format", "file, MB", f"prefill {PROMPT}", f"decode behind {PROMPT}"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for name in names:
        shares = []
        for phase in (0, 1):
            ratios = [
                base[phase] / own[phase]
                for base, own in zip(seconds[BASE], seconds[name], strict=True)
            ]
            shares.append(
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        table.add_row(name, f"{sizes[name] / 1e6:.0f}", *shares)
    Console().print(table)


if __name__ == "__main__":
    main()
