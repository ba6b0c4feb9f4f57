"""Direct I/O: the few system calls of the cold store, and aligned memory for what they need.

`os.preadv` and `os.pwritev` with O_DIRECT, from the caller's worker thread: they release the GIL, need no
library, move bytes between a segment file and the warm pool's own pages, and flush one record alone with
RWF_DSYNC. io_uring from Python was rejected: its binding holds the GIL while it waits.

`DirectIo` is a class so that tests can hand the store one that fails at the N-th call, and so that a file
system without O_DIRECT can be served by `BufferedIo`.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ...v1.shm import PAGE_BYTES, slot_of
from ..base import Buffer, Cause, CopyError
from ..durable import cause_of
from .log import record_bytes

IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX"))
MAX_IOVECS_PER_RECORD = 3  # header page, whole pages, last page
MAX_RUN_BYTES = 8 << 20  # of one system call; more gains nothing and delays the others
SCRATCH_BYTES = 2 << 20


class DirectIo:
    """System calls on files opened past the page cache. Raises OSError; thread-safe."""

    backend = "direct"

    def open(self, path: Path, *, direct: bool = True) -> int:
        """Open `path` for reading and writing, created when missing. Never follows a link."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Reserve the file's blocks, so that later writes cannot meet a full disk."""
        os.posix_fallocate(fd, 0, num_bytes)

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Fill `buffers` in turn from `offset`; return the bytes read."""
        return os.preadv(fd, buffers, offset)

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
    expected = sum(len(buffer) for buffer in buffers)
    try:
        num_read = io.read(fd, buffers, offset)
    except OSError as error:
        raise CopyError(cause_of(error), f"read of {expected} bytes: {error.strerror}") from error
    if num_read != expected:
        raise CopyError(Cause.SHORT_TRANSFER, f"read {num_read} of {expected} bytes")


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


def offset_of(place: int) -> int:
    """Return the byte offset of a record in its segment file."""
    return slot_of(place) * PAGE_BYTES
