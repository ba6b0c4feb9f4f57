"""Codecs that know nothing of numbers: lz4 and zstd over the bytes as they lie.

On floating-point KV they gain little (lz4 nothing, zstd a fifth at a tenth of the speed of `exponents`),
and are here for what is not floating point: quantised caches with long runs, states of other models, bytes
of a layout that kvtier does not know.
"""

import lz4.block
import zstandard

from ...base import Buffer
from ..base import EXACT, CodecError, DoesNotFit, Shape
from .planes import fill_from_frame


class Lz4:
    """Implements Codec with one lz4 block. `reserve` is the share of the raw size that `encode` may take."""

    codec_id = 3
    name = "lz4"
    library = "lz4"
    exactness = EXACT

    def __init__(self, reserve: float = 0.75) -> None:
        assert 0 < reserve <= 1
        self._reserve = reserve

    def parameters(self) -> bytes:
        """Return b"": the record describes itself."""
        return b""

    def accepts(self, shape: Shape) -> bool:
        """Whether the payload is not too long for one block."""
        return shape.raw_bytes < 0x7E000000

    def stored_bound(self, shape: Shape) -> int:
        """Return `reserve` of the raw size."""
        return 4 + int(shape.raw_bytes * self._reserve)

    def encode(self, shape: Shape, payload: Buffer, into: Buffer) -> int:
        """Encode; see Codec. Raises DoesNotFit."""
        del shape
        block = lz4.block.compress(payload, store_size=False)
        return _store(block, into)

    def decode(self, shape: Shape, stored: Buffer, into: Buffer) -> None:
        """Decode; see Codec. Raises CodecError."""
        try:
            raw = lz4.block.decompress(_stored(stored), uncompressed_size=shape.raw_bytes)
        except lz4.block.LZ4BlockError as error:
            raise CodecError(f"lz4: {error}") from error
        if len(raw) != shape.raw_bytes:
            raise CodecError(f"lz4: {len(raw)} bytes instead of {shape.raw_bytes}")
        into[:] = raw


class Zstd:
    """Implements Codec with one zstd frame of `level`, without a dictionary: a frame that names one is
    refused. `reserve`: the share of the raw size `encode` may take."""

    codec_id = 4
    name = "zstd"
    library = "zstandard"
    exactness = EXACT

    def __init__(self, level: int = 1, reserve: float = 0.85) -> None:
        assert -7 <= level <= 19
        assert 0 < reserve <= 1
        self._level = level
        self._reserve = reserve

    def parameters(self) -> bytes:
        """Return b"": the frame describes itself."""
        return b""

    def accepts(self, shape: Shape) -> bool:
        """Whether the payload is not too long for one frame."""
        return shape.raw_bytes < 1 << 31

    def stored_bound(self, shape: Shape) -> int:
        """Return `reserve` of the raw size."""
        return 4 + int(shape.raw_bytes * self._reserve)

    def encode(self, shape: Shape, payload: Buffer, into: Buffer) -> int:
        """Encode; see Codec. Raises DoesNotFit."""
        del shape
        return _store(zstandard.ZstdCompressor(level=self._level).compress(payload), into)

    def decode(self, shape: Shape, stored: Buffer, into: Buffer) -> None:
        """Decode; see Codec. Raises CodecError."""
        del shape
        fill_from_frame(_stored(stored), into)


def _store(encoded: bytes, into: Buffer) -> int:
    length = 4 + len(encoded)
    if length > len(into):
        raise DoesNotFit
    into[:4] = len(encoded).to_bytes(4, "little")
    into[4:length] = encoded
    return length


def _stored(stored: Buffer) -> Buffer:
    length = int.from_bytes(stored[:4], "little")
    if len(stored) < 4 or 4 + length > len(stored):
        raise CodecError("lengths beyond the end")
    return stored[4 : 4 + length]
