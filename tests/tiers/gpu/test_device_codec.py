"""The device's exact codecs: their own source run on the host, bit for bit what numba's loops do; and what it
refuses."""

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.tiers.codecs.base import Codec, CodecError, DoesNotFit, Shape
from kvtier.tiers.codecs.exact import exponents, float8
from kvtier.tiers.codecs.exact.exponents import Exponents
from kvtier.tiers.codecs.exact.float8 import Float8
from kvtier.tiers.codecs.trial import e4m3_of
from kvtier.tiers.gpu.decode import exponent_kernels, float8_kernels
from kvtier.tiers.gpu.decode.decoding import load_decoding
from kvtier.tiers.gpu.decode.exponents import DeviceExponents
from kvtier.tiers.gpu.decode.float8 import DeviceFloat8
from kvtier.tiers.gpu.decode.records import NUM_SLABS, Record
from kvtier.tiers.gpu.device.contract import Stream
from kvtier.tiers.gpu.pages import kernels as pieces
from tests.fakes.gpu.device import FakeDevice

from .device_bench import DeviceBench
from .host_kernels import HostKernels
from .nvrtc import compiled

SHAPES = [
    Shape(1, 2, 16, 8, 128, "bfloat16"),
    Shape(3, 2, 16, 2, 72, "bfloat16"),  # 2304 values a part: four blocks and a tail
    Shape(2, 1, 16, 1, 576, "bfloat16"),  # a joint latent
    Shape(1, 2, 10, 1, 160, "bfloat16"),  # three blocks and a short tail
    Shape(1, 2, 16, 8, 128, "float8_e4m3fn"),  # four blocks
    Shape(3, 2, 16, 4, 72, "float8_e4m3fn"),  # 4608 values a part: a block and two units
    Shape(2, 1, 16, 1, 580, "float8_e5m2"),  # a joint latent: two blocks, four units and a tail
    Shape(1, 2, 10, 1, 160, "float8_e5m2"),  # six units and a tail
]
Kernels = dict[bool, HostKernels]  # by whether they are of bfloat16


def is_wide(shape: Shape) -> bool:
    return shape.dtype == "bfloat16"


def host_codec(shape: Shape) -> Codec:
    return Exponents() if is_wide(shape) else Float8()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return {
        one is exponent_kernels: HostKernels(one.SOURCE, one.NAMES, tmp_path_factory.mktemp("kernels"))
        for one in (exponent_kernels, float8_kernels)
    }


def bench_of(kernels: Kernels, shape: Shape, seed: int) -> DeviceBench:
    make = DeviceExponents if is_wide(shape) else DeviceFloat8
    return DeviceBench(lambda device: make(device, kernels[is_wide(shape)]), seed)


@pytest.fixture(params=SHAPES, ids=[f"{s.dtype}-{s.num_values}x{s.num_layers}" for s in SHAPES])
def shape(request: pytest.FixtureRequest) -> Shape:
    chosen: Shape = request.param
    return chosen


@pytest.fixture
def bench(shape: Shape, kernels: Kernels) -> Iterator[DeviceBench]:
    with closing(bench_of(kernels, shape, SHAPES.index(shape))) as bench:
        yield bench


def padded(shape: Shape, stored: bytes | None) -> bytes:
    """Return a record as long as a slot for it."""
    return (stored or b"").ljust(-(-host_codec(shape).stored_bound(shape) // 8) * 8, b"\0")


def payloads_of(shape: Shape, seed: int) -> list[bytes]:
    """Ordinary KV, and what nobody expects: noise, one value, zeros, NaNs, windows at both ends."""
    rng = np.random.default_rng(seed)

    def bfloat16(values: NDArray[Any]) -> bytes:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()

    count = shape.num_values
    usual = rng.normal(0, 1, count)
    if not is_wide(shape):
        return payloads_of_fp8(shape, rng)
    heavy = usual * np.where(rng.random(count) < 0.02, 1e-9, 1.0)
    edges = rng.choice(np.array([0x0000, 0x8000, 0x7F80, 0xFFFF, 0x007F, 0x0080, 0x3F80], np.uint16), count)
    low = (rng.integers(0, 9, count).astype(np.uint16) << 7) | rng.integers(0, 128, count).astype(np.uint16)
    num_parts = shape.num_layers * shape.num_planes
    num_blocks = count // num_parts // 512
    step = num_blocks - 1 + num_blocks % 2
    rows = np.arange(count // num_parts) // 64
    is_sampled = np.tile((rows % max(step, 1) == 0) & (rows < 8 * step), num_parts)
    sampled = np.where(is_sampled, 1e-20, 1.0)  # the window is found by these alone
    return [
        bfloat16(sampled),
        bfloat16(usual),
        bfloat16(np.where(np.arange(count) % 97 == 5, 3e38, usual)),  # and not near the largest exponent
        bfloat16(heavy),
        bytes(2 * count),
        b"\x80\x3f" * count,
        edges.tobytes(),
        low.tobytes(),
        rng.bytes(2 * count),
    ]


def payloads_of_fp8(shape: Shape, rng: np.random.Generator) -> list[bytes]:
    """Ordinary KV, with bytes of noise in it, one value, all of them; noise alone does not fit."""
    count = shape.num_values
    usual = e4m3_of(rng.normal(0, 1, count).astype(np.float32))
    noisy = np.where(rng.random(count) < 0.02, rng.integers(0, 256, count), usual).astype(np.uint8)
    few = rng.choice(np.array([0x38, 0xB8, 0x40, 0x30], np.uint8), count)
    found = [usual, noisy, few, np.zeros(count, np.uint8), np.full(count, 0xFF, np.uint8)]
    return [payload.tobytes() for payload in [*found, rng.integers(0, 256, count).astype(np.uint8)]]


def encoded(shape: Shape, payload: bytes, room: int = 0) -> bytes | None:
    """Encode on the host into `room` bytes, or as many as is usual; None when it does not fit."""
    into = bytearray(room or host_codec(shape).stored_bound(shape))
    try:
        return bytes(into[: host_codec(shape).encode(shape, memoryview(payload), memoryview(into))])
    except DoesNotFit:
        return None


def decoded(shape: Shape, stored: bytes) -> bytes | None:
    """Decode on the host; None when it is refused."""
    into = bytearray(shape.raw_bytes)
    try:
        host_codec(shape).decode(shape, memoryview(stored), memoryview(into))
    except CodecError:
        return None
    return bytes(into)


def test_decodes_what_the_host_encoded(bench: DeviceBench, shape: Shape) -> None:
    payloads = [p for seed in range(3) for p in payloads_of(shape, seed) if encoded(shape, p)]
    stored = [padded(shape, encoded(shape, p)) for p in payloads]
    status, raw = bench.decode(host_codec(shape), shape, stored)
    assert status == [0] * len(payloads)
    assert raw == payloads


def test_refuses_exactly_what_the_host_refuses(bench: DeviceBench, shape: Shape) -> None:
    """Damaged in the head, in the planes, in the list: the same verdict and, if it passes, the same bytes."""
    rng = random.Random(7)
    good = [s for p in payloads_of(shape, 9) if (s := encoded(shape, p)) is not None]
    head_bytes = exponents.Layout(shape).blocks_at if is_wide(shape) else float8.Float8Layout(shape).units_at
    damaged = []
    for number in range(60):
        stored = bytearray(padded(shape, rng.choice(good)))
        end = head_bytes if number % 2 else len(stored)
        for _ in range(rng.choice((1, 1, 3))):
            stored[rng.randrange(end)] = rng.randrange(256)
        if number % 5 == 0:  # the counts are right in total and wrong in their parts
            stored[8:12], stored[16:20] = stored[16:20], stored[8:12]
        damaged.append(bytes(stored))
    status, raw = bench.decode(host_codec(shape), shape, damaged)
    expected = [decoded(shape, stored) for stored in damaged]
    assert [wrong == 0 for wrong in status] == [payload is not None for payload in expected]
    assert [r for r, e in zip(raw, expected, strict=True) if e is not None] == [e for e in expected if e]
    assert any(status), "none of them was refused: this test shows nothing"


def test_not_a_byte_more_than_there_is(bench: DeviceBench, shape: Shape) -> None:
    payload = payloads_of(shape, 5)[1]
    stored = encoded(shape, payload, 2 * len(payload))
    assert stored is not None
    assert bench.decode(host_codec(shape), shape, [stored]) == ([0], [payload])
    assert bench.decode(host_codec(shape), shape, [stored[:-1]])[0] == [1]


def test_scratch_is_bounded_and_comes_back(kernels: Kernels) -> None:
    shape = SHAPES[0]
    bench = bench_of(kernels, shape, 3)
    stored = padded(shape, encoded(shape, payloads_of(shape, 1)[1]))
    record = Record(bench.place(stored), len(stored), bench.place(b"", shape.raw_bytes))
    tickets = [bench.decoder.decode(bench.stream, Exponents(), shape, [record]) for _ in range(NUM_SLABS)]
    assert None not in tickets
    assert bench.decoder.decode(bench.stream, Exponents(), shape, [record]) is None
    bench.finish()
    for ticket in tickets:
        assert ticket is not None
        assert ticket.results().tolist() == [0]
    assert bench.decoder.decode(bench.stream, Exponents(), shape, [record]) is not None
    bench.finish()
    bench.close()


def test_what_it_does_not_take() -> None:
    device = FakeDevice()

    def never(stream: Stream, name: str, num_threads: int, arguments: Sequence[Any]) -> None:
        raise AssertionError(name)

    codec = DeviceExponents(device, never)
    wide, too_long = Exponents(), Shape(1, 2, 1 << 14, 8, 512, "bfloat16")
    assert codec.limits(wide, SHAPES[0]).max_fragments == 256
    assert codec.limits(wide, SHAPES[0]._replace(dtype="float16")).max_fragments == 0
    assert codec.limits(wide, too_long).max_fragments == 0, "longer than a call takes"
    codec.slabs.close()
    narrow = DeviceFloat8(device, never)
    assert narrow.limits(Float8(), SHAPES[4]).max_fragments == 256
    assert narrow.limits(Float8(), SHAPES[0]).max_fragments == 0
    narrow.slabs.close()
    assert load_decoding(device) is None, "no compiler"


@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
@pytest.mark.parametrize(
    ("source", "names"),
    [
        (exponent_kernels.SOURCE, exponent_kernels.NAMES),
        (float8_kernels.SOURCE, float8_kernels.NAMES),
        (pieces.SOURCE, (pieces.NAME,)),
    ],
    ids=["exponents", "float8", "pieces"],
)
def test_the_source_compiles_for_gpus(source: str, names: tuple[str, ...], architecture: str) -> None:
    """By NVRTC, which needs no driver, where its library is installed."""
    ptx = compiled(source, architecture)
    assert all(f".entry {name}(" in ptx for name in names)
