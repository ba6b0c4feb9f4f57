"""The CUDA driver's calls on live FakeDevices: so that CudaDevice and CudaExporter run where there is no GPU.

Each call is a C function pointer with the prototype of v1/cuda.py, so that arguments are converted as for the
library itself, structures by value included. As in the driver, a context is current per thread: a call on a
thread without one answers 201, and one on another device's thread is a violation. A batch of more pieces than
a driver is known to take is refused.

This shows that the code above keeps the device contract if CUDA does what its manual says. It shows nothing
about CUDA: the same suite on a GPU does (`pytest -m gpu`)."""

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import UUID

import numpy as np

from kvtier.tiers.gpu.device import cuda as cuda_device
from kvtier.tiers.gpu.device.contract import CopyPieces, DeviceError, DeviceFault, DeviceMemory
from kvtier.tiers.gpu.device.cuda import CudaDevice
from kvtier.tiers.gpu.device.driver import BATCH_PIECES
from kvtier.v1 import cuda
from tests.fakes.gpu.device import FakeDevice
from tests.fakes.gpu.streams import FakeEvent

INVALID_CONTEXT, NO_SUCH_DEVICE, INVALID_HANDLE = 201, 101, 400
STATUS = {
    DeviceFault.OUT_OF_MEMORY: 2,
    DeviceFault.REFUSED: 1,
    DeviceFault.LOST: 719,
    DeviceFault.UNAVAILABLE: 100,
}


class StubDriver:
    """Pointers are addresses for memory, and numbers for contexts, streams and events.

    `answers[name]` is the status of that call instead of doing it; `num_calls` counts them by name."""

    def __init__(self) -> None:
        self.fakes: dict[int, FakeDevice] = {}  # by index
        self.things: dict[int, Any] = {}  # streams and events, by number
        self.opened: dict[bytes, int] = {}  # handle -> address
        self.num_opened: Counter[int] = Counter()  # by address
        self.answers: dict[str, int] = {}
        self.num_calls: Counter[str] = Counter()
        self.batches: list[int] = []  # pieces of each
        self.defects: list[str] = []
        self._numbers = itertools.count(1)
        self._threads = threading.local()  # .stack: contexts of this thread, the current one last

    def library(self, *, without: tuple[str, ...] = ()) -> Any:
        """Return what `v1.cuda.library` returns."""
        return SimpleNamespace(
            **{name: self._function(name) for name in cuda.PROTOTYPES if name not in without}
        )

    def _function(self, name: str) -> Any:
        method: Callable[..., int | None] = getattr(self, name)

        def call(*arguments: Any) -> int:
            self.num_calls[name] += 1
            if name in self.answers:
                return self.answers[name]
            try:
                return method(*arguments) or 0
            except _Status as problem:
                return problem.status
            except DeviceError as problem:
                return STATUS[problem.fault]
            except Exception as defect:
                self.defects.append(f"{name}: {defect!r}")
                return 999

        parameters = [
            ctypes.c_void_p if kind is ctypes.c_char_p else kind for kind in cuda.PROTOTYPES[name]
        ]  # a callback's char* would be a copy
        return ctypes.CFUNCTYPE(ctypes.c_int, *parameters)(call)

    # --------------------------------------------------------------------------------------- contexts

    @property
    def _stack(self) -> list[int]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        stack: list[int] = self._threads.stack
        return stack

    @property
    def _fake(self) -> FakeDevice:
        """The device whose context is this thread's."""
        if not self._stack or not self._stack[-1]:
            raise _Status(INVALID_CONTEXT)
        return self.fakes[self._stack[-1] - 1]

    def _thing(self, number: int, device: FakeDevice | None = None) -> Any:
        """A stream or event, used where its device's context is current."""
        thing = self.things.get(number)
        if thing is None:
            raise _Status(INVALID_HANDLE)
        return thing

    def _add(self, thing: Any) -> int:
        number = next(self._numbers)
        self.things[number] = thing
        return number

    def cuInit(self, flags: int) -> None:  # noqa: N802
        assert flags == 0

    def cuDriverGetVersion(self, out: Any) -> None:  # noqa: N802
        out[0] = 13000

    def cuDeviceGetCount(self, out: Any) -> None:  # noqa: N802
        out[0] = len(self.fakes)

    def cuDeviceGet(self, out: Any, ordinal: int) -> None:  # noqa: N802
        if ordinal not in self.fakes:
            raise _Status(NO_SUCH_DEVICE)
        out[0] = ordinal

    def cuDeviceGetName(self, text: int, length: int, device: int) -> None:  # noqa: N802
        ctypes.memmove(text, b"stub\0", min(5, length))

    def cuDeviceGetPCIBusId(self, text: int, length: int, device: int) -> None:  # noqa: N802
        ctypes.memmove(text, b"0000:C%d:00.0\0" % device, min(14, length))

    def cuDeviceGetUuid_v2(self, out: Any, device: int) -> None:  # noqa: N802
        out[0].bytes[:] = UUID(self.fakes[device].uuid).bytes

    def cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> None:  # noqa: N802
        out[0] = device + 1

    def cuCtxSetCurrent(self, context: int | None) -> None:  # noqa: N802
        self._stack[-1:] = [context or 0]

    def cuCtxPushCurrent_v2(self, context: int | None) -> None:  # noqa: N802
        self._stack.append(context or 0)

    def cuCtxPopCurrent_v2(self, out: Any) -> None:  # noqa: N802
        out[0] = self._stack.pop()

    def cuDeviceCanAccessPeer(self, out: Any, device: int, peer: int) -> None:  # noqa: N802
        out[0] = self.fakes[device].has_peer_access and self.fakes[peer].has_peer_access

    def cuCtxEnablePeerAccess(self, context: int, flags: int) -> None:  # noqa: N802
        peer = self.fakes[context - 1]
        if peer.memory in self._fake.memory.reached:
            raise _Status(704)
        self._fake.reach(peer)

    # ----------------------------------------------------------------------------------------- memory

    def cuMemAlloc_v2(self, out: Any, size: int) -> None:  # noqa: N802
        out[0] = self._fake.allocate(size).address

    def cuMemFree_v2(self, address: int) -> None:  # noqa: N802
        self._fake.free(DeviceMemory(address, 0))

    def cuMemHostRegister_v2(self, address: int, size: int, flags: int) -> None:  # noqa: N802
        if self._fake.memory.first_touching(address, address + size) is not None:
            raise _Status(712)
        buffer = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
        self._fake.register_host(buffer, is_read_only=bool(flags & cuda.HOST_REGISTER_READ_ONLY))

    def cuMemHostUnregister(self, address: int) -> None:  # noqa: N802
        if address not in self._fake.memory.regions:
            raise _Status(713)
        self._fake.unregister_host(address)

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: int) -> None:  # noqa: N802
        region = self._fake.memory.first_touching(address, address + 1)
        if region is None or region.kind == "host":
            raise _Status(1)
        base[0], size[0] = region.address, len(region.keeper)

    def cuIpcGetMemHandle(self, out: Any, address: int) -> None:  # noqa: N802
        out[0] = cuda.IpcHandle.from_buffer_copy(self._fake.export(DeviceMemory(address, 0)))

    def cuIpcOpenMemHandle_v2(self, out: Any, handle: cuda.IpcHandle, flags: int) -> None:  # noqa: N802
        raw = bytes(handle.reserved)
        if raw not in self.opened:  # as CUDA: the second time the same address, counted
            self.opened[raw] = self._fake.open(raw, int.from_bytes(raw[24:32], "little")).address
        self.num_opened[self.opened[raw]] += 1
        out[0] = self.opened[raw]

    def cuIpcCloseMemHandle(self, address: int) -> None:  # noqa: N802
        self.num_opened[address] -= 1
        if self.num_opened[address] == 0:
            self.opened = {handle: at for handle, at in self.opened.items() if at != address}
            self._fake.close(DeviceMemory(address, 0))

    # ----------------------------------------------------------------------------- streams and events

    def cuStreamCreate(self, out: Any, flags: int) -> None:  # noqa: N802
        assert flags == cuda.STREAM_NON_BLOCKING
        out[0] = self._add(self._fake.take_stream())

    def cuStreamDestroy_v2(self, stream: int) -> None:  # noqa: N802
        self._fake.give_stream(self._thing(stream))
        del self.things[stream]

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:  # noqa: N802
        self._thing(stream).wait(self._thing(event))

    def cuEventCreate(self, out: Any, flags: int) -> None:  # noqa: N802
        assert flags & cuda.EVENT_DISABLE_TIMING
        is_shared = flags & cuda.EVENT_INTERPROCESS
        out[0] = self._add(self._fake.export_event()[0] if is_shared else FakeEvent(self._fake))

    def cuEventDestroy_v2(self, event: int) -> None:  # noqa: N802
        self._fake.recycle(self._thing(event))
        del self.things[event]

    def cuEventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        self._thing(stream).record(self._thing(event))

    def cuEventQuery(self, event: int) -> int:  # noqa: N802
        return 0 if self._thing(event).is_done() else cuda.NOT_READY

    def cuIpcGetEventHandle(self, out: Any, event: int) -> None:  # noqa: N802
        out[0] = cuda.IpcHandle.from_buffer_copy(self._thing(event).handle)

    def cuIpcOpenEventHandle(self, out: Any, handle: cuda.IpcHandle) -> None:  # noqa: N802
        out[0] = self._add(self._fake.open_event(bytes(handle.reserved)))

    def cuMemcpyAsync(self, target: int, source: int, size: int, stream: int) -> None:  # noqa: N802
        self._copy(stream, [target], [source], [size])

    def cuMemcpyBatchAsync(  # noqa: N802
        self,
        targets: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: Any,
        first: Any,
        num_attributes: int,
        failed: Any,
        stream: int,
    ) -> None:
        assert (num_attributes, first[0]) == (1, 0)
        assert attributes[0].src_access_order == cuda.SOURCE_IN_STREAM_ORDER
        self.batches.append(count)
        if not 0 < count <= BATCH_PIECES:
            raise _Status(1)
        self._copy(stream, *((ctypes.c_uint64 * count).from_address(at) for at in (targets, sources, sizes)))

    def _copy(self, stream: int, targets: Any, sources: Any, sizes: Any) -> None:
        columns = np.array(sources, np.uint64), np.array(targets, np.uint64), np.array(sizes, np.int64)
        assert self._thing(stream).device is self._fake, "another device's context is this thread's"
        self._thing(stream).copy(CopyPieces(*columns))


class _Status(Exception):
    """What a call answers instead of success."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


@contextmanager
def stubbed(driver: StubDriver, *, without: tuple[str, ...] = ()) -> Iterator[None]:
    """Let the product call `driver`, on this and all other threads."""
    library = driver.library(without=without)
    with (
        patch.object(cuda, "library", lambda: library),
        patch.object(cuda_device, "_current", threading.local()),
    ):
        yield
    assert driver.defects == []


def stubbed_cuda(
    has_batches: bool = True, index: int = 0, beside: CudaDevice | None = None, **options: Any
) -> CudaDevice:
    """Return a CudaDevice on a StubDriver, which is its `stub`. One `beside` another shares that one's
    driver, and ends first."""
    if beside is None:
        stub, where = StubDriver(), None
        patcher = stubbed(stub, without=() if has_batches else ("cuMemcpyBatchAsync",))
        patcher.__enter__()
    else:
        stub, where = getattr(beside, "stub"), getattr(beside, "stub").fakes[beside.index]  # noqa: B009
        patcher = None
    fake = FakeDevice(index, is_live=True, num_streams=64, beside=where, **options)
    stub.fakes[index] = fake
    device: Any = CudaDevice(index)
    device.stub = stub
    end = device.shut_down

    def shut_down() -> None:
        nonlocal patcher
        end()
        fake.shut_down()
        assert fake.violations == []
        if patcher is not None:
            patcher.__exit__(None, None, None)
            patcher = None

    device.shut_down = shut_down
    made: CudaDevice = device
    return made
