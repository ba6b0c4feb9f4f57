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


def cause_of(error: OSError) -> Cause:
    """Return the cause under which a failed system call is counted."""
    return Cause.NO_SPACE if error.errno in (errno.ENOSPC, errno.EDQUOT) else Cause.IO_ERROR
