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
from .packing import pack, unpack


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
