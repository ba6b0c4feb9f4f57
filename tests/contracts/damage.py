"""Damaged records through a decoder: bits flipped, ends cut off, stretches overwritten, bytes invented.

    python -m tests.contracts.damage [--records 1000000] [--seed 1]      all codecs in turn

A decoder refuses them with CodecError or decodes them to something, and neither writes nor reads beyond its
arrays. What it writes beyond is seen by a guard behind the target. What it reads beyond is a crash: a record
stands at the very end of mapped memory, so that the next byte is unreadable.
"""

import argparse
import ctypes
import mmap
import random
import time
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.codecs.base import Codec, CodecError, DoesNotFit, Shape
from kvtier.tiers.codecs.registry import BY_NAME
from tests.contracts.kv_values import values_like_kv

GUARD = 256
_NO_ACCESS = 0


class Cliff:
    """Memory that ends at an unreadable page."""

    def __init__(self, capacity_bytes: int) -> None:
        self._size = -(-capacity_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self._size + mmap.PAGESIZE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if libc.mprotect(self._bytes.ctypes.data + self._size, mmap.PAGESIZE, _NO_ACCESS) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")

    def put(self, data: NDArray[np.uint8]) -> memoryview:
        """Return a copy of `data` that ends where memory does."""
        mine = self._bytes[self._size - data.size : self._size]
        mine[:] = data
        return mine.data


def damaged(good: NDArray[np.uint8], length: int, rng: random.Random) -> NDArray[np.uint8]:
    """Return a record with something wrong in its first `length` bytes."""
    bad = good.copy()
    start = rng.randrange(length)
    match rng.randrange(5):
        case 0:
            bad[start] ^= 1 << rng.randrange(8)
        case 1:
            return bad[:start]
        case 2:
            bad[start : start + rng.randrange(1, 64)] = rng.randrange(256)
        case 3:
            at = rng.randrange(min(length, 96))  # where lengths are
            bad[at : at + 4] = np.frombuffer(rng.randbytes(4), np.uint8)[: len(bad[at : at + 4])]
        case _:
            return np.frombuffer(rng.randbytes(rng.randrange(1, length)), np.uint8).copy()
    return bad


def decode_damaged(codec: Codec, shape: Shape, num_records: int, seed: int = 1) -> Counter[str]:
    """Decode damaged records of one codec; return how many were `refused` and `decoded`.

    Raises AssertionError, with the record's number, when a decoder wrote beyond its target."""
    payload = values_like_kv(shape, seed=5)
    good = np.zeros(shape.raw_bytes, np.uint8)
    try:
        length = codec.encode(shape, payload.data, good.data)
    except DoesNotFit:  # lz4 gains nothing on values like KV
        payload = np.resize(payload[:512], payload.size)
        length = codec.encode(shape, payload.data, good.data)
    good = good[: max(length, codec.stored_bound(shape))]
    cliff, found = Cliff(good.size), Counter[str]()
    target = np.full(shape.raw_bytes + GUARD, 0x5A, np.uint8)
    for number in range(num_records):
        stored = cliff.put(damaged(good, length, random.Random(f"{seed} {codec.name} {number}")))
        try:
            codec.decode(shape, stored.toreadonly(), target.data[:-GUARD])
            found["decoded"] += 1
        except CodecError:
            found["refused"] += 1
        if number % 64 == 0 or number == num_records - 1:
            assert (target[-GUARD:] == 0x5A).all(), f"{codec.name}: seed {seed}, record {number} or before"
    return found


def main() -> None:
    """Run all codecs in turn: of profiles one with all quantisers and one with transforms."""
    from tests.contracts.test_lossy_codecs import mixed, transformed  # which imports this module

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000, help="damaged records, over all codecs")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    shape = Shape(2, 2, 16, 5, 16, "bfloat16")
    codecs = [*(make() for make in BY_NAME.values()), mixed(shape), transformed(shape)]
    each = -(-options.records // len(codecs))
    for codec in codecs:
        began_at = time.perf_counter()
        found = decode_damaged(codec, shape, each, options.seed)
        print(
            f"{codec.name:12} {each} records, {dict(found)}, {time.perf_counter() - began_at:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
