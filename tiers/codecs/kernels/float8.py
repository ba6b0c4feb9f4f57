"""The loops of the fp8 packer, compiled by numba: exponents ranked by frequency, coded in levels.

A value of fp8 is a sign, an exponent of four or five bits and three or two bits of mantissa. Sign and
mantissa are noise. The exponents of one layer's K or V take 2.4 to 2.6 bits by their frequencies, and no code
of one length comes near that: three bits are 1.14 x, a window with a list of exceptions is less. So exponents
are ranked, the most frequent is rank 0, and coded in levels: two bits say rank 0, 1, 2, or *listed*; a bit
for each listed one says rank 3, or listed again, and so on (LEVELS); what no level codes is a byte. That is a
prefix code, within a twentieth of a bit of Huffman's, but each level is planes of bits over a list, which a
vector unit compresses and expands 64 values at a time.

256 values are a unit: 64 bytes of the two low bits of each (four rows of 64 neighbours, shifted and or-ed),
then for each row words of 64 bits: signs, the two planes of the first level, and for e4m3 the third bit of
the mantissa. 16 units are a block; its levels' planes follow one another in a list of its own; the head
says where that ends, so that a device can decode blocks side by side.

Rejected: window and exceptions as for bfloat16 (1.15 x); Huffman or rANS over bytes (1.22 to 1.24 x at a
fifth of the speed: that is `planes`); ranks of exponent and first mantissa bit together (no smaller with
levels of three bits); a table of ranks for each head (0.001 x).
"""

from typing import Any

import numpy as np

from ..levels import LEVELS
from . import float8_vectors as vectors
from .compiling import compiled
from .float8_vectors import LANES, LOW_BYTES, NOT_DONE, ROWS

UNIT = LANES * ROWS  # values
BLOCK_UNITS = 16
BLOCK = UNIT * BLOCK_UNITS
SAMPLED_ROWS = 8
ALL_RIGHT, BEYOND, OTHER_SHAPE = -1, -2, -3
NUM_LEVELS = len(LEVELS)
BASES, WIDTHS = tuple(base for base, _ in LEVELS), tuple(width for _, width in LEVELS)
LIST_ROOM = BLOCK + 2 * LANES  # ranks of a block, and what vectors touch behind them
STAGE_ROOM = BLOCK * (sum(WIDTHS) + 8) // 8 + 4 * LANES


@compiled
def _write_u32(target: Any, at: Any, number: Any) -> Any:
    for byte in range(4):
        target[at + byte] = np.uint8((number >> (8 * byte)) & 0xFF)


@compiled
def _read_u32(source: Any, at: Any) -> Any:
    number = np.int64(0)
    for byte in range(4):
        number |= np.int64(source[at + byte]) << (8 * byte)
    return number


@compiled
def _rank(values: Any, first: Any, num_values: Any, mantissa: Any, order: Any, rank_of: Any) -> Any:
    """Fill `order` (exponent of each rank) and `rank_of` (its inverse), uint8, by a sample of a part: rows of
    neighbours, an odd number of rows apart, because heads take turns and there are mostly 2^n of them."""
    num_exponents = 1 << (7 - mantissa)
    counts = np.zeros((2, 32), np.uint32)
    num_rows = num_values // LANES
    step = num_rows // SAMPLED_ROWS
    step = max(step - 1 + step % 2, 1)
    for row in range(min(num_rows, SAMPLED_ROWS)):
        at = first + row * step * LANES
        for lane in range(0, LANES, 2):
            counts[0, (values[at + lane] >> mantissa) & (num_exponents - 1)] += np.uint32(1)
            counts[1, (values[at + lane + 1] >> mantissa) & (num_exponents - 1)] += np.uint32(1)
    for exponent in range(num_exponents):  # the most frequent first, then the smallest
        count = counts[0, exponent] + counts[1, exponent]
        counts[0, exponent] = count
        place = exponent
        while place > 0 and counts[0, order[place - 1]] < count:
            order[place] = order[place - 1]
            place -= 1
        order[place] = np.uint8(exponent)
    for rank in range(num_exponents):
        rank_of[order[rank]] = np.uint8(rank)


@compiled
def _pack_unit(source: Any, at: Any, target: Any, to: Any, rank_of: Any, listed: Any, mantissa: Any) -> Any:
    """Pack a unit one value after another; return how many ranks were listed. `target` is all zeros."""
    count = 0
    num_planes = 3 if mantissa == 2 else 4
    target[to : to + LOW_BYTES + 8 * num_planes * ROWS] = 0
    for row in range(ROWS):
        plane = to + LOW_BYTES + 8 * num_planes * row
        for lane in range(LANES):
            value = source[at + LANES * row + lane]
            rank = rank_of[(value >> mantissa) & ((1 << (7 - mantissa)) - 1)]
            code = min(rank, np.uint8(3))
            target[to + lane] |= np.uint8((value & 3) << (2 * row))
            place, bit = plane + (lane >> 3), lane & 7
            target[place] |= np.uint8((value >> 7) << bit)
            target[place + 8] |= np.uint8((code & 1) << bit)
            target[place + 16] |= np.uint8((code >> 1) << bit)
            if mantissa == 3:
                target[place + 24] |= np.uint8(((value >> 2) & 1) << bit)
            if code == 3:
                listed[count] = rank
                count += 1
    return count


@compiled
def _unpack_unit(source: Any, at: Any, target: Any, to: Any, order: Any, listed: Any, mantissa: Any) -> Any:
    """Undo `_pack_unit`; return how many of `listed` were used."""
    count = 0
    num_planes = 3 if mantissa == 2 else 4
    for row in range(ROWS):
        plane = at + LOW_BYTES + 8 * num_planes * row
        for lane in range(LANES):
            place, bit = plane + (lane >> 3), lane & 7
            rank = ((source[place + 8] >> bit) & 1) | (((source[place + 16] >> bit) & 1) << 1)
            if rank == 3:
                rank = np.int64(listed[count])
                count += 1
            value = (np.int64(order[rank & 31]) << mantissa) | ((source[at + lane] >> (2 * row)) & 3)
            value |= ((source[place] >> bit) & 1) << 7
            if mantissa == 3:
                value |= ((source[place + 24] >> bit) & 1) << 2
            target[to + LANES * row + lane] = np.uint8(value)
    return count


@compiled
def _pack_level(source: Any, at: Any, target: Any, to: Any, listed: Any, count: Any, level: Any) -> Any:
    """Pack `count` ranks of one row of a level; return how many were listed."""
    base, width, stride = BASES[level], WIDTHS[level], (count + 7) // 8
    num_listed = 0
    target[to : to + width * stride] = 0
    for lane in range(count):
        rank = source[at + lane]
        code = min(rank - base, (1 << width) - 1)
        for bit in range(width):
            target[to + bit * stride + (lane >> 3)] |= np.uint8(((code >> bit) & 1) << (lane & 7))
        if code == (1 << width) - 1:
            listed[num_listed] = rank
            num_listed += 1
    return num_listed


@compiled
def _unpack_level(source: Any, at: Any, target: Any, to: Any, listed: Any, count: Any, level: Any) -> Any:
    """Undo `_pack_level`."""
    base, width, stride = BASES[level], WIDTHS[level], (count + 7) // 8
    num_listed = 0
    for lane in range(count):
        code = 0
        for bit in range(width):
            code |= ((source[at + bit * stride + (lane >> 3)] >> (lane & 7)) & 1) << bit
        target[to + lane] = np.uint8(base + code)
        if code == (1 << width) - 1:
            target[to + lane] = listed[num_listed]
            num_listed += 1
    return num_listed


@compiled
def _valid(count: Any) -> Any:
    """Return the mask of the first `count` lanes, 1 to 64."""
    return np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(LANES - count)


@compiled
def _pack_row(
    source: Any, at: Any, target: Any, to: Any, listed: Any, first: Any, count: Any, level: Any
) -> Any:
    """Pack a row of a level with vectors, or without; return how many were listed."""
    valid = _valid(count)
    stride = (count + 7) // 8
    if level == 0:
        found = vectors.pack_level_1(source, at, target, to, listed, first, valid, stride)
    elif level == 1:
        found = vectors.pack_level_2(source, at, target, to, listed, first, valid, stride)
    elif level == 2:
        found = vectors.pack_level_3(source, at, target, to, listed, first, valid, stride)
    elif level == 3:
        found = vectors.pack_level_4(source, at, target, to, listed, first, valid, stride)
    else:
        found = vectors.pack_level_5(source, at, target, to, listed, first, valid, stride)
    if found == NOT_DONE:
        return _pack_level(source, at, target, to, listed[first:], count, level)
    return found


@compiled
def _unpack_row(
    source: Any, at: Any, target: Any, to: Any, listed: Any, first: Any, count: Any, level: Any
) -> Any:
    """Undo `_pack_row`; return how many of the list were used."""
    valid = _valid(count)
    stride = (count + 7) // 8
    if level == 0:
        found = vectors.unpack_level_1(source, at, target, to, listed, first, valid, stride)
    elif level == 1:
        found = vectors.unpack_level_2(source, at, target, to, listed, first, valid, stride)
    elif level == 2:
        found = vectors.unpack_level_3(source, at, target, to, listed, first, valid, stride)
    elif level == 3:
        found = vectors.unpack_level_4(source, at, target, to, listed, first, valid, stride)
    else:
        found = vectors.unpack_level_5(source, at, target, to, listed, first, valid, stride)
    if found == NOT_DONE:
        return _unpack_level(source, at, target, to, listed[first:], count, level)
    return found


@compiled
def _pack_list(ranks: Any, count: Any, spare: Any, stage: Any) -> Any:
    """Code the `count` listed ranks of a block into `stage`; return the bytes. `ranks` and `spare` are
    overwritten."""
    end = 0
    for level in range(NUM_LEVELS):
        num_listed = 0
        for row in range(0, count, LANES):
            num_here = min(count - row, LANES)
            num_listed += _pack_row(ranks, row, stage, end, spare, num_listed, num_here, level)
            end += WIDTHS[level] * ((num_here + 7) // 8)
        ranks, spare, count = spare, ranks, num_listed
    stage[end : end + count] = ranks[:count]
    return end + count


@compiled
def _unpack_list(stage: Any, num_bytes: Any, count: Any, ranks: Any, spare: Any, starts: Any) -> Any:
    """Decode the `count` ranks of a block out of `stage` into `ranks`; `spare` and `starts` (int64 [2, 5])
    are scratch. Returns whether they take `num_bytes`. Bits behind a short row are ignored."""
    at = 0
    for level in range(NUM_LEVELS):
        starts[0, level], starts[1, level] = at, count
        num_listed = 0
        if at + WIDTHS[level] * ((count // LANES) * 8 + (count % LANES + 7) // 8) > num_bytes:
            return False
        for row in range(0, count, LANES):
            num_here = min(count - row, LANES)
            stride = (num_here + 7) // 8
            second = (WIDTHS[level] - 1) * stride
            num_listed += vectors.num_marked(stage, at, second, _valid(num_here))
            at += WIDTHS[level] * stride
        count = num_listed
    if at + count != num_bytes:
        return False
    last, before = (ranks, spare) if NUM_LEVELS % 2 == 0 else (spare, ranks)
    last[:count] = stage[at:num_bytes]
    for back in range(NUM_LEVELS):
        level = NUM_LEVELS - 1 - back
        at, count = starts[0, level], starts[1, level]
        used = 0
        for row in range(0, count, LANES):
            num_here = min(count - row, LANES)
            used += _unpack_row(stage, at, before, row, last, used, num_here, level)
            at += WIDTHS[level] * ((num_here + 7) // 8)
        last, before = before, last
    return True


@compiled
def pack(values: Any, num_parts: Any, mantissa: Any, where: Any, target: Any) -> Any:
    """Write `values` (uint8, the parts one behind the other) as exact/float8.py says. `where` (int64 [3]):
    bytes of `target` at which the ends of lists, the units and the lists begin.

    Returns the bytes written, -1 when they do not fit. What is behind them is then undefined.
    """
    ends_at, units_at, lists_at = where
    part_values = values.size // num_parts
    num_units = part_values // UNIT
    num_rest = part_values - num_units * UNIT
    unit_bytes = LOW_BYTES + 8 * ROWS * (3 if mantissa == 2 else 4)
    num_exponents = 1 << (7 - mantissa)
    limit = target.size - num_rest * num_parts
    if lists_at > limit:
        return -1
    _write_u32(target, 0, num_parts)
    order, rank_of = np.zeros(LANES, np.uint8), np.zeros(LANES, np.uint8)
    ranks, spare = np.empty(LIST_ROOM, np.uint8), np.empty(LIST_ROOM, np.uint8)
    stage = np.empty(STAGE_ROOM, np.uint8)
    end, block, to = np.int64(lists_at), 0, np.int64(units_at)
    for part in range(num_parts):
        first = part * part_values
        _rank(values, first, num_units * UNIT, mantissa, order, rank_of)
        target[4 + part * num_exponents : 4 + (part + 1) * num_exponents] = order[:num_exponents]
        for begin in range(0, num_units, BLOCK_UNITS):
            count = 0
            for unit in range(begin, min(begin + BLOCK_UNITS, num_units)):
                at = first + unit * UNIT
                if mantissa == 3:
                    found = vectors.pack_unit_e4m3(values, at, target, to, rank_of, ranks, count)
                else:
                    found = vectors.pack_unit_e5m2(values, at, target, to, rank_of, ranks, count)
                if found == NOT_DONE:
                    found = _pack_unit(values, at, target, to, rank_of, ranks[count:], mantissa)
                count += found
                to += unit_bytes
            num_bytes = _pack_list(ranks, count, spare, stage)
            if end + num_bytes > limit:
                return -1
            target[end : end + num_bytes] = stage[:num_bytes]
            end += num_bytes
            _write_u32(target, ends_at + 4 * block, end - lists_at)
            block += 1
    for part in range(num_parts if num_rest else 0):
        target[end : end + num_rest] = values[(part + 1) * part_values - num_rest : (part + 1) * part_values]
        end += num_rest
    return end


@compiled
def unpack(source: Any, num_parts: Any, mantissa: Any, where: Any, values: Any) -> Any:
    """Undo `pack`: fill `values`.
    Returns ALL_RIGHT, or the first block with a list of another length than the head says, BEYOND when all
    that it says would not end within `source`, OTHER_SHAPE for another number of parts. Reads nothing
    beyond it whatever the head says; `source` is at least as long as the units end."""
    ends_at, units_at, lists_at = where
    part_values = values.size // num_parts
    num_units = part_values // UNIT
    num_rest = part_values - num_units * UNIT
    num_planes = 3 if mantissa == 2 else 4
    unit_bytes = LOW_BYTES + 8 * ROWS * num_planes
    num_exponents = 1 << (7 - mantissa)
    if _read_u32(source, 0) != num_parts:
        return OTHER_SHAPE
    order = np.zeros(LANES, np.uint8)
    ranks, spare = np.empty(LIST_ROOM, np.uint8), np.empty(LIST_ROOM, np.uint8)
    stage, starts = np.zeros(STAGE_ROOM, np.uint8), np.empty((2, NUM_LEVELS), np.int64)
    begin_at, block, at = np.int64(0), 0, np.int64(units_at)
    room = source.size - lists_at - num_rest * num_parts
    for part in range(num_parts):
        head = 4 + part * num_exponents
        for rank in range(LANES):
            order[rank] = source[head + rank % num_exponents] & np.uint8(num_exponents - 1)
        for begin in range(0, num_units, BLOCK_UNITS):
            num_here = min(BLOCK_UNITS, num_units - begin)
            end_at = _read_u32(source, ends_at + 4 * block)
            num_bytes = end_at - begin_at
            if num_bytes < 0 or num_bytes > STAGE_ROOM - 4 * LANES or end_at > room:
                return BEYOND
            count = 0
            for row in range(num_here * ROWS):
                plane = at + row // ROWS * unit_bytes + LOW_BYTES + 8 * num_planes * (row % ROWS)
                count += vectors.num_marked(source, plane + 8, 8, _valid(LANES))
            stage[:num_bytes] = source[lists_at + begin_at : lists_at + end_at]
            if not _unpack_list(stage, num_bytes, count, ranks, spare, starts):
                return block
            used = 0
            for unit in range(begin, begin + num_here):
                to = part * part_values + unit * UNIT
                if mantissa == 3:
                    found = vectors.unpack_unit_e4m3(source, at, values, to, order, ranks, used)
                else:
                    found = vectors.unpack_unit_e5m2(source, at, values, to, order, ranks, used)
                if found == NOT_DONE:
                    found = _unpack_unit(source, at, values, to, order, ranks[used:], mantissa)
                used += found
                at += unit_bytes
            begin_at = end_at
            block += 1
    at = lists_at + begin_at
    for part in range(num_parts if num_rest else 0):
        values[(part + 1) * part_values - num_rest : (part + 1) * part_values] = source[at : at + num_rest]
        at += num_rest
    return ALL_RIGHT
