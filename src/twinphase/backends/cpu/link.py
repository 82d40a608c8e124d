"""What ranks can exchange at best, by the commands with which a step gathers rows.

Runs as a process per rank, on the rank's cores, started by `measure_link`; the first prints what it
found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import ClassVar

from twinphase import lifeline
from twinphase.backends.cpu.ceilings import CeilingsError
from twinphase.backends.cpu.compiler import compile_kernels, load_kernels
from twinphase.backends.cpu.isa import choose_isa
from twinphase.backends.cpu.program import Buffer, Program, gather_columns
from twinphase.backends.cpu.threads import ThreadPool
from twinphase.backends.group import Group, shared_file
from twinphase.blueprint import Span
from twinphase.config import module_command
from twinphase.numa import bound_to, rank_places
from twinphase.weights.storage import cache_root

SPECS = ("copy_columns", "meet", "run_program")
# rows and columns, float32
LARGE = (512, 2048)
SMALL = (1, 64)
# of a round; the best round counts
EXCHANGES = 32
ROUNDS = 40
LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class LinkRates:
    """Between ranks: bytes per second of LARGE rows gathered and read; seconds of SMALL ones."""

    large: ClassVar = LARGE
    small: ClassVar = SMALL
    ranks: int
    bandwidth: float
    latency: float


def measure_link(ranks: int, threads: int, isa: str | None = None) -> LinkRates:
    """Measure between `ranks` ranks of `threads` threads, in own processes (about a second).

    Raises:
        InvalidRequestError: this processor cannot run `isa`, or the system cannot share memory.
        CeilingsError: the measuring processes failed.
    """
    path = choose_isa(isa)
    compile_kernels(cache_root() / "kernels", path, SPECS)
    memory = shared_file((1 << 20) + 4 * 4 * (LARGE[0] + 8) * LARGE[1])  # two of each take turns
    processes: list[subprocess.Popen[bytes]] = []
    command = [
        *module_command("twinphase.backends.cpu.link"),
        str(memory),
        str(ranks),
        str(threads),
        path.name,
    ]
    try:
        for rank, place in enumerate(rank_places(ranks)):
            out = subprocess.DEVNULL if rank else subprocess.PIPE
            with bound_to(place.cores if place.nodes else ()):
                processes.append(
                    lifeline.start([*command, str(rank)], pass_fds=[memory], stdout=out)
                )
        return LinkRates(ranks, **json.loads(processes[0].communicate(timeout=LIMIT_SECONDS)[0]))
    except (subprocess.TimeoutExpired, ValueError):
        raise CeilingsError(f"Measuring what {ranks} ranks can exchange failed.") from None
    finally:
        os.close(memory)
        for process in processes:
            process.kill()
            process.communicate()


class _Exchanges:
    """Rows that are gathered, and read by every rank, again and again."""

    def __init__(
        self, kernels: Mapping[str, int], group: Group, threads: int, rows: int, width: int
    ) -> None:
        program = Program(kernels, {"tokens": rows}, group)
        firsts = tuple(rank * width // group.ranks for rank in range(group.ranks + 1))
        mine = firsts[group.rank : group.rank + 2]
        span = Span(mine[0], mine[1] - mine[0], width, 1, firsts[:-1])
        source = Buffer(program, "tokens", width)
        own = Buffer(program, "tokens", width).floats
        for _ in range(EXCHANGES):
            whole = gather_columns(program, source, span, quantized=False)
            args = [whole.data, whole.stride, own.data, own.stride, 4 * whole.width]
            program.add_rows("copy_columns", args, [whole.data], own)
        program.cells.update({"tokens": rows})
        self._program = program  # owns the memory that the commands work on
        self._pool = ThreadPool(kernels["run_program"], threads, 4096)
        self._pool.load(program.commands)

    def seconds(self) -> float:
        """Seconds per exchange in the best round."""
        rounds = []
        for _ in range(ROUNDS):
            start = perf_counter()
            self._pool.run()
            rounds.append((perf_counter() - start) / EXCHANGES)
        return min(rounds)


def _main(memory: int, ranks: int, threads: int, isa: str, rank: int) -> None:
    kernels = load_kernels(cache_root() / "kernels", choose_isa(isa), SPECS)
    group = Group(rank, ranks, memory, Path())
    large, small = (_Exchanges(kernels, group, threads, *size).seconds() for size in (LARGE, SMALL))
    if rank == 0:
        print(
            json.dumps({"bandwidth": 4 * LARGE[0] * LARGE[1] / large, "latency": small}), flush=True
        )


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
