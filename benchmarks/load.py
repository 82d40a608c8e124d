"""From the start of a process to the first token of a short answer, and its peak memory, beside llama.cpp.

    python benchmarks/load.py --model FILE.gguf --peers-dir DIR      # DIR as made by
    benchmarks/peers/setup.py python benchmarks/load.py --model FILE.gguf                      #
    twinphase alone

Processes start in turn, one at a time; medians and ranges are printed. The first start of each,
which brings the file into the page cache and may compile kernels, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from peers.engines import ENGINES, REPO, Places
from rich.console import Console
from rich.progress import track
from rich.table import Table

PROMPT = "Once upon a time there was a small engine that answered before anybody had asked it"
CONTEXT = 2048
# Each prints the time when it has its token (CLOCK_MONOTONIC, of all processes), the prompt's
# tokens and VmHWM in KiB.
REPORT = """
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([seconds, tokens, int(peak)]))
"""
CHILDREN = {
    "twinphase": """
import json, time
from twinphase import LLM, SamplingParams
llm = LLM({model!r}, max_model_len={context}, threads={threads})
(out,) = llm.generate([{prompt!r}], SamplingParams(temperature=0, max_tokens=1))
seconds, tokens = time.monotonic(), len(out.prompt_token_ids)
""",
    "llama.cpp": """
import json, time
from llama_cpp import Llama
llm = Llama({model!r}, n_ctx={context}, n_threads={threads}, n_threads_batch={threads}, flash_attn=True, verbose=False)
out = llm.create_completion({prompt!r}, max_tokens=1, temperature=0)
seconds, tokens = time.monotonic(), out["usage"]["prompt_tokens"]
""",
}


def start(python: Path, source: str) -> tuple[float, int, float]:
    """Seconds to the first token, tokens of the prompt, peak memory in bytes, of one process."""
    environment = {**os.environ, "PYTHONPATH": str(REPO / "src")}
    began = time.monotonic()
    done = subprocess.run(
        [python, "-c", source + REPORT],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{python} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    seconds, tokens, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds - began, tokens, 1024 * peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument(
        "--peers-dir", type=Path, default=os.environ.get("PEERS_DIR"), help="default: $PEERS_DIR"
    )
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--reps", type=int, default=7, help="starts that count (default: %(default)s)"
    )
    args = parser.parse_args()
    model = str(args.model.resolve())
    places = Places(
        Path(args.peers_dir).resolve() if args.peers_dir else None, Path(sys.executable)
    )
    peer = places.python(next(spec for spec in ENGINES if spec.venv == "llamacpp"))
    pythons = {"twinphase": Path(sys.executable)} | ({"llama.cpp": peer} if peer else {})
    values = {"model": model, "context": CONTEXT, "threads": args.threads, "prompt": PROMPT}
    seen: dict[str, list[tuple[float, int, float]]] = {name: [] for name in pythons}
    for rep in track(range(args.reps + 1), "starts", console=Console(stderr=True)):
        for name in list(pythons)[:: 1 if rep % 2 else -1]:
            run = start(pythons[name], CHILDREN[name].format(**values))
            if rep:
                seen[name].append(run)
    table = Table(
        title=f"{args.model.name}, {args.model.stat().st_size / 1e9:.2f} GB: medians (range)"
    )
    for column in ("engine", "prompt", "first token, s", "peak memory, GB"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name, runs in seen.items():
        seconds, tokens, peaks = zip(*runs, strict=True)
        spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        table.add_row(name, f"{tokens[0]} tokens", spread, f"{statistics.median(peaks) / 1e9:.2f}")
    if peer:
        ratios = [own[0] / other[0] for own, other in zip(*seen.values(), strict=True)]
        table.add_row(
            "ratio",
            "",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            "",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
