"""The segment files of a cold store: opened and preallocated together, or not at all.

All space is taken at open, so that a full disk is an error of configuration, seen at start, and never of
a copy at night.
"""

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base import ColdStoreError
from .direct_io import DirectIo

PATTERN = "segment-??????"


@dataclass(slots=True)
class OpenedFiles:
    """File descriptors in the order of the numbers asked for, and which files were not as they were left."""

    fds: list[int]
    missing: set[int]  # created now
    resized: set[int]  # had another length


def segment_path(directory: Path, number: int) -> Path:
    """Return the path of a segment's file."""
    return directory / f"segment-{number:06d}"


def open_segment_files(
    directory: Path, io: DirectIo, numbers: Sequence[int], segment_bytes: int
) -> OpenedFiles:
    """Open the files of these segments, each of `segment_bytes`, creating and preallocating what is missing.

    Raises ColdStoreError; files created by this call are then removed again.
    """
    opened = OpenedFiles([], set(), set())
    try:
        for number in numbers:
            path = segment_path(directory, number)
            existed = path.exists()
            opened.fds.append(io.open(path))
            if not existed:
                opened.missing.add(number)
            _make_size(io, opened, opened.fds[-1], number, segment_bytes)
    except OSError as error:
        for fd in opened.fds:
            io.close(fd)
        for number in opened.missing:
            segment_path(directory, number).unlink(missing_ok=True)
        raise ColdStoreError(_explain(error, directory, len(numbers), segment_bytes)) from error
    return opened


def remove_surplus(directory: Path, num_segments: int) -> int:
    """Delete the files of segments beyond `num_segments`; return how many there were."""
    kept = {segment_path(directory, number) for number in range(num_segments)}
    surplus = [path for path in directory.glob(PATTERN) if path not in kept and path.is_file()]
    for path in surplus:
        path.unlink()
    return len(surplus)


def _make_size(io: DirectIo, opened: OpenedFiles, fd: int, number: int, segment_bytes: int) -> None:
    status = os.fstat(fd)
    if status.st_size != segment_bytes:
        if number not in opened.missing:
            opened.resized.add(number)
        if status.st_size > segment_bytes:
            os.ftruncate(fd, segment_bytes)
    if status.st_size < segment_bytes or status.st_blocks * 512 < segment_bytes:
        io.allocate(fd, segment_bytes)


def _explain(error: OSError, directory: Path, num_segments: int, segment_bytes: int) -> str:
    wanted = f"{num_segments} segments of {segment_bytes} bytes"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        status = os.statvfs(directory)
        free = status.f_bavail * status.f_frsize
        return (
            f"{directory} cannot hold {wanted}: {free} bytes are free; lower tiers.nvme.capacity or make room"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"too few file descriptors for {wanted}; raise the limit (nofile) or segment_bytes"
    return f"cannot open {wanted} in {directory}: {error.strerror}"
