"""Packs a quantized matrix from a checkpoint's blocks into strips (`formats.py`), without changing a value.

Sixteen rows at a time: four bytes of each, turned, are the four inputs of sixteen outputs that a
packed line wants side by side. What a block holds is then said once for all rows, with a row in
each lane of a vector.

The block layouts are those of ggml (ggml-common.h, `dequantize_row_*`), which the gguf package
documents in `gguf.quants`; the tests compare with that package.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from llvmlite import ir

from twinphase.backends.cpu.emit import I8, I16, I32, Emit, Value, vector
from twinphase.backends.cpu.formats import FORMATS, STRIP, SUPER, PackedFormat
from twinphase.backends.cpu.intrinsics import KERNEL_SIGNATURE, emitted, fields
from twinphase.backends.cpu.isa import Isa

HALF = 0x8000  # sign bit of a float16
LANES = 16
WORDS = vector(I32, LANES)
BLOCK_BYTES = {
    "Q4_0": 18,
    "Q4_1": 20,
    "Q5_0": 22,
    "Q5_1": 24,
    "Q8_0": 34,
    "Q2_K": 84,
    "Q3_K": 110,
    "Q4_K": 144,
    "Q5_K": 176,
    "Q6_K": 210,
    "IQ4_NL": 18,
    "IQ4_XS": 136,
    "MXFP4": 17,
}


class _Blocks:
    """A block of each of 16 rows. Values are int32 lanes, one a row; `start` and `at` are bytes from the block's."""

    def __init__(self, e: Emit, rows: list[Value], offset: Value) -> None:
        self.e = e
        self.rows = rows
        self.offset = offset
        self._turned: dict[int, list[Value]] = {}

    def quad(self, start: int, number: int) -> Value:
        """Four bytes, those at `start` + 4 * `number`; 16 from a multiple of 16 behind `start` are read."""
        at = start + number // 4 * 16
        if at not in self._turned:
            self._turned[at] = self._turn(at)
        return self._turned[at][number % 4]

    def _turn(self, at: int) -> list[Value]:
        e = self.e
        loads = [e.load(vector(I32, 4), row, self.offset, at) for row in self.rows]
        # Rows 0, 4, 8 and 12 in one vector, 1, 5, 9 and 13 in the next, and so on: 4 x 4 words turn
        # within 128 bits.
        pairs = [e.shuffle(loads[i], loads[i + 4], range(8)) for i in (0, 1, 2, 3, 8, 9, 10, 11)]
        rows = [e.shuffle(pairs[i], pairs[i + 4], range(16)) for i in range(4)]
        low = [0, 16, 1, 17]
        high = [2, 18, 3, 19]
        first = [0, 1, 16, 17]
        second = [2, 3, 18, 19]

        def within(left: Value, right: Value, lanes: list[int]) -> Value:
            return e.shuffle(left, right, [4 * part + lane for part in range(4) for lane in lanes])

        halves = [
            (within(rows[0], rows[1], lanes), within(rows[2], rows[3], lanes))
            for lanes in (low, high)
        ]
        return [within(left, right, lanes) for left, right in halves for lanes in (first, second)]

    def byte(self, start: int, number: int) -> Value:
        """The byte at `start` + `number`, with what is above it."""
        return self.shifted(self.quad(start, number // 4), number % 4 * 8)

    def word(self, at: int, element: ir.Type) -> Value:
        """An unsigned number of that size."""
        values = ir.Constant(vector(element, LANES), ir.Undefined)
        for lane, row in enumerate(self.rows):
            loaded = self.e.load(element, row, self.offset, at)
            values = self.e.b.insert_element(values, loaded, ir.Constant(I32, lane))
        return values if element == I32 else self.e.b.zext(values, WORDS)

    def shifted(self, value: Value, bits: int, mask: int | None = None) -> Value:
        """value >> bits (<< -bits) & mask."""
        b = self.e.b
        by = self.e.splat(WORDS, abs(bits))
        value = value if bits == 0 else b.lshr(value, by) if bits > 0 else b.shl(value, by)
        return value if mask is None else b.and_(value, self.e.splat(WORDS, mask))

    def joined(self, *values: Value) -> Value:
        return reduce(self.e.b.or_, values)


# The codes of a block: the function (blocks, group, quad) -> bytes of 4 inputs.
_Code = Callable[[_Blocks, int, int], Value]
# the low 4 bits, 2 bits and bit of each byte
LOW = 0x0F0F0F0F
PAIR = 0x03030303
BIT = 0x01010101


def _nibbles(header: int) -> _Code:
    return lambda x, j, q: x.shifted(x.quad(header + 16 * j, q % 4), 4 * (q // 4), LOW)


def _q5(header: int) -> _Code:
    low = _nibbles(header + 4)

    def code(x: _Blocks, j: int, q: int) -> Value:
        # Bit i of 4 to bit 8 i: of the products at 7 i + bit no two meet, and only those wanted are
        # at a byte's start.
        bits = x.shifted(x.word(header, I32), 4 * q, 15)
        spread = x.shifted(x.e.b.mul(bits, x.e.splat(WORDS, 0x00204081)), 0, BIT)
        return x.joined(low(x, j, q), x.shifted(spread, -4))

    return code


def _q8(x: _Blocks, j: int, q: int) -> Value:
    return x.e.b.xor(x.quad(2, q), x.e.splat(WORDS, 0x80808080))


def _k_nibbles(start: int) -> _Code:
    return lambda x, j, q: x.shifted(x.quad(start + j // 2 * 32, q), 4 * (j % 2), LOW)


def _q5_k(x: _Blocks, j: int, q: int) -> Value:
    return x.joined(_k_nibbles(48)(x, j, q), x.shifted(x.shifted(x.quad(16, q), j, BIT), -4))


def _q6_k(x: _Blocks, j: int, q: int) -> Value:
    half = j // 4
    part = j % 4
    low = x.shifted(x.quad(half * 64 + part % 2 * 32, q), 4 * (part // 2), LOW)
    return x.joined(low, x.shifted(x.shifted(x.quad(128 + half * 32, q), 2 * part, PAIR), -4))


def _q2_k(x: _Blocks, j: int, q: int) -> Value:
    return x.shifted(x.quad(16 + j // 4 * 32, q), 2 * (j % 4), PAIR)


def _q3_k(x: _Blocks, j: int, q: int) -> Value:
    low = x.shifted(x.quad(32 + j // 4 * 32, q), 2 * (j % 4), PAIR)
    return x.joined(low, x.shifted(x.shifted(x.quad(0, q), j, BIT), -2))


CODES: dict[str, _Code] = {
    "Q4_0": _nibbles(2),
    "Q4_1": _nibbles(4),
    "Q5_0": _q5(2),
    "Q5_1": _q5(4),
    "Q8_0": _q8,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _k_nibbles(16),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _nibbles(2),
    "IQ4_XS": _nibbles(8),
    "MXFP4": _nibbles(1),
}

# A group's scales, a vector for each of its parts, and its minima.
_Scales = tuple[list[Value], list[Value]]


def _flat(x: _Blocks, j: int) -> _Scales:
    return [x.word(0, I16)], [x.word(2, I16)]


def _mxfp4(x: _Blocks, j: int) -> _Scales:
    return [x.word(0, I8)], []


def _k_scales(x: _Blocks, j: int) -> _Scales:
    """Six bits each, the last groups' in three places."""
    if j < 4:
        return [x.shifted(x.byte(0, 4 + j), 0, 63)], [x.shifted(x.byte(0, 8 + j), 0, 63)]
    both = x.byte(0, 8 + j)
    high = [x.shifted(x.shifted(x.byte(0, start + j), 6, 3), -4) for start in (0, 4)]
    return [x.joined(x.shifted(both, 0, 15), high[0])], [x.joined(x.shifted(both, 4, 15), high[1])]


def _q6_k_scales(x: _Blocks, j: int) -> _Scales:
    return [x.byte(192, 2 * j + part) for part in range(2)], []


def _q2_k_scales(x: _Blocks, j: int) -> _Scales:
    both = [x.byte(0, 2 * j + part) for part in range(2)]
    return [x.shifted(value, 0, 15) for value in both], [x.shifted(value, 4, 15) for value in both]


def _q3_k_scales(x: _Blocks, j: int) -> _Scales:
    def scale(i: int) -> Value:
        low = x.shifted(x.byte(92, 4 + i % 8), 4 * (i // 8), 15)
        high = x.byte(92, 12 + i % 4)
        return _less_32(x, x.joined(low, x.shifted(x.shifted(high, 2 * (i // 4), 3), -4)))

    return [scale(2 * j + part) for part in range(2)], []


def _iq4_xs_scales(x: _Blocks, j: int) -> _Scales:
    low = x.shifted(x.quad(0, 1), 4 * j, 15)
    high = x.shifted(x.quad(0, 0), 16 + 2 * j, 3)
    return [_less_32(x, x.joined(low, x.shifted(high, -4)))], []


def _less_32(x: _Blocks, value: Value) -> Value:
    return x.e.b.sub(value, x.e.splat(WORDS, 32))


SCALES: dict[str, Callable[[_Blocks, int], _Scales]] = {
    "MXFP4": _mxfp4,
    "Q4_K": _k_scales,
    "Q5_K": _k_scales,
    "Q6_K": _q6_k_scales,
    "Q2_K": _q2_k_scales,
    "Q3_K": _q3_k_scales,
    "IQ4_XS": _iq4_xs_scales,
}
SHARED = {
    "Q4_K": 0,
    "Q5_K": 0,
    "Q6_K": 208,
    "Q2_K": 80,
    "Q3_K": 108,
    "IQ4_XS": 0,
}  # where a block's float16 are


class _Strip:
    """The half of a strip that 16 rows fill; `keep` has no bits in lanes beyond the matrix, where zeros stay."""

    def __init__(self, e: Emit, fmt: PackedFormat, half: Value, keep: Value) -> None:
        self.e = e
        self.fmt = fmt
        self.half = half
        self.keep = keep

    def put(self, value: Value, element: ir.Type, at: Value, offset: int) -> None:
        """A number for each output, at the place of the strip's first half."""
        kept = self.e.b.and_(value, self.keep)
        kept = kept if element == I32 else self.e.b.trunc(kept, vector(element, LANES))
        self.e.store(kept, at, self.e.mul(self.half, LANES * element.width // 8), offset)

    def put_group(self, x: _Blocks, j: int, record: Value) -> None:
        """Group j of the blocks."""
        fmt = self.fmt
        codes = [CODES[fmt.name](x, j, quad) for quad in range(8)]
        lines = codes
        if fmt.bits != 8:
            low = [x.shifted(code, 0, LOW) for code in codes]
            lines = [x.joined(low[i], x.shifted(low[i + 1], -4)) for i in range(0, 8, 2)]
        for i in range(fmt.plane_lines):
            per_line = 8 // fmt.plane_lines
            bits = fmt.bits - 4
            high = [
                x.shifted(code, 4, BIT if bits == 1 else PAIR)
                for code in codes[i * per_line :][:per_line]
            ]
            lines.append(
                x.joined(*(x.shifted(value, -bits * place) for place, value in enumerate(high)))
            )
        for i, line in enumerate(lines):
            self.put(line, I32, record, 128 * i)
        scales, minima = SCALES.get(fmt.name, _flat)(x, j)
        element = I8 if fmt.scale_size == 1 else I16
        at = fmt.code_bytes
        for value in scales + (minima if fmt.minimum else []):
            self.put(value, element, record, at)
            at += STRIP * fmt.scale_size

    def put_shared(self, x: _Blocks, header: Value) -> None:
        """The numbers that all groups of a block share."""
        at = SHARED[self.fmt.name]
        if not self.fmt.minimum:
            self.put(x.word(at, I16), I16, header, 0)
            return
        both = x.word(at, I32)
        self.put(both, I16, header, 0)
        # Minima are subtracted there, added here.
        self.put(
            self.e.b.xor(x.shifted(both, 16), self.e.splat(WORDS, HALF)), I16, header, 2 * STRIP
        )


def pack(isa: Isa, format_name: str) -> tuple[Any, Callable[[int, int, int], None]]:
    """One strip a tile. Arguments: source, bytes of a source row, outputs, groups, destination.

    Outputs beyond the matrix (the last strip's padding) become zeros.
    """
    fmt = FORMATS[format_name]
    per_block = SUPER if fmt.nested else 1
    to_bytes = fmt.header_bytes + per_block * fmt.record_bytes

    def half_strip(
        e: Emit, source: Value, row_bytes: Value, rows: Value, blocks: Value, to: Value, half: Value
    ) -> None:
        lanes = ir.Constant(WORDS, list(range(LANES)))
        inside = e.b.icmp_signed("<", lanes, e.broadcast(e.b.trunc(rows, I32), LANES))
        strip = _Strip(e, fmt, half, e.b.sext(inside, WORDS))
        last = e.add(rows, -1)
        addresses = [
            e.add(source, e.mul(e.least(e.i64(lane), last), row_bytes)) for lane in range(LANES)
        ]
        with e.loop(0, blocks) as i:
            x = _Blocks(e, addresses, e.mul(i, BLOCK_BYTES[format_name]))
            header = e.add(to, e.mul(i, to_bytes))
            if fmt.nested:
                strip.put_shared(x, header)
            for j in range(per_block):
                strip.put_group(x, j, e.add(header, fmt.header_bytes + j * fmt.record_bytes))

    pack_half = emitted(isa, 6, half_strip)
    arguments = fields(5)

    def kernel(args: int, tile: int, scratch: int) -> None:
        source, row_bytes, outputs, groups, destination = arguments(args)
        blocks = groups // per_block
        for half in range(2):
            first = STRIP * tile + LANES * half
            if first < outputs:
                pack_half(
                    source + first * row_bytes,
                    row_bytes,
                    min(LANES, outputs - first),
                    blocks,
                    destination + tile * blocks * to_bytes,
                    half,
                )

    return KERNEL_SIGNATURE, kernel
