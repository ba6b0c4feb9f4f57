"""Reads through a ring give what their twin gives, and the kernel writes nowhere else."""

import errno
import fcntl
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from kvtier.native import native
from kvtier.tiers.base import Buffer
from kvtier.tiers.cold import direct_io
from kvtier.tiers.cold.direct_io import MAX_READS, DirectIo, Read, RingIo


def _has_ring() -> bool:
    try:
        RingIo()
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _has_ring(), reason="not built, or this kernel refuses a ring")
SIZE = 200_000


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(random.Random(1).randbytes(SIZE))
    number = os.open(path, os.O_RDONLY)
    yield number
    os.close(number)


def results(io: DirectIo, reads: list[Read]) -> list[int]:
    """Return what each read says: bytes, or -errno."""
    found: dict[int, int] = {}
    with closing(io.read_many(reads)) as ended:
        for number, num_read in ended:
            assert number not in found
            found[number] = -(num_read.errno or 0) if isinstance(num_read, OSError) else num_read
    return [found[number] for number in range(len(reads))]


@pytest.mark.parametrize("seed", range(20))
def test_reads_are_the_twins(fd: int, seed: int) -> None:
    """Beyond the end, across it, of a file that is not open, into many buffers, into none."""
    dice, ring = random.Random(seed), RingIo()
    for count in (0, 1, 2, 7, MAX_READS):
        sizes = [
            [dice.choice((0, 1, 511, 4096, 30_000)) for _ in range(dice.randrange(5))] for _ in range(count)
        ]
        offsets = [dice.choice((0, dice.randrange(SIZE), SIZE - 3, SIZE, SIZE + 9, -1)) for _ in range(count)]
        files = [dice.choice((fd, fd, fd, fd, 999_999)) for _ in range(count)]
        memory = [[[bytearray(b"?" * size) for size in one] for one in sizes] for _ in range(2)]
        said = [
            results(
                io, [(f, o, tuple(map(memoryview, b))) for f, o, b in zip(files, offsets, mine, strict=True)]
            )
            for io, mine in ((DirectIo(), memory[0]), (ring, memory[1]))
        ]
        # A ring takes -1 for "where the file stands", and none of the store's places is negative.
        for number in range(count):
            if offsets[number] >= 0:
                assert said[0][number] == said[1][number], (files[number], offsets[number], sizes[number])
                assert memory[0][number] == memory[1][number]


def test_what_is_given_up_is_waited_for(fd: int) -> None:
    ring = RingIo()
    places: list[Buffer] = [memoryview(bytearray(50_000)) for _ in range(4)]
    reads: list[Read] = [(fd, 50_000 * number, (place,)) for number, place in enumerate(places)]
    first = ring.read_many(reads)
    next(first)
    with pytest.raises(ValueError, match="2 reads beside 3"):
        next(ring.read_many(reads[:2]))
    first.close()
    assert b"".join(places) == os.pread(fd, SIZE, 0)
    assert results(ring, reads) == [50_000] * 4


def test_buffers_are_held_until_the_last_read_has_ended(fd: int) -> None:
    assert native is not None
    ring, place = native.open_ring(4), bytearray(1000)
    native.begin_reads(ring, ((fd, 0, (place,)), (fd, 1000, (place,))))
    with pytest.raises(BufferError):
        place.append(0)
    assert [native.wait_read(ring)[1] for _ in range(2)] == [1000, 1000]
    assert native.wait_read(ring) is None
    place.append(0)
    native.begin_reads(ring, ((fd, 0, (place,)),))
    del ring  # hears of it first
    place.append(0)


def _begin_one_that_waits(fd: int) -> tuple[Any, list[bytearray], int]:
    """Return a ring with two reads, their memory, and the end of the pipe that the first waits for."""
    assert native is not None
    source, sink = os.pipe()
    ring, places = native.open_ring(2), [bytearray(9), bytearray(9)]
    assert native.begin_reads(ring, ((source, 0, (places[0],)), (fd, 9, (places[1],))))
    os.close(source)  # the ring has it open
    return ring, places, sink


def test_of_a_refused_ring_each_read_is_told_once_and_nothing_is_released(fd: int) -> None:
    assert native is not None
    before = set(os.listdir("/proc/self/fd"))
    ring, places, sink = _begin_one_that_waits(fd)
    for name in set(os.listdir("/proc/self/fd")) - before - {str(sink)}:
        with suppress(OSError):  # the one of the listing
            if "io_uring" in os.readlink(f"/proc/self/fd/{name}"):
                os.close(int(name))
                number = fcntl.fcntl(fd, fcntl.F_DUPFD, int(name))
                assert number == int(name)
    assert native.wait_read(ring) == (1, 9)
    assert native.wait_read(ring)[0] == 0
    assert native.wait_read(ring) is None
    io = RingIo()
    io._rings.ring = ring
    free = memoryview(bytearray(9))
    assert results(io, [(fd, 0, (free,))] * 2) == [9, 9]
    assert not native.begin_reads(ring, ((fd, 0, (free,)),) * 2)
    del ring, io
    for place in places:
        with pytest.raises(BufferError):
            place.append(0)
    os.fstat(number)  # another file by now
    os.close(number)
    os.close(sink)


def test_a_forked_child_takes_nothing_from_its_parent(fd: int) -> None:
    assert native is not None
    ring, places, sink = _begin_one_that_waits(fd)
    if (child := os.fork()) == 0:
        said = [native.begin_reads(ring, ()), *sorted(native.wait_read(ring) for _ in range(2))]
        del ring
        os._exit(said != [False, (0, -errno.ECANCELED), (1, -errno.ECANCELED)])
    assert os.waitpid(child, 0)[1] == 0
    os.write(sink, b"?" * 9)
    assert sorted(native.wait_read(ring) for _ in range(2)) == [(0, 9), (1, 9)]
    assert places[0] == b"?" * 9
    os.close(sink)


def test_of_no_reads_nothing_begins() -> None:
    assert native is not None
    ring = native.open_ring(2)
    assert not native.begin_reads(ring, ())
    assert native.wait_read(ring) is None


@pytest.mark.parametrize(
    "reads",
    [[], (1,), ((0, 0),), ((0, 0, [bytearray(1)]),), ((0, 0, (b"1",)),), ((0, 0, (None,)),)],
    ids=repr,
)
def test_what_makes_no_sense_is_refused(fd: int, reads: Any) -> None:
    assert native is not None
    ring, place = native.open_ring(2), bytearray(9)
    with pytest.raises((TypeError, ValueError, BufferError)):
        native.begin_reads(ring, reads)
    with pytest.raises(ValueError, match="3 reads beside 0"):
        native.begin_reads(ring, ((fd, 0, (place,)),) * 3)
    native.begin_reads(ring, ((fd, 0, (place,)),))
    assert native.wait_read(ring) == (0, 9)
    for number in (0, 65):
        with pytest.raises(ValueError, match="at a time"):
            native.open_ring(number)


def test_a_kernel_without_rings_is_served_by_preadv(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:

    class Without:
        @staticmethod
        def open_ring(number: int) -> None:
            raise OSError(errno.EPERM, "as in a container")

    io = direct_io.direct_io()
    assert io.backend == "direct, io_uring"
    monkeypatch.setattr(direct_io, "native", Without)
    place = memoryview(bytearray(9))
    with ThreadPoolExecutor(1) as pool:  # which has no ring yet
        assert pool.submit(results, io, [(fd, 0, (place,))] * 2).result() == [9, 9]
    for absent in (Without, None):
        monkeypatch.setattr(direct_io, "native", absent)
        assert direct_io.direct_io().backend == "direct"


def test_rings_of_all_threads_are_closed_with_the_store() -> None:
    def num_rings() -> int:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return sum("io_uring" in os.readlink(link) for link in links if link.is_symlink())

    before, io = num_rings(), RingIo()
    with ThreadPoolExecutor(1) as other:
        other.submit(io._ring).result()
        assert num_rings() == before + 2
        io.shut_down()
        assert num_rings() == before
