"""Copies that a caller waits for: trials at start, and bytes that must be over there before the next line.

Everything hot is asynchronous and never comes here.
"""

import threading

from .contract import CopyPieces, Device, DeviceError, DeviceFault, Stream


def copy_and_wait(device: Device, stream: Stream, pieces: CopyPieces, limit_s: float) -> None:
    """Copy `pieces` and block until that is done. Raises DeviceError; see `wait_for`."""
    stream.copy(pieces)
    wait_for(device, stream, limit_s)


def wait_for(device: Device, stream: Stream, limit_s: float) -> None:
    """Block until `stream` has done what it was given, `limit_s` at most.

    Raises DeviceError: LOST when it has not by then, and its memory may still be written.
    """
    ended: list[DeviceError | None] = []
    is_over = threading.Event()

    def tell(error: DeviceError | None) -> None:
        ended.append(error)
        is_over.set()

    event = stream.record()
    device.when_done(event, tell)
    if not is_over.wait(limit_s):
        raise DeviceError(DeviceFault.LOST, f"what a stream was given did not end in {limit_s:g} s")
    device.recycle(event)
    if ended[0] is not None:
        raise ended[0]
