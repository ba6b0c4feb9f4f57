"""The table of a transform: a basis, and how often its coefficients take which value. Fitted once, in a
profile.

    | u32 dims, classes, shift | i16 inverse [dim, dim] | f32 mean [dim] | u8 class [dim] | u16 counts |

The inverse is in integers, times 2^shift, because a decoder has to give the same bits everywhere: products
of small integers add up exactly in float32, in any order, so every BLAS agrees. The forward matrix is its
inverse in turn, computed where it is needed, and in integers too: encoders give the same bytes.
"""

import struct
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, log2
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .profile import ProfileError

PRECISION = 12  # bits of a frequency; what kernels/rans.py codes with
NUM_SYMBOLS = 256  # an escape, and -127 to 127
LARGEST_VALUE = 127
MAX_DIMS = 4096
MAX_CLASSES = 64
_HEAD = struct.Struct("<III")
_EXACT = 1 << 24  # integers below add up exactly in float32
#: By how much whole units, and a whole matrix, move a coefficient at most; in steps.
UNITS_ERROR, MATRIX_ERROR = 1 / 16, 1 / 32
#: A symbol as native/_transform.c encodes it: x // frequency is x * reciprocal >> 44.
_CODED = np.dtype([("reciprocal", "u8"), ("frequency", "u2"), ("start", "u2"), ("is_escape", "u4")])


class Forward(NamedTuple):
    """From values less their mean, in whole units of 2^-unit_bits steps, to steps: (units @ near) / 2^shift.

    `far`, with 2^far_shift, is for tokens where sum(units^2) exceeds `limit`, or a unit 16 bits: their
    sums take 64 bits, and `near` would not be precise enough.
    """

    near: NDArray[np.int16]  # [dim, coefficient]
    far: NDArray[np.int32]
    unit_bits: int
    shift: int
    far_shift: int
    limit: float


@dataclass(frozen=True, eq=False)
class TransformTable:
    """Raises ProfileError when the parts do not belong together."""

    inverse: NDArray[np.int16]  # [coefficient, dim]
    shift: int
    mean: NDArray[np.float32]  # [dim]
    classes: NDArray[np.uint8]  # [coefficient]
    frequencies: NDArray[np.uint16]  # [class, symbol]

    def __post_init__(self) -> None:
        largest_sum = LARGEST_VALUE * int(np.abs(self.inverse.astype(np.int64)).sum(axis=0).max())
        if largest_sum >= _EXACT or not 0 <= self.shift <= 24:
            raise ProfileError(f"a basis with sums up to {largest_sum}; fit it again with a smaller shift")
        if int(self.classes.max()) >= len(self.frequencies) or not np.isfinite(self.mean).all():
            raise ProfileError("a transform's table with classes or means that are not there; fit it again")
        sums = self.frequencies.sum(axis=1, dtype=np.int64)
        if (sums != 1 << PRECISION).any() or (self.frequencies[:, 0] == 0).any():
            raise ProfileError("a transform's frequencies do not add up; fit it again")

    @property
    def num_dims(self) -> int:
        """Values that are transformed together: heads times dims of a head."""
        return len(self.mean)

    @cached_property
    def decoding(self) -> NDArray[np.float32]:
        """The inverse [coefficient, dim] as float32; its integers are exact."""
        return self.inverse.astype(np.float32)

    @cached_property
    def forward(self) -> Forward:
        """The encoder's matrices, with as many bits as their sums have room for."""
        exact = np.linalg.inv(self.inverse.astype(np.float64) / (1 << self.shift))
        gain = float(np.abs(exact).sum(axis=0).max())
        unit_bits = ceil(log2(gain / 2 / UNITS_ERROR))
        far_bits = floor(log2((1 << 30) / gain))
        most_bits = floor(log2(32767 / float(np.abs(exact).max())))
        limit = 0.0
        for bits in range(most_bits - 4, most_bits + 1):  # fewer leave sums more room, more are more precise
            rounded = np.rint(np.ldexp(exact, bits))
            error = float(np.linalg.norm(np.ldexp(rounded, -bits) - exact, axis=0).max())
            room = ((1 << 31) - (1 << unit_bits + bits)) / float(np.linalg.norm(rounded, axis=0).max())
            found = min(room, MATRIX_ERROR * 2.0**unit_bits / max(error, 1e-9)) ** 2
            if found > limit:
                limit, near, near_bits = found, rounded.astype(np.int16), bits
        far = np.rint(np.ldexp(exact, far_bits)).astype(np.int32)
        return Forward(near, far, unit_bits, unit_bits + near_bits, unit_bits + far_bits, limit)

    @cached_property
    def worst_gain(self) -> float:
        """How far a value is moved when all its coefficients are moved by one, in the worst of cases."""
        return float(np.abs(self.inverse.astype(np.float64)).sum(axis=0).max()) / (1 << self.shift)

    @cached_property
    def starts(self) -> NDArray[np.uint16]:
        """Where each symbol's slots begin, [class, symbol]."""
        ends = np.cumsum(self.frequencies, axis=1, dtype=np.int64)
        return (ends - self.frequencies).astype(np.uint16)

    @cached_property
    def symbols(self) -> NDArray[np.uint8]:
        """The symbol of every slot, [class, 2^PRECISION]."""
        every = np.arange(NUM_SYMBOLS).astype(np.uint8)
        return np.stack([np.repeat(every, row) for row in self.frequencies])

    @cached_property
    def coded_symbols(self) -> NDArray[Any]:
        """What native/_transform.c encodes with, [class, symbol]."""
        coded = np.empty(self.frequencies.shape, _CODED)
        coded["frequency"], coded["start"] = self.frequencies, self.starts
        coded["reciprocal"] = -(-(1 << 44) // np.maximum(self.frequencies.astype(np.int64), 1))
        coded["is_escape"] = self.frequencies == 0
        coded["is_escape"][:, 0] = 1
        return coded

    @cached_property
    def slots(self) -> NDArray[np.uint8]:
        """What it decodes with, [class]: symbols of slots, then u32 of symbols, start | frequency << 16."""
        entries = np.stack([self.starts, self.frequencies], axis=2).astype("<u2")
        return np.hstack([self.symbols, entries.reshape(len(entries), -1).view(np.uint8)])

    def to_bytes(self) -> bytes:
        """Return the form in which a profile keeps it."""
        head = _HEAD.pack(self.num_dims, len(self.frequencies), self.shift)
        parts: list[NDArray[Any]] = [self.inverse, self.mean, self.classes, self.frequencies]
        return head + b"".join(part.astype(part.dtype.newbyteorder("<")).tobytes() for part in parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> "TransformTable":
        """Return a table from its bytes. Raises ProfileError."""
        if len(data) < _HEAD.size:
            raise ProfileError("a transform's table that is cut off; fit it again")
        num_dims, num_classes, shift = _HEAD.unpack_from(data)
        if not 0 < num_dims <= MAX_DIMS or not 0 < num_classes <= MAX_CLASSES:
            raise ProfileError(f"a transform of {num_dims} dims, {num_classes} classes; fit it again")
        sizes = (2 * num_dims**2, 4 * num_dims, num_dims, 2 * num_classes * NUM_SYMBOLS)
        if len(data) != _HEAD.size + sum(sizes):
            raise ProfileError(f"a transform's table of {len(data)} bytes; fit it again")
        at, parts = _HEAD.size, []
        for size, dtype in zip(sizes, ("<i2", "<f4", "u1", "<u2"), strict=True):
            parts.append(np.frombuffer(data[at : at + size], dtype))
            at += size
        inverse, mean, classes, frequencies = parts
        return cls(
            inverse.reshape(num_dims, num_dims), shift, mean, classes, frequencies.reshape(num_classes, -1)
        )


def in_blocks(matrix: NDArray[np.int16]) -> NDArray[np.int16]:
    """Return a matrix [n, n] as native/_transform.c reads it: [column / 16, row / 2, 16, 2]."""
    num = len(matrix)
    return np.ascontiguousarray(matrix.reshape(num // 2, 2, num // 16, 16).transpose(2, 0, 3, 1))
