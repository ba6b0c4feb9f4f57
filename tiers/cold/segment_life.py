"""Lives of segments: their state, which the parts of a cold store share, how they end, and the audit.

Sealing order: flush the data, then write the footer, then tell the manifest. A valid footer therefore
implies complete data, and needs no payload to be read at recovery. A failed flush is not repeated, because
the kernel may have dropped what it could not write: the segment becomes *suspect*, gets no footer, and
its records are believed one by one after a restart.
"""

import logging
import threading
from dataclasses import dataclass, field

import numpy as np

from ...v1.shm import PAGE_BYTES
from ..base import Cause, CopyError, EngineStatistics
from .direct_io import DirectIo, Scratch, write_fully
from .footer import Entries, Footer, FooterError, check_entries, pack_footer, pack_tombstone
from .manifest import Kind, segment_event
from .manifest_file import Manifest
from .opening import Durability
from .record import ENTRY

log = logging.getLogger(__name__)

NO_FILE = -1  # descriptor of a segment without a file: it was given back


@dataclass(slots=True)
class SegmentLife:
    """State of one segment; `epoch` is 0 while it is free."""

    fd: int
    epoch: int = 0
    sealed: bool = False
    suspect: bool = False  # a flush failed: no footer, ever
    is_failing: bool = False  # its last write failed, which was logged
    is_ending: bool = False  # the manifest is being told, or was: another life takes this one's place
    holds_copies: bool = False  # unflushed ones, out of other segments
    flushing: threading.Lock = field(default_factory=threading.Lock)  # a failed flush is told once
    entries: bytearray = field(default_factory=bytearray)  # of the records written, until sealed
    namespaces: dict[bytes, int] = field(default_factory=dict)


@dataclass(slots=True)
class StoreState:
    """What the parts of one cold store share.
    `lock` guards everything below a segment's life, and the counters."""

    io: DirectIo
    manifest: Manifest
    segments: list[SegmentLife]
    statistics: EngineStatistics
    data_pages: int  # of a segment, before its footer
    durability: Durability
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count_failure(self, cause: Cause) -> None:
        """Count a failed call. The caller holds the lock."""
        failures = self.statistics.failures
        failures[cause] = failures.get(cause, 0) + 1


class SegmentSealer:
    """Writes footers and tombstones behind the data of the store's segments."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._scratch = Scratch()
        self._copies = threading.Lock()

    def seal(self, number: int, entries: Entries) -> bool:
        """Flush a segment, write its footer of `entries` (n,), sorted by page, tell the manifest.

        Returns False, and marks the segment suspect, when any of it fails.
        """
        state, segment = self._state, self._state.segments[number]
        is_durable = state.durability != "none"
        owner_epoch = state.manifest.owner_epoch
        footer = Footer(number, segment.epoch, owner_epoch, list(segment.namespaces), entries)
        try:
            if is_durable:
                self._flush(segment)
            self._write_end(segment.fd, pack_footer(footer), durable=is_durable)
            state.manifest.append(segment_event(Kind.SEALED, number, segment.epoch), durable=is_durable)
        except CopyError as error:
            segment.suspect = True
            log.warning("segment %d is suspect and stays without footer: %s", number, error)
            with state.lock:
                state.count_failure(error.cause)
            return False
        with state.lock:
            segment.entries = bytearray()
        return True

    def flush_copies(self) -> None:
        """Flush every segment with records that were copied out of another one, before that is freed.
        They must be as durable as they were there. Never raises; a segment with a failed flush becomes
        suspect."""
        with self._copies:  # no mark means that the flush has ended
            for number, segment in enumerate(self._state.segments):
                if segment.holds_copies and not segment.suspect:
                    segment.holds_copies = False
                    try:
                        self._flush(segment)
                    except CopyError as error:
                        log.warning("segment %d is suspect: %s", number, error)

    def _flush(self, segment: SegmentLife) -> None:
        """Flush a segment's data, unless a flush of it failed before. Raises CopyError."""
        with segment.flushing:
            if segment.suspect:
                raise CopyError(Cause.IO_ERROR, "an earlier flush failed")
            try:
                self._state.io.sync(segment.fd)
            except OSError as error:
                segment.suspect = True
                raise CopyError(Cause.IO_ERROR, f"flush: {error.strerror}") from error

    def write_tombstone(self, number: int, epoch: int, fd: int) -> None:
        """Overwrite the footer of a freed segment. Never raises: the manifest knows already."""
        try:
            self._write_end(fd, pack_tombstone(number, epoch), durable=False)
        except CopyError as error:
            log.warning("segment %d: no tombstone (%s)", number, error)

    def _write_end(self, fd: int, data: bytes, *, durable: bool) -> None:
        """Write whole pages, from ordinary memory, behind the data of a segment. Raises CopyError."""
        self._scratch.reset(len(data))
        page = self._scratch.take(len(data))
        page[:] = data
        write_fully(self._state.io, fd, [page], self._state.data_pages * PAGE_BYTES, durable=durable)


def check_lives(state: StoreState) -> list[str]:
    """Return where lives disagree with the manifest's, or records of an unsealed segment overlap.

    A life that ends meanwhile is not judged.
    """
    problems = []
    segments, lives = state.segments, state.manifest.state.lives
    for number in range(len(segments)):
        with state.lock:
            segment, life = segments[number], lives.get(number)  # in this order: see `is_ending`
        if segment.epoch != (life.epoch if life else 0) and not segment.is_ending:
            problems.append(f"segment {number}: its epoch is not the manifest's")
        if segment.epoch and segment.fd == NO_FILE:
            problems.append(f"segment {number}: in use without a file")
        if life and life.sealed and not segment.sealed:
            problems.append(f"segment {number}: sealed in the manifest only")
        with state.lock:
            entries = np.frombuffer(bytes(segment.entries), ENTRY)
            num_namespaces = len(segment.namespaces)
        try:
            check_entries(entries[np.argsort(entries["page"])], num_namespaces, state.data_pages)
        except FooterError as error:
            problems.append(f"segment {number}: {error}")
    return problems
