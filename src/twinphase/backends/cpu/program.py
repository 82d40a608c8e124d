"""Captures a model's operations as a program: commands on fixed memory, replayed every step.

The model's forward pass runs once, on `Buffer` handles; what changes from step to step (row counts,
positions, block tables) is read by the kernels from memory. It is the idea of CUDA graphs, with row
counts that may vary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from twinphase.backends.cpu.formats import GROUP_INPUTS
from twinphase.backends.cpu.memory import aligned
from twinphase.backends.cpu.threads import Command, libc_address
from twinphase.backends.cpu.tiling import ELEMENTWISE_TILE_ROWS, MATRIX_TILE_ROWS
from twinphase.backends.cpu.weights import padded
from twinphase.backends.group import Group
from twinphase.blueprint import Span

# Kinds of rows (`Buffer`).
ALL_KINDS = ("f32", "q8", "bf16")
Key = tuple[str, int, bool, bool]  # of arrays: rows, width, whether quantized, whether shared


class StepCells:
    """int64 numbers that kernels read by address, computed for every step."""

    MOST = 256

    def __init__(self) -> None:
        self._values = aligned(self.MOST, np.int64)
        self._formulas: list[Callable[[dict[str, int]], int]] = []
        self._known: dict[object, int] = {}

    def address(self, key: object, formula: Callable[[dict[str, int]], int]) -> int:
        """Address of the number that `formula` gives for a step's counts; one for each key."""
        if key not in self._known:
            index = len(self._formulas)
            if index >= self.MOST:
                raise RuntimeError("too many step cells")
            self._formulas.append(formula)
            self._known[key] = self._values.ctypes.data + 8 * index
        return self._known[key]

    def constant(self, value: int) -> int:
        """Address of a number that never changes."""
        return self.address(("constant", value), lambda counts: value)

    def update(self, counts: dict[str, int]) -> None:
        """Compute all numbers for a step."""
        for index, formula in enumerate(self._formulas):
            self._values[index] = formula(counts)

    def only(self, address: int, tiles: int) -> None:
        """Let the next step run only the commands whose number of tiles is at the address."""
        self._values[:] = 0
        self._values[(address - self._values.ctypes.data) // 8] = tiles


def rows_in(counts: dict[str, int], rows: str) -> int:
    """How many rows there are of a kind such as "tokens" or "tokens*8"."""
    name, _, times = rows.partition("*")
    return counts[name] * int(times or 1)


class Buffer:
    """Rows that a program writes, or a promise of them (`make`): the reader chooses their kind.

    A promise is kept when an operation reads it: RMSNorm and SwiGLU write what the linear layer
    after them multiplies. Kinds are "f32"; "q8", int8 groups; and "bf16", bfloat16 in the order of
    matrix tiles, two numbers in a float32's place.

    Attributes:
        rows: which rows: "tokens" (all of the step) or "logits" (those whose logits are wanted);
            "tokens*8" is eight for each.
        width: columns, padding included.
        columns: first column of each of the tensors that were stacked.
        outputs: columns of the first of them, without padding.
    """

    def __init__(
        self,
        program: Program,
        rows: str,
        width: int,
        *,
        columns: tuple[int, ...] = (0,),
        outputs: int | None = None,
        make: Callable[[str], Memory] | None = None,
        kinds: tuple[str, ...] = ("f32", "q8"),
    ) -> None:
        """`make` writes the rows in one of `kinds`; others are converted from "f32"."""
        self.program = program
        self.rows = rows
        self.width = width
        self.columns = columns
        self._make = make
        self.outputs = width if outputs is None else outputs
        self._kinds = kinds
        self._made: dict[str, Memory] = {}
        if make is None:
            self._made["f32"] = Memory(program, rows, width, quantized=False)

    def memory(self, kind: str) -> Memory:
        """The rows in a kind."""
        if kind not in self._made:
            if self._make and kind in self._kinds:
                self._made[kind] = self._make(kind)
            else:
                convert = self.program.quantize if kind == "q8" else self.program.round
                self._made[kind] = convert(self.floats)
        return self._made[kind]

    @property
    def floats(self) -> Memory:
        """The rows as float32."""
        return self.memory("f32")

    @property
    def array(self) -> NDArray[np.float32]:
        """The memory of `floats`, [most rows, width]."""
        return self.floats.arrays[0].view(np.float32).reshape(-1, self.width)


class Memory:
    """Arrays of a buffer; they return to the program when the last handle is dropped."""

    def __init__(
        self, program: Program, rows: str, width: int, quantized: bool, shared: bool = False
    ) -> None:
        """`shared` rows lie where all ranks see them."""
        self.rows = rows
        self.width = width
        self.quantized = quantized
        self.groups = width // 32
        self._program = program
        self._key = (rows, width, quantized, shared)
        self.arrays = program.take(*self._key)

    @property
    def addresses(self) -> list[int]:
        """[data, 0, 0, 0], or [int8 data, scale, scale * sum, sums of 16]."""
        found = [array.ctypes.data for array in self.arrays]
        return found + [0] * (4 - len(found))

    @property
    def data(self) -> int:
        """Address of the values."""
        return self.addresses[0]

    @property
    def stride(self) -> int:
        """Bytes between rows of the values."""
        return self.width * self.arrays[0].itemsize

    def __del__(self) -> None:
        self._program.give(self._key, self.arrays)


class Program:
    """Commands in order, and the memory they work on."""

    def __init__(
        self, kernels: Mapping[str, int], max_rows: dict[str, int], group: Group | None = None
    ) -> None:
        """`kernels` are addresses by spec, `max_rows` the most rows of "tokens" and "logits"."""
        self.kernels = kernels
        self.max_rows = max_rows
        self.group = group
        self.cells = StepCells()
        self.commands: list[Command] = []
        self._free: dict[Key, list[list[NDArray[np.generic]]]] = {}
        self._read_since: list[
            tuple[Key, list[NDArray[np.generic]]]
        ] = []  # shared arrays, free after the next meeting
        self._all: list[list[NDArray[np.generic]]] = []
        self._reads: set[int] = set()
        self._writes: set[tuple[int, int]] = set()

    def take(
        self, rows: str, width: int, quantized: bool, shared: bool
    ) -> list[NDArray[np.generic]]:
        """Arrays for `rows` rows; padding columns are zeros that nothing writes."""
        free = self._free.get((rows, width, quantized, shared))
        if free:
            return free.pop()
        count = padded(rows_in(self.max_rows, rows), 2 * MATRIX_TILE_ROWS) + 8
        new = self._new_shared if shared else aligned
        if quantized:
            groups = width // 32
            arrays = [
                new(count * width, np.int8),
                new(count * groups, np.float32),
                new(count * groups, np.float32),
                new(count * groups * 2, np.int32),
            ]
        else:
            arrays = [new(count * width, np.float32)]
        self._all.append(arrays)  # the compiled program holds addresses only
        return arrays

    def _new_shared(self, count: int, dtype: type[np.generic]) -> NDArray[np.generic]:
        assert self.group is not None
        return self.group.take(count * np.dtype(dtype).itemsize).view(dtype)

    def give(self, key: Key, arrays: list[NDArray[np.generic]]) -> None:
        """Take arrays back for later commands."""
        if key[-1]:
            self._read_since.append((key, arrays))
        else:
            self._free.setdefault(key, []).append(arrays)

    def met(self) -> None:
        """All ranks have met: what was given back before is read by none of them any more."""
        for key, arrays in self._read_since:
            self._free.setdefault(key, []).append(arrays)
        self._read_since = []

    def count(self, rows: str) -> int:
        """Address of the number of rows in a step."""
        return self.cells.address(rows, lambda counts: rows_in(counts, rows))

    def tiles(self, rows: str, per_tile: int, times: int = 1) -> int:
        """Address of the number of tiles: `times` for every `per_tile` rows."""
        return self.cells.address(
            (rows, per_tile, times), lambda counts: -(-rows_in(counts, rows) // per_tile) * times
        )

    def add(
        self,
        spec: str,
        tiles: int,
        args: Sequence[int],
        reads: Sequence[int],
        writes: Sequence[tuple[int, int]],
    ) -> None:
        """Append a command.

        Args:
            spec: the kernel.
            tiles: address of its tile count.
            args: its arguments.
            reads: addresses of the memory it reads that some command writes.
            writes: (address, part) it writes; commands that write different parts of one memory may
                overlap.
        """
        written = {address for address, _ in writes}
        busy = {address for address, _ in self._writes}
        sync = (
            bool(busy & set(reads))
            or bool(self._reads & written)
            or bool(self._writes & set(writes))
        )
        if sync:
            self._reads = set()
            self._writes = set()
        self._reads |= set(reads)
        self._writes |= set(writes)
        self.commands.append(Command(self.kernels[spec], tiles, sync, list(args)))

    def add_rows(self, spec: str, args: Sequence[int], reads: Sequence[int], out: Memory) -> None:
        """Append a command of `intrinsics.row_kernel` that writes `out`, all of its rows."""
        tiles = self.tiles(out.rows, ELEMENTWISE_TILE_ROWS)
        self.add(spec, tiles, [self.count(out.rows), *args], reads, [(out.data, 0)])

    def quantize(self, source: Memory) -> Memory:
        """The rows of `source` as int8 groups."""
        out = Memory(self, source.rows, source.width, quantized=True)
        args = [source.data, source.stride, source.groups, *out.addresses]
        self.add_rows("quantize", args, [source.data], out)
        return out

    def memory_for(self, kind: str, rows: str, width: int) -> Memory:
        """Memory for rows of a kind (`Buffer`)."""
        return Memory(self, rows, width // 2 if kind == "bf16" else width, kind == "q8")

    def round(self, source: Memory) -> Memory:
        """The rows of `source` as bfloat16, in the order of matrix tiles."""
        out = self.memory_for("bf16", source.rows, source.width)
        args = [self.count(out.rows), source.data, source.stride, source.groups, out.data]
        tiles = self.tiles(out.rows, MATRIX_TILE_ROWS)
        self.add("round_rows", tiles, args, [source.data], [(out.data, 0)])
        return out


def gather_columns(
    program: Program, x: Buffer, span: Span, quantized: bool, column: int = 0
) -> Memory:
    """All ranks' columns; this rank's begin at `column` of x (0 where they are quantized)."""
    group = program.group
    assert group is not None
    source = x.memory("q8" if quantized else "f32")
    whole = Memory(program, x.rows, padded(span.total), quantized, shared=True)
    per_number = GROUP_INPUTS if quantized else 1  # columns that share a number of an array
    units = (GROUP_INPUTS, 4, 4, 8) if quantized else (4,)  # bytes of a group, or of a column
    for part, (here, there, size) in enumerate(span.pieces):
        args: list[int] = [program.count(x.rows)]
        for unit, mine, all_ranks in zip(units, source.arrays, whole.arrays, strict=True):
            start = unit * column + unit * (here // per_number)
            args += [mine.ctypes.data + start, unit * (source.width // per_number)]
            args += [all_ranks.ctypes.data + unit * (there // per_number)]
            args += [unit * (whole.width // per_number), unit * -(-size // per_number)]
        tiles = program.tiles(x.rows, ELEMENTWISE_TILE_ROWS)
        program.add("copy_columns", tiles, args, [source.data], [(whole.data, part)])
    args = [group.address, group.rank, group.ranks]
    args += [libc_address("usleep"), libc_address("clock_gettime")]
    program.add("meet", program.cells.constant(1), args, [whole.data], [(whole.data, 0)])
    program.met()
    return whole
