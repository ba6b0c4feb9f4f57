"""The kernel, its own source compiled for the host; the ring of its columns; the choice between it and a
batch."""

import ctypes
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.tiers.gpu import kernels
from kvtier.tiers.gpu.device import Pieces
from kvtier.tiers.gpu.fake import FakeDevice
from kvtier.tiers.gpu.kernels import (
    NAME,
    SOURCE,
    PieceCopier,
    PieceKernel,
    crossover,
    load,
    measured,
)

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


def columns_of(pieces: Pieces) -> list[Any]:
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
        pieces = Pieces(
            np.array(sources, np.uint64), np.array(targets, np.uint64), np.array(lengths, np.int64)
        )
        grid(*columns_of(pieces), len(lengths), rng.choice((1, 2, 5)), rng.choice((32, 64, 256)))
        assert (target == expected).all(), f"seed {seed}"


def pieces_between(device: FakeDevice, number: int, length: int) -> tuple[Pieces, Any, Any]:
    source, target = device.allocate(number * length), device.allocate(number * length)
    offsets = np.arange(number, dtype=np.uint64) * np.uint64(length)
    pieces = Pieces(
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
    assert stream is not None
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
    copier = PieceCopier(PieceKernel(device, launch), kernel_below_bytes=64)
    stream = device.take_stream()
    assert stream is not None
    for length, launches in ((16, 1), (63, 2), (64, 2), (4096, 2)):
        copier.copy(stream, pieces_between(device, 4, length)[0])
        device.run()
        assert len(launch.seen) == launches
    nothing = np.zeros(0, np.uint64)
    PieceCopier().copy(stream, pieces_between(device, 4, 16)[0])
    copier.copy(stream, Pieces(nothing, nothing, nothing.astype(np.int64)))
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


def test_both_ways_are_timed_at_start_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MEASURED_BYTES", 1 << 18)
    device = FakeDevice(is_live=True)
    launch = HostLaunch(device)
    copier = measured(device, launch)
    assert launch.seen
    assert copier.kernel is not None
    copier.close()
    assert not device.memory.regions
    device.shut_down()
    assert device.check_integrity() == []
    full = FakeDevice(max_registered_bytes=1 << 20)
    assert measured(full, HostLaunch(full)).kernel is None


def test_without_cuda_there_is_no_kernel() -> None:
    assert load(FakeDevice()) is None
