"""What the tests of the direct path put in place of a GPU: a runtime's tensors, and a daemon's pinned
slots."""

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvtier.appliance.direct import DirectDevice
from kvtier.clients.direct import Exported
from kvtier.tiers.block import Tier
from kvtier.tiers.gpu.device import Addresses, Device, DeviceMemory, Event
from kvtier.tiers.gpu.fake import FakeDevice
from kvtier.tiers.memory import ExtentEngine
from kvtier.v1.shm import extent_of


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


class PinnedExtents:
    """The device's addresses of a memory tier's slots; every extent is registered as it is first named."""

    def __init__(self, device: Device, engine: ExtentEngine) -> None:
        self._device = device
        self._engine = engine
        self._starts: dict[int, int] = {}

    def addresses(self, places: Sequence[int]) -> Addresses:
        found = [self._start(extent_of(place)) + self._engine._room.offset_of(place) for place in places]
        return np.array(found, np.uint64)

    def _start(self, number: int) -> int:
        if number not in self._starts:
            extent = self._engine._extent(number)
            self._starts[number] = self._device.register_host(extent.data, is_read_only=False)
        return self._starts[number]


def direct_device(device: FakeDevice, engines: Any) -> DirectDevice:
    """Return what a daemon needs to serve pages on `device` from its dram."""
    dram = cast(ExtentEngine, engines[Tier.DRAM])
    return DirectDevice(device, {Tier.DRAM: PinnedExtents(device, dram).addresses})
