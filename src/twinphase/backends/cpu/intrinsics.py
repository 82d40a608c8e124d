"""Makes emitted vector code and scalar memory access callable from Numba kernels.

Kernels are Python functions compiled by Numba; where a loop must use particular vector
instructions, it is written as a Python function that emits LLVM IR through `Emit` and appears to
the kernel as an ordinary call on integers and addresses (int64).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from twinphase.backends.cpu.emit import F32, F64, I32, I64, Emit, Value
from twinphase.backends.cpu.isa import Isa
from twinphase.backends.cpu.tiling import ELEMENTWISE_TILE_ROWS

Kernel = tuple[Any, Callable[[int, int, int], None]]

# A kernel: (address of its int64 arguments, tile number, address of the thread's scratch memory).
KERNEL_SIGNATURE = types.void(types.int64, types.int64, types.int64)


def helper(function: Callable[..., Any]) -> Any:
    """Compile a function for kernels that call it, without the wrappers for Python and C."""
    return njit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def emitted(isa: Isa, write: Callable[..., Value | None], starred: int = 0) -> Any:
    """A Numba-callable function of int64s whose body `write(emit, *arguments)` emits.

    Returns int64 when `write` returns a value, else nothing. `starred` is how many arguments its
    last, starred parameter takes.
    """
    return _intrinsic(
        [types.int64] * (_arguments_of(write) + starred),
        lambda b, *values: write(Emit(b, isa), *values),
    )


def built(write: Callable[..., Value | None]) -> Any:
    """The same on every path: the body is what `write(builder, *arguments)` builds."""
    return _intrinsic([types.int64] * _arguments_of(write), write)


def _arguments_of(write: Callable[..., Value | None]) -> int:
    """How many values it takes after the builder, without those of a starred parameter."""
    parameters = signature(write).parameters.values()
    return sum(one.kind is not Parameter.VAR_POSITIONAL for one in parameters) - 1


def _intrinsic(
    arguments: Sequence[Any], write: Callable[..., Value | None], result: Any = types.int64
) -> Any:
    """An @intrinsic of these types."""

    def codegen(
        context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[Value]
    ) -> Value:
        value = write(builder, *args)
        return ir.Constant(I64, 0) if value is None else value

    names = ", ".join(f"a{i}" for i in range(len(arguments)))
    scope: dict[str, Any] = {"typed": (result(*arguments), codegen)}
    # Numba looks at the parameter list, so the function must have exactly these arguments.
    exec(f"def typing(ctx, {names}):\n    return typed\n", scope)
    return intrinsic(scope["typing"])


def _load(b: ir.IRBuilder, address: Value, element: ir.Type) -> Value:
    """Unsigned 32 bits widen to int64, so that kernels compute in one integer type."""
    value = b.load(b.inttoptr(address, element.as_pointer()), align=1, typ=element)
    return b.zext(value, I64) if element == I32 else value


def fields(count: int, element: ir.Type = I64) -> Any:
    """Numba-callable (address): the `count` integers there, as a tuple of int64."""

    def read(b: ir.IRBuilder, address: Value) -> Value:
        offsets = [ir.Constant(I64, element.width // 8 * i) for i in range(count)]
        values = [_load(b, b.add(address, offset), element) for offset in offsets]
        return cgutils.pack_array(b, values, I64)

    return _intrinsic([types.int64], read, types.UniTuple(types.int64, count))


def _loader(element: ir.Type, result: Any = types.int64) -> Any:
    return _intrinsic([types.int64], lambda b, address: _load(b, address, element), result)


def _storer(element: ir.Type, argument: Any = types.int64) -> Any:
    def store(b: ir.IRBuilder, address: Value, value: Value) -> None:
        if element == I32:
            value = b.trunc(value, element)
        b.store(value, b.inttoptr(address, element.as_pointer()), align=1)

    return _intrinsic([types.int64, argument], store)


# Numba-callable (address).
load_u32 = _loader(I32)
load_i64 = _loader(I64)
load_f32 = _loader(F32, types.float32)
load_f64 = _loader(F64, types.float64)

# Numba-callable (address, value): integers lose their high bits.
store_i32 = _storer(I32)
store_i64 = _storer(I64)
store_f32 = _storer(F32, types.float32)
store_f64 = _storer(F64, types.float64)


@built
def call_kernel(b: ir.IRBuilder, function, arguments, tile, scratch):
    """Call a kernel by address, in Numba's calling convention (two result pointers first)."""
    pointer = ir.IntType(8).as_pointer()
    fn_type = ir.FunctionType(I32, [pointer, pointer, I64, I64, I64])
    place = b.bitcast(cgutils.alloca_once(b, ir.ArrayType(I64, 8)), pointer)
    fn = b.inttoptr(function, fn_type.as_pointer())
    b.call(fn, [place, place, arguments, tile, scratch])


def tile_kernel(isa: Isa, write: Callable[..., None], starred: int = 0) -> Kernel:
    """A kernel; `write(emit, tile, *arguments)` emits a tile."""
    tile_of = emitted(isa, write, starred)
    arguments = fields(_arguments_of(write) - 1 + starred)

    def kernel(args: int, tile: int, scratch: int) -> None:
        tile_of(tile, *arguments(args))

    return KERNEL_SIGNATURE, kernel


def block_kernel(isa: Isa, write: Callable[..., None]) -> Kernel:
    """A kernel of 16 rows per tile; `write(emit, tile, scratch, *arguments)` emits a tile."""
    block_of = emitted(isa, write)
    arguments = fields(_arguments_of(write) - 2)

    def kernel(args: int, tile: int, scratch: int) -> None:
        block_of(tile, scratch, *arguments(args))

    return KERNEL_SIGNATURE, kernel


def row_kernel(isa: Isa, write: Callable[..., None]) -> Kernel:
    """A kernel of some rows per tile; `write(emit, row, *arguments)` emits a row.

    In front of the arguments lies the address of the row count.
    """
    row_of = emitted(isa, write)
    arguments = fields(_arguments_of(write) - 1)

    def kernel(args: int, tile: int, scratch: int) -> None:
        operands = arguments(args + 8)
        first = tile * ELEMENTWISE_TILE_ROWS
        for m in range(first, min(load_i64(load_i64(args)), first + ELEMENTWISE_TILE_ROWS)):
            row_of(m, *operands)

    return KERNEL_SIGNATURE, kernel
