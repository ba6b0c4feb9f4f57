"""The manifest on disk: reading the two files, appending events, beginning a new file.

Every owner begins with a new file, so nothing is ever appended behind a torn tail; the number of that file is
the owner's epoch, larger than that of any owner before. After a failed flush the file is never trusted
again: the next event goes into a new one, written from the state in memory.
"""

import os
import threading
from collections import Counter
from pathlib import Path

from ..base import CopyError
from ..durable import cause_of, sync_directory
from .direct_io import DirectIo, write_fully
from .manifest import ManifestDamaged, ManifestState, frame, pack_prologue, parse_manifest

NAMES = ("manifest.0", "manifest.1")
NEW_NAME = "manifest.new"
ROTATE_BYTES = 1 << 20  # of events behind the snapshot
MAX_FILE_BYTES = 256 << 20  # more than any manifest has; bounds what a damaged one makes us read


def load_manifest(directory: Path) -> tuple[ManifestState | None, Counter[str]]:
    """Return the newest state that is whole, or else the newest at all, and what was found damaged.

    `generation` is the largest seen in either file. Raises IncompatibleFormat.
    """
    reasons: Counter[str] = Counter()
    states = []
    for name in NAMES:
        try:
            with open(directory / name, "rb") as file:
                states.append(parse_manifest(file.read(MAX_FILE_BYTES)))
        except FileNotFoundError:
            pass
        except OSError:
            reasons["manifest_unreadable"] += 1
        except ManifestDamaged:
            reasons["manifest_damaged"] += 1
    if not states:
        return None, reasons
    states.sort(key=lambda state: (state.complete, state.generation))
    best = states[-1]
    newest = max(state.generation for state in states)
    if best.generation < newest:
        reasons["manifest_older_generation"] += 1
    if best.num_lost_bytes:
        reasons["manifest_torn"] += 1
    if best.num_odd_events:
        reasons["manifest_odd_events"] += best.num_odd_events
    best.generation = newest
    return best, reasons


class Manifest:
    """The owner's end of the log. Thread-safe.

    `state` is what the events add up to, changed by `append` after its event was written. Raises CopyError
    when the first file cannot be written.
    """

    def __init__(self, directory: Path, io: DirectIo, state: ManifestState) -> None:
        self.state = state
        self._directory = directory
        self._io = io
        self._lock = threading.Lock()
        self._flushing = threading.Lock()  # held by a flush, and to change the file; taken after `_lock`
        self._fd = -1
        self._num_files = 0
        self._end = self._flushed = 0  # of what was written, and is on the medium
        self._rotate_at = 0
        self._suspect = False
        self._rotate()
        self.owner_epoch = state.generation

    def append(self, event: bytes, *, durable: bool = False) -> None:
        """Log one event. `durable`: it is on the medium when this returns, with all that were logged before.
        Others log theirs while one is flushed: a flush takes as long as what others write to the device.
        Raises CopyError: the event then counts as not having happened."""
        while True:
            with self._lock:
                if self._suspect or self._end >= self._rotate_at:
                    self._rotate_if_needed()
                framed = frame(event)
                try:
                    write_fully(self._io, self._fd, [framed], self._end)
                except CopyError:
                    self._suspect = True
                    raise
                self._end += len(framed)
                number, end = self._num_files, self._end
                if not durable:
                    return self.state.apply(event)
            self._flush(number, end)
            with self._lock:
                if number == self._num_files and self._flushed >= end and not self._suspect:
                    return self.state.apply(event)
            # A new file was begun meanwhile, or is to be: without it, as it was not part of the state.

    def _flush(self, number: int, end: int) -> None:
        """Flush file `number` up to `end`, unless that was done, or it is not to be trusted any more."""
        with self._flushing:
            if number != self._num_files or self._suspect or self._flushed >= end:
                return
            written = self._end
            try:
                self._sync(self._fd)
            except CopyError:
                self._suspect = True
                raise
            self._flushed = written

    def forget_namespace(self, digest: bytes) -> None:
        """Leave a namespace out of the next file."""
        with self._lock:
            self.state.namespaces.pop(digest, None)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock, self._flushing:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _rotate_if_needed(self) -> None:
        """A merely long log may go on growing when there is no room for a new one; a suspect may not."""
        try:
            self._rotate()
        except CopyError:
            if self._suspect:
                raise
            self._rotate_at = self._end + ROTATE_BYTES

    def _rotate(self) -> None:
        """Write the state to a new file, flush it, and put it in the place of the older one."""
        self.state.generation += 1
        content = pack_prologue(self.state.generation, self.state.features) + b"".join(
            map(frame, self.state.snapshot())
        )
        path = self._directory / NEW_NAME
        fd = -1
        try:
            path.unlink(missing_ok=True)
            fd = self._io.open(path, direct=False)
            write_fully(self._io, fd, [content], 0)
            self._sync(fd)
            path.rename(self._directory / NAMES[self.state.generation % 2])
            self._suspect = True  # a start would read the new file: nothing counts in the old one any more
            sync_directory(self._directory)
        except (OSError, CopyError) as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, CopyError):
                raise
            raise CopyError(cause_of(error), f"new manifest: {error.strerror}") from error
        with self._flushing:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._end, self._suspect = fd, len(content), False
            self._flushed = self._end
            self._num_files += 1
        self._rotate_at = self._end + ROTATE_BYTES

    def _sync(self, fd: int) -> None:
        try:
            self._io.sync(fd)
        except OSError as error:
            raise CopyError(cause_of(error), f"flush of the manifest: {error.strerror}") from error
