"""Float8: KV in fp8 at 6.6 bits a value (e4m3) or 5.6 (e5m2), exact, near the speed of memory.

    | u32 parts | exponents of each part, by rank | u32 end of each block's list | units | lists | tail |

A part is the K or the V of one layer: their exponents lie elsewhere, so each has ranks of its own. What does
not fill a unit of 256 values in the end of a part goes as it is into the tail. The loops are in
kernels/float8.py.
"""

from functools import lru_cache
from typing import Final

import numpy as np

from ...base import Buffer
from ..base import CodecError, DoesNotFit, ExactCodec, Shape, loops_of

#: Bits of mantissa of the types there are.
MANTISSAS: Final = {"float8_e4m3fn": 3, "float8_e5m2": 2}
UNIT, BLOCK_UNITS = 256, 16
MAX_PARTS = 1 << 16
_ALIGNMENT = 64
_MAX_SHAPES = 256


class Float8(ExactCodec):
    """Implements Codec for fp8. What is reserved leaves a fiftieth for values that spread more than usual."""

    codec_id = 6
    name = "float8"
    library = "numba"
    reserves: Final = {"float8_e4m3fn": 0.86, "float8_e5m2": 0.74}

    def accepts(self, shape: Shape) -> bool:
        """Whether the values are fp8."""
        return shape.dtype in MANTISSAS and shape.num_layers * shape.num_planes <= MAX_PARTS

    def stored_bound(self, shape: Shape) -> int:
        """Return the bytes to reserve: the head, and the usual share of the raw size."""
        if not self.accepts(shape):
            return shape.raw_bytes
        return layout_of(shape).units_at + int(shape.raw_bytes * self.reserves[shape.dtype])

    def encode(self, shape: Shape, payload: Buffer, into: Buffer) -> int:
        """Encode; see Codec. Raises DoesNotFit when the exponents spread too much."""
        layout, loops = layout_of(shape), loops_of("float8")
        values, target = np.frombuffer(payload, np.uint8), np.frombuffer(into, np.uint8)
        values.flags.writeable = False  # loops are compiled for one kind of memory, not for two
        length: int = loops.pack(values, layout.num_parts, layout.mantissa, layout.where, target)
        if length < 0:
            raise DoesNotFit
        return length

    def decode(self, shape: Shape, stored: Buffer, into: Buffer) -> None:
        """Decode; see Codec. Raises CodecError."""
        layout, loops = layout_of(shape), loops_of("float8")
        source, values = np.frombuffer(stored, np.uint8), np.frombuffer(into, np.uint8)
        if source.size < layout.least_bytes:
            raise CodecError(f"float8: {source.size} of {layout.least_bytes} bytes or more")
        source.flags.writeable = False
        wrong = loops.unpack(source, layout.num_parts, layout.mantissa, layout.where, values)
        if wrong == loops.OTHER_SHAPE:
            raise CodecError("float8: not of this shape")
        if wrong == loops.BEYOND:
            raise CodecError("float8: lengths beyond the end")
        if wrong != loops.ALL_RIGHT:
            raise CodecError(f"float8: the list of block {wrong} has another length")


class Float8Layout:
    """Where the parts of an encoded fragment begin, in bytes. Shared with the device's kernels.

    Raises CodecError for values that are not fp8."""

    def __init__(self, shape: Shape) -> None:
        if shape.dtype not in MANTISSAS:
            raise CodecError(f"float8: values of {shape.dtype}")
        self.num_parts = shape.num_layers * shape.num_planes
        self.mantissa = MANTISSAS[shape.dtype]
        num_values = shape.num_values // self.num_parts
        self.num_units = num_values // UNIT  # of each part
        self.num_blocks = -(-self.num_units // BLOCK_UNITS)  # of each part
        self.unit_bytes = 160 if self.mantissa == 2 else 192
        self.tail_bytes = self.num_parts * (num_values - self.num_units * UNIT)
        self.ends_at = 4 + self.num_parts * (1 << (7 - self.mantissa))
        head_bytes = self.ends_at + 4 * self.num_parts * self.num_blocks
        self.units_at = -(-head_bytes // _ALIGNMENT) * _ALIGNMENT
        self.lists_at = self.units_at + self.num_parts * self.num_units * self.unit_bytes
        self.least_bytes = self.lists_at + self.tail_bytes
        self.where = np.array([self.ends_at, self.units_at, self.lists_at], np.int64)


@lru_cache(_MAX_SHAPES)
def layout_of(shape: Shape) -> Float8Layout:
    """Return a shape's layout: small fragments are encoded in the time that computing it takes tenfold."""
    return Float8Layout(shape)
