"""The kernel, its own source compiled for the host; the ring of its columns; the choice between it and a
batch."""

import ctypes
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.tiers.gpu.device.contract import CopyPieces
from kvtier.tiers.gpu.pages import kernels
from kvtier.tiers.gpu.pages.kernels import (
    NAME,
    SOURCE,
    PieceCopier,
    PieceKernel,
    Way,
    crossover,
    load,
    measured,
)
from tests.fakes.gpu.device import FakeDevice
from tests.fakes.gpu.streams import FakeStream

from .host_launch import HostLaunch

# What CUDA gives a kernel, as one thread after another sees it.
HOST = """
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;
struct alignas(16) uint4 { unsigned x, y, z, w; };
#define __global__
%s
extern "C" void run_grid(const unsigned long long* s, const unsigned long long* t, const long long* l, int n,
                         unsigned blocks, unsigned threads)
{
    blockDim.x = threads;
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            %s(s, t, l, n);
}
"""


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernel as a function of the host; sanitized, so that an access out of bounds or alignment ends
    it."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here to compile the kernel for the host")
    folder: Path = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(HOST % (SOURCE, NAME))
    library = folder / "kernel.so"
    flags = [
        "-O1",
        "-shared",
        "-fPIC",
        "-fsanitize=alignment",
        "-fno-sanitize-recover=all",
        "-Wall",
        "-Werror",
    ]
    subprocess.run([compiler, *flags, "-o", library, folder / "kernel.cpp"], check=True)
    return ctypes.CDLL(str(library)).run_grid


def columns_of(pieces: CopyPieces) -> list[Any]:
    return [ctypes.c_void_p(column.ctypes.data) for column in pieces]


@pytest.mark.parametrize("align", [1, 4, 16])
def test_every_byte_once_and_no_other(grid: Any, align: int) -> None:
    for seed in range(30):
        rng = random.Random(f"{align}/{seed}")
        source = np.frombuffer(rng.randbytes(1 << 16), np.uint8)
        target = np.full(1 << 17, 0xA5, np.uint8)
        expected = target.copy()
        sources, targets, lengths, at = [], [], [], -target.ctypes.data % 16
        for _ in range(rng.randrange(1, 40)):
            at += align * rng.randrange(0, 4)
            length = align * rng.randrange(1, 64)
            start = align * rng.randrange(0, 1000) + (-source.ctypes.data % 16)
            sources.append(source.ctypes.data + start)
            targets.append(target.ctypes.data + at)
            lengths.append(length)
            expected[at : at + length] = source[start : start + length]
            at += length
        pieces = CopyPieces(
            np.array(sources, np.uint64), np.array(targets, np.uint64), np.array(lengths, np.int64)
        )
        grid(*columns_of(pieces), len(lengths), rng.choice((1, 2, 5)), rng.choice((32, 64, 256)))
        assert (target == expected).all(), f"seed {seed}"


def pieces_between(device: FakeDevice, number: int, length: int) -> tuple[CopyPieces, Any, Any]:
    source, target = device.allocate(number * length), device.allocate(number * length)
    offsets = np.arange(number, dtype=np.uint64) * np.uint64(length)
    pieces = CopyPieces(
        np.uint64(source.address) + offsets[::-1],
        np.uint64(target.address) + offsets,
        np.full(number, length),
    )
    return pieces, source, target


def test_columns_are_not_reused_before_their_launch_is_done() -> None:
    device = FakeDevice(seed=4)
    launch = HostLaunch(device)
    kernel = PieceKernel(device, launch, slab_pieces=8)
    stream = device.take_stream()
    pieces, source, target = pieces_between(device, 100, 16)
    device.poke(source.address, bytes(range(100)) * 16)
    kernel.copy(stream, pieces)
    assert launch.seen == [8] * 4  # four slabs; the rest went as batches, because nothing has run yet
    device.run()
    kernel.copy(stream, pieces)
    assert len(launch.seen) == 8
    device.run()
    wanted = np.frombuffer(device.peek(source.address, 1600), np.uint8).reshape(100, 16)[::-1]
    assert device.peek(target.address, 1600) == wanted.tobytes()
    kernel.close()
    kernel.close()
    assert device.check_integrity() == []


def test_the_choice_follows_the_mean_piece() -> None:
    device = FakeDevice()
    launch = HostLaunch(device)
    copier = PieceCopier(PieceKernel(device, launch), {Way.UP: 64, Way.WITHIN: 32})
    stream = device.take_stream()
    ways = (Way.UP, 63, 2), (Way.UP, 64, 2), (Way.UP, 4096, 2), (Way.WITHIN, 63, 2), (Way.WITHIN, 31, 3)
    for way, length, launches in ((Way.UP, 16, 1), *ways, (Way.DOWN, 16, 3)):
        copier.copy(stream, pieces_between(device, 4, length)[0], way)
        device.run()
        assert len(launch.seen) == launches
    nothing = np.zeros(0, np.uint64)
    PieceCopier().copy(stream, pieces_between(device, 4, 16)[0], Way.UP)
    copier.copy(stream, CopyPieces(nothing, nothing, nothing.astype(np.int64)), Way.UP)
    device.run()
    copier.close()
    assert device.check_integrity() == []


def test_the_crossover_is_where_a_batch_catches_up() -> None:
    sizes = (256, 1024, 4096, 16384)
    assert crossover(lambda size: 1e-6 + 1 / size, lambda size: 1e-3, sizes) == 512
    assert crossover(lambda size: 2.0, lambda size: 1.0, sizes) == 32768
    assert crossover(lambda size: 1.0, lambda size: 1.0, sizes) == 0
    times = iter([9.0, 1.0, 1.0] * len(sizes))  # the first launch compiles
    assert crossover(lambda size: 2.0, lambda size: next(times), sizes) == 32768


class Slow(FakeDevice):
    """A device whose batches take longer than a kernel on the ways named."""

    def __init__(self, ways: set[Way]) -> None:
        super().__init__(is_live=True)
        self.ways, self.seen, self.largest = ways, set[Way](), 0
        self.is_launching = False

    def enqueue_copy(self, stream: FakeStream, pieces: CopyPieces) -> None:
        kinds = [self.memory.first_touching(int(at[0]), int(at[0]) + 1) for at in pieces[:2]]
        source, target = ("" if kind is None else kind.kind for kind in kinds)
        way = {("host", "device"): Way.UP, ("device", "host"): Way.DOWN}.get((source, target), Way.WITHIN)
        self.seen.add(way)
        self.largest = max(self.largest, len(pieces.lengths))
        if self.is_launching != (way in self.ways):
            clock.now_s += 1.0
        super().enqueue_copy(stream, pieces)


class Clock:
    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


clock = Clock()


class Launching(HostLaunch):
    def __call__(self, stream: Any, name: str, num_threads: int, arguments: Sequence[Any]) -> None:
        self.device.is_launching = True  # type: ignore[attr-defined]
        super().__call__(stream, name, num_threads, arguments)
        self.device.is_launching = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("ways", [{Way.UP}, {Way.WITHIN}, {Way.UP, Way.DOWN}])
def test_every_way_is_timed_by_itself_and_nothing_is_left(
    ways: set[Way], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is quicker from pinned memory says nothing of copies within the device."""
    monkeypatch.setattr(kernels, "MEASURED_BYTES", 1 << 18)
    monkeypatch.setattr(kernels, "MEASURED_PIECES", 64)
    monkeypatch.setattr(kernels, "time", clock)
    device = Slow(ways)
    copier = measured(device, Launching(device))
    assert device.seen == set(Way)
    assert device.largest == 64, "more than a driver is known to take at once would not be timed"
    always = 2 * max(kernels.SIZES)
    assert copier.kernel_below_bytes == {way: always if way in ways else 0 for way in Way}
    copier.close()
    assert not device.memory.regions
    device.shut_down()
    assert device.check_integrity() == []


def test_what_cannot_be_measured_is_copied_in_batches_and_nothing_is_left() -> None:
    full = FakeDevice(max_registered_bytes=1 << 20)
    assert measured(full, HostLaunch(full)).kernel is None
    full = FakeDevice(capacity_bytes=1 << 20)
    assert measured(full, HostLaunch(full)).kernel is None
    assert not full.memory.regions


def test_without_cuda_there_is_no_kernel() -> None:
    assert load(FakeDevice()) is None
