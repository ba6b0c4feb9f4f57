"""Bounce: a small pinned buffer for bytes that must be on the device, or on the host, before the next line.

Everything hot goes asynchronously between pinned warm pages and the device and never sees this. It serves the
synchronous half of the engine contract, for memory of which the device knows nothing: a record on its way to
the cold store, a test's buffer. One copy at a time; a caller blocks."""

import mmap
import threading

from ...base import Buffer
from ...payload import copy, copy_and_checksum
from .contract import Device, pieces_of
from .waiting import copy_and_wait

BOUNCE_BYTES = 4 << 20
WAIT_S = 60.0  # beyond every copy of this size that will ever end


class Bounce:
    """Owns its buffer and one stream of `device`. Thread-safe. Raises DeviceError."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._mapping = mmap.mmap(-1, BOUNCE_BYTES)
        self._view: Buffer = memoryview(self._mapping)
        self._stream = device.take_stream()
        self._address = device.register_host(self._view, is_read_only=False)

    def store(self, address: int, payload: Buffer) -> bytes:
        """Copy `payload` to the device; return the checksum of what was stored. Blocks."""
        with self._lock:
            if len(payload) <= len(self._view):
                digest = copy_and_checksum(self._view[: len(payload)], payload)
                self._move(self._address, address, len(payload))
                return digest
            # Hashed in one go, from a copy of our own: the source may be a client's, which may change it.
            own = memoryview(bytearray(len(payload)))
            digest = copy_and_checksum(own, payload)
            for start in range(0, len(own), len(self._view)):
                part = own[start : start + len(self._view)]
                copy(self._view[: len(part)], part)
                self._move(self._address, address + start, len(part))
            return digest

    def fetch(self, address: int, into: Buffer) -> None:
        """Fill `into` from the device. Blocks. Raises DeviceError."""
        with self._lock:
            for start in range(0, len(into), len(self._view)):
                part = into[start : start + len(self._view)]
                self._move(address + start, self._address, len(part))
                copy(part, self._view[: len(part)])

    def _move(self, source: int, target: int, num_bytes: int) -> None:
        copy_and_wait(self._device, self._stream, pieces_of([(source, target, num_bytes)]), WAIT_S)

    def close(self) -> None:
        """Give everything back."""
        self._device.unregister_host(self._address)
        self._device.give_stream(self._stream)
        self._view.release()
