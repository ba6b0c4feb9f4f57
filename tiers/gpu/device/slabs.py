"""Slabs: scratch of kernel calls under way, half of it pinned and seen by host and device alike.

A call writes columns into the host's half, copies them to the device's, launches, and has results copied
back; nothing of that may change before the device is done with it. So each call has a slab of its own, their
number is fixed, and a caller that finds none does its work another way: waiting is what the thread that feeds
the device must not do.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .contract import CopyPieces, Device, DeviceError, DeviceMemory, Stream

_ALIGNMENT = 8


class Slab:
    """Scratch of one call: named parts, the same on both sides as far as the host's half goes."""

    def __init__(
        self, host: NDArray[np.uint8], address: int, device: int, offsets: Mapping[str, int]
    ) -> None:
        self._host = host
        self._address = address
        self._device = device
        self._offsets = offsets

    def at(self, part: str) -> int:
        """Return the device address of a part."""
        return self._device + self._offsets[part]

    def column(self, part: str, dtype: Any, count: int) -> "NDArray[Any]":
        """Return the first elements, (count,) of `dtype`, of the host's half of a part."""
        begin = self._offsets[part]
        return self._host[begin : begin + count * np.dtype(dtype).itemsize].view(dtype)

    def send(self, stream: Stream, part: str, num_bytes: int) -> None:
        """Enqueue the copy of the beginning of a part to the device."""
        begin = self._offsets[part]
        _move(stream, self._address + begin, self._device + begin, num_bytes)

    def fetch(self, stream: Stream, part: str, num_bytes: int) -> None:
        """Enqueue the copy of the beginning of a part to the host."""
        begin = self._offsets[part]
        _move(stream, self._device + begin, self._address + begin, num_bytes)


class Slabs:
    """`num_slabs` slabs of parts (name -> bytes): `shared` ones lie on host and device, `private` ones on the
    device only. Raises DeviceError when there is no memory for them. `close` when no stream works for any."""

    def __init__(
        self, device: Device, shared: Mapping[str, int], private: Mapping[str, int], num_slabs: int
    ) -> None:
        self._device = device
        offsets, end, host_bytes = {}, 0, 0
        for part, num_bytes in {**shared, **private}.items():
            offsets[part] = end
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            host_bytes = end if part in shared else host_bytes
        self._memory: DeviceMemory | None = device.allocate(num_slabs * end)
        self._host = np.zeros((num_slabs, host_bytes), np.uint8)
        try:
            self._address = device.register_host(self._host.data.cast("B"), is_read_only=False)
        except DeviceError:
            device.free(self._memory)
            raise
        self._free = [
            Slab(
                self._host[number],
                self._address + number * host_bytes,
                self._memory.address + number * end,
                offsets,
            )
            for number in range(num_slabs)
        ]

    @property
    def has_free(self) -> bool:
        """Whether there is a free slab."""
        return bool(self._free)

    def take(self) -> Slab | None:
        """Return a free slab; None: there is none now."""
        return self._free.pop() if self._free else None

    def give(self, slab: Slab) -> None:
        """Put a slab back: the device is done with it."""
        self._free.append(slab)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._memory is not None:
            self._device.unregister_host(self._address)
            self._device.free(self._memory)
            self._memory = None
            self._free.clear()


def _move(stream: Stream, source: int, target: int, num_bytes: int) -> None:
    columns = np.array([source], np.uint64), np.array([target], np.uint64), np.array([num_bytes], np.int64)
    stream.copy(CopyPieces(*columns))
