"""CudaExporter: a process's GPU memory and events as handles, for torch tensors on CUDA.

The driver is asked directly (v1/cuda.py), for two things that torch does not offer: where the allocation
begins that a tensor lies in, because an IPC handle always means the whole allocation, and the handle itself.
torch's own way (`_share_cuda_`) counts references through files in shared memory that only another torch can
read. Events are torch's: `torch.cuda.Event(interprocess=True)`.

A context is current per thread, and torch's device guard makes none current where the index is the one that a
fresh thread starts with, 0. So `export` pushes the device's primary context itself.

Memory that was mapped page by page has no such handle: `expandable_segments` of PYTORCH_CUDA_ALLOC_CONF, and
vLLM's sleep mode, which also moves its pools. The error says what to change. The driver also refuses where
the two processes do not share an IPC namespace.

Signatures: CUDA driver API reference, memory management. Never ran on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_void_p
from typing import Any

from ..v1 import cuda
from .errors import PreconditionFailed
from .operations.direct import Exported

_UNSHAREABLE = (cuda.INVALID_VALUE, cuda.NOT_SUPPORTED)


class CudaExporter:
    """Implements `Exporter` for device `index`, as torch numbers it here. May be used from any thread.

    Raises PreconditionFailed when there is no driver.
    """

    def __init__(self, index: int = 0) -> None:
        import torch

        self._torch = torch
        self._index = index
        with _advised("asking for the device"):
            device = cuda.device_of(index)
            self._context = cuda.primary_context(device)
            self.device_uuid = cuda.device_uuid(device)

    def export(self, address: int) -> Exported:
        """Return the allocation that `address` lies in. Raises PreconditionFailed."""
        handle = cuda.IpcHandle()
        with self._current():
            with _advised("finding the tensor's allocation"):
                base, num_bytes = cuda.allocation_of(address)
            try:
                cuda.check("cuIpcGetMemHandle", byref(handle), base)
            except cuda.DriverStatus as problem:
                if problem.status not in _UNSHAREABLE:
                    raise _refused("sharing the tensor's allocation", problem) from None
                raise PreconditionFailed(
                    "this GPU memory cannot be shared with another process: take `expandable_segments:True` "
                    "out of PYTORCH_CUDA_ALLOC_CONF, start vLLM without --enable-sleep-mode, and use no "
                    f"managed memory for the KV cache (status {problem.status})",
                    reason="NO_DEVICE",
                ) from None
        return Exported(bytes(handle.reserved), base, num_bytes)

    def new_event(self) -> tuple[Any, bytes]:
        """Return a torch event, to be recorded on a stream of torch's, and its handle."""
        with self._torch.cuda.device(self._index):
            event = self._torch.cuda.Event(interprocess=True)
            event.record()  # torch makes the CUDA event when it is first recorded
            return event, bytes(event.ipc_handle())

    def open_event(self, handle: bytes) -> Any:
        """Return a torch event of the daemon's, for `stream.wait_event`."""
        return self._torch.cuda.Event.from_ipc_handle(self._torch.device("cuda", self._index), handle)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the device's context this thread's for as long as it lasts. Raises PreconditionFailed."""
        with _advised("making the device's context current"):
            cuda.check("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            cuda.library().cuCtxPopCurrent_v2(byref(c_void_p()))


@contextmanager
def _advised(what: str) -> Iterator[None]:
    """Let a failure of the driver out as PreconditionFailed."""
    try:
        yield
    except cuda.DriverStatus as problem:
        raise _refused(what, problem) from None
    except OSError as problem:
        raise PreconditionFailed(str(problem), reason="NO_DEVICE") from None


def _refused(what: str, problem: cuda.DriverStatus) -> PreconditionFailed:
    return PreconditionFailed(f"{what} failed: CUDA status {problem.status}", reason="NO_DEVICE")
