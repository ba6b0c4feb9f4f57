"""The loops of the quantisers. A tile is `group_tokens` tokens of one head: it fits the first-level cache,
and has scales of its own.

For N bits, Q = 2^N - 1, in the arithmetic of float32:

    z = largest float16 <= min,  s = smallest float16 >= (max - z) / Q,  q = round((x - z) / s),  x' = z + q s

z and s stand in the record, so encoder and decoder use the same numbers; q has at most 8 bits and s 11, so
q s is exact and x' takes a single rounding: every machine decodes to the same bits, with or without fused
multiply-add. s is never too small, so nothing is clipped: |x' - x| <= s / 2, and the rounding to 16 bits.
Scales in bfloat16 were rejected: they are up to 1/256 too large, and coding a decoded tile again then moves
a third of its values.
"""

from typing import Any

import numpy as np

from .compiling import compiled
from .floats import (
    bfloat_of,
    bits_of,
    float_of,
    float_of_half,
    half_towards,
    key_of,
    narrow,
    nearest,
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
def _scales(low: Any, high: Any, is_half: Any, top_code: Any, scales: Any, offsets: Any, steps: Any) -> Any:
    """Fill `scales` (uint16 [2, n]: z and s as stored) and their values; return whether all are finite."""
    count = low.size
    for i in range(count):
        low[i], high[i] = key_of(low[i]), key_of(high[i])  # its own inverse: words again
    smallest, largest = np.empty(count, np.float32), np.empty(count, np.float32)
    widen(low.view(np.uint16), is_half, smallest)
    widen(high.view(np.uint16), is_half, largest)
    highest = np.uint16(0)
    for i in range(count):
        z = half_towards(smallest[i] + np.float32(0), False)
        offsets[i] = float_of_half(z)
        span = (largest[i] - offsets[i]) + np.float32(0)  # a sign of zero is lost in both
        s = half_towards(span / np.float32(top_code), True)
        steps[i] = float_of_half(s)
        scales[0, i], scales[1, i] = z, s
        highest = max(highest, max(np.uint16(z & np.uint16(0x7FFF)), s))
    infinity = np.int16(0x7C00 if is_half else 0x7F80)
    is_finite = highest < np.uint16(0x7C00)
    for i in range(count):
        is_finite &= (low[i] & infinity) != infinity and (high[i] & infinity) != infinity
    return is_finite


@compiled
def _quantise(values: Any, offset: Any, step: Any, codes: Any) -> Any:
    divisor = step if step > np.float32(0) else np.float32(1)
    for d in range(values.size):
        codes[d] = nearest_code((values[d] - offset) / divisor)


@compiled
def _quantise_channels(values: Any, offsets: Any, divisors: Any, codes: Any) -> Any:
    for d in range(values.size):
        codes[d] = nearest_code((values[d] - offsets[d]) / divisors[d])


@compiled
def encode_int(
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
    """Encode heads `first_head` to `end_head` of `words`, uint16 [token, head, dim] in one piece of memory,
    tile after tile (group of tokens, then head).

    Fills `scales` (uint16 [tile, 2, n], n channels or tokens of a tile) and `packed` (uint8 [tile, bytes]).
    Returns False when a value, or a scale, is not finite.
    """
    num_tokens, _, dim = words.shape
    count = dim if by_channel else group_tokens
    low, high = np.empty(count, np.int16), np.empty(count, np.int16)
    offsets, steps = np.empty(count, np.float32), np.empty(count, np.float32)
    values = np.empty(dim, np.float32)
    codes = np.zeros(-(-group_tokens * dim // 8) * 8, np.uint8)
    tile = 0
    for start in range(0, num_tokens, group_tokens):
        for head in range(first_head, end_head):
            _extremes(words[start : start + group_tokens], head, by_channel, low, high)
            if not _scales(low, high, is_half, (1 << bits) - 1, scales[tile], offsets, steps):
                return False
            if by_channel:
                for d in range(dim):
                    steps[d] = steps[d] if steps[d] > np.float32(0) else np.float32(1)
            if bits == 8:
                codes = packed[tile]
                codes[group_tokens * dim :] = 0
            for token in range(group_tokens):
                widen(words[start + token, head], is_half, values)
                if by_channel:
                    _quantise_channels(values, offsets, steps, codes[token * dim : (token + 1) * dim])
                else:
                    _quantise(values, offsets[token], steps[token], codes[token * dim : (token + 1) * dim])
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
def _to_fp8(values: Any, step: Any, mantissa_bits: Any, top_code: Any, codes: Any) -> Any:
    """Round values / step to fp8, halves to even. Below the normal range the codes count its steps."""
    bias = (1 << (6 - mantissa_bits)) - 1
    shift = np.uint32(23 - mantissa_bits)
    smallest = np.uint32((128 - bias) << 23)
    steps_per_one = np.float32(2.0 ** (bias - 1 + mantissa_bits))
    rebias = np.uint32((127 - bias) << mantissa_bits)
    for d in range(values.size):
        bits = bits_of(values[d] / step)
        magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
        is_small = magnitude < smallest
        small = np.uint32(nearest((float_of(magnitude) if is_small else np.float32(0)) * steps_per_one))
        half = np.uint32((np.uint32(1) << np.uint32(shift - np.uint32(1))) - np.uint32(1))
        odd = np.uint32((magnitude >> shift) & np.uint32(1))
        normal = np.uint32(((magnitude + half + odd) >> shift) - rebias)
        code = small if is_small else normal
        limited = code if code < np.uint32(top_code) else np.uint32(top_code)
        codes[d] = np.uint8(limited | ((bits >> np.uint32(24)) & np.uint32(0x80)))


@compiled
def encode_fp8(
    words: Any,
    first_head: Any,
    end_head: Any,
    group_tokens: Any,
    mantissa_bits: Any,
    top_code: Any,
    largest: Any,
    is_half: Any,
    scales: Any,
    packed: Any,
) -> Any:
    """As `encode_int`, with one scale a tile (uint16 [tile]): `largest`, the value of `top_code`, stands for
    the tile's largest magnitude or a little more."""
    num_tokens, _, dim = words.shape
    infinity = np.uint16(0x7C00 if is_half else 0x7F80)
    peak, values = np.empty(1, np.uint16), np.empty(dim, np.float32)
    tile = 0
    for start in range(0, num_tokens, group_tokens):
        for head in range(first_head, end_head):
            highest = np.uint16(0)
            for token in range(start, start + group_tokens):
                for d in range(dim):
                    highest = max(highest, np.uint16(words[token, head, d] & np.uint16(0x7FFF)))
            peak[0] = highest
            widen(peak, is_half, values[:1])
            scale = half_towards(values[0] / np.float32(largest), True)
            if highest >= infinity or scale >= np.uint16(0x7C00):
                return False
            scales[tile] = scale
            step = float_of_half(scale) if scale else np.float32(1)
            for token in range(group_tokens):
                widen(words[start + token, head], is_half, values)
                _to_fp8(values, step, mantissa_bits, top_code, packed[tile, token * dim : (token + 1) * dim])
            tile += 1
    return True


@compiled
def decode_fp8(
    words: Any,
    first_head: Any,
    end_head: Any,
    group_tokens: Any,
    mantissa_bits: Any,
    is_half: Any,
    scales: Any,
    packed: Any,
) -> Any:
    """Undo `encode_fp8`: fill `words`. Scales have to be finite."""
    num_tokens, _, dim = words.shape
    shift = np.uint32(23 - mantissa_bits)
    lift = np.float32(2.0 ** (128 - (1 << (6 - mantissa_bits))))
    values = np.empty(dim, np.float32)
    tile = 0
    for start in range(0, num_tokens, group_tokens):
        for head in range(first_head, end_head):
            step = float_of_half(scales[tile])
            for token in range(group_tokens):
                mine = packed[tile, token * dim : (token + 1) * dim]
                for d in range(dim):
                    code = np.uint32(mine[d])
                    magnitude = float_of(np.uint32((code & np.uint32(0x7F)) << shift)) * lift
                    signed = np.uint32(bits_of(magnitude) | ((code & np.uint32(0x80)) << np.uint32(24)))
                    values[d] = float_of(signed) * step
                narrow(values, is_half, words[start + token, head])
            tile += 1
