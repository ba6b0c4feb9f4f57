"""Single values between their formats, written so that LLVM makes vectors of them: no branches, no calls.

bfloat16 and float16 are `uint16` here, because numba knows neither. Both order as sign and magnitude, so
smallest and largest are found on integers, 32 at a time, and what is not finite shows in them.
"""

from typing import Any

import numpy as np

from .compiling import compiled

SMALLEST_NORMAL = 0x38800000  # 2^-14, as bits of float32
HALF_BIAS = 112 << 10  # what the exponents of float32 and float16 differ by, in a float16


@compiled
def float_of(bits: Any) -> Any:
    """Return the float32 with these bits (uint32)."""
    return np.uint32(bits).view(np.float32)


@compiled
def bits_of(value: Any) -> Any:
    """Return the bits of a float32, as uint32."""
    return np.float32(value).view(np.uint32)


@compiled
def nearest(value: Any) -> Any:
    """Return a float32 of less than 2^22 rounded to an integer, halves to even, by an addition."""
    magic = np.float32(12582912.0)
    return (value + magic) - magic


@compiled
def nearest_code(value: Any) -> Any:
    """Return a float32 in 0 to 255 rounded as `nearest` does, as uint8: the lowest bits of the same sum.
    A conversion would go through 64 bits and take four times as long."""
    return np.uint8(bits_of(value + np.float32(12582912.0)) & np.uint32(0xFF))


@compiled
def key_of(word: Any) -> Any:
    """Return an int16 that orders as the value of a 16-bit float does."""
    signed = np.int16(word)
    return np.int16(signed ^ np.int16((signed >> np.int16(15)) & np.int16(0x7FFF)))


@compiled
def float_of_bfloat(word: Any) -> Any:
    """Return the float32 of a bfloat16."""
    return float_of(np.uint32(np.uint32(word) << np.uint32(16)))


@compiled
def float_of_half(word: Any) -> Any:
    """Return the float32 of a finite float16; subnormals included."""
    bits = np.uint32(word)
    magnitude = float_of(np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))) * np.float32(2.0**112)
    return float_of(np.uint32(bits_of(magnitude) | ((bits & np.uint32(0x8000)) << np.uint32(16))))


@compiled
def half_towards(value: Any, upwards: Any) -> Any:
    """Return the float16 nearest to a float32 on its lower side, or on its upper one.
    What is out of range becomes a word that is not finite."""
    bits = bits_of(value)
    sign = np.uint32(bits >> np.uint32(31))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    away = np.uint32(sign ^ np.uint32(1)) if upwards else sign  # 1: away from zero
    scaled = float_of(magnitude) * np.float32(2.0**24)
    is_small = magnitude < np.uint32(SMALLEST_NORMAL)
    small = np.uint32(scaled) if is_small else np.uint32(0)
    has_small_rest = np.uint32(1) if np.float32(small) != scaled else np.uint32(0)
    normal = np.uint32((magnitude >> np.uint32(13)) - np.uint32(HALF_BIAS))
    has_rest = np.uint32(1) if (magnitude & np.uint32(0x1FFF)) != np.uint32(0) else np.uint32(0)
    word = (small + (has_small_rest & away)) if is_small else (normal + (has_rest & away))
    limited = word if word < np.uint32(0x7C00) else np.uint32(0x7C00)
    return np.uint16(limited | (sign << np.uint32(15)))


@compiled
def _half_of(value: Any) -> Any:
    """Return the float16 nearest to a float32, halves to even; beyond its range, its largest."""
    bits = bits_of(value)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    is_small = magnitude < np.uint32(SMALLEST_NORMAL)
    clipped = float_of(magnitude) if is_small else np.float32(0)
    small = np.uint32(nearest(clipped * np.float32(2.0**24)))
    odd = np.uint32((magnitude >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(((magnitude + np.uint32(0xFFF) + odd) >> np.uint32(13)) - np.uint32(HALF_BIAS))
    word = small if is_small else normal
    limited = word if word < np.uint32(0x7BFF) else np.uint32(0x7BFF)
    return np.uint16(limited | ((bits >> np.uint32(16)) & np.uint32(0x8000)))


@compiled
def bfloat_of(value: Any) -> Any:
    """Return the bfloat16 nearest to a finite float32, halves to even."""
    bits = bits_of(value)
    odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@compiled
def widen(words: Any, is_half: Any, floats: Any) -> Any:
    """Fill `floats` (float32) with the values of `words` (float16 when `is_half`, else bfloat16)."""
    if is_half:
        for i in range(words.size):
            floats[i] = float_of_half(words[i])
    else:
        for i in range(words.size):
            floats[i] = float_of_bfloat(words[i])


@compiled
def narrow(floats: Any, is_half: Any, words: Any) -> Any:
    """Undo `widen`: to the nearest value, halves to even. For finite values."""
    if is_half:
        for i in range(words.size):
            words[i] = _half_of(floats[i])
    else:
        for i in range(words.size):
            words[i] = bfloat_of(floats[i])


@compiled
def widen_heads(words: Any, first_head: Any, is_half: Any, floats: Any) -> Any:
    """Fill `floats` [token, head * dim] from neighbouring heads of `words` [token, head, dim]."""
    dim = words.shape[2]
    for token in range(floats.shape[0]):
        for head in range(floats.shape[1] // dim):
            widen(words[token, first_head + head], is_half, floats[token, head * dim : (head + 1) * dim])


@compiled
def narrow_heads(floats: Any, first_head: Any, is_half: Any, words: Any) -> Any:
    """Undo `widen_heads`."""
    dim = words.shape[2]
    for token in range(floats.shape[0]):
        for head in range(floats.shape[1] // dim):
            narrow(floats[token, head * dim : (head + 1) * dim], is_half, words[token, first_head + head])
