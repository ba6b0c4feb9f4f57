"""The loops of the quantisers. A tile is `group_tokens` tokens of one head: it fits the first-level cache,
and has scales of its own.

For N bits, Q = 2^N - 1, in the arithmetic of float32:

    z = largest float16 <= min + (max - min) (f / 2) / (Q + f)
    s = smallest float16 >= (max - z) / (Q + f / 2)
    q = round((x - z) / s) within 0 to Q,  x' = z + q s

z and s stand in the record, so encoder and decoder use the same numbers; q has at most 8 bits and s 11, so
q s is exact and x' takes a single rounding: every machine decodes to the same bits, with or without fused
multiply-add. s is never too small: |x' - x| <= s / 2, and the rounding to 16 bits.

f is how much of half a step the outermost codes stand inside the range (`inset`). With f = 0 they are its
ends, as quantisers for arithmetic have them, and the range has Q steps; with f = 1 it is cut into 2^N equal
cells, finer by a quarter at two bits and an eighth at three, for the same bound, but every extreme is then
half a step too small, and softmax minds the largest keys most. Measured on two models (KL of the next
token, keys and values): at two bits f = 1 costs half of f = 0, at three a tenth less, at four a fifth more.
What it does to a decoded tile that is coded again does not matter: nothing is coded twice here.

Rejected: scales in bfloat16, up to 1/256 too large.
"""

from typing import Any

import numpy as np

from .compiling import compiled
from .floats import (
    bfloat_of,
    bits_of,
    float_of,
    float_of_bfloat,
    float_of_half,
    half_towards,
    key_of,
    narrow,
    nearest_code,
    widen,
)
from .packing import pack, unpack

_LANES = 64  # of 16 bits: two of the widest vectors


@compiled
def _extremes(words: Any, head: Any, by_channel: Any, low: Any, high: Any) -> Any:
    """Find the smallest and largest keys (int16) of each channel, or token, of one head."""
    num_tokens, _, dim = words.shape
    low[:] = np.int16(0x7FFF)
    high[:] = np.int16(-0x8000)
    for token in range(num_tokens):
        row = words[token, head]
        if by_channel:
            for d in range(dim):
                key = key_of(row[d])
                low[d] = key if key < low[d] else low[d]
                high[d] = key if key > high[d] else high[d]
        else:
            least, most = np.int16(0x7FFF), np.int16(-0x8000)
            for d in range(dim):
                key = key_of(row[d])
                least = key if key < least else least
                most = key if key > most else most
            low[token], high[token] = least, most


@compiled
def _scales(
    low: Any, high: Any, is_half: Any, top_code: Any, inset: Any, scales: Any, offsets: Any, steps: Any
) -> Any:
    """Fill `scales` (uint16 [2, n]: z and s as stored) and their values; return whether all are finite."""
    count = low.size
    for i in range(count):
        low[i], high[i] = key_of(low[i]), key_of(high[i])  # its own inverse: words again
    smallest, largest = np.empty(count, np.float32), np.empty(count, np.float32)
    widen(low.view(np.uint16), is_half, smallest)
    widen(high.view(np.uint16), is_half, largest)
    margin = np.float32(inset) / np.float32(2)  # in steps
    share = margin / (np.float32(top_code) + np.float32(inset))
    num_steps = np.float32(top_code) + margin
    highest = np.uint16(0)
    for i in range(count):
        lowest = smallest[i] + (largest[i] - smallest[i]) * share
        z = half_towards(lowest + np.float32(0), False)
        offsets[i] = float_of_half(z)
        span = (largest[i] - offsets[i]) + np.float32(0)  # a sign of zero is lost in both
        s = half_towards(span / num_steps, True)
        steps[i] = float_of_half(s)
        scales[0, i], scales[1, i] = z, s
        highest = max(highest, max(np.uint16(z & np.uint16(0x7FFF)), s))
    infinity = np.int16(0x7C00 if is_half else 0x7F80)
    is_finite = highest < np.uint16(0x7C00)
    for i in range(count):
        is_finite &= (low[i] & infinity) != infinity and (high[i] & infinity) != infinity
    return is_finite


@compiled
def _code(value: Any, offset: Any, divisor: Any, top_code: Any) -> Any:
    """Return the code of one value: nothing rounds to -1 or to 2^N."""
    place = (value - offset) / divisor
    place = place if place > np.float32(0) else np.float32(0)
    return nearest_code(place if place < top_code else top_code)


@compiled
def _quantise(words: Any, is_half: Any, offset: Any, step: Any, top_code: Any, codes: Any) -> Any:
    divisor = step if step > np.float32(0) else np.float32(1)
    if is_half:
        for d in range(words.size):
            codes[d] = _code(float_of_half(words[d]), offset, divisor, top_code)
    else:
        for d in range(words.size):
            codes[d] = _code(float_of_bfloat(words[d]), offset, divisor, top_code)


@compiled
def _quantise_channels(
    words: Any, is_half: Any, offsets: Any, divisors: Any, top_code: Any, codes: Any
) -> Any:
    if is_half:
        for d in range(words.size):
            codes[d] = _code(float_of_half(words[d]), offsets[d], divisors[d], top_code)
    else:
        for d in range(words.size):
            codes[d] = _code(float_of_bfloat(words[d]), offsets[d], divisors[d], top_code)


@compiled
def encode_int(
    words: Any,
    first_head: Any,
    end_head: Any,
    group_tokens: Any,
    bits: Any,
    inset: Any,
    by_channel: Any,
    is_half: Any,
    scales: Any,
    packed: Any,
) -> Any:
    """Encode heads `first_head` to `end_head` of `words`, uint16 [token, head, dim] in one piece of memory,
    tile after tile (group of tokens, then head).

    Fills `scales` (uint16 [tile, 2, n], n channels or tokens of a tile) and `packed` (uint8 [tile, bytes]).
    Returns False when a value, or a scale, is not finite.
    """
    num_tokens, _, dim = words.shape
    count = dim if by_channel else group_tokens
    low, high = np.empty(count, np.int16), np.empty(count, np.int16)
    offsets, steps = np.empty(count, np.float32), np.empty(count, np.float32)
    codes = np.zeros(-(-group_tokens * dim // 8) * 8, np.uint8)
    top_code = np.float32((1 << bits) - 1)
    tile = 0
    for start in range(0, num_tokens, group_tokens):
        for head in range(first_head, end_head):
            _extremes(words[start : start + group_tokens], head, by_channel, low, high)
            if not _scales(low, high, is_half, (1 << bits) - 1, inset, scales[tile], offsets, steps):
                return False
            if by_channel:
                for d in range(dim):
                    steps[d] = steps[d] if steps[d] > np.float32(0) else np.float32(1)
            if bits == 8:
                codes = packed[tile]
                codes[group_tokens * dim :] = 0
            for token in range(group_tokens):
                row, mine = words[start + token, head], codes[token * dim : (token + 1) * dim]
                if by_channel:
                    _quantise_channels(row, is_half, offsets, steps, top_code, mine)
                else:
                    _quantise(row, is_half, offsets[token], steps[token], top_code, mine)
            if bits < 8:
                pack(codes, bits, packed[tile])
            tile += 1
    return True


@compiled
def _restore(codes: Any, offset: Any, step: Any, values: Any) -> Any:
    for d in range(values.size):
        values[d] = offset + np.float32(codes[d]) * step


@compiled
def _restore_channels(codes: Any, offsets: Any, steps: Any, values: Any) -> Any:
    for d in range(values.size):
        values[d] = offsets[d] + np.float32(codes[d]) * steps[d]


@compiled
def _restore_tile(
    codes: Any, by_channel: Any, is_half: Any, offsets: Any, steps: Any, words: Any, head: Any
) -> Any:
    """Fill one head of `words`, uint16 [token, head, dim], from a tile's codes. bfloat16 in one
    pass: with a row of float32 in between it takes three times as long."""
    num_tokens, _, dim = words.shape
    values = np.empty(dim, np.float32)
    for token in range(num_tokens):
        mine = codes[token * dim : (token + 1) * dim]
        row = words[token, head]
        if not is_half and by_channel:
            for d in range(dim):
                row[d] = bfloat_of(offsets[d] + np.float32(mine[d]) * steps[d])
            continue
        if not is_half:
            offset, step = offsets[token], steps[token]
            for d in range(dim):
                row[d] = bfloat_of(offset + np.float32(mine[d]) * step)
            continue
        if by_channel:
            _restore_channels(mine, offsets, steps, values)
        else:
            _restore(mine, offsets[token], steps[token], values)
        narrow(values, is_half, row)


@compiled
def decode_int(
    words: Any,
    first_head: Any,
    end_head: Any,
    group_tokens: Any,
    bits: Any,
    by_channel: Any,
    is_half: Any,
    scales: Any,
    packed: Any,
) -> Any:
    """Undo `encode_int`: fill `words`. Scales have to be finite."""
    num_tokens, _, dim = words.shape
    count = dim if by_channel else group_tokens
    offsets, steps = np.empty(count, np.float32), np.empty(count, np.float32)
    codes = np.zeros(-(-group_tokens * dim // 8) * 8, np.uint8)
    tile = 0
    for start in range(0, num_tokens, group_tokens):
        for head in range(first_head, end_head):
            mine = words[start : start + group_tokens]
            widen(scales[tile, 0], True, offsets)
            widen(scales[tile, 1], True, steps)
            if bits == 8:
                _restore_tile(packed[tile], by_channel, is_half, offsets, steps, mine, head)
            else:
                unpack(packed[tile], bits, codes)
                _restore_tile(codes, by_channel, is_half, offsets, steps, mine, head)
            tile += 1


@compiled
def _fp8_code(value: Any, mantissa_bits: Any) -> Any:
    """Return the nearest fp8 of a float32 within its range, halves to even, subnormals included.

    Adding a power of two that is 2^(23 - mantissa_bits) times the value's own rounds it to the bits that
    stay, and leaves them at the bottom of the sum; below the normal range the power stays that of the
    smallest normal. What the exponents differ by is in the bottom of what is added, modulo 256.
    """
    smallest = np.uint32((128 - ((1 << (6 - mantissa_bits)) - 1)) << 23)
    shift = np.uint32(23 - mantissa_bits)
    lift = np.uint32((shift << np.uint32(23)) + np.uint32(-np.int64(smallest >> shift) & 0xFF))
    bits = bits_of(value)
    exponent = max(np.uint32(bits & np.uint32(0x7F800000)), smallest)
    magnitude = float_of(np.uint32(bits & np.uint32(0x7FFFFFFF)))
    rounded = bits_of(magnitude + float_of(np.uint32(exponent + lift)))
    sign = np.uint32((bits >> np.uint32(24)) & np.uint32(0x80))
    return np.uint8(np.uint32(rounded + np.uint32(exponent >> shift)) | sign)


@compiled
def _tile_to_fp8(words: Any, head: Any, is_half: Any, step: Any, mantissa_bits: Any, codes: Any) -> Any:
    """Fill `codes` from one head of `words`. One loop a format: shifts by constants take half the time."""
    num_tokens, _, dim = words.shape
    if is_half:
        for token in range(num_tokens):
            row, mine = words[token, head], codes[token * dim : (token + 1) * dim]
            for d in range(dim):
                mine[d] = _fp8_code(float_of_half(row[d]) / step, mantissa_bits)
    elif mantissa_bits == 3:
        for token in range(num_tokens):
            row, mine = words[token, head], codes[token * dim : (token + 1) * dim]
            for d in range(dim):
                mine[d] = _fp8_code(float_of_bfloat(row[d]) / step, 3)
    else:
        for token in range(num_tokens):
            row, mine = words[token, head], codes[token * dim : (token + 1) * dim]
            for d in range(dim):
                mine[d] = _fp8_code(float_of_bfloat(row[d]) / step, 2)


@compiled
def _peak(words: Any, head: Any) -> Any:
    """Return the largest magnitude of one head, as a word. Lane by lane first: what vectors have found is
    brought together once, not once a row."""
    num_tokens, _, dim = words.shape
    most = np.zeros(_LANES, np.uint16)
    highest = np.uint16(0)
    for token in range(num_tokens):
        row = words[token, head]
        for first in range(0, dim - _LANES + 1, _LANES):
            mine = row[first : first + _LANES]
            for lane in range(_LANES):
                most[lane] = max(most[lane], np.uint16(mine[lane] & np.uint16(0x7FFF)))
        for d in range(dim - dim % _LANES, dim):
            highest = max(highest, np.uint16(row[d] & np.uint16(0x7FFF)))
    for lane in range(_LANES):
        highest = max(highest, most[lane])
    return highest


@compiled
def _unit_to_fp8(
    words: Any,
    first_head: Any,
    end_head: Any,
    group_tokens: Any,
    mantissa_bits: Any,
    largest: Any,
    is_half: Any,
    place: Any,
) -> Any:
    """Encode heads of `words` [token, head, dim]: scales of all tiles, then their codes."""
    num_tokens, _, dim = words.shape
    num_tiles = num_tokens // group_tokens * (end_head - first_head)
    code_bytes = (place.size - 2 * num_tiles) // num_tiles
    infinity = np.uint16(0x7C00 if is_half else 0x7F80)
    peak, value = np.empty(1, np.uint16), np.empty(1, np.float32)
    tile = 0
    for start in range(0, num_tokens, group_tokens):
        for head in range(first_head, end_head):
            mine = words[start : start + group_tokens]
            peak[0] = _peak(mine, head)
            widen(peak, is_half, value)
            scale = half_towards(value[0] / np.float32(largest), True)
            if peak[0] >= infinity or scale >= np.uint16(0x7C00):
                return False
            place[2 * tile] = np.uint8(scale & np.uint16(0xFF))
            place[2 * tile + 1] = np.uint8(scale >> np.uint16(8))
            step = float_of_half(scale) if scale else np.float32(1)
            codes = place[2 * num_tiles + tile * code_bytes : 2 * num_tiles + (tile + 1) * code_bytes]
            codes[group_tokens * dim :] = 0
            _tile_to_fp8(mine, head, is_half, step, mantissa_bits, codes)
            tile += 1
    return True


@compiled
def _unit_bytes(units: Any, first_head: Any, end_head: Any, group_tokens: Any) -> Any:
    """Length of one encoded unit: two bytes of scale, and codes up to a multiple of eight, for each tile."""
    _, num_tokens, _, dim = units.shape
    return num_tokens // group_tokens * (end_head - first_head) * (2 + (group_tokens * dim + 7) // 8 * 8)


@compiled
def encode_fp8(
    units: Any,
    first_head: Any,
    end_head: Any,
    group_tokens: Any,
    mantissa_bits: Any,
    largest: Any,
    is_half: Any,
    into: Any,
    stride: Any,
) -> Any:
    """Encode heads `first_head` to `end_head` of each of `units`, uint16 [unit, token, head, dim] in one
    piece of memory, into `into` (uint8), `stride` bytes apart, with zeros in between.

    `largest`, the largest value of the format, stands for a tile's largest magnitude or a little more.
    Returns False when a value, or a scale, is not finite, or `into` is too short.
    """
    num_bytes = _unit_bytes(units, first_head, end_head, group_tokens)
    if (units.shape[0] - 1) * stride + num_bytes > into.size:
        return False
    for unit in range(units.shape[0]):
        place = into[unit * stride : unit * stride + num_bytes]
        if not _unit_to_fp8(
            units[unit], first_head, end_head, group_tokens, mantissa_bits, largest, is_half, place
        ):
            return False
        into[unit * stride + num_bytes : (unit + 1) * stride] = 0
    return True


@compiled
def _float_of_fp8(code: Any, mantissa_bits: Any) -> Any:
    """Return the float32 of an fp8 that is finite."""
    wide = np.uint32(code)
    lift = np.float32(2.0 ** (128 - (1 << (6 - mantissa_bits))))
    magnitude = float_of(np.uint32((wide & np.uint32(0x7F)) << np.uint32(23 - mantissa_bits))) * lift
    return float_of(np.uint32(bits_of(magnitude) | ((wide & np.uint32(0x80)) << np.uint32(24))))


@compiled
def _tile_of_fp8(codes: Any, mantissa_bits: Any, step: Any, is_half: Any, words: Any, head: Any) -> Any:
    """Undo `_tile_to_fp8`."""
    num_tokens, _, dim = words.shape
    values = np.empty(dim, np.float32)
    for token in range(num_tokens):
        mine, row = codes[token * dim : (token + 1) * dim], words[token, head]
        if is_half:
            for d in range(dim):
                values[d] = _float_of_fp8(mine[d], mantissa_bits) * step
            narrow(values, is_half, row)
        elif mantissa_bits == 3:
            for d in range(dim):
                row[d] = bfloat_of(_float_of_fp8(mine[d], 3) * step)
        else:
            for d in range(dim):
                row[d] = bfloat_of(_float_of_fp8(mine[d], 2) * step)


@compiled
def decode_fp8(
    units: Any,
    first_head: Any,
    end_head: Any,
    group_tokens: Any,
    mantissa_bits: Any,
    is_half: Any,
    stored: Any,
    stride: Any,
) -> Any:
    """Undo `encode_fp8`: fill `units`. Returns False when a scale is not finite, or `stored` too short."""
    num_bytes = _unit_bytes(units, first_head, end_head, group_tokens)
    if (units.shape[0] - 1) * stride + num_bytes > stored.size:
        return False
    num_tokens = units.shape[1]
    num_tiles = num_tokens // group_tokens * (end_head - first_head)
    code_bytes = num_bytes // num_tiles - 2
    for unit in range(units.shape[0]):
        place = stored[unit * stride : unit * stride + num_bytes]
        for tile in range(num_tiles):
            scale = np.uint16(place[2 * tile]) | np.uint16(np.uint16(place[2 * tile + 1]) << np.uint16(8))
            if (scale & np.uint16(0x7FFF)) >= np.uint16(0x7C00):
                return False
            group, head = divmod(tile, end_head - first_head)
            codes = place[2 * num_tiles + tile * code_bytes : 2 * num_tiles + (tile + 1) * code_bytes]
            mine = units[unit, group * group_tokens : (group + 1) * group_tokens]
            _tile_of_fp8(codes, mantissa_bits, float_of_half(scale), is_half, mine, first_head + head)
    return True
