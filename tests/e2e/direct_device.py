"""What the tests of the direct path put in place of a GPU: a runtime's tensors, and a daemon's pinned
slots."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.clients.operations.direct import Exported
from kvtier.tiers.gpu.device.contract import DeviceError, DeviceFault, DeviceMemory, Event
from tests.fakes.gpu.device import FakeDevice


class FakeExporter:
    """Implements `Exporter` for tensors that lie in a FakeDevice of this process."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.device_uuid = device.uuid
        self.memories: list[DeviceMemory] = []

    def tensor(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return device memory as an array."""
        memory = self.device.allocate(num_bytes)
        self.memories.append(memory)
        raw = (ctypes.c_ubyte * num_bytes).from_address(memory.address)
        return np.frombuffer(memoryview(raw), np.uint8)

    def export(self, address: int) -> Exported:
        memory = next(m for m in self.memories if m.address <= address < m.address + m.num_bytes)
        return Exported(self.device.export(memory), memory.address, memory.num_bytes)

    def new_event(self) -> tuple[Event, bytes]:
        return self.device.export_event()

    def open_event(self, handle: bytes) -> Event:
        return self.device.open_event(handle)


class Mute(FakeDevice):
    """A device that answers `when_done` with an error that says nothing about the bytes."""

    is_mute = False

    def when_done(self, event: Event, call: Callable[[DeviceError | None], Any]) -> Callable[[], None]:
        if not self.is_mute:
            return super().when_done(event, call)
        call(DeviceError(DeviceFault.REFUSED, "no"))
        return lambda: None
