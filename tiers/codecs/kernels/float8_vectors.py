"""Units of the fp8 packer as LLVM's vectors: see float8.py for what is written, and its loops for the same
without them.

A row of 64 values is one register. Exponents become ranks by one byte permutation, bits of codes and signs
are comparisons (a mask register is a plane's word), and what has no code at one level is compressed into the
list that the next level codes. Nothing depends on the values but how far the list grows, so there is no
branch to mispredict. Compressing bytes takes x86's AVX-512 VBMI2; where code is generated for another
processor these functions answer NOT_DONE and nothing else, and LLVM removes the call.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..levels import LEVELS
from .vector_ir import (
    BIT,
    BYTE,
    WORD64,
    address_in,
    all_lanes,
    instruction,
    load,
    masked,
    prefetch,
    shifted,
    store,
)

NOT_DONE = -1  # nothing was written that counts
LANES = 64
ROWS = 4  # of a unit
LOW_BYTES = LANES  # two low bits of each value of a unit
_BYTES_AHEAD = 2048

_ROW = ir.VectorType(BYTE, LANES)
_MASK = ir.VectorType(BIT, LANES)


def has_byte_compression(context: Any) -> bool:
    """Whether code is generated for a processor that compresses bytes."""
    return "+avx512vbmi2" in context.codegen().magic_tuple()[2].split(",")


def _constant(value: int) -> Any:
    return ir.Constant(WORD64, value)


def _permuted(builder: Any, table: Any, places: Any) -> Any:
    """Return table[place] of every lane, of 64 bytes."""
    return instruction(builder, "x86.avx512.permvar.qi.512", _ROW, [table, places])


def _move(builder: Any, name: str, value: Any, mask: Any) -> Any:
    """Compress or expand the bytes of a mask."""
    return instruction(builder, f"x86.avx512.mask.{name}.v64i8", _ROW, [value, all_lanes(_ROW, 0), mask])


def _word(builder: Any, mask: Any) -> Any:
    return builder.bitcast(mask, WORD64)


def _bits(builder: Any, codes: Any, base: int, width: int) -> tuple[list[Any], Any]:
    """Return the planes of `codes` less `base` in `width` bits, and which have no code: all bits set."""
    if width == 1:
        escaped = builder.icmp_unsigned("!=", codes, all_lanes(_ROW, base))
        return [escaped], escaped
    escaped = builder.icmp_unsigned(">=", codes, all_lanes(_ROW, base + 3))
    low = builder.or_(builder.icmp_unsigned("==", codes, all_lanes(_ROW, base + 1)), escaped)
    return [low, builder.icmp_unsigned(">=", codes, all_lanes(_ROW, base + 2))], escaped


def _codes(builder: Any, planes: list[Any], base: int, listed: Any) -> tuple[Any, Any]:
    """Undo `_bits`: the ranks of a row, those without a code from the list at `listed`, and how many."""
    codes, escaped = all_lanes(_ROW, base), planes[0]
    for position, plane in enumerate(planes):
        added = builder.select(plane, all_lanes(_ROW, 1 << position), all_lanes(_ROW, 0))
        codes = builder.add(codes, added)
        escaped = builder.and_(escaped, plane)
    expanded = _move(builder, "expand", load(builder, _ROW, listed), escaped)
    return builder.select(escaped, expanded, codes), builder.ctpop(_word(builder, escaped))


def _pack_unit(builder: Any, source: Any, target: Any, table: Any, listed: Any, mantissa: int) -> Any:
    ranks_of = load(builder, _ROW, table)
    low, count = all_lanes(_ROW, 0), _constant(0)
    for line in range(ROWS):
        prefetch(builder, source, _BYTES_AHEAD + LANES * line)
    offset = LOW_BYTES
    for row in range(ROWS):
        values = load(builder, _ROW, source, LANES * row)
        low = builder.or_(low, shifted(builder, masked(builder, values, 3), 2 * row))
        exponents = masked(builder, shifted(builder, values, -mantissa), (1 << (7 - mantissa)) - 1)
        ranks = _permuted(builder, ranks_of, exponents)
        planes, escaped = _bits(builder, ranks, 0, 2)
        planes = [builder.icmp_signed("<", values, all_lanes(_ROW, 0)), *planes]
        if mantissa == 3:
            planes.append(builder.icmp_unsigned("!=", masked(builder, values, 4), all_lanes(_ROW, 0)))
        for plane in planes:
            store(builder, _word(builder, plane), target, offset)
            offset += 8
        store(builder, _move(builder, "compress", ranks, escaped), builder.gep(listed, [count]))
        count = builder.add(count, builder.ctpop(_word(builder, escaped)))
    store(builder, low, target)
    return count


def _unpack_unit(builder: Any, source: Any, target: Any, table: Any, listed: Any, mantissa: int) -> Any:
    exponents_of = load(builder, _ROW, table)
    low, count, offset = load(builder, _ROW, source), _constant(0), LOW_BYTES
    for line in range(ROWS):
        prefetch(builder, source, _BYTES_AHEAD + LANES * line)
        prefetch(builder, target, _BYTES_AHEAD + LANES * line, is_write=True)
    for row in range(ROWS):
        planes = []
        for _ in range(3 if mantissa == 2 else 4):
            planes.append(builder.bitcast(load(builder, WORD64, source, offset), _MASK))
            offset += 8
        ranks, num_listed = _codes(builder, planes[1:3], 0, builder.gep(listed, [count]))
        count = builder.add(count, num_listed)
        values = builder.or_(
            shifted(builder, _permuted(builder, exponents_of, ranks), mantissa),
            masked(builder, shifted(builder, low, -2 * row), 3),
        )
        for plane, bit in zip([planes[0], *planes[3:]], (0x80, 4), strict=False):
            values = builder.or_(values, builder.select(plane, all_lanes(_ROW, bit), all_lanes(_ROW, 0)))
        store(builder, values, target, LANES * row)
    return count


def _pack_level(builder: Any, where: list[Any], valid: Any, stride: Any, base: int, width: int) -> Any:
    source, target, listed = where
    ranks = load(builder, _ROW, source)
    is_valid = builder.bitcast(valid, _MASK)
    planes, escaped = _bits(builder, ranks, base, width)
    for plane in planes:  # in this order: the last bytes of a short row are overwritten by what follows
        store(builder, _word(builder, builder.and_(plane, is_valid)), target)
        target = builder.gep(target, [stride])
    escaped = builder.and_(escaped, is_valid)
    store(builder, _move(builder, "compress", ranks, escaped), listed)
    return builder.ctpop(_word(builder, escaped))


def _unpack_level(builder: Any, where: list[Any], valid: Any, stride: Any, base: int, width: int) -> Any:
    source, target, listed = where
    is_valid = builder.bitcast(valid, _MASK)
    planes = []
    for _ in range(width):
        plane = builder.bitcast(load(builder, WORD64, source), _MASK)
        planes.append(builder.and_(plane, is_valid))
        source = builder.gep(source, [stride])
    ranks, num_listed = _codes(builder, planes, base, listed)
    store(builder, ranks, target)
    return num_listed


def _unit_intrinsic(emit: Callable[..., Any], mantissa: int) -> Any:
    @intrinsic
    def function(
        typing_context: Any, source: Any, at: Any, target: Any, to: Any, table: Any, listed: Any, first: Any
    ) -> Any:
        """(source, its byte, target, its byte, table of 64 bytes, list, its byte) -> how many were listed."""
        del typing_context, at, to, first
        intp = types.intp

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            if not has_byte_compression(context):
                return _constant(NOT_DONE)
            kinds = signature.args
            where = [
                address_in(context, builder, kinds[array], values[array], position)
                for array, position in ((0, values[1]), (2, values[3]), (4, _constant(0)), (5, values[6]))
            ]
            return emit(builder, *where, mantissa)

        return intp(source, intp, target, intp, table, listed, intp), generate

    return function


def _level_intrinsic(emit: Callable[..., Any], base: int, width: int) -> Any:
    @intrinsic
    def function(
        typing_context: Any,
        source: Any,
        at: Any,
        target: Any,
        to: Any,
        listed: Any,
        first: Any,
        valid: Any,
        stride: Any,
    ) -> Any:
        """(source, its byte, target, its byte, list, its byte, mask of valid lanes, bytes of a plane) -> how
        many were listed."""
        del typing_context, at, to, first, valid, stride
        intp = types.intp

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            if not has_byte_compression(context):
                return _constant(NOT_DONE)
            where = [
                address_in(context, builder, signature.args[array], values[array], values[array + 1])
                for array in (0, 2, 4)
            ]
            return emit(builder, where, values[6], values[7], base, width)

        return intp(source, intp, target, intp, listed, intp, types.uint64, intp), generate

    return function


@intrinsic
def num_marked(typing_context: Any, source: Any, at: Any, second: Any, valid: Any) -> Any:
    """Return how many of 64 bits are set in a plane, the one `second` bytes behind it, and a mask.

    On any processor."""
    del typing_context, at, second, valid
    intp = types.intp

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address = address_in(context, builder, signature.args[0], values[0], values[1])
        word = load(builder, WORD64, address)
        other = load(builder, WORD64, builder.gep(address, [values[2]]))
        return builder.ctpop(builder.and_(builder.and_(word, other), values[3]))

    return intp(source, intp, intp, types.uint64), generate


pack_unit_e4m3, pack_unit_e5m2 = (_unit_intrinsic(_pack_unit, mantissa) for mantissa in (3, 2))
unpack_unit_e4m3, unpack_unit_e5m2 = (_unit_intrinsic(_unpack_unit, mantissa) for mantissa in (3, 2))
pack_level_1, pack_level_2, pack_level_3, pack_level_4, pack_level_5 = (
    _level_intrinsic(_pack_level, *level) for level in LEVELS
)
unpack_level_1, unpack_level_2, unpack_level_3, unpack_level_4, unpack_level_5 = (
    _level_intrinsic(_unpack_level, *level) for level in LEVELS
)
