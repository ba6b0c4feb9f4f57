"""bfloat16 to fp8 (e4m3) in lanes of 16 bits, 32 at a time: no floats, no branches.

A scale that is a power of two only moves exponents, so the code of a value is its word, moved and rounded:

    word            s eeeeeeee fffffff
    its distance    r = magnitude - (base << 7)        base: the exponent with code 0
    code            r >> 4, rounded, s on top

Below the smallest normal the leading one appears and goes down as far as the exponent is too small: the same
rounding with another shift. Widening to float32 takes twice as many vectors, and any other scale a division
or a product; what it would gain is the part of a binade that the largest value does not fill, and a format
with exponents has those to spare.

The lines of the tokens that come next are asked for while these are written, one behind the other: with heads
side by side a tile is a piece of every row, which what finds neighbours by itself does not follow.

What is larger than a scale allows shows in the largest magnitude, which is found on the way: so a scale may
be guessed (fp8.py).

Rejected: a branch around the values below the smallest normal (twice as fast from the first-level cache,
nothing from memory); the largest magnitude of the next tile in the same loop as the codes of this (slower
from memory).
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
    masked,
    prefetch,
    shifted,
    store,
    times,
)

LANES = 32  # a line of memory
_LINE_BYTES = 2 * LANES
_WORDS = ir.VectorType(WORD16, LANES)
_CODES = ir.VectorType(BYTE, LANES)
_MAGNITUDE = 0x7FFF
_ONE = 0x80  # the leading one of a bfloat16, which is not written
_NUM_DROPPED = 4  # of the 7 bits of a bfloat16's mantissa


class _Rows:
    """A tile's lines: `num_lines` at the begin of each of `num_rows`, which lie `row_bytes` apart."""

    def __init__(self, builder: Any, first: Any, num_rows: Any, row_bytes: Any, num_lines: Any) -> None:
        self._builder = builder
        self._first = first
        self._num_rows = num_rows
        self._row_bytes = row_bytes
        self._num_lines = num_lines

    def each(self, body: Any) -> None:
        """Emit `body(address, row, line)` for each line."""
        builder = self._builder
        with cgutils.for_range(builder, self._num_rows, intp=WORD64) as row:
            begin = builder.gep(self._first, [builder.mul(row.index, self._row_bytes)])
            with cgutils.for_range(builder, self._num_lines, intp=WORD64) as line:
                address = builder.gep(begin, [times(builder, line.index, _LINE_BYTES)])
                body(address, row.index, line.index)


class _Most:
    """The largest magnitude among vectors of words."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._most = cgutils.alloca_once_value(builder, all_lanes(_WORDS, 0))
        builder.store(all_lanes(_WORDS, 0), self._most)  # again where this is in a loop

    def take(self, words: Any) -> None:
        """Emit code that compares a vector of words with the largest so far."""
        magnitudes = masked(self._builder, words, _MAGNITUDE)
        before = self._builder.load(self._most)
        self._builder.store(lane_by_lane(self._builder, "umax", magnitudes, before), self._most)

    def value(self) -> Any:
        """Return the largest magnitude of all words taken."""
        return largest_lane(self._builder, self._builder.load(self._most))


def _emit_code(builder: Any, words: Any, bases: Any) -> Any:
    """Return the codes of 32 words; `bases` is base << 7, see above."""
    distance = builder.sub(masked(builder, words, _MAGNITUDE), bases)
    exponent = builder.ashr(distance, all_lanes(_WORDS, 7))
    shift = builder.sub(all_lanes(_WORDS, _NUM_DROPPED + 1), exponent)
    shift = lane_by_lane(builder, "smax", shift, all_lanes(_WORDS, _NUM_DROPPED))
    shift = lane_by_lane(builder, "smin", shift, all_lanes(_WORDS, 15))  # nothing of it is left then
    is_normal = builder.icmp_signed(">=", distance, all_lanes(_WORDS, _ONE))
    fraction = builder.or_(masked(builder, words, _ONE - 1), all_lanes(_WORDS, _ONE))
    kept = builder.select(is_normal, distance, fraction)
    nearly_half = builder.lshr(all_lanes(_WORDS, _MAGNITUDE), builder.sub(all_lanes(_WORDS, 16), shift))
    odd = masked(builder, builder.lshr(kept, shift), 1)
    rounded = builder.lshr(builder.add(builder.add(kept, nearly_half), odd), shift)
    sign = masked(builder, shifted(builder, words, -8), 0x80)
    return builder.trunc(builder.or_(rounded, sign), _CODES)


@intrinsic
def largest_magnitude(
    typing_context: Any, words: Any, words_at: Any, num_rows: Any, row_bytes: Any, num_lines: Any
) -> Any:
    """Return the largest of the words (uint16) of a tile without their signs:
    `num_lines` times 32 of them at the begin of each of `num_rows` rows, the first at byte `words_at`. Places
    are not checked."""
    del typing_context, words_at, num_rows, row_bytes, num_lines
    place = types.intp

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, at, *sizes = arguments
        tile = _Rows(builder, address_in(context, builder, signature.args[0], values, at), *sizes)
        most = _Most(builder)
        tile.each(lambda address, row, line: most.take(load(builder, _WORDS, address)))
        return most.value()

    return types.uint16(words, place, place, place, place), generate


@intrinsic
def write_codes(
    typing_context: Any,
    words: Any,
    words_at: Any,
    num_rows: Any,
    row_bytes: Any,
    num_lines: Any,
    codes: Any,
    codes_at: Any,
    dim: Any,
    base: Any,
    next_at: Any,
) -> Any:
    """Write the codes of a tile to `codes` (uint8) and return its largest magnitude.

    The tile is as `largest_magnitude` has it; its codes begin at byte `codes_at`, rows `dim` apart. What is
    larger than 448 has been written as nonsense. Asks for as many lines from byte `next_at` of the words on.
    Places are not checked, and the last need not be one.
    """
    del typing_context, words_at, num_rows, row_bytes, num_lines, codes_at, dim, base, next_at
    place = types.intp

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, at, *sizes, target, target_at, code_row_bytes, first_exponent, ahead_at = arguments
        num_lines = sizes[2]
        ahead = address_in(context, builder, signature.args[0], values, ahead_at)
        tile = _Rows(builder, address_in(context, builder, signature.args[0], values, at), *sizes)
        into = address_in(context, builder, signature.args[5], target, target_at)
        bases = shifted(builder, in_every_lane(builder, first_exponent, _WORDS), 7)
        most = _Most(builder)

        def write_line(address: Any, row: Any, line: Any) -> None:
            number = builder.add(builder.mul(row, num_lines), line)
            prefetch(builder, builder.gep(ahead, [times(builder, number, _LINE_BYTES)]))
            loaded = load(builder, _WORDS, address)
            most.take(loaded)
            found = _emit_code(builder, loaded, bases)
            begin = builder.gep(into, [builder.mul(row, code_row_bytes)])
            store(builder, found, builder.gep(begin, [times(builder, line, LANES)]))

        tile.each(write_line)
        return most.value()

    sizes = (place, place, place, place)
    return types.uint16(words, *sizes, codes, place, place, types.uint16, place), generate
