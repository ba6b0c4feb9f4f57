"""Warm extents, mapped into this process, and the proof that bytes read from them are the right ones.

Extents are mapped whole and on demand, with MAP_POPULATE, so that the first get pays for the page
tables once and later ones never fault. A mapping lives as long as anything views it: nothing here is
unmapped by hand, dropping the last reference does it, so a runtime that keeps an array past its lease reads
stale bytes, never a segmentation fault.

Slot headers are read as rows of 64-bit words: a whole batch is checked by a few numpy comparisons.
"""

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...v1.shm import MIN_SLOT_BYTES, PAGE_BYTES, SLOT_HEADER
from ..errors import Overloaded, broken_answer
from .buffers import address_of, copy_bytes

U8: TypeAlias = npt.NDArray[np.uint8]
U64: TypeAlias = npt.NDArray[np.uint64]
I64: TypeAlias = npt.NDArray[np.int64]

HEADER_BYTES = SLOT_HEADER.itemsize
# Columns of a header seen as words. They follow SLOT_HEADER; tests/clients/memory compares them.
GENERATION, IDENTITY, OFFSET, LENGTH, RAW_LENGTH, CHECK, HASH = range(7)
CHECKED_WORDS = HASH + 4  # up to the end of the prefix hash: compared before and after a copy
CHECKED_BYTES = CHECKED_WORDS * 8
_ONE, _HALF = np.uint64(1), np.uint64(32)


class Extent:
    """One mapped extent of `data_bytes` and the headers behind them (layout: v1/shm.py).

    Raises Unavailable when `memory` is too short.
    """

    __slots__ = ("address", "data", "data_bytes", "header_bytes", "headers", "whole")

    def __init__(self, memory: U8, data_bytes: int) -> None:
        num_slots = data_bytes // MIN_SLOT_BYTES
        if len(memory) < data_bytes + num_slots * HEADER_BYTES:
            raise broken_answer(f"an extent of {len(memory)} bytes, announced with {data_bytes} of data")
        table = memory[data_bytes : data_bytes + num_slots * HEADER_BYTES]
        self.whole = memory[: data_bytes + num_slots * HEADER_BYTES].data
        self.data = memory[:data_bytes]
        self.data_bytes = data_bytes
        self.headers: U64 = table.view("<u8").reshape(num_slots, HEADER_BYTES // 8)
        self.header_bytes = table.data  # slicing it costs a tenth of indexing the array
        self.address = address_of(memory)


Memory: TypeAlias = int | Extent | U8  # a file descriptor; or memory of this process (FakeAppliance)


class Wanted(NamedTuple):
    """Fragments to read, as columns of equal length; `places` as in v1/shm.py, NO_PLACE is allowed."""

    namespace_id: int
    places: I64
    names: U64  # prefix hashes, shape (fragments, 4)
    groups: U64
    lengths: U64
    generations: U64 | None = None  # None: any even one


class ExtentTable:
    """The extents mapped so far, by number. Grows only; a new connection starts a new table."""

    def __init__(self, extent_bytes: int) -> None:
        self.extent_bytes = extent_bytes
        self.mapped: dict[int, Extent] = {}
        self.memory: dict[int, memoryview] = {}  # the same, whole, for native code; of extents of that size

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Return those of `numbers` that are not mapped yet, each once."""
        return [number for number in dict.fromkeys(numbers) if number not in self.mapped]

    def add(self, number: int, memory: Memory) -> None:
        """Map extent `number`; takes ownership of a file descriptor."""
        if isinstance(memory, int):
            memory = Extent(map_memory(memory), self.extent_bytes)
        assert isinstance(memory, Extent)
        if self.mapped.setdefault(number, memory) is memory and memory.data_bytes == self.extent_bytes:
            self.memory[number] = memory.whole

    def add_all(self, numbers: Sequence[int], memory: Sequence[Memory]) -> None:
        """Map many extents; takes ownership of all file descriptors.

        Raises Overloaded when there is no room for one; those before it are mapped.
        """
        waiting = deque(zip(numbers, memory, strict=True))
        try:
            while waiting:
                self.add(*waiting.popleft())
        finally:
            for _, one in waiting:
                if isinstance(one, int):
                    os.close(one)

    def check(self, wanted: Wanted) -> tuple[npt.NDArray[np.bool_], U64, I64]:
        """Compare slot headers with what is wanted: generation even, identity, length.

        Return which fragments are right, their checked header words, and the addresses of their bytes.
        Places of extents that are not mapped are wrong.
        """
        headers, addresses = self._headers(wanted.places)
        right = (headers[:, GENERATION] & _ONE) == 0
        right &= headers[:, IDENTITY] == (np.uint64(wanted.namespace_id) | wanted.groups << _HALF)
        right &= (headers[:, LENGTH] == wanted.lengths) & (headers[:, RAW_LENGTH] == wanted.lengths)
        right &= (headers[:, HASH:CHECKED_WORDS] == wanted.names).all(axis=1)
        if wanted.generations is not None:
            right &= headers[:, GENERATION] == wanted.generations
        return right, headers, addresses

    def copy(self, wanted: Wanted, targets: I64) -> npt.NDArray[np.bool_]:
        """Copy fragments to the addresses `targets`; return which ones are proven right.

        `targets` has shape (fragments,) or, for fragments that go to pieces of equal length, (fragments,
        pieces). Headers are compared before the copy and once more after it. Memory at the target of a
        fragment that is not right is undefined.
        """
        right, before, sources = self.check(wanted)
        lengths = wanted.lengths.astype(np.int64)
        if right.all():
            _copy_runs(*_pieces_of(targets, sources, lengths))
        elif right.any():
            _copy_runs(*_pieces_of(targets[right], sources[right], lengths[right]))
        after, _ = self._headers(wanted.places)
        right &= (after == before).all(axis=1)
        return right

    def _headers(self, places: I64) -> tuple[U64, I64]:
        """Return the checked header words at `places` and where their data is; a generation of 1 for
        places that are not mapped."""
        headers = np.ones((len(places), CHECKED_WORDS), np.uint64)
        addresses = np.zeros(len(places), np.int64)
        numbers = places >> 32
        for number in dict.fromkeys(numbers.tolist()):
            extent = self.mapped.get(number)
            if extent is None:
                continue
            rows = np.flatnonzero(numbers == number)
            slots = places[rows] & 0xFFFF_FFFF
            if slots.max() >= len(extent.headers):
                rows = rows[slots < len(extent.headers)]
                slots = places[rows] & 0xFFFF_FFFF
            found = extent.headers[slots, :CHECKED_WORDS]
            room = np.uint64(extent.data_bytes)
            is_inside = found[:, LENGTH] <= room
            is_inside &= found[:, OFFSET] <= room - found[:, LENGTH]  # a sum could wrap
            found[~is_inside, GENERATION] = 1
            headers[rows] = found
            addresses[rows] = found[:, OFFSET].astype(np.int64) + extent.address
        return headers, addresses


def map_memory(memory: Memory, *, writable: bool = False) -> U8:
    """Return `memory` as an array of bytes.

    A file descriptor is mapped shared and prefaulted, then closed: the mapping keeps the memory. Raises
    Overloaded when this process has no room for it, Unavailable when the descriptor is of no memory, or of
    memory that could be cut short: reading behind its end would end this process with SIGBUS.
    """
    if isinstance(memory, np.ndarray):
        return memory
    assert isinstance(memory, int)
    try:
        num_bytes = os.fstat(memory).st_size // PAGE_BYTES * PAGE_BYTES
        if not num_bytes:
            raise broken_answer("a file descriptor without memory")
        if not _is_size_fixed(memory):
            raise broken_answer("shared memory that is not sealed against F_SEAL_SHRINK")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return np.frombuffer(mmap.mmap(memory, num_bytes, flags=flags, prot=protection), np.uint8)
    except OSError as problem:
        raise Overloaded(
            f"cannot map {num_bytes} bytes of shared memory here ({problem.strerror}); raise the limit of "
            "this process's address space (ulimit -v), or vm.max_map_count",
            reason="NO_ADDRESS_SPACE",
        ) from problem
    finally:
        os.close(memory)


def _is_size_fixed(descriptor: int) -> bool:
    """Whether memory cannot become shorter, as its seals say. Files and devices have none."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def _pieces_of(targets: I64, sources: I64, lengths: I64) -> tuple[I64, I64, I64]:
    """Return targets, sources and lengths of single pieces."""
    num_pieces = 1 if targets.ndim == 1 else targets.shape[1]
    if num_pieces == 1:
        return targets.reshape(-1), sources, lengths
    piece_bytes = lengths // num_pieces
    sources = sources[:, None] + piece_bytes[:, None] * np.arange(num_pieces)
    return targets.reshape(-1), sources.reshape(-1), np.repeat(piece_bytes, num_pieces)


def _copy_runs(targets: I64, sources: I64, lengths: I64) -> None:
    """Copy fragments; those that are neighbours on both sides are copied together."""
    apart = (sources[1:] != sources[:-1] + lengths[:-1]) | (targets[1:] != targets[:-1] + lengths[:-1])
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    sizes = np.add.reduceat(lengths, starts)
    for target, source, size in zip(
        targets[starts].tolist(), sources[starts].tolist(), sizes.tolist(), strict=True
    ):
        copy_bytes(target, source, size)
