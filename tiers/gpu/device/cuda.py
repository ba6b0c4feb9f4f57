"""CudaDevice: the contract of a GPU on NVIDIA, through the CUDA driver.

All calls are the driver's, through ctypes (v1/cuda.py): kvtier needs addresses, streams and events, and a
thread that waits in a call of the driver must not hold the interpreter's lock, which cupy's wrappers of the
CUDA runtime do in half of what is needed here. torch would bring its caching allocator, with blocks that
cannot be exported one by one, and 2 GB. A slab is one `cuMemAlloc`, so that its IPC handle means all of it
and nothing else. cupy is needed for kernels only (launching.py), which use the same primary context.

Streams are non-blocking: they do not wait for the legacy default stream, on which other libraries work.
Events carry no timing (a timed one costs more); those of `export_event` are interprocess. Errors that CUDA
keeps returning once a context is broken become LOST and stay so; the rest of the process then runs on without
this device.

Never ran on a GPU.
"""

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_int, c_uint64, c_void_p, create_string_buffer
from typing import Any, cast

import numpy as np

from ....v1 import cuda
from ...base import Buffer
from . import driver
from .contract import CopyPieces, Device, DeviceError, DeviceFault, DeviceMemory, Event, Stream
from .watcher import Watcher

log = logging.getLogger(__name__)

NUM_STREAMS = 64
SHUT_DOWN_S = 10.0
#: Streams share hardware queues, eight unless told otherwise, and work behind one that waits, waits, too.
CONNECTIONS = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")

_current = threading.local()  # .context: the context that is this thread's, one for all CudaDevices

# Status codes of CUresult (cuda.h).
_OUT_OF_MEMORY = 2
_PEER_ACCESS_IS_ON = 704
_UNAVAILABLE = {
    3: "CUDA could not be initialised; see the driver's log (dmesg)",
    34: "libcuda.so.1 is the stub of the toolkit; put the driver's own before it in the library path",
    100: "no NVIDIA device is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES",
    101: "there is no such device; change tiers.hbm.device",
    802: "the system is not ready: on machines with NVSwitch start nvidia-fabricmanager, and see that its "
    "version is the driver's",
    803: "the driver does not fit the CUDA library; reboot after a driver update",
    804: "the forward compatibility package does not support this GPU; remove cuda-compat",
}
_LOST = {
    4: "the driver is unloading",
    46: "the device is busy or unavailable",
    214: "uncorrectable ECC error",
    220: "NVLink error",
    700: "illegal address",
    702: "a kernel ran too long",
    709: "the context was destroyed",
    710: "a device-side assertion failed",
    714: "hardware stack error",
    715: "illegal instruction",
    716: "misaligned address",
    717: "invalid address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
    999: "unknown error; see dmesg for an Xid",
}
_REFUSED = {
    cuda.INVALID_VALUE: "invalid value",
    201: "invalid context; a handle cannot be opened in the process that made it",
    205: "mapping failed",
    208: "mapped already",
    217: "these devices cannot reach each other's memory",
    304: "an operating system call failed: memory may not be pinned here (memlock limit, IOMMU, container)",
    400: "not a valid handle",
    712: "this memory is registered already",
    713: "this memory is not registered",
    _PEER_ACCESS_IS_ON: "peer access is on already",
    705: "peer access is off",
    711: "too many peers",
    800: "not permitted here; a container may need hostIPC",
    801: "not supported on this system",
}
_BROKEN_CONTEXT = frozenset((*range(700, 720), 999))


def fault_of(status: int, *, is_foreign: bool = False) -> DeviceFault:
    """Return how far the damage of a CUDA status goes.

    What is not known to be harmless breaks the device: it would not be known whether memory is quiet.

    `is_foreign`: the call opened a handle that another process sent. Then nothing was touched yet, and an
    unknown status refuses the handle; else a forged one would take the device from all clients.
    """
    if status == _OUT_OF_MEMORY:
        return DeviceFault.OUT_OF_MEMORY
    if status in _UNAVAILABLE:
        return DeviceFault.UNAVAILABLE
    if status in _REFUSED or (is_foreign and status not in _BROKEN_CONTEXT):
        return DeviceFault.REFUSED
    return DeviceFault.LOST


def _detail(problem: cuda.DriverStatus) -> str:
    """Return the status in words, with what to do where that is known."""
    advice = {**_UNAVAILABLE, **_LOST, **_REFUSED}.get(problem.status, "")
    return f"{problem.call} (status {problem.status}){': ' if advice else ''}{advice}"


def _unavailable(problem: cuda.DriverStatus | OSError) -> DeviceError:
    detail = _detail(problem) if isinstance(problem, cuda.DriverStatus) else str(problem)
    return DeviceError(DeviceFault.UNAVAILABLE, detail)


def num_devices() -> int:
    """Return how many GPUs this process sees. Raises DeviceError (UNAVAILABLE), naming the fix."""
    os.environ.setdefault(*CONNECTIONS)  # read when the driver is initialised
    count = c_int()
    try:
        cuda.check("cuInit", 0)
        cuda.check("cuDeviceGetCount", byref(count))
    except (cuda.DriverStatus, OSError) as problem:
        raise _unavailable(problem) from problem
    return count.value


class CudaEvent:
    """Implements `Event`."""

    def __init__(self, device: "CudaDevice", pointer: int, is_pooled: bool) -> None:
        self.device = device
        self.pointer = pointer
        self.is_pooled = is_pooled

    def is_done(self) -> bool:
        """See Event.is_done."""
        self.device.enter()
        status: int = cuda.library().cuEventQuery(self.pointer)
        if status not in (cuda.SUCCESS, cuda.NOT_READY):
            raise self.device.error(cuda.DriverStatus("cuEventQuery", status))
        return status == cuda.SUCCESS


class CudaStream:
    """Implements `Stream`."""

    def __init__(self, device: "CudaDevice", pointer: int) -> None:
        self.device = device
        self.pointer = pointer

    def copy(self, pieces: CopyPieces) -> None:
        """See Stream.copy. One call of the driver for BATCH_PIECES where it has batches, else one each."""
        if self.device.has_batches:
            self.device.enter()
            try:
                driver.copy_batch(pieces, self.pointer)
            except cuda.DriverStatus as problem:
                raise self.device.error(problem) from None
            return
        for source, target, length in zip(*(column.tolist() for column in pieces), strict=True):
            self.device.call("cuMemcpyAsync", target, source, length, self.pointer)

    def wait(self, event: Event) -> None:
        """See Stream.wait."""
        self.device.call("cuStreamWaitEvent", self.pointer, cast(CudaEvent, event).pointer, 0)

    def record(self, event: Event | None = None) -> Event:
        """See Stream.record."""
        mine = self.device.take_event() if event is None else cast(CudaEvent, event)
        self.device.call("cuEventRecord", mine.pointer, self.pointer)
        return mine


class CudaDevice:
    """Implements `Device` for device `index` of this process. Raises DeviceError (UNAVAILABLE)."""

    def __init__(self, index: int = 0) -> None:
        os.environ.setdefault(*CONNECTIONS)  # read when the driver is initialised
        self.index = index
        self._lost = ""
        self._lock = threading.Lock()
        name, bus_id = create_string_buffer(256), create_string_buffer(32)
        try:
            self._number = cuda.device_of(index)
            self._context = cuda.primary_context(self._number)
            self.uuid = cuda.device_uuid(self._number)
            cuda.check("cuDeviceGetName", name, len(name), self._number)
            cuda.check("cuDeviceGetPCIBusId", bus_id, len(bus_id), self._number)
            self.has_batches = driver.has_batches()
        except (cuda.DriverStatus, OSError) as problem:
            raise _unavailable(problem) from problem
        self.name = name.value.decode()
        self.bus_id = bus_id.value.decode().lower()
        self._free_events: list[CudaEvent] = []
        self._allocations: set[int] = set()
        self._opened: Counter[int] = Counter()  # how often each is open: CUDA counts, and returns it again
        self._registered: dict[int, Any] = {}  # address -> view that keeps the buffer from being unmapped
        pointers = [
            self._made(c_void_p(), "cuStreamCreate", cuda.STREAM_NON_BLOCKING) for _ in range(NUM_STREAMS)
        ]
        self._streams = [CudaStream(self, pointer) for pointer in pointers]
        self._free_streams = list(self._streams)
        self._watcher = Watcher(f"kvtier-gpu-{index}")
        self._is_shut_down = False

    # ------------------------------------------------------------------------------------------- calls

    def enter(self) -> None:
        """Make this device's context the calling thread's. Raises DeviceError (LOST)."""
        if self._lost:
            raise DeviceError(DeviceFault.LOST, self._lost)
        if getattr(_current, "context", None) != self._context:
            try:
                cuda.check("cuCtxSetCurrent", self._context)
            except cuda.DriverStatus as problem:
                raise self.error(problem) from None
            _current.context = self._context

    def call(self, name: str, *arguments: Any, is_foreign: bool = False) -> None:
        """Call the driver in this device's context. Raises DeviceError."""
        self.enter()
        try:
            cuda.check(name, *arguments)
        except cuda.DriverStatus as problem:
            raise self.error(problem, is_foreign=is_foreign) from None

    def _made(self, out: Any, name: str, *arguments: Any, is_foreign: bool = False) -> int:
        """Call the driver; return what it wrote to `out`, its first parameter. Raises DeviceError."""
        self.call(name, byref(out), *arguments, is_foreign=is_foreign)
        return int(out.value or 0)

    def error(self, problem: cuda.DriverStatus, *, is_foreign: bool = False) -> DeviceError:
        """Return the error of a CUDA status; a lost device stays lost."""
        fault, detail = fault_of(problem.status, is_foreign=is_foreign), _detail(problem)
        if fault is DeviceFault.LOST:
            self._lost = self._lost or f"device {self.index}: {detail}"
        return DeviceError(fault, detail)

    # ------------------------------------------------------------------------------------------ memory

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """See Device.allocate."""
        address = self._made(c_uint64(), "cuMemAlloc_v2", num_bytes)
        with self._lock:
            self._allocations.add(address)
        return DeviceMemory(address, num_bytes)

    def free(self, memory: DeviceMemory) -> None:
        """See Device.free."""
        with self._lock:
            self._check_held(memory.address, memory.address in self._allocations)
            self._allocations.discard(memory.address)
        self._give_back("cuMemFree_v2", memory.address)

    def register_host(self, buffer: Buffer, *, is_read_only: bool) -> int:
        """See Device.register_host."""
        view = np.frombuffer(buffer, np.uint8)
        address = int(view.ctypes.data)
        flags = cuda.HOST_REGISTER_PORTABLE | (cuda.HOST_REGISTER_READ_ONLY if is_read_only else 0)
        self.call("cuMemHostRegister_v2", address, len(view), flags)
        with self._lock:
            self._registered[address] = view
        return address

    def unregister_host(self, address: int) -> None:
        """See Device.unregister_host."""
        with self._lock:
            view = self._registered.pop(address, None)
        if view is not None:
            self._give_back("cuMemHostUnregister", address)

    def reach(self, peer: Device) -> bool:
        """See Device.reach."""
        assert isinstance(peer, CudaDevice)
        try:
            if not self._made(c_int(), "cuDeviceCanAccessPeer", self._number, peer._number):
                return False
            self.enter()
            status: int = cuda.library().cuCtxEnablePeerAccess(peer._context, 0)
            if status not in (cuda.SUCCESS, _PEER_ACCESS_IS_ON):
                raise self.error(cuda.DriverStatus("cuCtxEnablePeerAccess", status))
        except DeviceError as error:
            if error.fault is not DeviceFault.REFUSED:
                raise
            log.warning("device %d does not reach device %d: %s", self.index, peer.index, error)
            return False
        return True

    def open(self, handle: bytes, num_bytes: int) -> DeviceMemory:
        """See Device.open. CUDA does not open a handle in the process that made it."""
        flags = cuda.IPC_LAZY_ENABLE_PEER_ACCESS
        address = self._made(c_uint64(), "cuIpcOpenMemHandle_v2", _handle_of(handle), flags, is_foreign=True)
        with self._lock:
            self._opened[address] += 1
        try:
            base, size = cuda.allocation_of(address)
            shared_bytes = base + size - address
        except cuda.DriverStatus:
            shared_bytes = 0
        if num_bytes > shared_bytes:
            self.close(DeviceMemory(address, shared_bytes))
            raise DeviceError(DeviceFault.REFUSED, f"{num_bytes} bytes asked for, {shared_bytes} are shared")
        return DeviceMemory(address, num_bytes)

    def close(self, memory: DeviceMemory) -> None:
        """See Device.close."""
        with self._lock:
            self._check_held(memory.address, self._opened[memory.address] > 0)
            self._opened -= Counter({memory.address: 1})
        self._give_back("cuIpcCloseMemHandle", memory.address)

    def _check_held(self, address: int, is_held: bool) -> None:
        assert is_held or self._is_shut_down, f"{address:#x} was given back twice"

    def _give_back(self, name: str, pointer: int) -> None:
        """Give something back by the driver's call `name`, which has no effect on a lost device."""
        try:
            self.call(name, pointer)
        except DeviceError as error:
            if error.fault is not DeviceFault.LOST:
                raise

    # ------------------------------------------------------------------------------ streams and events

    def take_stream(self) -> Stream:
        """See Device.take_stream."""
        self.enter()
        with self._lock:
            if not self._free_streams:
                raise DeviceError(DeviceFault.OCCUPIED, f"all {len(self._streams)} streams are taken")
            return self._free_streams.pop(0)

    def give_stream(self, stream: Stream) -> None:
        """See Device.give_stream."""
        with self._lock:
            assert stream not in self._free_streams, "given back twice"
            self._free_streams.append(cast(CudaStream, stream))

    def take_event(self) -> CudaEvent:
        """See Device.take_event."""
        with self._lock:
            if self._free_events:
                return self._free_events.pop()
        pointer = self._made(c_void_p(), "cuEventCreate", cuda.EVENT_DISABLE_TIMING)
        return CudaEvent(self, pointer, True)

    def export_event(self) -> tuple[Event, bytes]:
        """See Device.export_event."""
        flags = cuda.EVENT_DISABLE_TIMING | cuda.EVENT_INTERPROCESS
        event = CudaEvent(self, self._made(c_void_p(), "cuEventCreate", flags), False)
        handle = cuda.IpcHandle()
        self.call("cuIpcGetEventHandle", byref(handle), event.pointer)
        return event, bytes(handle.reserved)

    def open_event(self, handle: bytes) -> Event:
        """See Device.open_event."""
        pointer = self._made(c_void_p(), "cuIpcOpenEventHandle", _handle_of(handle), is_foreign=True)
        return CudaEvent(self, pointer, False)

    def recycle(self, event: Event) -> None:
        """See Device.recycle."""
        mine = cast(CudaEvent, event)
        if mine.is_pooled:
            with self._lock:
                self._free_events.append(mine)
        else:
            self._give_back("cuEventDestroy_v2", mine.pointer)

    def when_done(self, event: Event, call: Callable[[DeviceError | None], Any]) -> Callable[[], None]:
        """See Device.when_done."""
        return self._watcher.watch(event, call)

    # --------------------------------------------------------------------------------------------- end

    def shut_down(self) -> None:
        """See Device.shut_down. Waits ten seconds at most.

        What hangs for longer keeps its memory, which goes with the process: giving it back would wait for
        ever."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        with suppress(DeviceError):
            for stream in self._streams:
                self.when_done(stream.record(), lambda _: None)
        if not self._watcher.close(SHUT_DOWN_S):
            log.error(
                "device %d is not quiet after %.0f s; its memory is left to the driver",
                self.index,
                SHUT_DOWN_S,
            )
            return
        for address in list(self._registered):
            self.unregister_host(address)
        for opened in list(self._opened.elements()):
            self.close(DeviceMemory(opened, 0))
        for address in list(self._allocations):
            self.free(DeviceMemory(address, 0))
        for event in self._free_events:
            self._give_back("cuEventDestroy_v2", event.pointer)
        for stream in self._streams:
            self._give_back("cuStreamDestroy_v2", stream.pointer)
        self._lost = self._lost or "the device was shut down"


def _handle_of(handle: bytes) -> cuda.IpcHandle:
    """Return the handle as the driver takes it. Raises DeviceError (REFUSED)."""
    if len(handle) != cuda.HANDLE_BYTES:
        raise DeviceError(
            DeviceFault.REFUSED, f"a CUDA handle has {cuda.HANDLE_BYTES} bytes, this one {len(handle)}"
        )
    return cuda.IpcHandle.from_buffer_copy(handle)
