"""Makes emitted vector code and scalar memory access callable from Numba kernels.

Kernels are Python functions compiled by Numba; where a loop must use particular vector
instructions, it is written as a Python function that emits LLVM IR through `Emit` and appears to
the kernel as an ordinary call on integers and addresses (int64).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from twinphase.backends.cpu.emit import F32, I8, I16, I32, I64, Emit, Value
from twinphase.backends.cpu.isa import Isa

# A kernel: (address of its int64 arguments, tile number, address of the thread's scratch memory).
KERNEL_SIGNATURE = types.void(types.int64, types.int64, types.int64)


def emitted(isa: Isa, arguments: int, write: Callable[..., Value | None]) -> Any:
    """A Numba-callable function of `arguments` int64s whose body `write(emit, *args)` emits.

    Returns int64 when `write` returns a value, else nothing.
    """
    return _intrinsic(arguments, lambda: _typing(isa, arguments, write))


def _intrinsic(arguments: int, typing: Callable[[], tuple[Any, Any]]) -> Any:
    """An @intrinsic of `arguments` arguments of any type."""
    names = ", ".join(f"a{i}" for i in range(arguments))
    scope: dict[str, Any] = {}
    # Numba looks at the parameter list, so the function must have exactly these arguments.
    exec(f"def typing(ctx, {names}):\n    return make()\n", {"make": typing}, scope)
    return intrinsic(scope["typing"])


def _typing(isa: Isa, arguments: int, write: Callable[..., Value | None]) -> tuple[Any, Any]:
    def codegen(
        context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[Value]
    ) -> Value:
        result = write(Emit(builder, isa), *args)
        return result if result is not None else ir.Constant(I64, 0)

    return types.int64(*[types.int64] * arguments), codegen


def fields(count: int, element: ir.Type = I64) -> Any:
    """Numba-callable (address): the `count` integers there, as a tuple of int64."""

    def read(ctx: Any, address: Any) -> Any:
        def codegen(
            context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[Value]
        ) -> Value:
            size = element.width // 8
            values = []
            for i in range(count):
                place = builder.inttoptr(
                    builder.add(args[0], ir.Constant(I64, size * i)), element.as_pointer()
                )
                value = builder.load(place, align=1, typ=element)
                values.append(value if element == I64 else builder.zext(value, I64))
            return context.make_tuple(builder, signature.return_type, values)

        return types.UniTuple(types.int64, count)(types.int64), codegen

    return intrinsic(read)


def _loader(element: ir.Type, result: Any, doc: str) -> Any:
    """A Numba function reading one `element` at an address."""

    def load(ctx: Any, address: Any) -> Any:
        def codegen(
            context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[Value]
        ) -> Value:
            value = builder.load(
                builder.inttoptr(args[0], element.as_pointer()), align=1, typ=element
            )
            if element in (I8, I16, I32):
                # Small unsigned numbers widen to int64, so that kernels compute in one integer
                # type.
                return builder.zext(value, I64)
            return value

        return result(types.int64), codegen

    load.__doc__ = doc
    return intrinsic(load)


def _storer(element: ir.Type, argument: Any, doc: str) -> Any:
    """A Numba function writing one `element` at an address."""

    def store(ctx: Any, address: Any, value: Any) -> Any:
        def codegen(
            context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[Value]
        ) -> Value:
            value = args[1]
            if element in (I8, I16, I32):
                value = builder.trunc(value, element)
            builder.store(value, builder.inttoptr(args[0], element.as_pointer()), align=1)
            return ir.Constant(I64, 0)

        return types.int64(types.int64, argument), codegen

    store.__doc__ = doc
    return intrinsic(store)


load_u8 = _loader(I8, types.int64, "The unsigned byte at an address, as int64.")
load_u32 = _loader(I32, types.int64, "The unsigned 32 bits at an address, as int64.")
load_i64 = _loader(I64, types.int64, "The int64 at an address.")
load_f32 = _loader(F32, types.float32, "The float32 at an address.")


store_u8 = _storer(I8, types.int64, "Write the low byte.")
store_u16 = _storer(I16, types.int64, "Write the low 16 bits.")
store_i32 = _storer(I32, types.int64, "Write the low 32 bits.")
store_i64 = _storer(I64, types.int64, "Write an int64.")
store_f32 = _storer(F32, types.float32, "Write a float32.")
