"""Opens files that an administrator or a user names, without being held up by what stands at their place."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular_file(path: Path, flags: int = 0) -> BinaryIO:
    """Return a file, open for reading, with further `flags` of os.open; links are followed.

    Raises OSError, with `strerror` that can be shown, when it cannot be opened, or is no regular file: a pipe
    of that name would be waited for without end, a device read without end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    file = open(descriptor, "rb")  # noqa: SIM115 (the caller's)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def read_regular_file(path: Path, max_bytes: int, flags: int = 0) -> bytes:
    """Return what a file holds.

    Raises OSError like `open_regular_file`, and when it is larger than `max_bytes`.
    """
    with open_regular_file(path, flags) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes} bytes", str(path))
    return data
