"""CudaDevice: the contract of a GPU on NVIDIA, through cupy's thin wrapper of the CUDA runtime.

cupy was chosen over torch because kvtier needs addresses, streams and events, and cupy's `runtime` names
exactly those CUDA calls, one function each, releasing the interpreter's lock in all that may block. torch
would bring its caching allocator, whose blocks cannot be exported one by one, and 2 GB. cupy's own pools,
streams and arrays are not used either: a slab is one `cudaMalloc`, so that its IPC handle means all of it and
nothing else.

Streams are non-blocking: they do not wait for the legacy default stream, on which other libraries work.
Events carry no timing (a timed one costs more); those of `export_event` are interprocess. Errors that CUDA
keeps returning once a context is broken become LOST and stay so; the rest of the process then runs on without
this device.

Checked against cupy-cuda12x 14.2.0 (names and signatures). Never ran on a GPU.
"""

import importlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import numpy as np

from ..base import Buffer
from . import driver
from .device import Device, DeviceError, DeviceFault, DeviceMemory, Event, Pieces, Stream
from .watcher import Watcher

log = logging.getLogger(__name__)

SHUT_DOWN_S = 10.0
READ_ONLY = 8  # cudaHostRegisterReadOnly (CUDA 11.1); cupy has no name for it
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context
_PEER_ACCESS_IS_ON = 704

_current = threading.local()  # .index: the device that this thread works on, one for all CudaDevices

# Status codes of cudaError_t (driver_types.h).
_SUCCESS, _INVALID_VALUE, _OUT_OF_MEMORY, _NOT_READY = 0, 1, 2, 600
_UNAVAILABLE = {
    3: "CUDA could not be initialised; see the driver's log (dmesg)",
    35: "the NVIDIA driver is older than CUDA 12, or missing; install a newer one",
    100: "no NVIDIA device is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES",
    101: "there is no such device; change tiers.hbm.device",
    803: "the driver does not fit the CUDA library; reboot after a driver update",
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
    _INVALID_VALUE: "invalid value",
    201: "invalid context; a handle cannot be opened in the process that made it",
    205: "mapping failed",
    208: "mapped already",
    217: "these devices cannot reach each other's memory",
    304: "an operating system call failed: memory may not be pinned here (memlock limit, IOMMU, container)",
    400: "not a valid handle",
    712: "this memory is registered already",
    713: "this memory is not registered",
    704: "peer access is on already",
    705: "peer access is off",
    711: "too many peers",
    800: "not permitted here; a container may need hostIPC",
    801: "not supported on this system",
}


def fault_of(status: int) -> DeviceFault:
    """Return how far the damage of a CUDA status goes. What is not known to be harmless breaks the device: it
    would not be known whether memory is quiet."""
    if status == _OUT_OF_MEMORY:
        return DeviceFault.OUT_OF_MEMORY
    if status in _UNAVAILABLE:
        return DeviceFault.UNAVAILABLE
    return DeviceFault.REFUSED if status in _REFUSED else DeviceFault.LOST


def load_runtime() -> Any:
    """Return cupy's wrapper of the CUDA runtime. Raises DeviceError (UNAVAILABLE), naming the fix."""
    try:
        return importlib.import_module("cupy.cuda.runtime")
    except ImportError as error:
        raise DeviceError(
            DeviceFault.UNAVAILABLE, "cupy is not installed; `pip install kvtier[gpu]`, or use backend: host"
        ) from error


def num_devices() -> int:
    """Return how many GPUs this process sees. Raises DeviceError (UNAVAILABLE)."""
    runtime = load_runtime()
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise DeviceError(DeviceFault.UNAVAILABLE, str(error)) from error


class CudaEvent:
    """Implements `Event`."""

    def __init__(self, device: "CudaDevice", pointer: int, is_pooled: bool) -> None:
        self.device = device
        self.pointer = pointer
        self.is_pooled = is_pooled

    def is_done(self) -> bool:
        """See Event.is_done."""
        with self.device.calling() as runtime:
            status = int(runtime.eventQuery(self.pointer))
        if status not in (_SUCCESS, _NOT_READY):
            raise self.device.error(status, "asking an event")
        return status == _SUCCESS


class CudaStream:
    """Implements `Stream`."""

    def __init__(self, device: "CudaDevice", pointer: int) -> None:
        self.device = device
        self.pointer = pointer

    def copy(self, pieces: Pieces) -> None:
        """See Stream.copy. One call of the driver where it has batches, one per piece otherwise."""
        with self.device.calling() as runtime:
            if self.device.has_batches:
                sources, targets = np.ascontiguousarray(pieces.sources), np.ascontiguousarray(pieces.targets)
                status = driver.copy_batch(Pieces(sources, targets, pieces.lengths), self.pointer)
                if status != driver.SUCCESS:
                    raise self.device.error(status, "copying a batch")
                return
            copy, kind = runtime.memcpyAsync, runtime.memcpyDefault
            columns_of_ints = zip(*(column.tolist() for column in pieces), strict=True)
            for source, target, length in columns_of_ints:
                copy(target, source, length, kind, self.pointer)

    def wait(self, event: Event) -> None:
        """See Stream.wait."""
        with self.device.calling() as runtime:
            runtime.streamWaitEvent(self.pointer, cast(CudaEvent, event).pointer)

    def record(self, event: Event | None = None) -> Event:
        """See Stream.record."""
        mine = self.device.take_event() if event is None else cast(CudaEvent, event)
        with self.device.calling() as runtime:
            runtime.eventRecord(mine.pointer, self.pointer)
        return mine


class CudaDevice:
    """Implements `Device` for device `index` of this process. Raises DeviceError (UNAVAILABLE), with the fix.

    `num_streams` and `num_events` bound its pools.
    """

    def __init__(self, index: int = 0, *, num_streams: int = 64, num_events: int = 512) -> None:
        self.index = index
        self._runtime = load_runtime()
        self._lost = ""
        self._lock = threading.Lock()
        with self.calling() as runtime:
            self.name = runtime.getDeviceProperties(index)["name"].decode()
        self.uuid = driver.device_uuid(index)
        self.has_batches = driver.has_batches()
        self._free_events: list[CudaEvent] = []
        self._num_events_left = num_events
        self._allocations: set[int] = set()
        self._opened: Counter[int] = Counter()  # how often each is open: CUDA counts, and returns it again
        self._registered: dict[int, Any] = {}  # address -> view that keeps the buffer from being unmapped
        with self.calling() as runtime:
            pointers = [runtime.streamCreateWithFlags(runtime.streamNonBlocking) for _ in range(num_streams)]
        self._streams = [CudaStream(self, pointer) for pointer in pointers]
        self._free_streams = list(self._streams)
        self._watcher = Watcher(f"kvtier-gpu-{index}")
        self._is_shut_down = False

    # ------------------------------------------------------------------------------------------ errors

    @contextmanager
    def calling(self) -> Iterator[Any]:
        """Give the runtime to this thread, on this device; CUDA's errors come out as DeviceError."""
        if self._lost:
            raise DeviceError(DeviceFault.LOST, self._lost)
        try:
            if getattr(_current, "index", None) != self.index:
                self._runtime.setDevice(self.index)
                _current.index = self.index
            yield self._runtime
        except self._runtime.CUDARuntimeError as error:
            raise self.error(int(error.status), str(error)) from error

    def error(self, status: int, what: str) -> DeviceError:
        """Return the error of a CUDA status; a lost device stays lost."""
        fault = fault_of(status)
        advice = {**_UNAVAILABLE, **_LOST, **_REFUSED}.get(status, "")
        detail = f"{what} (status {status}){': ' if advice else ''}{advice}"
        if fault is DeviceFault.LOST:
            self._lost = self._lost or f"device {self.index}: {detail}"
        return DeviceError(fault, detail)

    # ------------------------------------------------------------------------------------------ memory

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """See Device.allocate."""
        with self.calling() as runtime:
            address = int(runtime.malloc(num_bytes))
        with self._lock:
            self._allocations.add(address)
        return DeviceMemory(address, num_bytes)

    def free(self, memory: DeviceMemory) -> None:
        """See Device.free."""
        with self._lock:
            self._check_held(memory.address, memory.address in self._allocations)
            self._allocations.discard(memory.address)
        self._giving_back(self._runtime.free, memory.address)

    def register_host(self, buffer: Buffer, *, is_read_only: bool) -> int:
        """See Device.register_host."""
        view = np.frombuffer(buffer, np.uint8)
        address = int(view.ctypes.data)
        with self.calling() as runtime:
            runtime.hostRegister(address, len(view), PORTABLE | (READ_ONLY if is_read_only else 0))
        with self._lock:
            self._registered[address] = view
        return address

    def unregister_host(self, address: int) -> None:
        """See Device.unregister_host."""
        with self._lock:
            view = self._registered.pop(address, None)
        if view is not None:
            self._giving_back(self._runtime.hostUnregister, address)

    def reach(self, peer: Device) -> bool:
        """See Device.reach."""
        try:
            with self.calling() as runtime:
                if not runtime.deviceCanAccessPeer(self.index, peer.index):
                    return False
                try:
                    runtime.deviceEnablePeerAccess(peer.index)
                except runtime.CUDARuntimeError as error:
                    if int(error.status) != _PEER_ACCESS_IS_ON:
                        raise
        except DeviceError as error:
            if error.fault is not DeviceFault.REFUSED:
                raise
            log.warning("device %d does not reach device %d: %s", self.index, peer.index, error)
            return False
        return True

    def export(self, memory: DeviceMemory) -> bytes:
        """See Device.export."""
        with self.calling() as runtime:
            return bytes(runtime.ipcGetMemHandle(memory.address))

    def open(self, handle: bytes, num_bytes: int) -> DeviceMemory:
        """See Device.open. CUDA does not open a handle in the process that made it."""
        _check_handle(handle)
        with self.calling() as runtime:
            address = int(runtime.ipcOpenMemHandle(handle))
            shared_bytes = driver.allocation_bytes(address)
        with self._lock:
            self._opened[address] += 1
        if num_bytes > shared_bytes:
            self.close(DeviceMemory(address, shared_bytes))
            raise DeviceError(DeviceFault.REFUSED, f"{num_bytes} bytes asked for, {shared_bytes} are shared")
        return DeviceMemory(address, num_bytes)

    def close(self, memory: DeviceMemory) -> None:
        """See Device.close."""
        with self._lock:
            self._check_held(memory.address, self._opened[memory.address] > 0)
            self._opened -= Counter({memory.address: 1})
        self._giving_back(self._runtime.ipcCloseMemHandle, memory.address)

    def _check_held(self, address: int, is_held: bool) -> None:
        assert is_held or self._is_shut_down, f"{address:#x} was given back twice"

    def _giving_back(self, call: Callable[[int], Any], pointer: int) -> None:
        """Give something back, which has no effect on a lost device."""
        try:
            with self.calling():
                call(pointer)
        except DeviceError as error:
            if error.fault is not DeviceFault.LOST:
                raise

    # ------------------------------------------------------------------------------ streams and events

    def take_stream(self) -> Stream | None:
        """See Device.take_stream."""
        with self.calling(), self._lock:
            return self._free_streams.pop(0) if self._free_streams else None

    def give_stream(self, stream: Stream) -> None:
        """See Device.give_stream."""
        with self._lock:
            assert stream not in self._free_streams, "given back twice"
            self._free_streams.append(cast(CudaStream, stream))

    def take_event(self) -> CudaEvent:
        """Return an event of the pool. Raises DeviceError (REFUSED) when it is empty."""
        with self._lock:
            if self._free_events:
                return self._free_events.pop()
            if self._num_events_left == 0:
                raise DeviceError(DeviceFault.REFUSED, "all events are in use; recycle some")
            self._num_events_left -= 1
        with self.calling() as runtime:
            return CudaEvent(self, int(runtime.eventCreateWithFlags(runtime.eventDisableTiming)), True)

    def export_event(self) -> tuple[Event, bytes]:
        """See Device.export_event."""
        with self.calling() as runtime:
            flags = runtime.eventDisableTiming | runtime.eventInterprocess
            event = CudaEvent(self, int(runtime.eventCreateWithFlags(flags)), False)
            return event, bytes(runtime.ipcGetEventHandle(event.pointer))

    def open_event(self, handle: bytes) -> Event:
        """See Device.open_event."""
        _check_handle(handle)
        with self.calling() as runtime:
            return CudaEvent(self, int(runtime.ipcOpenEventHandle(handle)), False)

    def recycle(self, event: Event) -> None:
        """See Device.recycle."""
        mine = cast(CudaEvent, event)
        if mine.is_pooled:
            with self._lock:
                self._free_events.append(mine)
        else:
            self._giving_back(self._runtime.eventDestroy, mine.pointer)

    def when_done(self, event: Event, call: Callable[[DeviceError | None], Any]) -> None:
        """See Device.when_done."""
        self._watcher.watch(event, call)

    # --------------------------------------------------------------------------------------------- end

    def shut_down(self) -> None:
        """See Device.shut_down. Waits ten seconds at most. What hangs for longer keeps its memory, which goes
        with the process: giving it back would wait for ever."""
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
            self._giving_back(self._runtime.eventDestroy, event.pointer)
        for stream in self._streams:
            self._giving_back(self._runtime.streamDestroy, stream.pointer)
        self._lost = self._lost or "the device was shut down"


def _check_handle(handle: bytes) -> None:
    if len(handle) != 64:
        raise DeviceError(DeviceFault.REFUSED, f"a CUDA handle has 64 bytes, this one {len(handle)}")
