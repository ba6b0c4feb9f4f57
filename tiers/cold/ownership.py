"""The lock of a store's directory, and the setting aside of one in a format we do not know.

The lock is an flock on a file inside: it follows the inode, so a second path to the same directory (a
bind mount, a link) meets the same lock, and it goes with the process however that dies. A pid file was
rejected: it survives its process and lies after a reboot.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..base import ColdStoreError
from ..durable import sync_directory

LOCK_NAME = "lock"
SET_ASIDE_PREFIX = "set-aside-"


class DirectoryOwned(ColdStoreError):
    """Another process, or another store in this one, owns the directory."""


class DirectoryLock:
    """Exclusive ownership of `directory` (created when missing) until `release` or the process's end.

    Raises DirectoryOwned, naming the holder, at once: waiting for it would hide a mistake.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_NAME
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ColdStoreError(
                f"cannot use {directory}: {error.strerror}; give the cold store a directory it may write"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._fd, 512, 0).decode(errors="replace").strip() or "an unknown process"
            os.close(self._fd)
            raise DirectoryOwned(
                f"{directory} belongs to {holder}; stop it or give this daemon another directory"
            ) from error
        status = os.fstat(self._fd)
        self._identity = (status.st_dev, status.st_ino)
        text = f"pid {os.getpid()} on {socket.gethostname()}, device {status.st_dev}, inode {status.st_ino}\n"
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def still_ours(self) -> bool:
        """Whether the lock file at the path is the one we hold: false when it was replaced."""
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return False
        return self._fd >= 0 and (status.st_dev, status.st_ino) == self._identity

    def release(self) -> None:
        """Release the lock. Idempotent. The file stays: removing it would race with the next owner."""
        if self._fd >= 0:
            with suppress(OSError):  # a disk that takes no writes: our name stays, the lock does not
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


@contextmanager
def reading_lock(directory: Path) -> Iterator[None]:
    """Keep owners away from `directory` while it is read, without changing anything in it.

    Raises DirectoryOwned when a process owns it. A folder without a lock file (a copy) has no owner.
    """
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        holder = os.pread(fd, 512, 0).decode(errors="replace").strip() or "an unknown process"
        raise DirectoryOwned(
            f"{directory} belongs to {holder}, and changes while it is read; ask that daemon, or stop it"
        ) from error
    finally:
        os.close(fd)


def set_aside(directory: Path) -> Path:
    """Move everything but the lock, and what was set aside before, into a new folder inside; return it.

    For formats we do not know: nothing in them is read further, changed or deleted.
    """
    number = 1
    while (target := directory / f"{SET_ASIDE_PREFIX}{number}").exists():
        number += 1
    target.mkdir(mode=0o700)
    for entry in sorted(directory.iterdir()):
        if entry.name != LOCK_NAME and not entry.name.startswith(SET_ASIDE_PREFIX):
            entry.rename(target / entry.name)
    sync_directory(target)
    sync_directory(directory)
    return target
