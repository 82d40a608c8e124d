"""`Emit`: writes vector instructions as LLVM IR.

Everything but the dot products is generic LLVM vectors, so it runs on any processor. Not for
kernels themselves: those are Python functions that call what `intrinsics.emitted` makes of an
emitting function.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from twinphase.backends.cpu.isa import Isa

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16 = ir.HalfType()
F32 = ir.FloatType()
F64 = ir.DoubleType()
Value = Any  # an llvmlite value; the library is untyped
# Minimax polynomials of 2^f on [-0.5, 0.5], highest power first; relative error below 3e-7 and
# 1.1e-4.
EXP2_DEGREE_5 = (1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
EXP2_DEGREE_3 = (5.5171669e-2, 2.4261112e-1, 6.9326099e-1, 9.9992807e-1)
LOG2_E = 1.4426950408889634


def vector(element: ir.Type, count: int) -> ir.VectorType:
    """The vector type <count x element>."""
    return ir.VectorType(element, count)


class Emit:
    """Writes LLVM IR at the builder's position. Addresses are int64 values; offsets are bytes."""

    def __init__(self, builder: ir.IRBuilder, isa: Isa) -> None:
        self.b = builder
        self.isa = isa

    # Scalars and constants
    def i64(self, value: int | Value) -> Value:
        """An int64 constant; an LLVM value passes through."""
        return ir.Constant(I64, value) if isinstance(value, int) else value

    def splat(self, ty: ir.VectorType, value: float) -> Value:
        """A constant vector of equal elements."""
        return ir.Constant(ty, [value] * ty.count)

    def same(self, ty: ir.Type, value: float) -> Value:
        """A constant: a scalar, or a vector of equal elements."""
        return self.splat(ty, value) if isinstance(ty, ir.VectorType) else ir.Constant(ty, value)

    def float_of(self, bits: Value) -> Value:
        """The float32 whose bits are the low 32 of an int64."""
        return self.b.bitcast(self.b.trunc(bits, I32), F32)

    def add(self, *terms: int | Value) -> Value:
        """Sum of int64 terms."""
        total = self.i64(terms[0])
        for term in terms[1:]:
            total = self.b.add(total, self.i64(term))
        return total

    def mul(self, left: int | Value, right: int | Value) -> Value:
        """Product of int64 terms."""
        return self.b.mul(self.i64(left), self.i64(right))

    def least(self, left: Value, right: Value) -> Value:
        """Smaller of two int64 values."""
        return self.b.select(self.b.icmp_signed("<", left, right), left, right)

    # Memory
    def pointer(self, address: Value, ty: ir.Type) -> Value:
        """An int64 address as a pointer."""
        return self.b.inttoptr(address, ty.as_pointer())

    def load(self, ty: ir.Type, address: Value, *offsets: int | Value, align: int = 1) -> Value:
        """Load `ty` at the address plus offsets."""
        return self.b.load(self.pointer(self.add(address, *offsets), ty), align=align, typ=ty)

    def store(self, value: Value, address: Value, *offsets: int | Value, align: int = 1) -> None:
        """Store at the address plus offsets."""
        self.b.store(value, self.pointer(self.add(address, *offsets), value.type), align=align)

    def prefetch(
        self, address: Value, *offsets: int | Value, level: int = 2, write: bool = False
    ) -> None:
        """Ask for a cache line to be brought into a level of the cache; any address will do."""
        pointer_type = ir.PointerType(I8)
        fn = self.function("llvm.prefetch.p0", ir.VoidType(), [pointer_type, I32, I32, I32])
        place = self.pointer(self.add(address, *offsets), I8)
        self.b.call(
            fn,
            [place, ir.Constant(I32, int(write)), ir.Constant(I32, 4 - level), ir.Constant(I32, 1)],
        )

    def variable(self, initial: Value) -> Variable:
        """A mutable value; LLVM keeps it in a register."""
        slot = cgutils.alloca_once(self.b, initial.type)
        self.b.store(initial, slot)
        return Variable(self.b, slot, initial.type)

    # Control
    @contextlib.contextmanager
    def loop(self, start: int | Value, stop: int | Value, step: int = 1) -> Iterator[Value]:
        """for index in range(start, stop, step); the body is the `with` block."""
        index = self.variable(self.i64(start))
        stop = self.i64(stop)
        head = self.b.append_basic_block("loop.head")
        body = self.b.append_basic_block("loop.body")
        done = self.b.append_basic_block("loop.done")
        self.b.branch(head)
        self.b.position_at_end(head)
        now = index.get()
        self.b.cbranch(self.b.icmp_signed("<", now, stop), body, done)
        self.b.position_at_end(body)
        yield now
        index.set(self.add(now, step))
        self.b.branch(head)
        self.b.position_at_end(done)

    # Vectors
    def function(self, name: str, result: ir.Type, arguments: Sequence[ir.Type]) -> Value:
        """An external function or LLVM intrinsic."""
        module = self.b.module
        return module.globals.get(name) or ir.Function(
            module, ir.FunctionType(result, arguments), name
        )

    def call(self, name: str, result: ir.Type, *args: Value) -> Value:
        """Call an LLVM intrinsic by its full name."""
        return self.b.call(self.function(name, result, [a.type for a in args]), list(args))

    def _suffix(self, ty: ir.Type) -> str:
        names = {F16: "f16", F32: "f32", I8: "i8", I16: "i16", I32: "i32", I64: "i64"}
        return f"v{ty.count}{names[ty.element]}" if isinstance(ty, ir.VectorType) else names[ty]

    def broadcast(self, scalar: Value, count: int) -> Value:
        """A scalar in every lane."""
        ty = vector(scalar.type, count)
        undefined = ir.Constant(ty, ir.Undefined)
        lane0 = self.b.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(lane0, undefined, self.splat(vector(I32, count), 0))

    def shuffle(self, left: Value, right: Value | None, lanes: Sequence[int]) -> Value:
        """Lanes picked from the concatenation of two vectors."""
        right = ir.Constant(left.type, ir.Undefined) if right is None else right
        return self.b.shuffle_vector(left, right, ir.Constant(vector(I32, len(lanes)), list(lanes)))

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        """x * y + z in one rounding (two where the processor has no such instruction)."""
        # Without hardware the fused form would be a library call for each lane.
        name = "llvm.fmuladd" if self.isa.name == "generic" else "llvm.fma"
        return self.call(f"{name}.{self._suffix(x.type)}", x.type, x, y, z)

    def unary(self, name: str, x: Value) -> Value:
        """llvm.NAME of a float vector: fabs, sqrt, rint, ..."""
        return self.call(f"llvm.{name}.{self._suffix(x.type)}", x.type, x)

    def maximum(self, x: Value, y: Value) -> Value:
        """Larger of two floats, lane by lane; no NaN handling."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def minimum(self, x: Value, y: Value) -> Value:
        """Smaller of two floats, lane by lane; y where x is not a number."""
        return self.b.select(self.b.fcmp_ordered("<", x, y), x, y)

    def reduce_max(self, x: Value) -> Value:
        """Largest lane of a float vector."""
        name = f"llvm.vector.reduce.fmax.{self._suffix(x.type)}"
        return self.b.call(self.function(name, x.type.element, [x.type]), [x], fastmath=("nnan",))

    def reduce_add(self, x: Value) -> Value:
        """Sum of the lanes by a fixed tree: halves are added until one lane is left."""
        count = x.type.count
        plus = self.b.add if isinstance(x.type.element, ir.IntType) else self.b.fadd
        while count > 1:
            count //= 2
            x = plus(
                self.shuffle(x, None, range(count)), self.shuffle(x, None, range(count, 2 * count))
            )
        return self.b.extract_element(x, ir.Constant(I32, 0))

    def widen(self, x: Value) -> Value:
        """float16 to float32; the generic path makes infinities and NaN finite."""
        single = F32 if x.type == F16 else vector(F32, x.type.count)
        if self.isa.converts_f16:
            return self.b.fpext(x, single)
        # Without the instruction LLVM would call a library function that is not there. Shifted into
        # place, the bits are the number times 2^-112, subnormals included.
        ints = I32 if x.type == F16 else vector(I32, x.type.count)
        halves = I16 if x.type == F16 else vector(I16, x.type.count)
        bits = self.b.zext(self.b.bitcast(x, halves), ints)
        magnitude = self.b.shl(self.b.and_(bits, self.same(ints, 0x7FFF)), self.same(ints, 13))
        scaled = self.b.fmul(self.b.bitcast(magnitude, single), self.same(single, 2.0**112))
        sign = self.b.shl(self.b.and_(bits, self.same(ints, 0x8000)), self.same(ints, 16))
        return self.b.bitcast(self.b.or_(self.b.bitcast(scaled, ints), sign), single)

    def narrow(self, x: Value) -> Value:
        """float32 to float16, to nearest even, a vector or a scalar."""
        half = F16 if x.type == F32 else vector(F16, x.type.count)
        if self.isa.converts_f16:
            return self.b.fptrunc(x, half)
        b = self.b
        single = x.type
        ints = I32 if x.type == F32 else vector(I32, x.type.count)
        halves = I16 if x.type == F32 else vector(I16, x.type.count)
        bits = b.bitcast(x, ints)
        sign = b.and_(b.lshr(bits, self.same(ints, 16)), self.same(ints, 0x8000))
        magnitude = b.and_(bits, self.same(ints, 0x7FFFFFFF))
        odd = b.and_(b.lshr(magnitude, self.same(ints, 13)), self.same(ints, 1))
        rebias = self.same(ints, (15 - 127 << 23) + 0xFFF)
        normal = b.lshr(b.add(magnitude, b.add(rebias, odd)), self.same(ints, 13))
        # Adding 0.5 aligns a subnormal result with the low bits, rounded by the addition.
        shifted = b.fadd(b.bitcast(magnitude, single), self.same(single, 0.5))
        subnormal = b.sub(b.bitcast(shifted, ints), self.same(ints, 0x3F000000))
        small = b.icmp_signed("<", magnitude, self.same(ints, 113 << 23))
        large = b.icmp_signed(">", magnitude, self.same(ints, 0x477FEFFF))
        result = b.select(large, self.same(ints, 0x7C00), b.select(small, subnormal, normal))
        return b.bitcast(b.trunc(b.or_(result, sign), halves), half)

    def exp2(self, x: Value, coefficients: Sequence[float] = EXP2_DEGREE_5) -> Value:
        """2^x of a float32 vector for x <= 126: Cody-Waite split, then a polynomial.

        Below -126 the result stays at 2^-126, which adds nothing to any sum of float32 numbers that
        contains a 1.
        """
        ty = x.type
        ints = vector(I32, ty.count)
        x = self.maximum(x, self.splat(ty, -126.0))
        # Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
        magic = self.splat(ty, 12582912.0)
        shifted = self.b.fadd(x, magic)
        f = self.b.fsub(x, self.b.fsub(shifted, magic))
        p = self.splat(ty, coefficients[0])
        for c in coefficients[1:]:
            p = self.fma(p, f, self.splat(ty, c))
        exponent = self.b.shl(self.b.bitcast(shifted, ints), self.splat(ints, 23))
        return self.b.bitcast(self.b.add(self.b.bitcast(p, ints), exponent), ty)

    def _over_one_plus_exp2(self, x: Value, exponent: Value) -> Value:
        """x / (1 + 2^exponent)."""
        # Above 2^88 the quotient is 0 either way; the clamp keeps exp2 in its range.
        return self.b.fdiv(
            x,
            self.b.fadd(
                self.exp2(self.minimum(exponent, self.splat(x.type, 88.0))), self.splat(x.type, 1.0)
            ),
        )

    def silu(self, x: Value, alpha: float = 1.0) -> Value:
        """x / (1 + e^(-alpha x)) of a float32 vector."""
        return self._over_one_plus_exp2(x, self.b.fmul(x, self.splat(x.type, -LOG2_E * alpha)))

    def sigmoid(self, x: Value) -> Value:
        """1 / (1 + e^-x) of a float32 vector."""
        exponent = self.b.fmul(x, self.splat(x.type, -LOG2_E))
        return self._over_one_plus_exp2(self.splat(x.type, 1.0), exponent)

    def softplus(self, x: Value) -> Value:
        """ln(1 + e^x) = max(x, 0) + 2 artanh(s), s = m / (2 + m), m = e^-|x|, of a vector.

        s is at most 1/3: eight terms of the series are exact to float32.
        """
        ty = x.type
        m = self.exp2(self.b.fmul(self.unary("fabs", x), self.splat(ty, -LOG2_E)))
        s = self.b.fdiv(m, self.b.fadd(m, self.splat(ty, 2.0)))
        square = self.b.fmul(s, s)
        series = self.splat(ty, 1 / 15)
        for odd in range(13, 0, -2):
            series = self.fma(series, square, self.splat(ty, 1 / odd))
        zero = self.splat(ty, 0.0)
        return self.fma(self.b.fadd(s, s), series, self.maximum(x, zero))

    def gelu(self, x: Value) -> Value:
        """x / 2 (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).

        That is GELU by tanh (Hendrycks and Gimpel, 2016, arXiv:1606.08415).
        """
        slope = -2 * LOG2_E * math.sqrt(2 / math.pi)
        square = self.b.fmul(x, x)
        factor = self.fma(square, self.splat(x.type, slope * 0.044715), self.splat(x.type, slope))
        return self._over_one_plus_exp2(x, self.b.fmul(x, factor))

    def softcap(self, x: Value, slope: Value, cap: Value) -> Value:
        """cap * tanh(x / c) by 1 - 2 / (1 + 2^(slope x)); `slope` is 2 log2(e) / c."""
        ty = x.type
        share = self._over_one_plus_exp2(self.splat(ty, 2.0), self.b.fmul(x, slope))
        return self.b.fmul(cap, self.b.fsub(self.splat(ty, 1.0), share))

    def lookup(self, codes: Value, table: Sequence[int]) -> Value:
        """table[code] of each byte below 16, a byte again; bytes in int32 lanes."""
        count = 4 * codes.type.count
        ty = vector(I8, count)
        numbers = self.b.bitcast(codes, ty)
        entries = [entry - 256 if entry > 127 else entry for entry in table]
        name = {8: "llvm.x86.avx2.pshuf.b", 16: "llvm.x86.avx512.pshuf.b.512"}.get(self.isa.lanes)
        if name is not None:
            found = self.call(name, ty, ir.Constant(ty, entries * (count // 16)), numbers)
        elif self.isa.dot == "sdot":
            found = self.call("llvm.aarch64.neon.tbl1.v16i8", ty, ir.Constant(ty, entries), numbers)
        else:
            found = self.select_by_code(numbers, entries)
        return self.b.bitcast(found, codes.type)

    def select_by_code(self, codes: Value, table: Sequence[int]) -> Value:
        """table[code] of a vector of bytes, without an instruction for it."""
        found = self.splat(codes.type, table[0])
        for code, entry in enumerate(table):
            here = self.b.icmp_signed("==", codes, self.splat(codes.type, code))
            found = self.b.select(here, self.splat(codes.type, entry), found)
        return found

    # Dot products: the only instructions that differ between paths
    def dot(self, total: Value, weights: Value, inputs: Value, *, signed: bool = False) -> Value:
        """total[i] += sum over 4 of weights[4i+j] * inputs[4i+j]; bytes in int32 lanes.

        `weights` are unsigned bytes and `inputs` signed, below 2^7 in magnitude. With `signed` the
        weights were stored as value + 128 and the product is that of the value: see
        `dot_is_signed`.
        """
        kind = self.isa.dot
        count = total.type.count
        bytes_type = vector(I8, 4 * count)
        w = self.b.bitcast(weights, bytes_type)
        a = self.b.bitcast(inputs, bytes_type)
        if kind == "vnni":
            return self.call(f"llvm.x86.avx512.vpdpbusd.{32 * count}", total.type, total, w, a)
        if kind == "maddubs":
            return self._dot_maddubs(total, w, a, signed)
        if kind == "sdot":
            w = self.b.xor(w, self.splat(bytes_type, -128)) if signed else w
            return self.call(
                f"llvm.aarch64.neon.sdot.v{count}i32.v{4 * count}i8", total.type, total, w, a
            )
        return self._dot_widen(total, weights, inputs)

    def dot_is_signed(self, bits: int) -> bool:
        """Whether byte-wide weights are multiplied as values (stored + 128 undone).

        maddubs saturates at 16 bits and sdot takes signed bytes, so both undo the offset; others
        leave it to the caller to subtract 128 times the sum of the inputs.
        """
        return bits == 8 and self.isa.dot in ("maddubs", "sdot")

    def _dot_maddubs(self, total: Value, w: Value, a: Value, signed: bool) -> Value:
        words = vector(I16, w.type.count // 2)
        if signed:
            # |w| * sign(w) a: the unsigned operand stays below 129, so that two products fit 16
            # bits.
            w = self.b.xor(w, self.splat(w.type, -128))
            a = self.call("llvm.x86.avx2.psign.b", a.type, a, w)
            minus = self.b.sub(self.splat(w.type, 0), w)
            w = self.b.select(self.b.icmp_signed(">", w, self.splat(w.type, 0)), w, minus)
        return self.add_pairs(total, self.call("llvm.x86.avx2.pmadd.ub.sw", words, w, a))

    def pairs(self, weights: Value, inputs: Value) -> Value:
        """weights[2i] * inputs[2i] + weights[2i+1] * inputs[2i+1] in int16 lanes (maddubs)."""
        bytes_type = vector(I8, 4 * weights.type.count)
        w = self.b.bitcast(weights, bytes_type)
        a = self.b.bitcast(inputs, bytes_type)
        return self.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, bytes_type.count // 2), w, a)

    def add_pairs(self, total: Value, pairs: Value) -> Value:
        """total[i] += pairs[2i] + pairs[2i+1]; int32 lanes."""
        ones = self.splat(pairs.type, 1)
        return self.b.add(total, self.call("llvm.x86.avx2.pmadd.wd", total.type, pairs, ones))

    def dot_words(self, left: Value, right: Value) -> Value:
        """left[2i] * right[2i] + left[2i+1] * right[2i+1]; pairs of int16 in int32 lanes (x86)."""
        words = vector(I16, 2 * left.type.count)
        name = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
        pairs = (self.b.bitcast(left, words), self.b.bitcast(right, words))
        return self.call(name[left.type.count], left.type, *pairs)

    def _dot_widen(self, total: Value, weights: Value, inputs: Value) -> Value:
        # Even and odd bytes as 16-bit lanes; a product of uint8 and int8 fits 16 bits.
        words = vector(I16, 2 * total.type.count)
        w = self.b.bitcast(weights, words)
        a = self.b.bitcast(inputs, words)
        eight = self.splat(words, 8)
        sixteen = self.splat(total.type, 16)
        even = self.b.mul(
            self.b.and_(w, self.splat(words, 255)), self.b.ashr(self.b.shl(a, eight), eight)
        )
        odd = self.b.mul(self.b.lshr(w, eight), self.b.ashr(a, eight))
        for product in (even, odd):
            pairs = self.b.bitcast(product, total.type)
            total = self.b.add(total, self.b.ashr(self.b.shl(pairs, sixteen), sixteen))
            total = self.b.add(total, self.b.ashr(pairs, sixteen))
        return total

    # Matrix tiles (AMX): eight registers that are called by number
    def matrix(self, operation: str, *tiles: int, at: tuple[Value, Value] | None = None) -> None:
        """An instruction on whole tiles; `at` is an address and the bytes between rows.

        "tdpbssd" of tiles c, a, b adds to c[m][n] the sum over k of a[m][k] * b[k / 4][4 n + k %
        4], of signed bytes; "tdpbsud" of unsigned ones in b; "tdpbf16ps" of bfloat16 pairs in
        float32: inputs 2 i apart from inputs 2 i + 1, then both to c.
        """
        args = [ir.Constant(I8, tile) for tile in tiles]
        args += [] if at is None else [self.pointer(at[0], I8), at[1]]
        self.call(f"llvm.x86.{operation}", ir.VoidType(), *args)

    def shape_tiles(self, shapes: Sequence[tuple[int, int]], scratch: Value) -> None:
        """Give tiles their (rows, bytes per row) by 64 bytes of `scratch`."""
        palette = [1, *[0] * 63]
        for tile, (rows, width) in enumerate(shapes):
            palette[16 + 2 * tile] = width
            palette[48 + tile] = rows
        self.store(ir.Constant(vector(I8, 64), palette), scratch)
        self.call("llvm.x86.ldtilecfg", ir.VoidType(), self.pointer(scratch, I8))

    def dot_bf16(self, total: Value, left: Value, right: Value) -> Value:
        """total[i] += left[2i] * right[2i] + left[2i+1] * right[2i+1]; bfloat16 pairs in int32."""
        count = total.type.count
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * count}"
        bf16 = vector(BFloat(), 2 * count)
        return self.call(
            name, total.type, total, self.b.bitcast(left, bf16), self.b.bitcast(right, bf16)
        )

    def to_bf16(self, low: Value, high: Value) -> Value:
        """Two float32 vectors rounded to a bfloat16 vector, as int32 lanes: low first."""
        count = low.type.count
        bf16 = vector(BFloat(), 2 * count)
        name = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * count}"
        return self.b.bitcast(self.call(name, bf16, high, low), vector(I32, count))


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)

    def _to_string(self) -> str:
        return "bfloat"


class Variable:
    """A mutable value during emission."""

    def __init__(self, builder: ir.IRBuilder, slot: Value, ty: ir.Type) -> None:
        self._b = builder
        self._slot = slot
        self._ty = ty

    def get(self) -> Value:
        """The value now."""
        return self._b.load(self._slot, typ=self._ty)

    def set(self, value: Value) -> None:
        """Change it."""
        self._b.store(value, self._slot)
