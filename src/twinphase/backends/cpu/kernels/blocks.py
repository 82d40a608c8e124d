"""Reads a checkpoint's quantized blocks by `weights/block_formats.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce

from llvmlite import ir

from twinphase.backends.cpu.emit import I8, I16, I32, Emit, Value, vector
from twinphase.backends.cpu.formats import GROUP_INPUTS
from twinphase.weights.block_formats import BlockFormat, Numbers, Plane

PACKED_ROWS = 16
WINDOW_BYTES = 16
EACH_BYTE = 0x01010101
SIGN_BITS = 0x80 * EACH_BYTE


def turned(e: Emit, rows: list[Value]) -> list[Value]:
    """Columns of 16 rows of four words: four vectors of a word of each row."""
    # Rows 0, 4, 8 and 12 in one vector, 1, 5, 9 and 13 in the next, and so on: 4 x 4 words turn
    # within 128 bits.
    pairs = [e.shuffle(rows[i], rows[i + 4], range(8)) for i in (0, 1, 2, 3, 8, 9, 10, 11)]
    return turned_within(e, [e.shuffle(pairs[i], pairs[i + 4], range(16)) for i in range(4)])


def turned_within(e: Emit, rows: list[Value]) -> list[Value]:
    """Turn 4 x 4 words within each 128 bits of four vectors."""
    low = [0, 16, 1, 17]
    high = [2, 18, 3, 19]
    first = [0, 1, 16, 17]
    second = [2, 3, 18, 19]

    def within(left: Value, right: Value, lanes: list[int]) -> Value:
        return e.shuffle(left, right, [4 * part + lane for part in range(4) for lane in lanes])

    halves = [
        (within(rows[0], rows[1], lanes), within(rows[2], rows[3], lanes)) for lanes in (low, high)
    ]
    return [within(left, right, lanes) for left, right in halves for lanes in (first, second)]


class Blocks:
    """The same block of several rows, by `weights/block_formats.py`.

    Numbers are int32 lanes, one per row, or an int32 where there is one row only. Bytes are counted
    from the block's first one.
    """

    def __init__(self, e: Emit, fmt: BlockFormat, rows: list[Value], offset: Value) -> None:
        self.e = e
        self.fmt = fmt
        self.rows = rows
        self.offset = offset
        self.words = I32 if len(rows) == 1 else vector(I32, len(rows))
        self._turned: dict[int, list[Value]] = {}

    def codes(self, first: int) -> Value:
        """The codes of the inputs `first` to `first` + 3, a byte each; signed ones plus 128."""
        code = self._joined_planes(self.fmt.codes, lambda plane: self._plane_of_codes(plane, first))
        signed = self.fmt.code_bits == 8
        return self.e.b.xor(code, self.e.same(self.words, SIGN_BITS)) if signed else code

    def _plane_of_codes(self, plane: Plane, first: int) -> Value:
        byte, shift = plane.place(first)
        if plane.run > 1:
            quad = self._quad(plane.start, (byte - plane.start) // 4)
            return self._shifted(quad, shift, EACH_BYTE * ((1 << plane.bits) - 1))
        # Bit i moves to bit 8 i: of the products at 7 i + bit no two meet, and only those wanted
        # are at a byte's start.
        spread = self.e.b.mul(self._bits(byte, shift, 4), self.e.same(self.words, 0x00204081))
        return self._shifted(spread, 0, EACH_BYTE)

    def _joined_planes(self, planes: Iterable[Plane], bits_of: Callable[[Plane], Value]) -> Value:
        """Numbers from the bits that each plane has of them, the lowest first."""
        parts = []
        position = 0
        for plane in planes:
            parts.append(self._shifted(bits_of(plane), -position))
            position += plane.bits
        return reduce(self.e.b.or_, parts)

    def parameters(self, group: int) -> list[Value]:
        """Scales, then minima, of 32 inputs: small integers, float16 bits or an exponent."""
        fmt = self.fmt
        if fmt.power_scales:
            return [self.word(0, I8)]
        if not fmt.scales:
            return [self.word(at, I16) for at in fmt.halves]
        count = GROUP_INPUTS // fmt.group_size
        numbers = range(group * count, (group + 1) * count)
        less = self.e.same(self.words, fmt.scale_offset)
        scales = [self.e.b.sub(self._number(fmt.scales, i), less) for i in numbers]
        return scales + [self._number(fmt.minima, i) for i in numbers if fmt.minima]

    def joined(self, codes: list[Value], first_bit: int, bits: int) -> Value:
        """Some bits of each byte of several codes, side by side in one byte."""
        mask = EACH_BYTE * ((1 << bits) - 1)
        parts = [self._shifted(code, first_bit, mask) for code in codes]
        return reduce(self.e.b.or_, [self._shifted(v, -bits * i) for i, v in enumerate(parts)])

    def _number(self, parts: Numbers, index: int) -> Value:
        """A small integer of a group; those of 8 bits are signed."""
        count = self.fmt.block_size // self.fmt.group_size // len(parts)
        planes = parts[index // count]
        value = self._joined_planes(
            planes, lambda plane: self._bits(*plane.place(index % count), plane.bits)
        )
        if planes[0].bits < 8:
            return value
        by = self.e.same(self.words, 24)
        return self.e.b.ashr(self.e.b.shl(value, by), by)

    def _bits(self, byte: int, shift: int, count: int) -> Value:
        """Some bits of a byte."""
        start = min(byte // WINDOW_BYTES * WINDOW_BYTES, self.fmt.block_bytes - WINDOW_BYTES)
        quad, within = divmod(byte - start, 4)
        return self._shifted(self._quad(start, quad), 8 * within + shift, (1 << count) - 1)

    def _quad(self, start: int, number: int) -> Value:
        """Four bytes, those at `start` + 4 * `number`; more rows load a window of 16 at once."""
        if len(self.rows) == 1:
            return self.word(start + 4 * number, I32)
        at = start + number // 4 * WINDOW_BYTES
        if at not in self._turned:
            self._turned[at] = self._turn(at)
        return self._turned[at][number % 4]

    def _turn(self, at: int) -> list[Value]:
        return turned(
            self.e, [self.e.load(vector(I32, 4), row, self.offset, at) for row in self.rows]
        )

    def word(self, at: int, element: ir.Type) -> Value:
        """An unsigned number of that size."""
        loaded = [self.e.load(element, row, self.offset, at) for row in self.rows]
        value = loaded[0]
        if len(loaded) > 1:
            value = ir.Constant(vector(element, PACKED_ROWS), ir.Undefined)
            for lane, number in enumerate(loaded):
                value = self.e.b.insert_element(value, number, ir.Constant(I32, lane))
        return value if element == I32 else self.e.b.zext(value, self.words)

    def _shifted(self, value: Value, bits: int, mask: int | None = None) -> Value:
        """value >> bits (<< -bits) & mask."""
        b = self.e.b
        by = self.e.same(self.words, abs(bits))
        value = value if bits == 0 else b.lshr(value, by) if bits > 0 else b.shl(value, by)
        return value if mask is None else b.and_(value, self.e.same(self.words, mask))
