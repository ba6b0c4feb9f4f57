"""Exponents: bfloat16 at 11 bits and a little a value, exact, near the speed of memory.

    | u32 parts | (u32 top, u32 exceptions) a part | blocks of all parts | exceptions of all parts | tail |

A part is the K or the V of one layer: their exponents lie elsewhere, so each has a window of its own. What
does not fill a block of 512 values in the end of a part goes as it is into the tail. The loops are in
kernels/exponents.py.
"""

from functools import lru_cache

import numpy as np

from ...base import Buffer
from ..base import CodecError, DoesNotFit, ExactCodec, Shape, loops_of, words_of

_ALIGNMENT = 64
MAX_PARTS = 1 << 16
_MAX_SHAPES = 256


class Exponents(ExactCodec):
    """Implements Codec for bfloat16.

    `reserve`: 11/16 is what no exceptions at all would take; every hundredth of the values outside the window
    adds half a hundredth.
    """

    codec_id = 1
    name = "exponents"
    library = "numba"
    reserve = 0.73

    def accepts(self, shape: Shape) -> bool:
        """Whether the values are bfloat16."""
        return shape.dtype == "bfloat16" and shape.num_layers * shape.num_planes <= MAX_PARTS

    def stored_bound(self, shape: Shape) -> int:
        """Return the bytes to reserve: the head, and `reserve` of the raw size."""
        return layout_of(shape).blocks_at + super().stored_bound(shape)

    def encode(self, shape: Shape, payload: Buffer, into: Buffer) -> int:
        """Encode; see Codec. Raises DoesNotFit when too many exponents are outside their windows."""
        layout, loops = layout_of(shape), loops_of("exponents")
        values = words_of(payload)
        whole = np.frombuffer(into, np.uint8)
        if whole.size < layout.exceptions_at:
            raise DoesNotFit
        where = layout.num_parts, layout.blocks_at, layout.exceptions_at
        length: int = loops.pack(values, *where, whole)
        if length == loops.ASKEW:
            target = np.empty(whole.size, np.uint8)
            length = loops.pack(values, *where, target)
            whole[: max(length, 0)] = target[: max(length, 0)]
        if length < 0:
            raise DoesNotFit
        return length

    def decode(self, shape: Shape, stored: Buffer, into: Buffer) -> None:
        """Decode; see Codec. Raises CodecError."""
        layout, loops = layout_of(shape), loops_of("exponents")
        source = np.frombuffer(stored, np.uint8)
        if source.size < layout.exceptions_at:
            raise CodecError(f"exponents: {source.size} of {layout.exceptions_at} bytes or more")
        source.flags.writeable = False  # loops are compiled for one kind of memory, not for two
        whole = np.frombuffer(into, np.uint16)
        values = whole if whole.flags.aligned else np.empty(whole.size, np.uint16)
        where = layout.num_parts, layout.blocks_at, layout.exceptions_at
        wrong = loops.unpack(source, *where, values)
        if wrong == loops.ASKEW:
            source = source.copy()
            source.flags.writeable = False
            wrong = loops.unpack(source, *where, values)
        if wrong == loops.ALL_RIGHT:
            if values is not whole:
                whole[:] = values
            return
        if wrong == loops.OTHER_SHAPE:
            raise CodecError("exponents: not of this shape")
        if wrong == loops.BEYOND:
            raise CodecError("exponents: lengths beyond the end")
        raise CodecError(f"exponents: part {wrong} has another number of exceptions")


class Layout:
    """Where the parts of an encoded fragment begin, in bytes. Shared with the device's kernels."""

    def __init__(self, shape: Shape) -> None:
        self.num_parts = shape.num_layers * shape.num_planes
        num_values = shape.num_values // self.num_parts
        num_blocks = num_values // 512
        self.num_packed = num_blocks * 512  # values of each part
        self.tail_bytes = 2 * self.num_parts * (num_values - self.num_packed)
        self.blocks_at = _head_bytes(self.num_parts)
        self.exceptions_at = self.blocks_at + self.num_parts * num_blocks * (512 + 192)


@lru_cache(_MAX_SHAPES)
def layout_of(shape: Shape) -> Layout:
    """Return a shape's layout: small fragments are encoded in the time that computing it takes tenfold."""
    return Layout(shape)


def _head_bytes(num_parts: int) -> int:
    """Length of the head, rounded up so that the blocks behind it are aligned as the whole is."""
    return -(-(4 + 8 * num_parts) // _ALIGNMENT) * _ALIGNMENT
