"""The codes of intN, 16 values of bfloat16 at a time; see quantised.py for the arithmetic, which is the same.

LLVM's vectoriser takes 128 values a turn where codes are bytes and values words, and heads have 64 or 128
dims: it did a half of them, or all, one by one. What bounds these loops is the division, which has to be one
(a product with the reciprocal rounds otherwise, and codes are compared between machines). Asking for the
lines of the next tile meanwhile gained nothing.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .vector_ir import (
    BYTE,
    WORD16,
    WORD32,
    WORD64,
    address_in,
    all_lanes,
    in_every_lane,
    instruction,
    lane_by_lane,
    load,
    shifted,
    store,
    times,
)

LANES = 16
_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, LANES)
_WIDE = ir.VectorType(WORD32, LANES)
_WORDS = ir.VectorType(WORD16, LANES)
_CODES = ir.VectorType(BYTE, LANES)
_MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, halves to even, in the lowest bits


def _emit_codes(builder: Any, words: Any, scales: Any, tops: Any) -> Any:
    """Return the codes of 16 values; `scales` are their offsets and divisors."""
    offsets, divisors = scales
    values = builder.bitcast(shifted(builder, builder.zext(words, _WIDE), 16), _FLOATS)
    places = builder.fdiv(builder.fsub(values, offsets), divisors)
    zeros = all_lanes(_FLOATS, 0.0)
    places = builder.select(builder.fcmp_ordered(">", places, zeros), places, zeros)
    places = builder.select(builder.fcmp_ordered("<", places, tops), places, tops)
    sums = builder.bitcast(builder.fadd(places, all_lanes(_FLOATS, _MAGIC)), _WIDE)
    return builder.trunc(sums, _CODES)


def _writer(by_channel: bool) -> Any:
    """Return the intrinsic for scales of channels, or of tokens."""

    @intrinsic
    def write(
        typing_context: Any,
        words: Any,
        words_at: Any,
        num_rows: Any,
        row_bytes: Any,
        num_lines: Any,
        offsets: Any,
        divisors: Any,
        top_code: Any,
        codes: Any,
        codes_at: Any,
    ) -> Any:
        """Write the codes of a tile, `num_lines` times 16 values at the begin of each of `num_rows` rows of
        `words` (uint16, the first at byte `words_at`), to `codes` (uint8) from `codes_at`, row by row.
        `offsets` and `divisors` (float32) are those of channels, or of rows. Places are not checked."""
        del typing_context, words_at, num_rows, row_bytes, num_lines, codes_at
        place = types.intp

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            values, at, rows, stride, lines, lows, steps, top, target, target_at = arguments
            kinds = signature.args
            first = address_in(context, builder, kinds[0], values, at)
            into = address_in(context, builder, kinds[8], target, target_at)
            nowhere = ir.Constant(WORD64, 0)
            low = address_in(context, builder, kinds[5], lows, nowhere)
            step = address_in(context, builder, kinds[6], steps, nowhere)
            tops = in_every_lane(builder, top, _FLOATS)
            row_codes = times(builder, lines, LANES)
            with cgutils.for_range(builder, rows, intp=WORD64) as row:
                begin = builder.gep(first, [builder.mul(row.index, stride)])
                written = builder.gep(into, [builder.mul(row.index, row_codes)])
                if not by_channel:
                    mine = times(builder, row.index, 4)
                    of_row = [
                        in_every_lane(builder, load(builder, _FLOAT, builder.gep(one, [mine])), _FLOATS)
                        for one in (low, step)
                    ]
                with cgutils.for_range(builder, lines, intp=WORD64) as line:
                    lane_bytes = times(builder, line.index, 4 * LANES)
                    scales = (
                        [load(builder, _FLOATS, builder.gep(one, [lane_bytes])) for one in (low, step)]
                        if by_channel
                        else of_row
                    )
                    words_of_line = builder.gep(begin, [times(builder, line.index, 2 * LANES)])
                    found = _emit_codes(builder, load(builder, _WORDS, words_of_line), scales, tops)
                    store(builder, found, builder.gep(written, [times(builder, line.index, LANES)]))
            return context.get_dummy_value()

        sizes = (place, place, place, place)
        return types.void(words, *sizes, offsets, divisors, types.float32, codes, place), generate

    return write


write_by_channel, write_by_token = _writer(by_channel=True), _writer(by_channel=False)


@intrinsic
def row_extremes(
    typing_context: Any,
    words: Any,
    words_at: Any,
    num_rows: Any,
    row_bytes: Any,
    num_lines: Any,
    low: Any,
    high: Any,
) -> Any:
    """Fill `low` and `high` (int16) with the smallest and the largest key of each row of a tile.
    Keys are those of floats.key_of, the tile is as `write_by_token` has it."""
    del typing_context, words_at, num_rows, row_bytes, num_lines
    place = types.intp

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, at, rows, stride, lines, lows, highs = arguments
        kinds = signature.args
        first = address_in(context, builder, kinds[0], values, at)
        nowhere = ir.Constant(WORD64, 0)
        targets = [
            address_in(context, builder, kind, array, nowhere)
            for kind, array in ((kinds[5], lows), (kinds[6], highs))
        ]
        names = ("smin", "smax")
        furthest = [all_lanes(_WORDS, 0x7FFF), all_lanes(_WORDS, -0x8000)]
        found = [cgutils.alloca_once_value(builder, one) for one in furthest]
        with cgutils.for_range(builder, rows, intp=WORD64) as row:
            begin = builder.gep(first, [builder.mul(row.index, stride)])
            for one, slot in zip(furthest, found, strict=True):
                builder.store(one, slot)
            with cgutils.for_range(builder, lines, intp=WORD64) as line:
                loaded = load(builder, _WORDS, builder.gep(begin, [times(builder, line.index, 2 * LANES)]))
                sign = builder.ashr(loaded, all_lanes(_WORDS, 15))
                keys = builder.xor(loaded, builder.and_(sign, all_lanes(_WORDS, 0x7FFF)))
                for name, slot in zip(names, found, strict=True):
                    builder.store(lane_by_lane(builder, name, keys, builder.load(slot)), slot)
            mine = times(builder, row.index, 2)
            for name, slot, target in zip(names, found, targets, strict=True):
                store(builder, _reduced(builder, name, builder.load(slot)), builder.gep(target, [mine]))
        return context.get_dummy_value()

    sizes = (place, place, place, place)
    return types.void(words, *sizes, low, high), generate


def _reduced(builder: Any, name: str, value: Any) -> Any:
    return instruction(builder, f"vector.reduce.{name}.v{LANES}i16", WORD16, [value])
