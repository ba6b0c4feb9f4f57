"""The devices that the contract suite of test_devices.py runs against, and how to wait for them."""

import threading
import time
from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.tiers.gpu.device.contract import CopyPieces, Device, DeviceError, DeviceMemory, Event
from kvtier.tiers.gpu.device.cuda import CudaDevice
from kvtier.v1 import cuda
from tests.fakes.gpu.device import FakeDevice
from tests.tiers.gpu.stub_cuda import stubbed_cuda

WAIT_S = 60.0
POLL_S = 0.001


def exported(device: Device, memory: DeviceMemory) -> bytes:
    """Return the handle by which another process opens `memory`, as a runtime makes it."""
    if isinstance(device, FakeDevice):
        return device.export(memory)
    assert isinstance(device, CudaDevice)
    handle = cuda.IpcHandle()
    device.call("cuIpcGetMemHandle", byref(handle), memory.address)
    return bytes(handle.reserved)


@dataclass
class DeviceCase:
    """A device, opened for one test."""

    kind: str
    device: Device

    def finish(self, event: Event) -> DeviceError | None:
        """Wait until `event` is done; give it back. Returns what `when_done` said."""
        error = self.wait(event)
        self.device.recycle(event)
        return error

    def wait(self, event: Event) -> DeviceError | None:
        """Wait until `event` is done. Returns what `when_done` said."""
        told: list[DeviceError | None] = []
        is_told = threading.Event()

        def tell(error: DeviceError | None) -> None:
            told.append(error)
            is_told.set()

        self.device.when_done(event, tell)
        deadline_at = time.monotonic() + WAIT_S
        while not is_told.wait(POLL_S):
            assert time.monotonic() < deadline_at, "never done"
            if self.kind == "fake":  # its time passes here only; another process may have to come first
                assert isinstance(self.device, FakeDevice)
                self.device.run()
        return told[0]


def pieces(*parts: tuple[int, int, int]) -> CopyPieces:
    """Return columns of (source, target, length)."""
    sources, targets, lengths = zip(*parts, strict=True)
    return CopyPieces(np.array(sources, np.uint64), np.array(targets, np.uint64), np.array(lengths, np.int64))


def stubbed_pair() -> tuple[Device, Device]:
    """Return two CudaDevices of one process."""
    home = stubbed_cuda(has_batches=False)
    return home, stubbed_cuda(has_batches=False, index=1, beside=home)


def fake_pair(seed: int = 0, **options: Any) -> tuple[FakeDevice, FakeDevice]:
    """Return two fakes of one process."""
    home = FakeDevice(seed=seed, is_live=bool(options.get("is_live")))
    return home, FakeDevice(1, seed=seed, beside=home, **options)


#: Two devices of one process; the second is asked to reach the first.
PAIRS: dict[str, Callable[[], tuple[Device, Device]]] = {
    "fake": fake_pair,
    "live fake": lambda: fake_pair(is_live=True),
    "cuda over a stub": stubbed_pair,
    "cuda": lambda: (CudaDevice(0), CudaDevice(1)),
}
FACTORIES: dict[str, Callable[[], Device]] = {
    "fake": FakeDevice,
    "live fake": lambda: FakeDevice(is_live=True),
    "cuda over a stub": stubbed_cuda,
    "cuda over a stub, without batches": lambda: stubbed_cuda(has_batches=False),
    "cuda": CudaDevice,
}
