"""A device that copies no bytes and ends its events at once: what remains is the host's work."""

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.clients.operations.direct import Exported
from kvtier.tiers.base import Buffer
from kvtier.tiers.gpu.device.contract import CopyPieces, Device, DeviceError, DeviceMemory, Event, Stream
from kvtier.tiers.gpu.device.watcher import Watcher

UUID = "free-device"
CLOSE_S = 10.0


class FreeEvent:
    """An event that is always done."""

    def is_done(self) -> bool:
        return True


class FreeStream:
    """A stream that copies nothing."""

    def copy(self, pieces: CopyPieces) -> None:
        assert len(pieces.sources) == len(pieces.targets) == len(pieces.lengths)

    def wait(self, event: Event) -> None:
        pass

    def record(self, event: Event | None = None) -> Event:
        return event or FreeEvent()


class FreeDevice:
    """Implements `Device` without memory, time or limits."""

    index, name, uuid = 0, "free", UUID

    def __init__(self) -> None:
        self._addresses = count(1 << 45, 1 << 36)
        self._watcher = Watcher("bench-free-device")

    def allocate(self, num_bytes: int) -> DeviceMemory:
        return DeviceMemory(next(self._addresses), num_bytes)

    def free(self, memory: DeviceMemory) -> None:
        pass

    def register_host(self, buffer: Buffer, *, is_read_only: bool) -> int:
        return next(self._addresses)

    def unregister_host(self, address: int) -> None:
        pass

    def reach(self, peer: Device) -> bool:
        return True

    def open(self, handle: bytes, num_bytes: int) -> DeviceMemory:
        return self.allocate(num_bytes)

    def close(self, memory: DeviceMemory) -> None:
        pass

    def take_event(self) -> Event:
        return FreeEvent()

    def export_event(self) -> tuple[Event, bytes]:
        return FreeEvent(), bytes(64)

    def open_event(self, handle: bytes) -> Event:
        return FreeEvent()

    def take_stream(self) -> Stream:
        return FreeStream()

    def give_stream(self, stream: Stream) -> None:
        pass

    def recycle(self, event: Event) -> None:
        pass

    def when_done(self, event: Event, call: Callable[[DeviceError | None], Any]) -> Callable[[], None]:
        return self._watcher.watch(event, call)

    def shut_down(self) -> None:
        self._watcher.close(CLOSE_S)


class FreeExporter:
    """Implements `Exporter` for host memory that nothing is ever copied into."""

    device_uuid = UUID

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.uint16]] = []

    def tensor(self, shape: tuple[int, ...]) -> NDArray[np.uint16]:
        """Return an array of zeros in memory that is never touched."""
        self._arrays.append(np.zeros(shape, np.uint16))
        return self._arrays[-1]

    def export(self, address: int) -> Exported:
        for array in self._arrays:
            start = array.__array_interface__["data"][0]
            if start <= address < start + array.nbytes:
                return Exported(bytes(64), start, array.nbytes)
        raise ValueError(f"{address:#x} is in none of the tensors")

    def new_event(self) -> tuple[Event, bytes]:
        return FreeEvent(), bytes(64)

    def open_event(self, handle: bytes) -> Event:
        return FreeEvent()
