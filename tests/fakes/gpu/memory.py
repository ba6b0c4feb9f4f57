"""The memory of a FakeDevice: real host addresses, so that a copy is a memmove and a wild one is noticed.

Allocations are memfds of their own, like CUDA's exportable allocations: another process of this host opens
one through /proc by the 64 bytes of its handle, and nothing outlives a killed process. Named files in
/dev/shm were rejected because they do. Every address a piece names must lie in one region that is alive:
device memory, memory opened from elsewhere, or registered host memory.
"""

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.base import Buffer
from kvtier.tiers.gpu.device.contract import CopyPieces, DeviceError, DeviceFault, DeviceMemory
from kvtier.tiers.memory import memfd
from kvtier.v1.shm import PAGE_BYTES

HANDLE_BYTES = 64  # as CUDA's
_HANDLE = struct.Struct("<8sIIQQ")  # magic, pid, descriptor, inode, bytes
_MAGIC = b"kvt-fake"

Bounds = tuple[NDArray[np.uint64], NDArray[np.uint64]]  # starts, ends


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that pieces may name: `kind` is `device`, `opened` or `host`."""

    address: int
    num_bytes: int
    kind: str
    is_read_only: bool = False
    descriptor: int = -1
    keeper: Any = None  # what keeps the bytes mapped: a mapping, or a view of the caller's buffer


def bounds_of(starts: NDArray[np.uint64], lengths: NDArray[np.int64]) -> Bounds:
    """Return [start, end) of each piece."""
    return starts, starts + lengths.astype(np.uint64)


def pack_handle(descriptor: int, num_bytes: int) -> bytes:
    """Return the handle by which another process finds this descriptor's file."""
    packed = _HANDLE.pack(_MAGIC, os.getpid(), descriptor, os.fstat(descriptor).st_ino, num_bytes)
    return packed.ljust(HANDLE_BYTES, b"\0")


def open_handle(handle: bytes) -> tuple[int, mmap.mmap]:
    """Return (descriptor, mapping) of the file that `handle` names. Raises DeviceError (REFUSED)."""
    if len(handle) != HANDLE_BYTES or not handle.startswith(_MAGIC):
        raise DeviceError(DeviceFault.REFUSED, "this is no handle of a fake device")
    _, pid, number, inode, num_bytes = _HANDLE.unpack_from(handle)
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise DeviceError(
            DeviceFault.REFUSED, f"process {pid} does not share it: {error.strerror}"
        ) from error
    status = os.fstat(descriptor)
    if status.st_ino != inode or status.st_size != num_bytes:
        os.close(descriptor)
        raise DeviceError(DeviceFault.REFUSED, f"process {pid} has freed it")
    return descriptor, mmap.mmap(descriptor, num_bytes)


class FakeMemory:
    """Regions of one device, and their limits. Not thread-safe: the device holds its lock.

    Devices `beside` each other see each other's registered host memory, and each other's allocations once
    they `reached` them.
    """

    def __init__(
        self, capacity_bytes: int, max_registered_bytes: int, beside: "FakeMemory | None" = None
    ) -> None:
        self.is_lost = False
        self.reached: list[FakeMemory] = []
        self._family: list[FakeMemory] = beside._family if beside is not None else []
        self._family.append(self)
        self.capacity_bytes = capacity_bytes
        self.max_registered_bytes = max_registered_bytes
        self.regions: dict[int, Region] = {}
        self._tables: dict[bool, Bounds] = {}  # of regions, for `why_not`, by whether they are written

    def taken_bytes(self, kind: str) -> int:
        """Return the bytes of all regions of one kind."""
        return sum(region.num_bytes for region in self.regions.values() if region.kind == kind)

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """See Device.allocate."""
        assert num_bytes > 0
        free_bytes = self.capacity_bytes - self.taken_bytes("device")
        if num_bytes > free_bytes:
            raise DeviceError(
                DeviceFault.OUT_OF_MEMORY, f"{num_bytes} bytes asked for, {free_bytes} of the device are free"
            )
        file_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        descriptor = memfd.create("kvtier-fake-gpu", file_bytes)
        mapping = mmap.mmap(descriptor, file_bytes)
        region = Region(memfd.address_of(mapping), num_bytes, "device", False, descriptor, mapping)
        self._add(region)
        return DeviceMemory(region.address, num_bytes)

    def register(self, buffer: Buffer, is_read_only: bool) -> int:
        """See Device.register_host. Keeps the buffer alive, as a pinned page is."""
        view = np.frombuffer(buffer, np.uint8)
        address = int(view.ctypes.data)
        limit = self.max_registered_bytes
        if self.taken_bytes("host") + len(view) > limit:
            raise DeviceError(
                DeviceFault.REFUSED, f"more than {limit} bytes may not be registered; raise the memlock limit"
            )
        if any(memory.first_touching(address, address + len(view)) for memory in self._family):
            raise DeviceError(DeviceFault.REFUSED, "a part of this memory is registered already")
        self._add(Region(address, len(view), "host", is_read_only, -1, view))
        return address

    def open(self, handle: bytes, num_bytes: int) -> DeviceMemory:
        """See Device.open."""
        descriptor, mapping = open_handle(handle)
        shared_bytes = len(mapping)
        if num_bytes > shared_bytes:
            os.close(descriptor)
            mapping.close()
            raise DeviceError(DeviceFault.REFUSED, f"{num_bytes} bytes asked for, {shared_bytes} are shared")
        region = Region(memfd.address_of(mapping), num_bytes, "opened", False, descriptor, mapping)
        self._add(region)
        return DeviceMemory(region.address, num_bytes)

    def export(self, memory: DeviceMemory) -> bytes:
        """Return the handle by which another process opens `memory`."""
        region = self.regions.get(memory.address)
        if region is None or region.kind != "device":
            raise DeviceError(DeviceFault.REFUSED, "only the start of an own allocation can be exported")
        return pack_handle(region.descriptor, os.fstat(region.descriptor).st_size)

    def drop(self, address: int) -> None:
        """Forget a region and give back what it holds."""
        region = self.regions.pop(address)
        self._changed()
        if region.descriptor >= 0:
            os.close(region.descriptor)
            region.keeper.close()

    def first_touching(self, start: int, end: int) -> Region | None:
        """Return a region that shares a byte with [start, end)."""
        for region in self.regions.values():
            if region.address < end and start < region.address + region.num_bytes:
                return region
        return None

    def why_not(self, pieces: CopyPieces) -> str:
        """Say in words why `pieces` cannot be copied; empty when they can."""
        for word, starts, is_write in (("source", pieces.sources, False), ("target", pieces.targets, True)):
            starts, ends = bounds_of(starts, pieces.lengths)
            firsts, lasts = self._usable(is_write)
            which = np.searchsorted(firsts, starts, side="right") - 1
            inside = which >= 0
            inside[inside] = ends[inside] <= lasts[which[inside]]
            if not inside.all():
                wild = int(np.flatnonzero(~inside)[0])
                return f"{word} {int(starts[wild]):#x}+{int(pieces.lengths[wild])} is in no usable region"
        return ""

    def _usable(self, is_write: bool) -> Bounds:
        """Return the regions that may be read, or written, in order."""
        if is_write not in self._tables:
            known = [one for memory in self._family for one in memory.regions.values()]
            seen = [one for one in known if self._sees(one) and not (is_write and one.is_read_only)]
            seen.sort(key=lambda one: one.address)
            firsts, lasts = [one.address for one in seen], [one.address + one.num_bytes for one in seen]
            self._tables[is_write] = np.array(firsts, np.uint64), np.array(lasts, np.uint64)
        return self._tables[is_write]

    def _sees(self, region: Region) -> bool:
        if region.kind == "host" or self.regions.get(region.address) is region:
            return True
        return region.kind == "device" and any(
            peer.regions.get(region.address) is region for peer in self.reached
        )

    def names_lost(self, pieces: CopyPieces) -> bool:
        """Whether `pieces` name memory of a peer that is lost."""
        lost = [region for peer in self.reached if peer.is_lost for region in peer.regions.values()]
        return any(
            bool(((starts >= region.address) & (starts < region.address + region.num_bytes)).any())
            for region in lost
            if region.kind == "device"
            for starts in (pieces.sources, pieces.targets)
        )

    def reach(self, peer: "FakeMemory") -> None:
        """See Device.reach. Idempotent."""
        assert peer in self._family, "devices of one process are made beside each other"
        if peer not in self.reached:
            self.reached.append(peer)
            self._changed()

    def _add(self, region: Region) -> None:
        self.regions[region.address] = region
        self._changed()

    def _changed(self) -> None:
        for memory in self._family:
            memory._tables.clear()


def move(target: int, source: int, num_bytes: int) -> None:
    """Copy bytes between addresses. Releases the GIL."""
    ctypes.memmove(target, source, num_bytes)
