"""The calls of the CUDA driver that cupy has no name for, through ctypes: columns in, one call per
batch.

`cuMemcpyBatchAsync` (driver 12.8 and newer) takes arrays of sources, targets and sizes, which is what
`Pieces` is, so a get of thousands of pieces crosses from Python once and without the interpreter's lock. The
runtime's `cudaMemcpyBatchAsync` is the same call, but lives in a library that cupy's wheels link statically.
The unsuffixed symbol keeps its first signature, with `failIdx`, in later drivers.

cupy reads a device's UUID as a C string and loses what follows a zero byte, so that is asked here, too; and
how large an allocation is that another process claims to have shared, because its word is not enough.

Signatures: CUDA driver API reference, memory management and device management. Never ran on a GPU.
"""

import ctypes
import uuid
from functools import cache

import numpy as np

from .device import DeviceError, DeviceFault, Pieces

SUCCESS = 0
_SOURCE_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: not before the stream gets there


class _Location(ctypes.Structure):
    """CUmemLocation; ignored for memory that is not managed."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_hint", _Location),
        ("dst_hint", _Location),
        ("flags", ctypes.c_uint),
    )


@cache
def library() -> ctypes.CDLL:
    """Return the driver. Raises DeviceError (UNAVAILABLE)."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(
            DeviceFault.UNAVAILABLE,
            "no NVIDIA driver here (libcuda.so.1 is missing); a container needs the NVIDIA runtime",
        ) from error


def has_batches() -> bool:
    """Whether the driver copies batches."""
    return hasattr(library(), "cuMemcpyBatchAsync")


def copy_batch(pieces: Pieces, stream: int) -> int:
    """Enqueue all pieces on `stream` (a CUstream) in one call; return the driver's status, 0 when it took
    them.

    The arrays are contiguous, and free when it returns. The calling thread has the device's context.
    """
    sizes = pieces.lengths.astype(np.uintp)
    attributes = _Attributes(src_access_order=_SOURCE_IN_STREAM_ORDER)
    first = ctypes.c_size_t(0)
    failed = ctypes.c_size_t(0)
    status: int = library().cuMemcpyBatchAsync(
        ctypes.c_void_p(pieces.targets.ctypes.data),
        ctypes.c_void_p(pieces.sources.ctypes.data),
        ctypes.c_void_p(sizes.ctypes.data),
        ctypes.c_size_t(len(sizes)),
        ctypes.byref(attributes),
        ctypes.byref(first),
        ctypes.c_size_t(1),
        ctypes.byref(failed),
        ctypes.c_void_p(stream),
    )
    return status


def allocation_bytes(address: int) -> int:
    """Return how many bytes of the allocation around `address` begin there; 0 when there is none."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    status = library().cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    return base.value + size.value - address if status == SUCCESS else 0


def device_uuid(index: int) -> str:
    """Return the UUID of a device as nvidia-smi prints it, without `GPU-`. Raises DeviceError
    (UNAVAILABLE)."""
    driver = library()
    handle, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    status = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(index))
    status = status or driver.cuDeviceGetUuid(ctypes.byref(raw), handle)
    if status != SUCCESS:
        raise DeviceError(DeviceFault.UNAVAILABLE, f"the driver knows no device {index} (status {status})")
    return str(uuid.UUID(bytes=bytes(raw)))
