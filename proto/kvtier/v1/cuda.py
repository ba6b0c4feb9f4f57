"""The calls of the CUDA driver that kvtier makes, through ctypes: one table of prototypes.

The daemon and a runtime's process use the same one.

ctypes releases the interpreter's lock during a call. cupy's wrappers of `eventQuery`, `eventRecord`,
`setDevice` and all of `ipc*` keep it (cupy 13.6 and 14.2, cupy_backends/cuda/api/runtime.pyx), and these
calls may block for as long as another process keeps the device busy.

A GPU has one primary context per process, which the CUDA runtime, torch and cupy use, too; `primary_context`
returns it. A context is current per thread, and on a thread without one the driver answers 201, so a caller
makes it current (`cuCtxSetCurrent`, `cuCtxPushCurrent_v2`) on every thread.

Prototypes: cuda.h of CUDA 12.8 and 13.0, which tests/tiers/gpu/test_signatures.py compares. Suffixes are
those that cuda.h adds by macro. `cuMemcpyBatchAsync` without a suffix has the parameter `failIdx`, also in
the libraries of CUDA 13.
"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any
from uuid import UUID

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64  # of an IPC handle
SUCCESS, INVALID_VALUE, NOT_READY, NOT_SUPPORTED = 0, 1, 600, 801
STREAM_NON_BLOCKING = 1  # does not wait for the legacy default stream
EVENT_DISABLE_TIMING, EVENT_INTERPROCESS = 2, 4
HOST_REGISTER_PORTABLE, HOST_REGISTER_READ_ONLY = 1, 8  # pinned for every context; mapped read-only
IPC_LAZY_ENABLE_PEER_ACCESS = 1
SOURCE_IN_STREAM_ORDER = 1  # a batch's sources are not read before the stream gets there


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle, which are passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class Location(ctypes.Structure):
    """CUmemLocation; ignored for memory that is not managed."""

    _fields_ = (("type", c_int), ("id", c_int))


class BatchAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("src_access_order", c_int),
        ("src_hint", Location),
        ("dst_hint", Location),
        ("flags", c_uint),
    )


_OUT_INT, _OUT_SIZE, _OUT_ADDRESS, _OUT_POINTER = map(POINTER, (c_int, c_size_t, c_uint64, c_void_p))
_OUT_HANDLE = POINTER(IpcHandle)

#: name -> ctypes of the parameters. Contexts, streams and events are void pointers, device addresses uint64.
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (_OUT_INT,),
    "cuDeviceGetCount": (_OUT_INT,),
    "cuDeviceGet": (_OUT_INT, c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (POINTER(Uuid), c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_OUT_POINTER, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (_OUT_POINTER,),
    "cuDeviceCanAccessPeer": (_OUT_INT, c_int, c_int),
    "cuCtxEnablePeerAccess": (c_void_p, c_uint),
    "cuMemAlloc_v2": (_OUT_ADDRESS, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemGetAddressRange_v2": (_OUT_ADDRESS, _OUT_SIZE, c_uint64),
    "cuIpcGetMemHandle": (_OUT_HANDLE, c_uint64),
    "cuIpcOpenMemHandle_v2": (_OUT_ADDRESS, IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuIpcGetEventHandle": (_OUT_HANDLE, c_void_p),
    "cuIpcOpenEventHandle": (_OUT_POINTER, IpcHandle),
    "cuStreamCreate": (_OUT_POINTER, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (_OUT_POINTER, c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpyBatchAsync": (
        *(c_void_p, c_void_p, c_void_p, c_size_t),  # targets, sources, sizes, how many
        *(POINTER(BatchAttributes), _OUT_SIZE, c_size_t, _OUT_SIZE, c_void_p),
    ),
}
OPTIONAL = ("cuMemcpyBatchAsync",)  # driver 12.8


class DriverStatus(Exception):
    """A call answered something else than success: `call` is its name, `status` a CUresult."""

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} answered {status}")
        self.call = call
        self.status = status


def prototyped(library: Any) -> Any:
    """Return `library` with the prototypes set. Raises OSError, naming the fix, when it lacks a call."""
    for name, parameters in PROTOTYPES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            if name in OPTIONAL:
                continue
            raise OSError(f"the NVIDIA driver has no {name}; install one for CUDA 12 or newer") from None
        function.argtypes = parameters
        function.restype = c_int
    return library


@cache
def library() -> Any:
    """Return the driver. Raises OSError, naming the fix."""
    try:
        loaded = ctypes.CDLL(LIBRARY)
    except OSError as problem:
        raise OSError(
            f"no NVIDIA driver here ({LIBRARY} is missing); a container needs the NVIDIA runtime"
        ) from problem
    return prototyped(loaded)


def check(name: str, *arguments: Any) -> None:
    """Call the driver. Raises DriverStatus, OSError (no driver)."""
    status: int = getattr(library(), name)(*arguments)
    if status != SUCCESS:
        raise DriverStatus(name, status)


def device_of(index: int) -> int:
    """Return the driver's handle of device `index`, counted as CUDA_VISIBLE_DEVICES says.

    Raises DriverStatus, OSError.
    """
    handle = c_int()
    check("cuInit", 0)
    check("cuDeviceGet", byref(handle), index)
    return handle.value


def primary_context(device: int) -> int:
    """Return the primary context of a device, made where it was not there. It stays until the process ends.
    Raises DriverStatus."""
    context = c_void_p()
    check("cuDevicePrimaryCtxRetain", byref(context), device)
    return context.value or 0


def device_uuid(device: int) -> str:
    """Return the UUID of a device, or of the MIG instance that it is. Raises DriverStatus.

    As nvidia-smi prints it behind `GPU-` or `MIG-`: the same in every process.
    """
    raw = Uuid()
    check("cuDeviceGetUuid_v2", byref(raw), device)
    return str(UUID(bytes=bytes(raw.bytes)))


def allocation_of(address: int) -> tuple[int, int]:
    """Return (first address, bytes) of the allocation that `address` lies in. Raises DriverStatus."""
    base, num_bytes = c_uint64(), c_size_t()
    check("cuMemGetAddressRange_v2", byref(base), byref(num_bytes), address)
    return base.value, num_bytes.value
