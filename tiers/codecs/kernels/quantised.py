"""The loops of the quantisers with N bits. A tile is `group_tokens` tokens of one head: it fits the
first-level cache, and has scales of its own.

With Q = 2^N - 1, in the arithmetic of float32:

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
    float_of_bfloat,
    float_of_half,
    half_towards,
    key_of,
    narrow,
    nearest_code,
    widen,
)
from .int_vectors import LANES, row_extremes, write_by_channel, write_by_token
from .packing import pack, unpack

#: Columns of the table of segments; the place and the end, gap included, are bytes.
UNIT, FIRST_HEAD, END_HEAD, GROUP_TOKENS, BITS, BY_CHANNEL, AT, GAP_END, NUM_COLUMNS = range(9)


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
def _quantise(words: Any, is_half: Any, offset: Any, divisor: Any, top_code: Any, codes: Any) -> Any:
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
def _write_codes(
    tile: Any,
    head: Any,
    by_channel: Any,
    is_half: Any,
    offsets: Any,
    divisors: Any,
    top_code: Any,
    codes: Any,
    codes_at: Any,
) -> Any:
    """Write the codes of one head of `tile`, uint16 [token, head, dim], to `codes` from byte `codes_at`."""
    num_tokens, _, dim = tile.shape
    if not is_half and dim % LANES == 0:
        rows = 2 * dim * head, num_tokens, tile.strides[0], dim // LANES
        if by_channel:
            write_by_channel(tile, *rows, offsets, divisors, top_code, codes, codes_at)
        else:
            write_by_token(tile, *rows, offsets, divisors, top_code, codes, codes_at)
        return
    for token in range(num_tokens):
        begin = codes_at + token * dim
        row, mine = tile[token, head], codes[begin : begin + dim]
        if by_channel:
            _quantise_channels(row, is_half, offsets, divisors, top_code, mine)
        else:
            _quantise(row, is_half, offsets[token], divisors[token], top_code, mine)


@compiled
def _encode_segment(words: Any, row: Any, inset: Any, is_half: Any, into: Any) -> Any:
    """Encode the segment that `row` of the table speaks of; return whether everything was finite."""
    num_tokens, _, dim = words.shape
    num_mine = row[END_HEAD] - row[FIRST_HEAD]
    group_tokens, bits, by_channel = row[GROUP_TOKENS], row[BITS], row[BY_CHANNEL] != 0
    count = dim if by_channel else group_tokens
    code_bytes = -(-group_tokens * dim // 8) * bits
    scales_at = row[AT]
    codes_at = scales_at + 4 * count * (num_tokens // group_tokens) * num_mine
    low, high = np.empty(count, np.int16), np.empty(count, np.int16)
    offsets, steps = np.empty(count, np.float32), np.empty(count, np.float32)
    scales = np.empty((2, count), np.uint16)
    codes = np.zeros(-(-group_tokens * dim // 8) * 8, np.uint8)
    top_code = np.float32((1 << bits) - 1)
    for start in range(0, num_tokens, group_tokens):
        for head in range(row[FIRST_HEAD], row[END_HEAD]):
            tile = words[start : start + group_tokens]
            if by_channel or dim % LANES:
                _extremes(tile, head, by_channel, low, high)
            else:
                row_extremes(tile, 2 * dim * head, group_tokens, tile.strides[0], dim // LANES, low, high)
            if not _scales(low, high, is_half, (1 << bits) - 1, inset, scales, offsets, steps):
                return False
            for i in range(count):
                steps[i] = steps[i] if steps[i] > np.float32(0) else np.float32(1)
            _store_words(scales.ravel(), into, scales_at)
            scales_at += 4 * count
            where = by_channel, is_half, offsets, steps, top_code
            if bits == 8:
                _write_codes(tile, head, *where, into, codes_at)
                into[codes_at + group_tokens * dim : codes_at + code_bytes] = 0
            else:
                _write_codes(tile, head, *where, codes, 0)
                pack(codes, bits, into[codes_at : codes_at + code_bytes])
            codes_at += code_bytes
    into[codes_at : row[GAP_END]] = 0
    return True


@compiled
def encode_int(units: Any, table: Any, insets: Any, is_half: Any, into: Any) -> Any:
    """Encode segments of `units`, uint16 [unit, token, head, dim] in one piece of memory.
    Tile after tile (group of tokens, then head): scales of all tiles of a segment (uint16 [2, n] each, n
    channels or tokens), then their codes.

    `table` (int64 [segment, NUM_COLUMNS]) says what and where in `into`; `insets` (float32) are by bits.
    Returns False when a value, or a scale, is not finite. Places are not checked.
    """
    for number in range(table.shape[0]):
        row = table[number]
        if not _encode_segment(units[row[UNIT]], row, insets[row[BITS]], is_half, into):
            return False
    return True


@compiled
def _store_words(words: Any, into: Any, at: Any) -> Any:
    for i in range(words.size):
        into[at + 2 * i] = np.uint8(words[i] & np.uint16(0xFF))
        into[at + 2 * i + 1] = np.uint8(words[i] >> np.uint16(8))


@compiled
def _load_words(source: Any, at: Any, words: Any) -> Any:
    """Undo `_store_words`; return whether all are finite as float16."""
    highest = np.uint16(0)
    for i in range(words.size):
        word = np.uint16(source[at + 2 * i]) | np.uint16(np.uint16(source[at + 2 * i + 1]) << np.uint16(8))
        words[i] = word
        highest = max(highest, np.uint16(word & np.uint16(0x7FFF)))
    return highest < np.uint16(0x7C00)


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
def _decode_segment(words: Any, row: Any, is_half: Any, source: Any) -> Any:
    """Undo `_encode_segment`; return whether all scales are finite."""
    num_tokens, _, dim = words.shape
    group_tokens, bits, by_channel = row[GROUP_TOKENS], row[BITS], row[BY_CHANNEL] != 0
    count = dim if by_channel else group_tokens
    code_bytes = -(-group_tokens * dim // 8) * bits
    scales_at = row[AT]
    codes_at = scales_at + 4 * count * (num_tokens // group_tokens) * (row[END_HEAD] - row[FIRST_HEAD])
    offsets, steps = np.empty(count, np.float32), np.empty(count, np.float32)
    scales = np.empty(count, np.uint16)
    codes = np.zeros(-(-group_tokens * dim // 8) * 8, np.uint8)
    for start in range(0, num_tokens, group_tokens):
        for head in range(row[FIRST_HEAD], row[END_HEAD]):
            mine = words[start : start + group_tokens]
            is_finite = _load_words(source, scales_at, scales)
            widen(scales, True, offsets)
            is_finite &= _load_words(source, scales_at + 2 * count, scales)
            widen(scales, True, steps)
            if not is_finite:
                return False
            scales_at += 4 * count
            packed = source[codes_at : codes_at + code_bytes]
            codes_at += code_bytes
            if bits == 8:
                _restore_tile(packed, by_channel, is_half, offsets, steps, mine, head)
            else:
                unpack(packed, bits, codes)
                _restore_tile(codes, by_channel, is_half, offsets, steps, mine, head)
    return True


@compiled
def decode_int(units: Any, table: Any, is_half: Any, source: Any) -> Any:
    """Undo `encode_int`: fill the heads of `units` that `table` speaks of.
    Returns whether all scales are finite; when not, what was filled is undefined. `source` has all of them.
    Places are not checked."""
    for number in range(table.shape[0]):
        row = table[number]
        if not _decode_segment(units[row[UNIT]], row, is_half, source):
            return False
    return True
