"""Words for writing a loop's body as LLVM's vectors, where its vectoriser does not find them by itself.

Vectors of any length may be written: LLVM cuts them to what a processor has. So this is no assembler, and
runs where numba runs; only what names an instruction of one processor has to ask for it first
(exponent_vectors.py).

Types are Any, because llvmlite and numba have none.
"""

from typing import Any

from llvmlite import ir

BIT, BYTE, WORD16, WORD32, WORD64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_DATA = 1  # of a prefetch: not code


def address_in(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Return the address of byte `at` of a numba array, not checked."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(builder.bitcast(data, ir.PointerType(BYTE)), [at])


def all_lanes(kind: Any, value: float) -> Any:
    """Return the vector that is `value` everywhere."""
    return ir.Constant(kind, [value] * kind.count)


def in_every_lane(builder: Any, value: Any, kind: Any) -> Any:
    """Return the vector that is a value known later everywhere."""
    nothing = ir.Constant(kind, ir.Undefined)
    alone = builder.insert_element(nothing, value, ir.Constant(WORD32, 0))
    return shuffle(builder, alone, nothing, [0] * kind.count)


def load(builder: Any, kind: Any, address: Any, offset: int = 0) -> Any:
    """Return what lies `offset` bytes behind an address, aligned or not."""
    pointer = builder.bitcast(_behind(builder, address, offset), ir.PointerType(kind))
    return builder.load(pointer, align=1, typ=kind)


def store(builder: Any, value: Any, address: Any, offset: int = 0) -> None:
    """Undo `load`."""
    pointer = builder.bitcast(_behind(builder, address, offset), ir.PointerType(value.type))
    builder.store(value, pointer, align=1)


def prefetch(builder: Any, address: Any, offset: int = 0, *, is_write: bool = False, cache: int = 1) -> None:
    """Ask for a line of memory, into this cache of a core. Wherever it points, only time is at stake."""
    options = [ir.Constant(WORD32, option) for option in (int(is_write), 4 - cache, _DATA)]
    instruction(builder, "prefetch.p0", ir.VoidType(), [_behind(builder, address, offset), *options])


def instruction(builder: Any, name: str, kind: Any, arguments: list[Any]) -> Any:
    """Return what one of LLVM's intrinsics, named without `llvm.`, makes of its arguments."""
    function_kind = ir.FunctionType(kind, [argument.type for argument in arguments])
    function = builder.module.declare_intrinsic(f"llvm.{name}", (), function_kind)
    return builder.call(function, arguments)


def lane_by_lane(builder: Any, name: str, one: Any, other: Any) -> Any:
    """Return `umax`, `smin` or the like of two vectors of integers."""
    kind = one.type
    return instruction(builder, f"{name}.v{kind.count}i{kind.element.width}", kind, [one, other])


def largest_lane(builder: Any, value: Any) -> Any:
    """Return the largest of a vector's unsigned integers."""
    kind = value.type
    name = f"vector.reduce.umax.v{kind.count}i{kind.element.width}"
    return instruction(builder, name, kind.element, [value])


def shuffle(builder: Any, first: Any, second: Any, places: list[int]) -> Any:
    """Return the lanes of two vectors, numbered through, in another order."""
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(WORD32, len(places)), places))


def shifted(builder: Any, value: Any, left: int) -> Any:
    """Shift to the left, or to the right when `left` is negative."""
    if left < 0:
        return builder.lshr(value, all_lanes(value.type, -left))
    return builder.shl(value, all_lanes(value.type, left))


def times(builder: Any, value: Any, factor: int) -> Any:
    """Return an index of 64 bits times a constant."""
    return builder.mul(value, ir.Constant(WORD64, factor))


def masked(builder: Any, value: Any, mask: int) -> Any:
    """AND every lane."""
    return builder.and_(value, all_lanes(value.type, mask))


def _behind(builder: Any, address: Any, offset: int) -> Any:
    return builder.gep(address, [ir.Constant(WORD64, offset)])
