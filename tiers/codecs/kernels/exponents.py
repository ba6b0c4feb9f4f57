"""The loops of the exponent packer, compiled by numba: the only code here that looks at single values.

A bfloat16 is sign, eight bits of exponent, seven of mantissa. In keys and values nearly all exponents of
one layer lie in a window of seven neighbours, so three bits name one: 0 to 6 below `top`, or 7 for
"elsewhere", in which case the exponent follows in a list.

512 values are a block of three parts that a vector unit likes: 512 bytes of sign and mantissa, and three
planes of 64 bytes, one for each bit of the code. Bit i of byte j belongs to value 64 i + j, so that eight
loads of 64 neighbours, shifted and or-ed lane by lane, make a plane: no shuffles. The AND of the planes marks
the exceptions; they are listed in the order of the bits of that mask, which is the same in both directions.

What is here is one block after another, and the loops for processors without the instructions of
exponent_vectors.py, which does a block at once; same bytes.

Rejected: codes packed three bytes for eight values (one operation in six less, but then the exceptions have
to be searched for byte by byte, which took longer than everything else); Huffman codes (a seventh smaller
than this at a fifth of the speed: that is `planes`); torch (no operation packs bits, 40 passes over
memory).

The layout follows SplitZip (arXiv 2605.01708: fixed codes and an escape list); the bit planes are ours.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .compiling import compiled
from .exponent_vectors import NOT_DONE, pack_block, unpack_block
from .window_vectors import LANES, NUM_WINDOWS, count_windows, largest_exponent

BLOCK = 512  # values
PLANE_BYTES = BLOCK // 8
CODE_BYTES = 3 * PLANE_BYTES
BLOCK_BYTES = BLOCK + CODE_BYTES
WINDOW = 7  # neighbouring exponents that have a code
SAMPLES = 512  # values of a part that are looked at to find its window
SAMPLED_ROWS = SAMPLES // LANES
ALL_RIGHT, BEYOND, ASKEW, OTHER_SHAPE = -1, -2, -3, -4


@intrinsic
def _lowest_bit(typing_context: Any, word: Any) -> Any:
    """Position of the lowest set bit of a word that is not zero."""
    del typing_context, word
    signature = types.int64(types.uint64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return signature, generate


@compiled
def _find_top(values: Any, few_counts: Any, counts: Any) -> Any:
    """Return the highest exponent of the window that most of a sample of `values`, whole blocks of them, fall
    into, or nearly. `few_counts` (int64 [NUM_WINDOWS]) and `counts` (uint16 [4, 264]) are scratch.

    The sample are rows of neighbours, an odd number of rows apart: heads take turns, and there are mostly
    2^n of them.
    """
    num_blocks = values.size // BLOCK
    if num_blocks == 0:
        return np.uint8(0)
    row_values = (num_blocks - 1 + num_blocks % 2) * LANES
    largest = largest_exponent(values, SAMPLED_ROWS, 2 * row_values)
    count_windows(values, SAMPLED_ROWS, 2 * row_values, largest, np.uint8(WINDOW), few_counts)
    best = 0
    for number in range(1, NUM_WINDOWS):
        best = number if few_counts[number] > few_counts[best] else best
    if best == NUM_WINDOWS - 1 or 8 * few_counts[best] < 7 * SAMPLES:
        return _find_top_anywhere(values, row_values, counts)
    return np.uint8(largest - np.uint8(best))


@compiled
def _find_top_anywhere(values: Any, row_values: Any, counts: Any) -> Any:
    """Return the highest exponent of the best window of all, for the same sample. Four tables of `counts`
    take turns, because neighbours are mostly equal and each increment would wait for the one before."""
    counts[:] = np.uint16(0)
    for row in range(np.uint64(SAMPLED_ROWS)):
        for lane in range(np.uint64(0), np.uint64(LANES), np.uint64(4)):
            for turn in range(np.uint64(4)):
                value = values[row * np.uint64(row_values) + lane + turn]
                exponent = np.uint8((value >> np.uint16(7)) & np.uint16(0xFF))
                counts[turn, exponent + np.uint64(WINDOW)] += np.uint16(1)
    for place in range(counts.shape[1]):
        counts[0, place] += np.uint16(counts[1, place] + np.uint16(counts[2, place] + counts[3, place]))
    most = np.uint16(0)
    for place in range(1, 257):
        inside = counts[0, place]
        for other in range(1, WINDOW):
            inside += counts[0, place + other]
        counts[1, place] = inside
        most = max(most, inside)
    top = 0
    while counts[1, top + 1] != most:
        top += 1
    return np.uint8(top)


@compiled
def _pack_block(source: Any, top: Any, target: Any, exceptions: Any) -> Any:
    """Pack one block; return how many exceptions it has, -1 when they do not fit."""
    num_exceptions = 0
    highest = np.uint16(top)
    codes = target[BLOCK:]
    for place in range(BLOCK):
        value = source[place]
        sign = np.uint16(value >> np.uint16(8)) & np.uint16(0x80)
        target[place] = np.uint8(sign | (value & np.uint16(0x7F)))
    for lane in range(PLANE_BYTES):
        low = middle = high = np.uint8(0)
        for bit in range(8):
            exponent = (source[bit * PLANE_BYTES + lane] >> np.uint16(7)) & np.uint16(0xFF)
            below = np.uint8(highest - exponent)  # wraps around
            code = np.uint8(7) if below > np.uint8(7) else below
            low |= np.uint8((code & np.uint8(1)) << np.uint8(bit))
            middle |= np.uint8(((code >> np.uint8(1)) & np.uint8(1)) << np.uint8(bit))
            high |= np.uint8(((code >> np.uint8(2)) & np.uint8(1)) << np.uint8(bit))
        codes[lane] = low
        codes[PLANE_BYTES + lane] = middle
        codes[2 * PLANE_BYTES + lane] = high
    words = codes.view(np.uint64)
    for word in range(8):
        mask = words[word] & words[8 + word] & words[16 + word]
        while mask != np.uint64(0):
            if num_exceptions >= exceptions.size:
                return -1
            marked = _lowest_bit(mask)
            mask &= mask - np.uint64(1)
            exception = source[(marked & 7) * PLANE_BYTES + word * 8 + (marked >> 3)]
            exceptions[num_exceptions] = np.uint8((exception >> 7) & 0xFF)
            num_exceptions += 1
    return num_exceptions


@compiled
def _pack(values: Any, first: Any, top: Any, blocks: Any, at: Any, num_blocks: Any, listed: Any) -> Any:
    """Pack `num_blocks` from value `first` on into `blocks` at byte `at`, their exceptions into `listed`;
    return how many there were, -1 when they do not fit. Views are avoided: each costs as much as a block."""
    end = 0
    for block in range(num_blocks):
        value, place = first + BLOCK * block, at + BLOCK_BYTES * block
        count = pack_block(values, 2 * value, blocks, place, listed, end, top)
        if count == NOT_DONE:
            source, target = values[value : value + BLOCK], blocks[place : place + BLOCK_BYTES]
            count = _pack_block(source, top, target, listed[end:])
        if count < 0:
            return -1
        end += count
    return end


@compiled
def _unpack_block(source: Any, top: Any, exceptions: Any, target: Any) -> Any:
    """Undo `_pack_block`; return how many exceptions were used, -1 when there were too few of them."""
    num_used = 0
    codes = source[BLOCK:]
    for bit in range(8):
        shift = np.uint8(bit)
        for lane in range(PLANE_BYTES):
            code = (
                ((codes[lane] >> shift) & np.uint8(1))
                | (((codes[PLANE_BYTES + lane] >> shift) & np.uint8(1)) << np.uint8(1))
                | (((codes[2 * PLANE_BYTES + lane] >> shift) & np.uint8(1)) << np.uint8(2))
            )
            exponent = np.uint8(top - np.uint8(code))
            rest = source[bit * PLANE_BYTES + lane]
            target[bit * PLANE_BYTES + lane] = (
                (np.uint16(rest & np.uint8(0x80)) << np.uint16(8))
                | (np.uint16(exponent) << np.uint16(7))
                | np.uint16(rest & np.uint8(0x7F))
            )
    words = codes.view(np.uint64)
    for word in range(8):
        mask = words[word] & words[8 + word] & words[16 + word]
        while mask != np.uint64(0):
            marked = _lowest_bit(mask)
            mask &= mask - np.uint64(1)
            if num_used >= exceptions.size:
                return -1
            place = (marked & 7) * PLANE_BYTES + word * 8 + (marked >> 3)
            known = np.uint16(exceptions[num_used]) << np.uint16(7)
            target[place] = np.uint16((target[place] & np.uint16(0x807F)) | known)
            num_used += 1
    return num_used


@compiled
def _unpack(blocks: Any, at: Any, top: Any, listed: Any, values: Any, first: Any, num_blocks: Any) -> Any:
    """Undo `_pack`; return how many of `listed` were used, -1 when there were too few. Those of other parts
    may follow."""
    end = 0
    for block in range(num_blocks):
        value, place = first + BLOCK * block, at + BLOCK_BYTES * block
        count = unpack_block(blocks, place, values, 2 * value, listed, end, top)
        if count == NOT_DONE:
            source, target = blocks[place : place + BLOCK_BYTES], values[value : value + BLOCK]
            count = _unpack_block(source, top, listed[end:], target)
        if count < 0:
            return -1
        end += count
    return end


@compiled
def pack(values: Any, num_parts: Any, blocks_at: Any, exceptions_at: Any, target: Any) -> Any:
    """Write `values` (uint16, the parts one behind the other) as exact/exponents.py says.
    The blocks go to byte `blocks_at` of `target` (uint8) on, the exceptions to `exceptions_at`.

    Returns the bytes written, -1 when they do not fit, and ASKEW when `target` does not begin at a multiple
    of 8. What is behind them is then undefined.
    """
    if target.ctypes.data % 8:
        return ASKEW
    part_values = values.size // num_parts
    num_blocks = part_values // BLOCK
    num_packed, part_bytes = num_blocks * BLOCK, num_blocks * BLOCK_BYTES
    num_rest = part_values - num_packed
    limit = target.size - 2 * num_rest * num_parts
    if exceptions_at > limit:
        return -1
    target[:blocks_at] = 0
    head = target[: 4 + 8 * num_parts].view(np.uint32)
    head[0] = num_parts
    few_counts, counts = np.empty(NUM_WINDOWS, np.int64), np.empty((4, 264), np.uint16)
    end = exceptions_at
    for part in range(num_parts):
        first = part * part_values
        top = _find_top(values[first : first + num_packed], few_counts, counts)
        blocks_begin = blocks_at + part * part_bytes
        count = _pack(values, first, top, target, blocks_begin, num_blocks, target[end:limit])
        if count < 0:
            return -1
        head[1 + 2 * part], head[2 + 2 * part] = top, count
        end += count
    for part in range(num_parts if num_rest else 0):
        for place in range((part + 1) * part_values - num_rest, (part + 1) * part_values):
            target[end] = np.uint8(values[place] & np.uint16(0xFF))
            target[end + 1] = np.uint8(values[place] >> np.uint16(8))
            end += 2
    return end


@compiled
def unpack(source: Any, num_parts: Any, blocks_at: Any, exceptions_at: Any, values: Any) -> Any:
    """Undo `pack`: fill `values`.
    Returns ALL_RIGHT, or the first part with another number of exceptions than the head says, BEYOND when all
    that it says would not end within `source`, OTHER_SHAPE for another number of parts, ASKEW when `source`
    does not begin at a multiple of 8. Reads nothing beyond it whatever the head says; `source` is at least
    `exceptions_at` long."""
    if source.ctypes.data % 8:
        return ASKEW
    part_values = values.size // num_parts
    num_blocks = part_values // BLOCK
    num_packed, part_bytes = num_blocks * BLOCK, num_blocks * BLOCK_BYTES
    num_rest = part_values - num_packed
    head = source[: 4 + 8 * num_parts].view(np.uint32)
    if head[0] != num_parts:
        return OTHER_SHAPE
    tail_at = np.int64(exceptions_at)
    for part in range(num_parts):
        if head[1 + 2 * part] > 255:
            return BEYOND
        tail_at += np.int64(head[2 + 2 * part])
    if tail_at + 2 * num_rest * num_parts > source.size:
        return BEYOND
    end = np.int64(exceptions_at)
    for part in range(num_parts):
        count = np.int64(head[2 + 2 * part])
        top, listed = np.uint8(head[1 + 2 * part]), source[end:tail_at]
        blocks_begin = blocks_at + part * part_bytes
        if _unpack(source, blocks_begin, top, listed, values, part * part_values, num_blocks) != count:
            return part
        end += count
    for part in range(num_parts if num_rest else 0):
        for place in range((part + 1) * part_values - num_rest, (part + 1) * part_values):
            values[place] = np.uint16(source[end]) | (np.uint16(source[end + 1]) << np.uint16(8))
            end += 2
    return ALL_RIGHT
