"""Exponents: bfloat16 at 11 bits and a little a value, exact, near the speed of memory.

    | u32 parts | (u32 top, u32 exceptions) a part | blocks of all parts | exceptions of all parts | tail |

A part is the K or the V of one layer: their exponents lie elsewhere, so each has a window of its own. What
does not fill a block of 512 values in the end of a part goes as it is into the tail. The loops are in
exponent_kernels.py; numba is imported with the first use, because it takes half a second and a daemon
without compression should not pay it.
"""

import struct
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from ..base import Buffer
from .base import EXACT, CodecError, DoesNotFit, Shape

_COUNT = struct.Struct("<I")
_ALIGNMENT = 64
MAX_PARTS = 1 << 16


def kernels() -> ModuleType:
    """Return the compiled loops. Raises CodecError, saying what to install, when numba is missing."""
    try:
        from .kernels import exponents
    except ImportError as error:
        raise CodecError(
            f"codec exponents needs numba ({error}); pip install 'kvtier[codecs]', or name codec planes"
        ) from error
    return exponents


class Exponents:
    """Implements Codec for bfloat16. `reserve` is the share of the raw size that `encode` may take: 11/16 is
    what no exceptions at all would take; every hundredth of the values outside the window adds half a
    hundredth."""

    codec_id = 1
    name = "exponents"
    exactness = EXACT

    def __init__(self, reserve: float = 0.73) -> None:
        assert 11 / 16 < reserve < 1
        self._reserve = reserve

    def parameters(self) -> bytes:
        """Nothing: the record describes itself."""
        return b""

    def accepts(self, shape: Shape) -> bool:
        """Whether the values are bfloat16."""
        return shape.dtype == "bfloat16" and shape.num_layers * shape.num_planes <= MAX_PARTS

    def stored_bound(self, shape: Shape) -> int:
        """Return `reserve` of the raw size, and the head."""
        return _head_bytes(shape.num_layers * shape.num_planes) + int(shape.raw_bytes * self._reserve)

    def encode(self, shape: Shape, payload: Buffer, into: Buffer) -> int:
        """Encode; see Codec. Raises DoesNotFit when too many exponents are outside their windows."""
        loops = kernels()
        layout = Layout(shape)
        parts = _aligned(payload).view(np.uint16).reshape(layout.num_parts, -1)
        target = np.frombuffer(into, np.uint8)
        limit = target.size - layout.tail_bytes
        if layout.exceptions_at > limit:
            raise DoesNotFit
        blocks = target[layout.blocks_at : layout.exceptions_at]
        packed = blocks if target.ctypes.data % 8 == 0 else np.empty(blocks.size, np.uint8)
        head = np.empty((layout.num_parts, 2), np.uint32)
        count = loops.pack(parts, packed, head, target[layout.exceptions_at : limit])
        if count < 0:
            raise DoesNotFit
        if packed is not blocks:
            blocks[:] = packed
        tail_at = layout.exceptions_at + count
        if layout.tail_bytes:
            tail = np.ascontiguousarray(parts[:, layout.num_packed :])
            target[tail_at : tail_at + layout.tail_bytes] = tail.view(np.uint8).reshape(-1)
        target[: layout.blocks_at] = 0
        _COUNT.pack_into(into, 0, layout.num_parts)
        target[_COUNT.size : _COUNT.size + head.nbytes] = head.view(np.uint8).reshape(-1)
        return int(tail_at) + layout.tail_bytes

    def decode(self, shape: Shape, stored: Buffer, into: Buffer) -> None:
        """Decode; see Codec. Raises CodecError."""
        loops = kernels()
        layout = Layout(shape)
        source = _aligned(stored)
        if source.size < layout.exceptions_at or _COUNT.unpack_from(stored)[0] != layout.num_parts:
            raise CodecError("exponents: not of this shape")
        head = source[_COUNT.size : _COUNT.size + 8 * layout.num_parts].view(np.uint32).reshape(-1, 2)
        tail_at = layout.exceptions_at + int(head[:, 1].sum(dtype=np.int64))
        if (head[:, 0] > 255).any() or tail_at + layout.tail_bytes > source.size:
            raise CodecError("exponents: lengths beyond the end")
        whole = np.frombuffer(into, np.uint8)
        values = whole if whole.ctypes.data % 8 == 0 else np.empty(whole.size, np.uint8)
        parts = values.view(np.uint16).reshape(layout.num_parts, -1)
        blocks = source[layout.blocks_at : layout.exceptions_at]
        wrong = loops.unpack(parts, blocks, head, source[layout.exceptions_at : tail_at])
        if wrong >= 0:
            raise CodecError(f"exponents: part {wrong} has another number of exceptions")
        if layout.tail_bytes:
            tail = source[tail_at : tail_at + layout.tail_bytes].copy().view(np.uint16)
            parts[:, layout.num_packed :] = tail.reshape(layout.num_parts, -1)
        if values is not whole:
            whole[:] = values


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


def _head_bytes(num_parts: int) -> int:
    """Length of the head, rounded up so that the blocks behind it are aligned as the whole is."""
    return -(-(_COUNT.size + 8 * num_parts) // _ALIGNMENT) * _ALIGNMENT


def _aligned(buffer: Buffer) -> NDArray[np.uint8]:
    """Return the bytes as an array that may be read in words of eight; copies when they lie askew."""
    array = np.frombuffer(buffer, np.uint8)
    return array if array.ctypes.data % 8 == 0 else array.copy()
