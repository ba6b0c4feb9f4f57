"""The primitives that touch bytes."""

import numpy as np
import pytest
import xxhash

from kvtier.tiers.payload import CHUNK_BYTES, checksum, copy, copy_and_checksum
from tests.tiers.helpers import make_payload

SIZES = [1, 4096, (32 << 10) - 1, (32 << 10) + 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5]


@pytest.mark.parametrize("length", SIZES)
def test_copy_and_hash(length: int) -> None:
    source = make_payload(1, length)
    into = memoryview(bytearray(length))
    copy(into, source)
    assert into == source
    into = memoryview(bytearray(length))
    assert copy_and_checksum(into, source) == checksum(source) == xxhash.xxh3_128(source).digest()
    assert into == source


@pytest.mark.parametrize("length", [4096, CHUNK_BYTES, 3 * CHUNK_BYTES])
def test_the_hash_is_of_the_copy(length: int) -> None:
    # The copy overlaps its source and so changes it, as a hostile client does at the worst moment.
    buffer = memoryview(bytearray(make_payload(1, length + 64)))
    into, source = buffer[:length], buffer[64:]
    digest = copy_and_checksum(into, source)
    assert digest == checksum(into)
    assert digest != checksum(source)


def test_lengths_that_differ_are_a_bug() -> None:
    for length in SIZES:
        with pytest.raises(AssertionError):
            copy_and_checksum(memoryview(bytearray(length)), memoryview(bytes(length + 1)))


def test_numpy_memory_is_accepted() -> None:
    source = np.arange(100_000, dtype=np.uint8)
    into = np.zeros_like(source)
    assert copy_and_checksum(into.data, source.data) == checksum(source.data)
    assert np.array_equal(into, source)
