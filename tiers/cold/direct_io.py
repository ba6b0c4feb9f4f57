"""Direct I/O: the few system calls of the cold store, and aligned memory for what they need.

`os.preadv` and `os.pwritev` with O_DIRECT, from the caller's worker thread: they release the GIL, need no
library, move bytes between a segment file and the warm pool's own pages, and flush one record alone with
RWF_DSYNC.

Reads that are no neighbours go through an io_uring, where the kernel has one to give (`RingIo`): all of a
group are at the disk while the first is verified. Writes do not: one call carries a whole run, and nothing is
done between them. A binding of liburing was rejected: it holds the GIL while it waits.

`DirectIo` is a class so that tests can hand the store one that fails at the N-th call, and so that a file
system without O_DIRECT can be served by `BufferedIo`.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ...native import native
from ...v1.shm import PAGE_BYTES, slot_of
from ..base import Buffer, Cause, CopyError
from ..durable import cause_of
from .log import record_bytes

IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX"))
MAX_IOVECS_PER_RECORD = 3  # header page, whole pages, last page
MAX_RUN_BYTES = 8 << 20  # of one system call; more gains nothing and delays the others
SCRATCH_BYTES = 2 << 20
MAX_READS = 32  # at a time, of one thread

Read: TypeAlias = tuple[int, int, tuple[Buffer, ...]]  # file, offset, what to fill in turn
Ended: TypeAlias = Generator[tuple[int, int | OSError], None, None]  # which one, and the bytes read


class DirectIo:
    """System calls on files opened past the page cache. Raises OSError; thread-safe."""

    backend = "direct"
    _direct = os.O_DIRECT

    def open(self, path: Path, *, direct: bool = True) -> int:
        """Open `path` for reading and writing, created when missing. Never follows a link."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags | (self._direct if direct else 0), 0o600)

    def open_to_read(self, path: Path) -> int:
        """Open `path` for reading only, which a read-only file system allows, too."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | self._direct)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Reserve the file's blocks, so that later writes cannot meet a full disk."""
        os.posix_fallocate(fd, 0, num_bytes)

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Fill `buffers` in turn from `offset`; return the bytes read."""
        return os.preadv(fd, buffers, offset)

    def read_many(self, reads: Sequence[Read]) -> Ended:
        """Yield the place of each of `reads` when it has ended, and the bytes read or why none were.
        At most MAX_READS. To be closed before any of the memory is used otherwise."""
        for number, (fd, offset, buffers) in enumerate(reads):
            try:
                yield number, self.read(fd, buffers, offset)
            except OSError as error:
                yield number, error

    def write(self, fd: int, buffers: Sequence[Buffer | bytes], offset: int, *, durable: bool = False) -> int:
        """Write `buffers` in turn at `offset`; return the bytes written.
        `durable`: on the medium when this returns."""
        return os.pwritev(fd, buffers, offset, os.RWF_DSYNC if durable else 0)

    def sync(self, fd: int) -> None:
        """Flush the file's data. After an error its unflushed data must be considered lost."""
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        """Close the file."""
        os.close(fd)

    def shut_down(self) -> None:
        """End what serves the calls. The files must be closed. Idempotent."""


class RingIo(DirectIo):
    """`DirectIo` with a ring of the kernel's for each thread. Raises OSError where there is none."""

    backend = "direct, io_uring"

    def __init__(self) -> None:
        if native is None:
            raise OSError(errno.ENOSYS, "native code is missing")
        self._rings = threading.local()
        self._rings.ring = native.open_ring(MAX_READS)

    def read_many(self, reads: Sequence[Read]) -> Ended:
        """See DirectIo.read_many: all are begun at once, and end in any order."""
        ring = self._ring() if len(reads) > 1 else None
        if native is None or ring is None or not native.begin_reads(ring, tuple(reads)):
            yield from super().read_many(reads)
            return
        try:
            while (ended := native.wait_read(ring)) is not None:
                number, num_read = ended
                yield number, OSError(-num_read, os.strerror(-num_read)) if num_read < 0 else num_read
        finally:
            while native.wait_read(ring) is not None:  # the kernel writes there until then
                pass

    def shut_down(self) -> None:
        """See DirectIo.shut_down: all threads' rings are closed."""
        self._rings = threading.local()

    def _ring(self) -> Any:
        """Return the calling thread's, None where it gets none."""
        if native is not None and not hasattr(self._rings, "ring"):
            self._rings.ring = None
            with suppress(OSError):
                self._rings.ring = native.open_ring(MAX_READS)
        return self._rings.ring


def direct_io() -> DirectIo:
    """Return the quicker one that there is."""
    with suppress(OSError):
        return RingIo()
    return DirectIo()


def supports_direct(directory: Path) -> bool:
    """Whether files in `directory` can be read and written past the page cache. Tries it."""
    probe = directory / f".direct-probe-{os.getpid()}"
    page = memoryview(mmap.mmap(-1, PAGE_BYTES))
    io = DirectIo()
    try:
        fd = io.open(probe)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    try:
        return io.write(fd, [page], 0) == PAGE_BYTES and io.read(fd, [page], 0) == PAGE_BYTES
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        io.close(fd)
        probe.unlink()


def write_fully(
    io: DirectIo, fd: int, buffers: Sequence[Buffer | bytes], offset: int, *, durable: bool = False
) -> None:
    """Write all of `buffers` in one call. Raises CopyError:
    a short write is a failed one, its space is abandoned rather than trusted."""
    expected = sum(len(buffer) for buffer in buffers)
    try:
        written = io.write(fd, buffers, offset, durable=durable)
    except OSError as error:
        raise CopyError(cause_of(error), f"write of {expected} bytes: {error.strerror}") from error
    if written != expected:
        raise CopyError(Cause.SHORT_TRANSFER, f"wrote {written} of {expected} bytes")


def read_fully(io: DirectIo, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Fill all of `buffers` in one call. Raises CopyError."""
    try:
        num_read: int | OSError = io.read(fd, buffers, offset)
    except OSError as error:
        num_read = error
    if cause := read_cause(num_read, buffers):
        raise CopyError(cause, f"read of {sum(map(len, buffers))} bytes: {num_read}")


def read_cause(num_read: int | OSError, buffers: Sequence[Buffer]) -> Cause | None:
    """Return why what was read is not all of `buffers`, None where it is."""
    if isinstance(num_read, OSError):
        return cause_of(num_read)
    return None if num_read == sum(map(len, buffers)) else Cause.SHORT_TRANSFER


def is_aligned(view: Buffer) -> bool:
    """Whether direct I/O can use `view` as it is."""
    if view.readonly:
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    else:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return bool(address % PAGE_BYTES == 0)


class Scratch(threading.local):
    """Page-aligned memory of one thread: header pages, last pages, bounce buffers.

    Handed out from the front, all taken back at once by `reset`. Grows to what the largest run needs: at
    most MAX_RUN_BYTES, or one record where that is larger.
    """

    def __init__(self) -> None:
        self._memory = memoryview(b"")
        self._next = 0

    def reset(self, num_bytes: int) -> None:
        """Take everything back and make room for `num_bytes`, in whole pages."""
        self._next = 0
        if len(self._memory) < num_bytes:
            self._memory = memoryview(mmap.mmap(-1, max(num_bytes, SCRATCH_BYTES)))

    def abandon(self) -> None:
        """Use other memory from now on: a ring that is lost may still write into this."""
        self._memory = memoryview(b"")

    def take(self, num_bytes: int) -> Buffer:
        """Return the next `num_bytes`, whole pages, with whatever they held before."""
        start, self._next = self._next, self._next + num_bytes
        assert num_bytes % PAGE_BYTES == 0
        assert self._next <= len(self._memory), "reset() was told too little"
        return self._memory[start : self._next]


def runs_of(places: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indexes of records that one system call can move: adjacent on disk, within the limits."""
    run: list[int] = []
    run_bytes = 0
    next_place = -1
    for index in sorted(range(len(places)), key=places.__getitem__):
        place, num_bytes = places[index], record_bytes(lengths[index])
        joins = (
            place == next_place
            and run_bytes + num_bytes <= MAX_RUN_BYTES
            and (len(run) + 1) * MAX_IOVECS_PER_RECORD <= IOV_MAX
        )
        if run and not joins:
            yield run
            run, run_bytes = [], 0
        run.append(index)
        run_bytes += num_bytes
        next_place = place + num_bytes // PAGE_BYTES
    if run:
        yield run


def groups_of(runs: Iterator[list[int]], lengths: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield the runs that are read at the same time: some memory's worth, and as many as a ring takes."""
    group: list[list[int]] = []
    group_bytes = 0
    for run in runs:
        num_bytes = sum(record_bytes(lengths[index]) for index in run)
        if group and (group_bytes + num_bytes > MAX_RUN_BYTES or len(group) == MAX_READS):
            yield group
            group, group_bytes = [], 0
        group.append(run)
        group_bytes += num_bytes
    if group:
        yield group


def offset_of(place: int) -> int:
    """Return the byte offset of a record in its segment file."""
    return slot_of(place) * PAGE_BYTES
