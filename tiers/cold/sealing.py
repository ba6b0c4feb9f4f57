"""Ends of segments: flush and footer of one that is full, tombstone of one that is freed.

Sealing order: flush the data, then write the footer, then tell the manifest. A valid footer therefore
implies complete data, and needs no payload to be read at recovery. A failed flush is not repeated, because
the kernel may have dropped what it could not write: the segment becomes *suspect*, gets no footer, and
its records are believed one by one after a restart.
"""

import logging
import threading
from collections.abc import Sequence

from ...v1.shm import PAGE_BYTES
from ..base import Cause, CopyError, EngineStatistics
from .direct_io import DirectIo, Scratch, write_fully
from .footer import Entries, Footer, pack_footer, pack_tombstone
from .manifest import Kind, segment_event
from .manifest_file import Manifest
from .segment_life import SegmentLife

log = logging.getLogger(__name__)


class SegmentSealer:
    """Writes footers and tombstones behind the `data_pages` of the store's `segments`.

    `segments` and `statistics` are the store's own, `lock` guards both. `is_durable`: a sealed segment
    survives power loss.
    """

    def __init__(
        self,
        io: DirectIo,
        manifest: Manifest,
        segments: Sequence[SegmentLife],
        statistics: EngineStatistics,
        lock: threading.Lock,
        data_pages: int,
        *,
        is_durable: bool,
    ) -> None:
        self._io = io
        self._manifest = manifest
        self._segments = segments
        self._statistics = statistics
        self._lock = lock
        self._data_pages = data_pages
        self._is_durable = is_durable
        self._scratch = Scratch()

    def seal(self, number: int, entries: Entries) -> bool:
        """Flush a segment, write its footer of `entries` (n,), sorted by page, tell the manifest. Returns
        False, and marks the segment suspect, when any of it fails."""
        segment = self._segments[number]
        footer = Footer(number, segment.epoch, self._manifest.owner_epoch, list(segment.namespaces), entries)
        try:
            if self._is_durable:
                try:
                    self._io.sync(segment.fd)
                except OSError as error:
                    raise CopyError(Cause.IO_ERROR, f"flush: {error.strerror}") from error
            self._write_end(segment.fd, pack_footer(footer), durable=self._is_durable)
            self._manifest.append(segment_event(Kind.SEALED, number, segment.epoch))
        except CopyError as error:
            segment.suspect = True
            log.warning("segment %d is suspect and stays without footer: %s", number, error)
            with self._lock:
                failures = self._statistics.failures
                failures[error.cause] = failures.get(error.cause, 0) + 1
            return False
        with self._lock:
            segment.entries = bytearray()
        return True

    def flush_unsealed(self) -> None:
        """Flush every unsealed segment, before one is freed: records copied out of that one must be as
        durable as they were in it. Never raises; a segment with a failed flush becomes suspect."""
        for number, segment in enumerate(self._segments):
            if segment.entries and not segment.sealed and not segment.suspect:
                try:
                    self._io.sync(segment.fd)
                except OSError as error:
                    segment.suspect = True
                    log.warning("segment %d is suspect: flush: %s", number, error.strerror)

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
        write_fully(self._io, fd, [page], self._data_pages * PAGE_BYTES, durable=durable)
