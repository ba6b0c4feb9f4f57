"""Codes of two to seven bits, side by side in bytes, in a way that vectors like.

A code is taken apart into its low four bits, then two, then one, as its width asks for (7 = 4 + 2 + 1);
each part has an area of its own. Byte j of the area of w-bit parts holds those of codes j, j + n, j + 2n
..., where n is the area's length: loads and stores of neighbours, one shift and one OR a value, no
shuffles.

Rejected: bit planes as the exponent packer has them (four times the operations for four bits); codes across
byte boundaries (shuffles LLVM does not find).
"""

from typing import Any

import numpy as np

from .compiling import compiled


@compiled
def _pack_nibbles(codes: Any, area: Any) -> Any:
    size = area.size
    for j in range(size):
        area[j] = (codes[j] & np.uint8(15)) | np.uint8(codes[size + j] << np.uint8(4))


@compiled
def _pack_pairs(codes: Any, shift: Any, area: Any) -> Any:
    size = area.size
    down, three = np.uint8(shift), np.uint8(3)
    for j in range(size):
        area[j] = (
            ((codes[j] >> down) & three)
            | np.uint8(((codes[size + j] >> down) & three) << np.uint8(2))
            | np.uint8(((codes[2 * size + j] >> down) & three) << np.uint8(4))
            | np.uint8(((codes[3 * size + j] >> down) & three) << np.uint8(6))
        )


@compiled
def _pack_bits(codes: Any, shift: Any, area: Any) -> Any:
    size = area.size
    down, one = np.uint8(shift), np.uint8(1)
    for j in range(size):
        byte = np.uint8(0)
        for i in range(8):
            byte |= np.uint8(((codes[i * size + j] >> down) & one) << np.uint8(i))
        area[j] = byte


@compiled
def pack(codes: Any, bits: Any, target: Any) -> Any:
    """Fill `target` (uint8, codes.size * bits / 8 long) from `codes`.
    Those are uint8 below 2^bits, a multiple of 8 of them."""
    eighth = codes.size // 8
    shift = 0
    at = 0
    if bits & 4:
        _pack_nibbles(codes, target[: 4 * eighth])
        shift = 4
        at = 4 * eighth
    if bits & 2:
        _pack_pairs(codes, shift, target[at : at + 2 * eighth])
        shift += 2
        at += 2 * eighth
    if bits & 1:
        _pack_bits(codes, shift, target[at : at + eighth])


@compiled
def _unpack_nibbles(area: Any, codes: Any) -> Any:
    size = area.size
    for j in range(size):
        codes[j] = area[j] & np.uint8(15)
    for j in range(size):
        codes[size + j] = area[j] >> np.uint8(4)


@compiled
def _unpack_part(area: Any, width: Any, shift: Any, codes: Any) -> Any:
    """OR parts of `width` bits into `codes`, `shift` bits up; the first part of a code sets it."""
    size = area.size
    mask, up = np.uint8((1 << width) - 1), np.uint8(shift)
    for i in range(8 // width):
        down = np.uint8(i * width)
        mine = codes[i * size : (i + 1) * size]
        if shift:
            for j in range(size):
                mine[j] |= np.uint8(((area[j] >> down) & mask) << up)
        else:
            for j in range(size):
                mine[j] = (area[j] >> down) & mask


@compiled
def unpack(source: Any, bits: Any, codes: Any) -> Any:
    """Undo `pack`: fill `codes`."""
    eighth = codes.size // 8
    shift = 0
    at = 0
    if bits & 4:
        _unpack_nibbles(source[: 4 * eighth], codes)
        shift = 4
        at = 4 * eighth
    if bits & 2:
        _unpack_part(source[at : at + 2 * eighth], 2, shift, codes)
        shift += 2
        at += 2 * eighth
    if bits & 1:
        _unpack_part(source[at : at + eighth], 1, shift, codes)
