"""Both phases on a GPU beside transformers, and our linear kernel beside cuBLAS, in one run.

    python benchmarks/device.py                             # Llama-3.1-8B's shape, random weights
    python benchmarks/device.py --shape llama-3.2-1b --batches 1,8

Both engines have random weights of one shape and run in turn: ours with 4-bit weights and with the
same weights dequantized to bfloat16, transformers in bfloat16 with its default cache. MFU and MBU
of whole steps: `twinphase roofline MODEL --backend torch`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from random_model import random_tensor, write_model
from rich.console import Console
from rich.table import Table

from twinphase import Workshop
from twinphase.backends.torch.kernels.linear import linear
from twinphase.backends.torch.tune import cold_seconds
from twinphase.backends.torch.weights import pack
from twinphase.estimate.known_models import KNOWN_MODELS

STEPS = 30
WARM_UP_STEPS = 5
ROWS = 1, 64, 2048
# Outputs and inputs: those of Llama-3.1-8B's layers.
MATRICES = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)


class Engine(Protocol):
    """What is measured; each call takes seconds on the wall clock."""

    def prefill(self, length: int) -> float: ...

    def decode(self, batch: int, length: int) -> float: ...


class Ours:
    """Whole steps of our engine, with scheduling and drawing of tokens."""

    def __init__(self, path: Path, max_batch: int, longest: int, **config: Any) -> None:
        self._shop = Workshop(
            str(path),
            backend="torch",
            max_num_seqs=max_batch,
            max_model_len=longest + 2 * STEPS + max_batch,
            max_num_batched_tokens=2048,
            **config,
        )

    def prefill(self, length: int) -> float:
        stepped = self._shop.engine(max_num_batched_tokens=2048, max_num_seqs=1)
        stepped.prefill(prompt(length))
        return sum(stepped.walls)

    def decode(self, batch: int, length: int) -> float:
        stepped = self._shop.engine(max_num_batched_tokens=2048, max_num_seqs=batch)
        count = 2 * STEPS + batch
        requests = [stepped.submit(prompt(length), count) for _ in range(batch)]
        stepped.run_until(lambda: all(request.times for request in requests))
        walls = []
        for _ in range(STEPS):
            stepped.step()
            walls.append(stepped.walls[-1])
        stepped.clear()
        return statistics.median(walls[WARM_UP_STEPS:])


class Theirs:
    """Forward passes of transformers, each with an argmax on the device that the host waits for."""

    def __init__(self, shape: str) -> None:
        config = transformers.LlamaConfig(**KNOWN_MODELS[shape].config)
        with torch.device("cuda"):
            self._model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        self._model.eval()

    @torch.inference_mode()
    def prefill(self, length: int) -> float:
        return timed(partial(self._forward, self._tokens(1, length), None))

    @torch.inference_mode()
    def decode(self, batch: int, length: int) -> float:
        cache = transformers.DynamicCache()
        tokens = self._forward(self._tokens(batch, length), cache)
        walls = [timed(partial(self._forward, tokens, cache)) for _ in range(STEPS)]
        return statistics.median(walls[WARM_UP_STEPS:])

    def _forward(self, tokens: Any, cache: Any) -> Any:
        found = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        chosen = found.logits[:, -1:].argmax(-1)
        chosen.cpu()
        return chosen

    def _tokens(self, batch: int, length: int) -> Any:
        return torch.tensor([prompt(length)] * batch, device="cuda")


def prompt(length: int) -> list[int]:
    return list(range(3, 3 + length))


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b", help="a name of `twinphase estimate`")
    parser.add_argument("--lengths", default="512,2048", help="tokens of prompts")
    parser.add_argument("--batches", default="1,8,64", help="sequences that decode")
    parser.add_argument("--rounds", type=int, default=3, help="of all points in turn")
    args = parser.parse_args()
    lengths = [int(one) for one in args.lengths.split(",")]
    batches = [int(one) for one in args.batches.split(",")]
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(args.shape, "Q4_0", Path(folder) / "model.gguf")
        seats = max(batches), max(lengths)
        engines: dict[str, Engine] = {
            "twinphase Q4_0": Ours(path, *seats),
            "twinphase bfloat16": Ours(path, *seats, dequantize=True),
            "transformers bfloat16": Theirs(args.shape),
        }
        console.print(phases(engines, lengths, batches, args.rounds, args.shape))
    console.print(products())


def phases(
    engines: dict[str, Engine], lengths: list[int], batches: list[int], rounds: int, shape: str
) -> Table:
    """Tokens per second, medians over the rounds."""
    title = f"{shape}, {torch.cuda.get_device_name()}, tokens/s (ratio to transformers)"
    table = Table("phase", "context", "batch", *engines, title=title)
    points = [("prefill", length, 1) for length in lengths]
    points += [("decode", length, batch) for length in lengths for batch in batches]
    found: dict[tuple[Any, str], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for point, (name, engine) in product(points, engines.items()):
            found[point, name].append(speed(engine, *point))
    for point in points:
        phase, length, batch = point
        speeds = [statistics.median(found[point, name]) for name in engines]
        table.add_row(
            phase,
            f"{length:,}",
            str(batch),
            *(f"{one:,.0f} ({one / speeds[-1]:.2f})" for one in speeds),
        )
    return table


def speed(engine: Engine, phase: str, length: int, batch: int) -> float:
    if phase == "prefill":
        return length / engine.prefill(length)
    return batch / engine.decode(batch, length)


def products() -> Table:
    """Our linear kernel beside cuBLAS on the same weights in bfloat16: the price of fixed sums."""
    table = Table(
        "outputs x inputs", "rows", "Q4_0, µs", "bfloat16, µs", "cuBLAS, µs", title="One product"
    )
    for row in product_rows():
        table.add_row(*row)
    return table


def product_rows() -> Iterator[list[str]]:
    rng = np.random.default_rng(0)
    device = torch.device("cuda", 0)
    major, minor = torch.cuda.get_device_capability()
    for shape in MATRICES:
        packed = pack(
            random_tensor(rng, shape, "Q4_0").reshape(-1), shape, "Q4_0", torch.bfloat16, device
        )
        whole = packed.dequantized()
        weights = whole.values()
        for rows in ROWS:
            x = torch.randn(rows, shape[1], device=device, dtype=torch.bfloat16)
            calls = (
                partial(linear, x, packed, capability=10 * major + minor),
                partial(linear, x, whole, capability=10 * major + minor),
                partial(torch.matmul, x, weights.T),
            )
            each = [f"{1e6 * cold_seconds(device, call):.0f}" for call in calls]
            yield [f"{shape[0]:,} x {shape[1]:,}", f"{rows:,}", *each]


if __name__ == "__main__":
    main()
