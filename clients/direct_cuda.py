"""CudaExporter: a process's GPU memory and events as handles, for torch tensors on CUDA.

The driver is asked directly (ctypes), for two things that torch does not offer: where the allocation begins
that a tensor lies in, because an IPC handle always means the whole allocation, and the handle itself. torch's
own way (`_share_cuda_`) counts references through files in shared memory that only another torch can read.
Events are torch's: `torch.cuda.Event(interprocess=True)`.

Memory of `expandable_segments` (PYTORCH_CUDA_ALLOC_CONF) is mapped page by page and has no such handle; the
error says what to change. The driver also refuses where the two processes do not share an IPC namespace.

Signatures: CUDA driver API reference, memory management. Never ran on a GPU.
"""

import ctypes
import uuid
from functools import cache
from typing import Any

from .direct import Exported
from .errors import PreconditionFailed

HANDLE_BYTES = 64
_NOT_SUPPORTED, _INVALID_VALUE = 801, 1


class CudaExporter:
    """Implements `Exporter` for device `index`, as torch numbers it here. Raises PreconditionFailed when
    there is no driver."""

    def __init__(self, index: int = 0) -> None:
        import torch

        torch.cuda.init()
        self._torch = torch
        self._index = index
        raw = (ctypes.c_ubyte * 16)()
        device = ctypes.c_int()
        with torch.cuda.device(index):
            torch.cuda.current_stream()
            _check(_driver().cuCtxGetDevice(ctypes.byref(device)), "asking for the device")
            _check(_driver().cuDeviceGetUuid_v2(ctypes.byref(raw), device), "asking for the device's UUID")
        self.device_uuid = str(uuid.UUID(bytes=bytes(raw)))

    def export(self, address: int) -> Exported:
        """Return the allocation that `address` lies in. Raises PreconditionFailed."""
        base, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
        handle = (ctypes.c_ubyte * HANDLE_BYTES)()
        with self._torch.cuda.device(self._index):
            found = _driver().cuMemGetAddressRange_v2(
                ctypes.byref(base), ctypes.byref(num_bytes), ctypes.c_uint64(address)
            )
            _check(found, "finding the tensor's allocation")
            status = _driver().cuIpcGetMemHandle(ctypes.byref(handle), base)
        if status in (_INVALID_VALUE, _NOT_SUPPORTED):
            raise PreconditionFailed(
                "this GPU memory cannot be shared with another process; take `expandable_segments:True` out "
                f"of PYTORCH_CUDA_ALLOC_CONF, and use no managed memory for the KV cache (status {status})",
                reason="NO_DEVICE",
            )
        _check(status, "sharing the tensor's allocation")
        return Exported(bytes(handle), int(base.value), int(num_bytes.value))

    def new_event(self) -> tuple[Any, bytes]:
        """Return a torch event, to be recorded on a stream of torch's, and its handle."""
        with self._torch.cuda.device(self._index):
            event = self._torch.cuda.Event(interprocess=True)
            event.record()  # torch makes the CUDA event when it is first recorded
            return event, bytes(event.ipc_handle())

    def open_event(self, handle: bytes) -> Any:
        """Return a torch event of the daemon's, for `stream.wait_event`."""
        return self._torch.cuda.Event.from_ipc_handle(self._torch.device("cuda", self._index), handle)


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as problem:
        raise PreconditionFailed(
            "no NVIDIA driver here (libcuda.so.1 is missing); a container needs the NVIDIA runtime",
            reason="NO_DEVICE",
        ) from problem


def _check(status: int, what: str) -> None:
    if status != 0:
        raise PreconditionFailed(f"{what} failed: CUDA status {status}", reason="NO_DEVICE")
