"""Durable files: what the key file, the manifest and the segment files share of making changes durable."""

import errno
import os
from pathlib import Path

from .base import Cause


def sync_directory(directory: Path) -> None:
    """Make renames and new files in `directory` durable. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file, whole or not at all, durably. Blocks. Raises OSError."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)
    new.rename(path)
    sync_directory(path.parent)


def cause_of(error: OSError) -> Cause:
    """Return the cause under which a failed system call is counted."""
    is_short = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)  # of memory, too: it may pass
    return Cause.NO_SPACE if is_short else Cause.IO_ERROR
