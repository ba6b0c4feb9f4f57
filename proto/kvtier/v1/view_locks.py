"""Locks on single bytes of an index's file: clients take them, and the next daemon asks which are taken.

They belong to an open file, not to a process (F_OFD_SETLK): closing another descriptor of the file, as any
thread or library may, does not drop them.
"""

import fcntl
import os
import struct
from contextlib import suppress

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


def lock(descriptor: int, byte: int) -> None:
    """Take a shared lock. Where another open file has an exclusive one take none: that says as much."""
    with suppress(BlockingIOError):
        _set(descriptor, fcntl.F_RDLCK, byte)


def unlock(descriptor: int, byte: int) -> None:
    """Drop a lock."""
    _set(descriptor, fcntl.F_UNLCK, byte)


def is_locked(descriptor: int, byte: int, num_bytes: int = 1) -> bool:
    """Return whether another open file has a lock there. `num_bytes` 0: up to the end."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, num_bytes, 0)
    kind: int = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


def _set(descriptor: int, kind: int, byte: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
