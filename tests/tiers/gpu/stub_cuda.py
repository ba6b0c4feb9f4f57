"""The functions of `cupy.cuda.runtime` that CudaDevice calls, on a live FakeDevice: so that its Python runs
where there is no GPU.

This shows that CudaDevice keeps the device contract if CUDA does what its manual says. It shows nothing about
CUDA: the same suite on a GPU does (`pytest -m gpu`). Names and parameters are those of cupy 14."""

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from kvtier.tiers.gpu import cuda, driver
from kvtier.tiers.gpu.cuda import READ_ONLY, CudaDevice
from kvtier.tiers.gpu.device import DeviceError, DeviceFault, DeviceMemory, Pieces, Stream
from kvtier.tiers.gpu.fake import FakeDevice
from kvtier.tiers.gpu.fake_streams import FakeEvent

STATUS = {
    DeviceFault.OUT_OF_MEMORY: 2,
    DeviceFault.REFUSED: 1,
    DeviceFault.LOST: 719,
    DeviceFault.UNAVAILABLE: 100,
}


_current = threading.local()  # .index: the device of this thread, as CUDA keeps it


class CUDARuntimeError(RuntimeError):
    """As cupy's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


@contextmanager
def translated() -> Iterator[None]:
    """Let a fake's errors come out as CUDA's."""
    try:
        yield
    except DeviceError as error:
        raise CUDARuntimeError(STATUS[error.fault]) from error


class StubRuntime:
    """Pointers are addresses for memory, and numbers for streams and events, as in CUDA."""

    CUDARuntimeError = CUDARuntimeError
    eventDisableTiming, eventInterprocess = 2, 4  # noqa: N815
    streamNonBlocking = 1  # noqa: N815
    memcpyDefault = 4  # noqa: N815

    def __init__(self, fake: FakeDevice, beside: "StubRuntime | None" = None) -> None:
        self.fake = fake
        # Those of this process, by index.
        self.fakes: dict[int, FakeDevice] = beside.fakes if beside is not None else {}
        self.fakes[fake.index] = fake
        # Streams and events, by number, of all devices of this process.
        self.things: dict[int, Any] = beside.things if beside is not None else {}
        self.opened: dict[bytes, int] = {}  # handle -> address
        self.num_opened: Counter[int] = Counter()  # by address
        self._numbers: itertools.count[int] = beside._numbers if beside is not None else itertools.count(1)

    def _add(self, thing: Any) -> int:
        number = next(self._numbers)
        self.things[number] = thing
        return number

    def setDevice(self, device: int) -> None:  # noqa: N802
        if device != self.fake.index:
            raise CUDARuntimeError(101)
        _current.index = device

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:  # noqa: N802
        return int(self.fakes[device].has_peer_access and self.fakes[peer].has_peer_access)

    def deviceEnablePeerAccess(self, peer: int) -> None:  # noqa: N802
        assert _current.index == self.fake.index
        if self.fakes[peer].memory in self.fake.memory.reached:
            raise CUDARuntimeError(704)
        with translated():
            self.fake.reach(self.fakes[peer])

    def getDeviceProperties(self, device: int) -> dict[str, bytes]:  # noqa: N802
        return {"name": b"stub"}

    def malloc(self, size: int) -> int:
        assert _current.index == self.fake.index, "another device is this thread's"
        with translated():
            return self.fake.allocate(size).address

    def free(self, ptr: int) -> None:
        with translated():
            self.fake.free(DeviceMemory(ptr, 0))

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:  # noqa: N802
        if self.fake.memory.first_touching(ptr, ptr + size) is not None:
            raise CUDARuntimeError(712)
        buffer = memoryview((ctypes.c_ubyte * size).from_address(ptr)).cast("B")
        with translated():
            self.fake.register_host(buffer, is_read_only=bool(flags & READ_ONLY))

    def hostUnregister(self, ptr: int) -> None:  # noqa: N802
        if ptr not in self.fake.memory.regions:
            raise CUDARuntimeError(713)
        self.fake.unregister_host(ptr)

    def ipcGetMemHandle(self, ptr: int) -> bytes:  # noqa: N802
        with translated():
            return self.fake.export(DeviceMemory(ptr, 0))

    def ipcOpenMemHandle(self, handle: bytes) -> int:  # noqa: N802
        if handle not in self.opened:  # as CUDA: the second time the same address, counted
            with translated():
                self.opened[handle] = self.fake.open(handle, int.from_bytes(handle[24:32], "little")).address
        self.num_opened[self.opened[handle]] += 1
        return self.opened[handle]

    def ipcCloseMemHandle(self, ptr: int) -> None:  # noqa: N802
        self.num_opened[ptr] -= 1
        if self.num_opened[ptr] == 0:
            self.opened = {handle: address for handle, address in self.opened.items() if address != ptr}
            self.fake.close(DeviceMemory(ptr, 0))

    def streamCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        assert flags == self.streamNonBlocking
        return self._add(self.fake.take_stream())

    def streamDestroy(self, stream: int) -> None:  # noqa: N802
        self.fake.give_stream(self.things.pop(stream))

    def streamWaitEvent(self, stream: int, event: int) -> None:  # noqa: N802
        with translated():
            self.things[stream].wait(self.things[event])

    def eventCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        assert flags & self.eventDisableTiming
        is_shared = flags & self.eventInterprocess
        return self._add(self.fake.export_event()[0] if is_shared else FakeEvent(self.fake))

    def eventDestroy(self, event: int) -> None:  # noqa: N802
        self.fake.recycle(self.things.pop(event))

    def eventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        with translated():
            self.things[stream].record(self.things[event])

    def eventQuery(self, event: int) -> int:  # noqa: N802
        try:
            return 0 if self.things[event].is_done() else 600
        except DeviceError as error:
            return STATUS[error.fault]

    def ipcGetEventHandle(self, event: int) -> bytes:  # noqa: N802
        handle: bytes = self.things[event].handle
        return handle

    def ipcOpenEventHandle(self, handle: bytes) -> int:  # noqa: N802
        with translated():
            return self._add(self.fake.open_event(handle))

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
        assert kind == self.memcpyDefault
        assert _current.index == self.fake.index, "another device is this thread's"
        self._copy(self.things[stream], Pieces(*_columns(src, dst, size)))

    def copy_batch(self, pieces: Pieces, stream: int) -> int:
        """The driver's, not the runtime's."""
        try:
            self._copy(self.things[stream], pieces)
        except CUDARuntimeError as error:
            return error.status
        return driver.SUCCESS

    @staticmethod
    def _copy(stream: Stream, pieces: Pieces) -> None:
        with translated():
            stream.copy(pieces)

    def allocation_bytes(self, address: int) -> int:
        """The driver's, too."""
        return len(self.fake.memory.regions[address].keeper)


def _columns(src: int, dst: int, size: int) -> tuple[Any, Any, Any]:
    return np.array([src], np.uint64), np.array([dst], np.uint64), np.array([size], np.int64)


def stubbed_cuda(
    has_batches: bool = True, index: int = 0, beside: CudaDevice | None = None, **options: Any
) -> CudaDevice:
    """Return a CudaDevice on a stub, which is its `_runtime`. One `beside` another has no batches: the
    driver's functions are patched once for all."""
    other = beside._runtime if beside is not None else None
    options["beside"] = other and other.fake
    stub = StubRuntime(
        FakeDevice(index, is_live=True, num_streams=64, num_events=10_000, **options), beside=other
    )
    with (
        patch.object(cuda, "load_runtime", return_value=stub),
        patch.multiple(driver, device_uuid=lambda index: stub.fake.uuid, has_batches=lambda: has_batches),
    ):
        device = CudaDevice(index)
    patcher = patch.multiple(driver, copy_batch=stub.copy_batch, allocation_bytes=stub.allocation_bytes)
    patcher.start()
    end, stubbed = device.shut_down, [patcher]

    def shut_down() -> None:
        end()
        stub.fake.shut_down()
        assert stub.fake.violations == []
        while stubbed:
            stubbed.pop().stop()

    device.shut_down = shut_down  # type: ignore[method-assign]
    return device
