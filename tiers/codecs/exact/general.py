"""Codecs that know nothing of numbers: lz4 and zstd over the bytes as they lie.

    | u32 length | lz4 block or zstd frame |

On floating-point KV they gain little (lz4 nothing, zstd a fifth at a tenth of the speed of `exponents`),
and are here for what is not floating point: quantised caches with long runs, states of other models, bytes
of a layout that kvtier does not know.
"""

from typing import ClassVar

import lz4.block
import zstandard

from ...base import Buffer
from ..base import CodecError, DoesNotFit, ExactCodec, Shape
from .planes import fill_from_frame


class _General(ExactCodec):
    """A codec of bytes, behind their length once encoded."""

    head_bytes = 4
    max_raw_bytes: ClassVar[int]

    def accepts(self, shape: Shape) -> bool:
        """Whether the payload is not too long for one block or frame."""
        return shape.raw_bytes < self.max_raw_bytes

    def encode(self, shape: Shape, payload: Buffer, into: Buffer) -> int:
        """Encode; see Codec. Raises DoesNotFit."""
        del shape
        encoded = self._compress(payload)
        length = 4 + len(encoded)
        if length > len(into):
            raise DoesNotFit
        into[:4] = len(encoded).to_bytes(4, "little")
        into[4:length] = encoded
        return length

    def decode(self, shape: Shape, stored: Buffer, into: Buffer) -> None:
        """Decode; see Codec. Raises CodecError."""
        del shape
        length = int.from_bytes(stored[:4], "little")
        if len(stored) < 4 or 4 + length > len(stored):
            raise CodecError("lengths beyond the end")
        self._decompress(stored[4 : 4 + length], into)

    def _compress(self, payload: Buffer) -> bytes:
        raise NotImplementedError

    def _decompress(self, encoded: Buffer, into: Buffer) -> None:
        raise NotImplementedError


class Lz4(_General):
    """Implements Codec with one lz4 block."""

    codec_id = 3
    name = "lz4"
    library = "lz4"
    reserve = 0.75
    max_raw_bytes = 0x7E000000

    def _compress(self, payload: Buffer) -> bytes:
        block: bytes = lz4.block.compress(payload, store_size=False)
        return block

    def _decompress(self, encoded: Buffer, into: Buffer) -> None:
        try:
            raw = lz4.block.decompress(encoded, uncompressed_size=len(into))
        except lz4.block.LZ4BlockError as error:
            raise CodecError(f"lz4: {error}") from error
        if len(raw) != len(into):
            raise CodecError(f"lz4: {len(raw)} bytes instead of {len(into)}")
        into[:] = raw


class Zstd(_General):
    """Implements Codec with one zstd frame of level 1. A frame that names a dictionary is refused."""

    codec_id = 4
    name = "zstd"
    library = "zstandard"
    reserve = 0.85
    max_raw_bytes = 1 << 31

    def _compress(self, payload: Buffer) -> bytes:
        return zstandard.ZstdCompressor(level=1).compress(payload)

    def _decompress(self, encoded: Buffer, into: Buffer) -> None:
        fill_from_frame(encoded, into)
