"""Chunks: where records rest between the cold store and a slot of hbm; a pinned half and one on the device.

A record is read into the pinned half, or straight into the device's, and is gone from here as soon as its
slot has what it says. One size for all, few of them, made at start: how many batches are under way at a time
is bounded by the mover anyway, and registering memory takes milliseconds.

Every record has an area of whole pages in both halves, at the same offset: its header's page, its payload.
"""

import mmap
from dataclasses import dataclass
from threading import Lock

from ....v1.shm import PAGE_BYTES
from ...base import Buffer
from ..device.contract import Device, DeviceError, DeviceMemory

CHUNK_BYTES = 16 << 20
NUM_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk: `view` is the pinned half, with the address `host` for the device."""

    view: Buffer
    host: int
    device: int

    def payload(self, area: int, num_bytes: int) -> Buffer:
        """Return the pinned half of the payload of the record at `area`."""
        return self.view[area + PAGE_BYTES : area + PAGE_BYTES + num_bytes]

    def header(self, area: int) -> Buffer:
        """Return the pinned half of the header's page of the record at `area`."""
        return self.view[area : area + PAGE_BYTES]


class Chunks:
    """`num_chunks` chunks of `chunk_bytes`. Thread-safe. Raises DeviceError when there is no memory for them.
    `close` when no stream works for any."""

    def __init__(self, device: Device, chunk_bytes: int = CHUNK_BYTES, num_chunks: int = NUM_CHUNKS) -> None:
        self.chunk_bytes = chunk_bytes
        self._device = device
        self._lock = Lock()
        self._memory: DeviceMemory | None = device.allocate(num_chunks * chunk_bytes + PAGE_BYTES)
        self._mapping = mmap.mmap(-1, num_chunks * chunk_bytes)
        try:
            self._host = device.register_host(memoryview(self._mapping), is_read_only=False)
        except DeviceError:
            device.free(self._memory)
            raise
        first = -(-self._memory.address // PAGE_BYTES) * PAGE_BYTES
        views = memoryview(self._mapping)
        self._free = [
            Chunk(views[at : at + chunk_bytes], self._host + at, first + at)
            for at in range(0, num_chunks * chunk_bytes, chunk_bytes)
        ]

    def take(self) -> Chunk | None:
        """Return a free chunk; None: there is none now."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give(self, chunk: Chunk) -> None:
        """Put a chunk back: the device is done with it."""
        with self._lock:
            self._free.append(chunk)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._memory is not None:
            self._device.unregister_host(self._host)
            self._device.free(self._memory)
            self._memory = None
            self._free.clear()
