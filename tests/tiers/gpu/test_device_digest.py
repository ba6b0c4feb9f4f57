"""The device's checksum: its own source run on the host, bit for bit what xxhash takes of the same bytes."""

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import xxhash

from kvtier.tiers.gpu.decode.digest import NUM_SLABS, DeviceDigest, digests_of
from kvtier.tiers.gpu.decode.digest_kernels import MIN_BYTES, NAMES, SOURCE

from .device_bench import DeviceBench
from .host_kernels import on_host
from .nvrtc import compiled

#: Around the borders of a stripe, of a block, and of what is hashed like this at all.
LENGTHS = [248, 256, 264, 1016, 1024, 1032, 1088, 2040, 2048, 2056, 9000, 65536, 65544, (1 << 20) + 24]


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[DeviceBench]:
    made = DeviceBench(lambda device: DeviceDigest(device, on_host(SOURCE, NAMES)), len(request.node.name))
    with closing(made) as bench:
        yield bench


@pytest.mark.parametrize("length", LENGTHS)
def test_the_same_as_on_the_host(bench: DeviceBench, length: int) -> None:
    payloads = [np.random.default_rng(length + i).bytes(length) for i in range(3)]
    ticket = bench.decoder.digest(bench.stream, [bench.place(payload) for payload in payloads], length)
    bench.finish()
    assert ticket is not None
    digests = digests_of(ticket)
    assert digests == [xxhash.xxh3_128_digest(payload) for payload in payloads]
    assert [int.from_bytes(d[8:], "big") for d in digests] == [xxhash.xxh3_64_intdigest(p) for p in payloads]


def test_every_bit_counts(bench: DeviceBench) -> None:
    """One flipped bit anywhere in a fragment is another digest: no part of it is left out."""
    length = 3 * 1024 + 136
    payload = np.random.default_rng(1).bytes(length)
    places = [bench.place(payload)]
    for at in range(0, length, 8):
        damaged = bytearray(payload)
        damaged[at + at // 8 % 8] ^= 1 << at // 64 % 8
        places.append(bench.place(bytes(damaged)))
    digests: list[bytes] = []
    for first in range(0, len(places), 200):
        ticket = bench.decoder.digest(bench.stream, places[first : first + 200], length)
        bench.finish()
        assert ticket is not None
        digests += digests_of(ticket)
    assert digests[0] == xxhash.xxh3_128_digest(payload)
    assert len(set(digests)) == len(places)


def test_what_is_hashed_is_what_is_there_when_the_stream_gets_there(bench: DeviceBench) -> None:
    length = 4096
    place = bench.place(bytes(length))
    ticket = bench.decoder.digest(bench.stream, [place], length)
    bench.device.poke(place, b"\x01" * length)  # before any time has passed
    bench.finish()
    assert ticket is not None
    assert digests_of(ticket) == [xxhash.xxh3_128_digest(b"\x01" * length)]


def test_lengths_that_are_hashed_otherwise_are_left_to_the_host() -> None:
    assert DeviceDigest.max_fragments(MIN_BYTES - 1) == DeviceDigest.max_fragments(4100) == 0
    assert DeviceDigest.max_fragments(65 << 20) == 0
    assert DeviceDigest.max_fragments(4096) == 256


def test_without_scratch_the_answer_is_none_and_not_a_wait(bench: DeviceBench) -> None:
    place = bench.place(bytes(512))
    tickets = [bench.decoder.digest(bench.stream, [place], 512) for _ in range(NUM_SLABS + 1)]
    assert tickets[-1] is None
    bench.finish()
    assert tickets[0] is not None
    tickets[0].results()
    again = bench.decoder.digest(bench.stream, [place], 512)
    assert again is not None
    bench.finish()


@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
def test_it_compiles_for_a_gpu(architecture: str) -> None:
    ptx = compiled(SOURCE, architecture)
    assert all(f".entry {name}" in ptx for name in NAMES)
