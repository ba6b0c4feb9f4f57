"""How many exponents of a sample lie in a window, for several windows at once, as LLVM's vectors.

The window that most values fall into nearly always begins at the largest exponent or a few below it. So the
largest is found first, and then each of these windows counts what is inside: a subtraction, a comparison and
a count of bits for 64 values. A histogram, which asks nothing of the values, takes five times as long, and a
fragment of 16 tokens spent more time on its histograms than on being packed; it is still what decides where
the best of these windows is not good enough (exponents.py).
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .vector_ir import (
    BYTE,
    WORD16,
    WORD64,
    address_in,
    all_lanes,
    in_every_lane,
    lane_by_lane,
    largest_lane,
    load,
    shifted,
)

LANES = 64
NUM_WINDOWS = 6  # the first begins at the largest exponent, the others one lower each
_WORDS = ir.VectorType(WORD16, LANES)
_BYTES = ir.VectorType(BYTE, LANES)


def _exponents(builder: Any, address: Any) -> Any:
    return builder.trunc(shifted(builder, load(builder, _WORDS, address), -7), _BYTES)


@intrinsic
def largest_exponent(typing_context: Any, values: Any, num_rows: Any, row_bytes: Any) -> Any:
    """Return the largest exponent of the first 64 values (uint16) of each row. Places are not checked."""
    del typing_context, num_rows, row_bytes

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, num_rows, row_bytes = arguments
        first = address_in(context, builder, signature.args[0], array, ir.Constant(WORD64, 0))
        most = cgutils.alloca_once_value(builder, all_lanes(_BYTES, 0))
        builder.store(all_lanes(_BYTES, 0), most)
        with cgutils.for_range(builder, num_rows, intp=WORD64) as row:
            exponents = _exponents(builder, builder.gep(first, [builder.mul(row.index, row_bytes)]))
            builder.store(lane_by_lane(builder, "umax", exponents, builder.load(most)), most)
        return largest_lane(builder, builder.load(most))

    return types.uint8(values, types.intp, types.intp), generate


@intrinsic
def count_windows(
    typing_context: Any, values: Any, num_rows: Any, row_bytes: Any, top: Any, width: Any, counts: Any
) -> Any:
    """Fill `counts` (int64 [NUM_WINDOWS]) with how many of the same values lie in each window.
    Windows of `width` exponents begin at `top`, `top` - 1, and so on. Exponents wrap around."""
    del typing_context, num_rows, row_bytes, top, width

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, num_rows, row_bytes, top, width, target = arguments
        zero = ir.Constant(WORD64, 0)
        first = address_in(context, builder, signature.args[0], array, zero)
        tops, widths = (in_every_lane(builder, value, _BYTES) for value in (top, width))
        found = [cgutils.alloca_once_value(builder, zero) for _ in range(NUM_WINDOWS)]
        for one in found:
            builder.store(zero, one)
        with cgutils.for_range(builder, num_rows, intp=WORD64) as row:
            exponents = _exponents(builder, builder.gep(first, [builder.mul(row.index, row_bytes)]))
            below = builder.sub(tops, exponents)
            for number, one in enumerate(found):
                place = builder.sub(below, all_lanes(_BYTES, number))
                inside = builder.bitcast(builder.icmp_unsigned("<", place, widths), WORD64)
                builder.store(builder.add(builder.load(one), builder.ctpop(inside)), one)
        into = builder.bitcast(
            address_in(context, builder, signature.args[5], target, zero), ir.PointerType(WORD64)
        )
        for number, one in enumerate(found):
            builder.store(builder.load(one), builder.gep(into, [ir.Constant(WORD64, number)]))
        return context.get_dummy_value()

    return types.void(values, types.intp, types.intp, types.uint8, types.uint8, counts), generate
