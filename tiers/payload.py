"""Copies, hashes, or copies and hashes payloads in one pass.

All release the GIL where that pays. numpy does the copying because `copyto` runs libc's memcpy without
the GIL at 0.7 us a call; ctypes costs half a microsecond more. Below 32 KiB a plain slice assignment is
used: it keeps the GIL, but for less than 2 us, which is less than handing it over.

Rejected by measurement: splitting one large copy over threads (slower at 8 MiB, 1.3 times faster at
32 MiB, and both cores are busy with other fragments anyway); hashing after the whole copy (a 32 MiB
payload has left the cache by then: 12 instead of 17 GB/s). In C (`native`) each word is loaded once, stored
and hashed, at the speed of memcpy.
"""

import numpy as np
import xxhash

from ..native import native
from .base import Buffer

_SLICE_BYTES = 32 << 10
_DIGEST_BYTES = 16
MIN_NATIVE_BYTES = 241  # shorter payloads have another form of the hash
CHUNK_BYTES = 256 << 10  # a quarter of a common level 2 cache: the copy is still warm when it is hashed


def copy(into: Buffer, source: Buffer) -> None:
    """Copy `source` into `into`; both are contiguous bytes of equal length."""
    assert len(into) == len(source), f"{len(source)} bytes into {len(into)}"
    if len(into) <= _SLICE_BYTES:
        into[:] = source
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def checksum(buffer: Buffer) -> bytes:
    """Return the xxh3-128 of `buffer`, 16 bytes, in the canonical (big-endian) form."""
    return xxhash.xxh3_128_digest(buffer)


def copy_and_checksum_many(into: Buffer, source: Buffer, length: int) -> list[bytes]:
    """Copy `source`, payloads of `length` bytes back to back, and return the xxh3-128 of each *copy*.

    Few large copies instead of one per payload: below a megabyte Python takes longer than memcpy.
    """
    assert len(into) == len(source), f"{len(source)} bytes into {len(into)}"
    if native is not None and length >= MIN_NATIVE_BYTES:
        packed: bytes = native.copy_and_digest_many(into, source, length)
        return [packed[first : first + _DIGEST_BYTES] for first in range(0, len(packed), _DIGEST_BYTES)]
    step = max(1, CHUNK_BYTES // length) * length
    target = np.frombuffer(into, np.uint8)
    origin = np.frombuffer(source, np.uint8)
    digest = xxhash.xxh3_128_digest
    digests = []
    for start in range(0, len(into), step):
        end = min(start + step, len(into))
        np.copyto(target[start:end], origin[start:end])
        digests += [digest(into[first : first + length]) for first in range(start, end, length)]
    return digests


def copy_and_checksum(into: Buffer, source: Buffer) -> bytes:
    """Copy `source` into `into` and return the xxh3-128 of *the copy*.

    Never of `source`: that may be a client's staging extent, which the client can change while we
    copy. What was hashed is then exactly what is stored, whatever the client does.
    """
    assert len(into) == len(source), f"{len(source)} bytes into {len(into)}"
    if native is not None and len(into) >= MIN_NATIVE_BYTES:
        digest: bytes = native.copy_and_digest_many(into, source, len(into))
        return digest
    if len(into) <= CHUNK_BYTES:
        copy(into, source)
        return xxhash.xxh3_128_digest(into)
    target = np.frombuffer(into, np.uint8)
    origin = np.frombuffer(source, np.uint8)
    hasher = xxhash.xxh3_128()
    for start in range(0, len(into), CHUNK_BYTES):
        np.copyto(target[start : start + CHUNK_BYTES], origin[start : start + CHUNK_BYTES])
        hasher.update(into[start : start + CHUNK_BYTES])
    return hasher.digest()
