"""Times the parts of a captured program from inside, by clock readings between commands.

For measuring where a step's time goes (`twinphase roofline`). Not for serving: each reading waits
until all earlier commands are done, which costs about a microsecond, so callers compare with the
program without readings.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.cpu.memory import aligned
from twinphase.backends.cpu.program import Program
from twinphase.backends.cpu.threads import Command, ThreadPool, libc_address

# scan: what reads or writes the states of recurrent layers, short convolutions included; other:
# norms, rotation and KV write, gates, routing, quantizing, embedding
PARTS = ("linear", "attention", "scan", "other")
_SCANS = ("delta_scan", "space_scan", "causal_conv", "keep_history")


def part_of(spec: str) -> str:
    """The part of a step that a kernel belongs to, by its spec such as "quantized_linear:Q4_0"."""
    name = spec.partition(":")[0]
    if name.endswith(("_linear", "_experts")):
        return "linear"
    if name in _SCANS:
        return "scan"
    return "attention" if name.startswith("attention_") else "other"


class StampedProgram:
    """A captured program with a clock reading wherever the part of the step changes.

    Attributes:
        num_stamps: readings a step.
    """

    def __init__(self, program: Program, threads: int, scratch_bytes: int) -> None:
        """Put readings between the program's commands, which stay as they are.

        Args:
            program: captured.
            threads: of a pool of its own.
            scratch_bytes: private memory of each thread.
        """
        commands = program.commands
        specs = {address: spec for spec, address in program.kernels.items()}
        stamp = program.kernels["stamp"]
        clock = libc_address("clock_gettime")
        parts = [part_of(specs[command.fn]) for command in commands]
        ends = [i for i, part in enumerate(parts) if i + 1 == len(parts) or parts[i + 1] != part]
        self.num_stamps = len(ends) + 1
        self._times: NDArray[np.int64] = (
            aligned(2 * self.num_stamps, np.int64).view(np.int64).reshape(-1, 2)
        )  # timespec
        self._parts = np.array([PARTS.index(parts[i]) for i in ends])
        one = program.cells.constant(1)
        places = iter(self._times)

        def reading() -> Command:
            return Command(stamp, one, True, [clock, next(places).ctypes.data])

        stamped = [reading()]
        after = True
        for index, command in enumerate(commands):
            # What follows a reading waits for it; the commands that it would have waited for are
            # done then.
            stamped.append(Command(command.fn, command.tiles, command.sync or after, command.args))
            after = index in ends
            if after:
                stamped.append(reading())
        self._pool = ThreadPool(program.kernels["run_program"], threads, scratch_bytes)
        self._pool.load(stamped)

    def run(self) -> Mapping[str, float]:
        """One step; seconds of each of `PARTS` that the program has.

        The step's inputs must be in place, as for the program itself.
        """
        self._pool.run()
        moments = self._times @ np.array([1_000_000_000, 1])
        spent = np.bincount(self._parts, np.diff(moments)) / 1e9
        return {PARTS[part]: float(spent[part]) for part in np.unique(self._parts)}

    def close(self) -> None:
        """Stop the threads."""
        self._pool.close()
