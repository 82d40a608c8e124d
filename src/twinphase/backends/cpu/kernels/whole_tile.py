"""Register tiles of K formats whose scales of 16 inputs are multiplied in whole numbers.

Within 256 inputs such a scale is a small integer times one float16. A group of 32 inputs is then
one whole number, the sum over its parts of scale * (codes . inputs): it leaves the integers once,
is multiplied by the scale of the row's group and added up; the float16 comes in once a superblock.
It is below 2^24 in magnitude and so exact in float32: every kernel of a path makes the same one,
however it gets there, and a row has the same bits in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinphase.backends.cpu.emit import F16, I32, Value, vector
from twinphase.backends.cpu.formats import GROUPS_PER_SUPERBLOCK, STRIP_OUTPUTS
from twinphase.backends.cpu.kernels.register_tile import Inputs, RegisterTile


class WholeTile(RegisterTile):
    """A register tile on packed weights."""

    # Whether a minus sign is left to the end of a superblock.
    negative = False

    def superblock(self, address: Value, i: Value) -> Value:
        """Address of superblock i."""
        fmt = self.fmt
        size = fmt.header_bytes + GROUPS_PER_SUPERBLOCK * fmt.record_bytes
        return self.e.add(address, self.e.mul(i, size))

    def record(self, superblock: Value, j: Value) -> Value:
        """Address of a superblock's group j."""
        fmt = self.fmt
        return self.e.add(superblock, fmt.header_bytes, self.e.mul(j, fmt.record_bytes))

    def factors(self, record: Value, kind: int, part: int) -> list[Value]:
        """Whole scales (kind 0) or minima (1) of a part of a group, int32 lanes."""
        at = self.fmt.code_bytes + kind * self.fmt.scale_bytes + part * STRIP_OUTPUTS
        signed = kind == 0 and self.fmt.signed_scales
        return [self.small(record, at, n, signed) for n in range(self.vectors)]

    def shared(self, superblock: Value, kind: int) -> list[Value]:
        """The float16 numbers by which scales or minima of a superblock are multiplied."""
        e = self.e
        halves = vector(F16, self.lanes)
        return [
            e.widen(e.load(halves, superblock, self.shared_at, 64 * kind + 2 * n * self.lanes))
            for n in range(self.vectors)
        ]

    def scaled(self, totals: list[list[Value]], sums: list[list[Value]], by: list[Value]) -> Any:
        """Totals plus sums of 16 products times whole numbers."""
        e = self.e
        # The scales' high words are 0; of the sums, which fit 16 bits, low words are enough.
        low = e.splat(self.ints, 0xFFFF)
        words = [e.b.and_(number, low) for number in by]
        products = [[e.dot_words(s, words[n]) for n, s in enumerate(row)] for row in sums]
        return [
            [e.b.add(total, product) for total, product in zip(*rows, strict=True)]
            for rows in zip(totals, products, strict=True)
        ]

    def numbers(self, record: Value, x: Inputs, g: Value) -> list[list[Value]]:
        """The whole numbers of group g."""
        totals = self.starts(x, g, 0)
        quads = self.fmt.group // 4
        for part in range(self.fmt.parts):
            sums = self.starts(x, g, self.fmt.offset, part)
            self.dots(record, x, g, sums, range(part * quads, (part + 1) * quads))
            totals = self.scaled(totals, sums, self.factors(record, 0, part))
        return totals

    def minima(self, record: Value, x: Inputs, g: Value) -> list[list[Value]]:
        """The whole numbers of group g's minima: those of its parts times the inputs' sums."""
        e = self.e
        by = [self.factors(record, 1, part) for part in range(self.fmt.parts)]
        found = []
        for m in range(self.rows):
            place = e.add(e.mul(e.mul(x.scale_stride, 2), m), e.mul(g, 8))
            sums = [
                e.broadcast(e.load(I32, x.isum, place, 4 * part), self.lanes)
                for part in range(self.fmt.parts)
            ]
            row = [
                e.b.add(e.dot_words(sums[0], by[0][n]), e.dot_words(sums[1], by[1][n]))
                for n in range(self.vectors)
            ]
            found.append(row)
        return found

    def zeros(self) -> list[list[Any]]:
        """Variables of float32 sums."""
        zero = self.e.splat(self.floats, 0.0)
        return [[self.e.variable(zero) for _ in range(self.vectors)] for _ in range(self.rows)]

    def add_whole(
        self, numbers: list[list[Value]], x: Inputs, g: Value, partial: list[list[Any]]
    ) -> None:
        """Add a group's whole numbers, times the scales of the rows' group."""
        e = self.e
        for m, row in enumerate(numbers):
            token_scale = self.token_scale(x, g, m)
            for n, number in enumerate(row):
                value = e.b.sitofp(number, self.floats)
                partial[m][n].set(e.fma(value, token_scale, partial[m][n].get()))

    def finish(
        self, partial: list[list[Any]], superblock: Value, kind: int, totals: list[list[Any]]
    ) -> None:
        """Add what a superblock's groups came to, times its float16 number."""
        e = self.e
        shared = self.shared(superblock, kind)
        for m, row in enumerate(partial):
            for n, part in enumerate(row):
                value = part.get()
                value = e.b.fneg(value) if self.negative and kind == 0 else value
                totals[m][n].set(e.fma(value, shared[n], totals[m][n].get()))

    def add_minima(
        self, superblock: Value, first: Value, x: Inputs, totals: list[list[Any]]
    ) -> None:
        """Add a superblock's minima; `first` is its first group."""
        e = self.e
        if self.fmt.minimum:
            partial = self.zeros()
            with e.loop(0, GROUPS_PER_SUPERBLOCK) as j:
                g = e.add(first, j)
                self.add_whole(self.minima(self.record(superblock, j), x, g), x, g, partial)
            self.finish(partial, superblock, 1, totals)

    def add_groups(
        self,
        address: Value,
        groups: Value,
        x: Inputs,
        totals: list[Any],
        fetch: Callable[[Value, Value], None],
    ) -> None:
        e = self.e
        with e.loop(0, e.b.sdiv(groups, e.i64(GROUPS_PER_SUPERBLOCK))) as i:
            superblock = self.superblock(address, i)
            first = e.mul(i, GROUPS_PER_SUPERBLOCK)
            partial = self.zeros()
            with e.loop(0, GROUPS_PER_SUPERBLOCK) as j:
                g = e.add(first, j)
                record = self.record(superblock, j)
                fetch(g, record)
                self.add_whole(self.numbers(record, x, g), x, g, partial)
            self.finish(partial, superblock, 0, totals)
            self.add_minima(superblock, first, x, totals)
