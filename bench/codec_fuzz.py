"""`python -m bench.codec_fuzz [--records 1000000] [--seed 1]`: damaged records through every decoder.

Bits flipped, ends cut off, stretches overwritten, bytes invented: a decoder refuses them with CodecError or
decodes them to something, and does neither write nor read beyond its arrays. What it writes beyond is seen
by guards behind the target; what it reads beyond would be a crash, or is caught by placing the record at the
very end of mapped memory, so that the next byte is unreadable.

Exit status 1, and the seed of the record, for whatever else happens. The tests do two thousand of these.
"""

import argparse
import ctypes
import mmap
import random
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bench.machine import print_machine
from kvtier.tiers.codecs.base import Codec, CodecError, DoesNotFit, Shape
from kvtier.tiers.codecs.registry import BY_NAME
from tests.contracts.kv_values import values_like_kv
from tests.contracts.test_lossy_codecs import mixed, transformed

SHAPE = Shape(2, 2, 16, 5, 16, "bfloat16")
GUARD = 256
PAGE = mmap.PAGESIZE
_NO_ACCESS = 0


class Cliff:
    """Memory that ends at an unreadable page: reading past its end faults."""

    def __init__(self, capacity_bytes: int) -> None:
        self._size = -(-capacity_bytes // PAGE) * PAGE
        self._map = mmap.mmap(-1, self._size + PAGE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if libc.mprotect(self._bytes.ctypes.data + self._size, PAGE, _NO_ACCESS) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")

    def put(self, data: NDArray[np.uint8]) -> memoryview:
        """Return a copy of `data` that ends where memory does."""
        mine = self._bytes[self._size - data.size : self._size]
        mine[:] = data
        return mine.data


def damaged(good: NDArray[np.uint8], length: int, rng: random.Random) -> NDArray[np.uint8]:
    """Return a record with something wrong with it."""
    match rng.randrange(5):
        case 0:
            bad = good.copy()
            bad[rng.randrange(length)] ^= 1 << rng.randrange(8)
        case 1:
            bad = good[: rng.randrange(1, length)].copy()
        case 2:
            bad = good.copy()
            start = rng.randrange(length)
            bad[start : start + rng.randrange(1, 64)] = rng.randrange(256)
        case 3:
            bad = good.copy()
            at = rng.randrange(min(length, 96))  # where lengths are
            bad[at : at + 4] = np.frombuffer(rng.randbytes(4), np.uint8)[: len(bad[at : at + 4])]
        case _:
            bad = np.frombuffer(rng.randbytes(rng.randrange(1, length)), np.uint8).copy()
    return bad


def fuzz(name: str, codec: Codec, num_records: int, seed: int) -> Counter[str]:
    """Decode damaged records of one codec; return what happened how often. Raises AssertionError."""
    payload = values_like_kv(SHAPE, seed=5)
    good = np.zeros(SHAPE.raw_bytes, np.uint8)
    try:
        length = codec.encode(SHAPE, payload.data, good.data)
    except DoesNotFit:  # lz4 gains nothing on values like KV
        payload = np.resize(payload[:512], payload.size)
        length = codec.encode(SHAPE, payload.data, good.data)
    good = good[: max(length, codec.stored_bound(SHAPE))]
    cliff = Cliff(good.size)
    target = np.full(SHAPE.raw_bytes + GUARD, 0x5A, np.uint8)
    found: Counter[str] = Counter()
    for number in range(num_records):
        rng = random.Random(f"{seed} {name} {number}")
        stored = cliff.put(damaged(good, length, rng))
        try:
            codec.decode(SHAPE, stored.toreadonly(), target.data[:-GUARD])
            found["decoded"] += 1
        except CodecError:
            found["refused"] += 1
        if number % 64 == 0:
            assert (target[-GUARD:] == 0x5A).all(), f"{name}: record {number} of seed {seed} wrote beyond"
    assert (target[-GUARD:] == 0x5A).all(), f"{name}: seed {seed} wrote beyond its target"
    return found


def makers() -> dict[str, Callable[[], Codec]]:
    """Return every codec there is, by name; of profiles one with all quantisers and one with transforms."""
    return {
        **BY_NAME,
        "profiled, quantised": lambda: mixed(SHAPE),
        "profiled, transform": lambda: transformed(SHAPE),
    }


def main() -> None:
    """Run the fuzzer on all codecs in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000, help="damaged records, over all codecs")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print_machine()
    codecs = makers()
    each = -(-options.records // len(codecs))
    for name, make in codecs.items():
        began_at = time.perf_counter()
        found = fuzz(name, make(), each, options.seed)
        seconds = time.perf_counter() - began_at
        print(f"{name:22} {each} records, {dict(found)}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
