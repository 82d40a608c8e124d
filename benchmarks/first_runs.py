"""First runs on a machine that knows nothing of itself: do the ceilings that each keeps agree?

    python benchmarks/first_runs.py [--runs 10] [--busy 1]

Each run has an empty cache of its own; provisional ceilings are taken again, as later runs would. Prints the ceilings
that each run keeps (1e9 operations or bytes per second), and the difference between the highest and the lowest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

from twinphase.bench.conditions import Bystanders
from twinphase.config import EngineConfig
from twinphase.engine.ceilings import learn_ceilings
from twinphase.phases.hardware import Ceilings, must_measure


def rates(kept: Ceilings) -> dict[str, float]:
    peaks = {unit: peak for unit in ("int8", "float32", "bfloat16") if (peak := kept.peak(unit)) is not None}
    sets = {f"{size >> 20} MiB": rate for size, rate in kept.bandwidth}
    return {name: rate / 1e9 for name, rate in (peaks | sets).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--busy", type=int, default=0, help="Processes that use a core each meanwhile.")
    args = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    found: list[dict[str, float]] = []
    try:
        for number in range(1, args.runs + 1):
            with tempfile.TemporaryDirectory() as cache, Bystanders() as others:
                os.environ["TWINPHASE_CACHE"], start, kept = cache, time.perf_counter(), None
                while kept is None or must_measure(kept):
                    kept, _ = learn_ceilings(EngineConfig())
                took = time.perf_counter() - start
            found.append(rates(kept))
            if number == 1:
                print("run  " + " ".join(f"{name:>8}" for name in found[0]) + "  taken  seconds  final")
            cells = " ".join(f"{rate:8.1f}" for rate in found[-1].values())
            final = "no" if kept.provisional else "yes"
            print(
                f"{number:<4} {cells}  {kept.measurements:>5}  {took:>7.1f}  {final} (others {others.cores or 0:.2f})"
            )
    finally:
        for one in busy:
            one.kill()
    spread = (max(one[name] for one in found) / min(one[name] for one in found) - 1 for name in found[0])
    print("diff " + " ".join(f"{value:8.1%}" for value in spread))


if __name__ == "__main__":
    main()
