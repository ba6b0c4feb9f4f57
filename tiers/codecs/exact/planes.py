"""Planes: the exponents of floating-point values entropy-coded, the rest as it is. Exact, dense, needs no
compiler.

The bits of a value are rotated by one, so that the sign goes to the bottom and the exponent fills the top
byte; the top bytes of all values are one zstd frame, with the search for repetitions all but switched off:
there are none in KV, and what is left of zstd is a fast Huffman coder with new tables every 128 KiB. The
other bytes are noise and stand behind it unchanged. Types of one byte are all top byte.

    | u32 length of the frame | frame | other bytes |

Rejected: higher levels of zstd, lz4 and XOR or deltas along tokens on the planes (slower and larger); own
rANS (two per cent smaller at best, a coder more to maintain); entropy-coding the mantissas (they are
incompressible: 7.9 of 8 bits). Idea: ZipNN (arXiv 2411.05239), DFloat11 (arXiv 2504.11651).
"""

import struct
import threading
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from ...base import Buffer
from ...block import DTYPE_BYTES
from ..base import CodecError, DoesNotFit, ExactCodec, Shape

_LENGTH = struct.Struct("<I")
Words: TypeAlias = NDArray[Any]
_WORDS: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


def _parameters() -> zstandard.ZstdCompressionParameters:
    """No search to speak of: literals and their Huffman codes remain."""
    return zstandard.ZstdCompressionParameters(
        window_log=17,
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
        strategy=zstandard.STRATEGY_FAST,
        write_content_size=True,
        write_checksum=False,
    )


#: Share of the raw size that is usually enough, by dtype: ordinary KV takes a twentieth less.
USUAL_RESERVE = {"bfloat16": 0.71, "float16": 0.9, "float32": 0.89, "int8": 0.85, "float8_e4m3fn": 0.87}
USUAL_RESERVE_ONE_BYTE = 0.82


class Planes(ExactCodec):
    """Implements Codec for every dtype."""

    codec_id = 2
    name = "planes"
    library = "zstandard"

    def __init__(self) -> None:
        self._own = threading.local()  # zstd's contexts serve one thread at a time

    def accepts(self, shape: Shape) -> bool:
        """Whether the payload is not too long for one frame."""
        return shape.dtype in DTYPE_BYTES and shape.raw_bytes < 1 << 31

    def stored_bound(self, shape: Shape) -> int:
        """Return the bytes that KV of this dtype usually needs."""
        reserve = USUAL_RESERVE.get(shape.dtype, USUAL_RESERVE_ONE_BYTE)
        return _LENGTH.size + int(shape.raw_bytes * reserve)

    def encode(self, shape: Shape, payload: Buffer, into: Buffer) -> int:
        """Encode; see Codec. Raises DoesNotFit."""
        width = DTYPE_BYTES[shape.dtype]
        words = np.frombuffer(payload, _WORDS[width])
        top, rest = _split(words)
        frame = self._compressor().compress(top.data)
        rest_at = _LENGTH.size + len(frame)
        length = rest_at + rest.size
        if length > len(into):
            raise DoesNotFit
        _LENGTH.pack_into(into, 0, len(frame))
        into[_LENGTH.size : rest_at] = frame
        np.frombuffer(into, np.uint8)[rest_at:length] = rest
        return length

    def decode(self, shape: Shape, stored: Buffer, into: Buffer) -> None:
        """Decode; see Codec. Raises CodecError."""
        width = DTYPE_BYTES[shape.dtype]
        if len(stored) < _LENGTH.size:
            raise CodecError("planes: too short")
        rest_at = _LENGTH.size + _LENGTH.unpack_from(stored)[0]
        num_rest = shape.num_values * (width - 1)
        if rest_at + num_rest > len(stored):
            raise CodecError("planes: frame beyond the end")
        frame = stored[_LENGTH.size : rest_at]
        if width == 1:
            fill_from_frame(frame, into)
            return
        top = np.empty(shape.num_values, np.uint8)
        fill_from_frame(frame, top.data)
        rest = np.frombuffer(stored, np.uint8)[rest_at : rest_at + num_rest]
        _join(top, rest, np.frombuffer(into, _WORDS[width]))

    def _compressor(self) -> zstandard.ZstdCompressor:
        if not hasattr(self._own, "compressor"):
            self._own.compressor = zstandard.ZstdCompressor(compression_params=_parameters())
        compressor: zstandard.ZstdCompressor = self._own.compressor
        return compressor


def fill_from_frame(frame: Buffer, into: Buffer) -> None:
    """Fill `into` from one zstd frame.

    What the frame says of its length is not believed, and no more memory taken than a window of 8 MiB.
    Raises CodecError when it is not one frame of exactly this length.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=8 << 20)
    try:
        with decompressor.stream_reader(frame) as reader:
            filled = 0
            while filled < len(into):
                count = reader.readinto(into[filled:])
                if not count:
                    raise CodecError(f"zstd: {filled} of {len(into)} bytes")
                filled += count
            if reader.read(1):
                raise CodecError(f"zstd: more than {len(into)} bytes")
    except zstandard.ZstdError as error:
        raise CodecError(f"zstd: {error}") from error


@cache
def _loops() -> ModuleType | None:
    """Return the compiled loops, None where numba is missing: then numpy does the same in twice the time.

    Imported with the first use, because that takes half a second.
    """
    try:
        from ..kernels import planes
    except ImportError:
        return None
    return planes


def _split(words: Words) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the top bytes of the rotated words, and all their other bytes."""
    width = words.dtype.itemsize
    if width == 1:
        return words, words[:0]
    loops = _loops() if width == 2 and words.flags.aligned else None
    if loops is not None:
        top, rest = np.empty(words.size, np.uint8), np.empty(words.size, np.uint8)
        loops.split(words, top, rest)
        return top, rest
    rotated = (words << 1) | (words >> (width * 8 - 1))
    columns = rotated.view(np.uint8).reshape(-1, width)
    return np.ascontiguousarray(columns[:, -1]), columns[:, :-1].reshape(-1)


def _join(top: NDArray[np.uint8], rest: NDArray[np.uint8], words: Words) -> None:
    """Undo `_split`: fill `words`."""
    width = words.dtype.itemsize
    loops = _loops() if width == 2 and words.flags.aligned else None
    if loops is not None:
        loops.join(top, rest, words)
        return
    columns = np.empty((words.size, width), np.uint8)
    columns[:, -1] = top
    columns[:, :-1] = rest.reshape(-1, width - 1)
    rotated = columns.reshape(-1).view(words.dtype)
    np.bitwise_or(rotated >> 1, rotated << (width * 8 - 1), out=words)
