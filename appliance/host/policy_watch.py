"""FileWatch: notices that a file of the administrator's is another one, however it became that.

Editors write in place or rename over it; Kubernetes swaps a symbolic link two folders up (`..data`) and the
path stays what it was. All of these show in what `stat` says about the end of the path, so that is looked at
once a second, from a thread that the end of the process does not wait for: a ConfigMap arrives a minute
after it was changed anyway. inotify was rejected: it watches inodes, and every one of these ways exchanges
the inode, so all folders on the way would have to be watched as well, and it tells nothing on network file
systems.

A file is read when it stood still for one look: an editor that writes in place may be in the middle of it.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..detached import detached

POLL_S = 1.0


class FileSignature(NamedTuple):
    """What tells one content of the file from another without reading it."""

    device: int
    inode: int
    changed_ns: int
    num_bytes: int


def signature_of(path: Path) -> FileSignature | None:
    """Return what stands at the end of `path` now, links followed; None when nothing does."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return FileSignature(status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


class FileWatch:
    """Looks at one file; says when what is there is new and stands still. Pure but for `look`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: FileSignature | None = None
        self._told: FileSignature | None = (
            None  # none yet: the file may have changed since it was read at the start
        )

    def look(self) -> bool:
        """Look once; return whether the file should be read now. Blocks for one `stat`."""
        return self.saw(signature_of(self.path))

    def saw(self, signature: FileSignature | None) -> bool:
        """Compare a new result of `stat` with the last."""
        stands_still = signature == self._seen
        self._seen = signature
        if not stands_still or signature == self._told:
            return False
        self._told = signature
        return True


async def watch(
    paths: Sequence[Path], changed: Callable[[], Awaitable[object]], poll_s: float = POLL_S
) -> None:
    """Call `changed` whenever a file at one of `paths` became another one, until cancelled."""
    files = [FileWatch(path) for path in paths]
    while True:
        await asyncio.sleep(poll_s)
        if any(await detached(lambda: [file.look() for file in files])):
            await changed()
