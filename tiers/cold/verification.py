"""Verification: the records of a segment are read and compared with what their headers promise.

For the background pass of a daemon and, read-only and without a daemon, for a folder. Neither needs a key: a
record carries the hash of the bytes as they were written, encoded and encrypted. With keys (`Opener`) the tag
of an encrypted record is verified as well.
"""

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...v1.shm import PAGE_BYTES, extent_of, place_of, slot_of
from ..base import Buffer, Cause, CopyError, Damaged, Verified
from ..codecs.records import RecordCodecs
from ..encryption.envelope import Envelopes
from ..encryption.keyring import Keyring
from ..encryption.master_keys import MasterKeys
from .direct_io import read_fully
from .footer import Entries, FooterError, footer_bytes_for, pages_of
from .inspection import ReadOnlyIo
from .manifest import ManifestState
from .manifest_file import load_manifest
from .ownership import reading_lock
from .record import ENTRY, RecordError, RecordHeader, unpack_header
from .record_io import Opener
from .recovery import (
    ExaminedSegment,
    SegmentFile,
    assemble,
    examine,
    is_whole,
    known_namespaces,
    read_columns,
    read_footer,
)
from .segment_files import segment_path
from .segment_life import SegmentLife, StoreState

#: Read and compared in one step: a millisecond or two. One larger record is a step of its own.
STEP_BYTES = 2 << 20
STEP_RECORDS = 64


class SegmentVerifier:
    """Implements `Verifier` for the segments of one open store.

    `file_of` returns a segment as recovery sees it.
    """

    def __init__(self, state: StoreState, file_of: Callable[[int], SegmentFile], directory: Path) -> None:
        self._state, self._file_of, self._directory = state, file_of, directory
        self.is_closed = False

    def units(self) -> list[int]:
        """Return the numbers of the segments that are in use."""
        return [number for number, segment in enumerate(self._state.segments) if segment.epoch]

    def is_alive(self, damaged: Damaged) -> bool:
        """Whether the segment is in the life in which the record was found damaged."""
        return self._state.segments[extent_of(damaged.place)].epoch == damaged.life

    def verify_unit(self, number: int) -> Iterator[Verified]:
        """Verify what stands in a segment now; see Verifier.

        Which records there are the footer says, or before there is one, the entries in memory.
        """
        state, file = self._state, self._file_of(number)
        segment = state.segments[number]
        try:
            # The store may close its own.
            file.fd = state.io.open_to_read(segment_path(self._directory, number))
        except OSError as error:
            yield Verified(0, 0, (), f"segment {number}: its file: {error.strerror}")
            return
        try:
            for step in self._steps(file, segment):
                if self.is_closed or state.segments[number] is not segment or segment.epoch != file.epoch:
                    return
                yield step
        finally:
            state.io.close(file.fd)

    def _steps(self, file: SegmentFile, segment: SegmentLife) -> Iterator[Verified]:
        with self._state.lock:
            entries = np.frombuffer(bytes(segment.entries), ENTRY)
        if len(entries) or not segment.sealed:
            yield from verify_records(file, entries[np.argsort(entries["page"])])
            return
        try:
            footer = read_footer(file)
        except (FooterError, CopyError) as problem:
            if isinstance(problem, CopyError) and problem.cause is Cause.NO_SPACE:
                return  # no memory for the read
            found = examine(file, sealed=True).footer
            whole = (
                [] if found is None else [place_of(file.number, p) for p in found.entries["page"].tolist()]
            )
            footer_place = Damaged(place_of(file.number, file.data_pages), file.epoch, Cause.WRONG_CHECKSUM)
            words = f"segment {file.number}: its footer: {problem}"
            yield Verified(len(whole), file.data_pages * PAGE_BYTES, (footer_place,), words, whole)
            return
        if footer is not None:
            yield from verify_records(file, footer.entries)


def verify_records(file: SegmentFile, entries: Entries, opener: Opener | None = None) -> Iterator[Verified]:
    """Verify records of a segment, given by their entries (n,) in page order, in steps."""
    starts = entries["page"].astype(np.int64)
    ends = starts + pages_of(entries)
    memory = memoryview(b"")
    first = 0
    while first < len(entries):
        limit = starts[first] + STEP_BYTES // PAGE_BYTES
        end = min(max(first + 1, int(np.searchsorted(ends, limit, "right"))), first + STEP_RECORDS)
        num_bytes = int(ends[end - 1] - starts[first]) * PAGE_BYTES
        if len(memory) < num_bytes:
            memory = memoryview(mmap.mmap(-1, max(num_bytes, STEP_BYTES)))
        rows = [(int(starts[i]), int(ends[i]), entries[i]) for i in range(first, end)]
        damaged = _verify_run(file, rows, memory[:num_bytes], opener)
        yield Verified(len(rows), num_bytes, damaged)
        first = end


def _verify_run(
    file: SegmentFile, rows: list[tuple[int, int, "np.void"]], view: Buffer, opener: Opener | None
) -> list[Damaged]:
    """Read neighbouring records, (page, end, entry), into `view` with one call; return the damaged ones."""
    first_page = rows[0][0]
    try:
        read_fully(file.io, file.fd, [view], first_page * PAGE_BYTES)
    except CopyError as error:
        if error.cause is Cause.NO_SPACE:  # no memory for the read: of the record it says nothing
            return []
        if len(rows) == 1:
            return [Damaged(place_of(file.number, first_page), file.epoch, error.cause)]
        damaged = []
        for row in rows:  # one bad sector must not take its neighbours along
            num_bytes = (row[1] - row[0]) * PAGE_BYTES
            damaged += _verify_run(file, [row], view[:num_bytes], opener)
        return damaged
    found = []
    for page, end, entry in rows:
        record = view[(page - first_page) * PAGE_BYTES : (end - first_page) * PAGE_BYTES]
        cause = _cause_of(record, entry, (file.number, file.epoch, page), opener)
        if cause is not None:
            found.append(Damaged(place_of(file.number, page), file.epoch, cause))
    return found


def _cause_of(
    record: Buffer, entry: "np.void", where: tuple[int, int, int], opener: Opener | None
) -> Cause | None:
    """Return why the bytes of a record are not what was written; None: they are."""
    try:
        header = unpack_header(record[:PAGE_BYTES])
    except RecordError:
        return Cause.WRONG_IDENTITY
    if (header.segment, header.epoch, header.page) != where or not _is_entrys(header, entry):
        return Cause.WRONG_IDENTITY
    if not is_whole(record, 0, header):
        return Cause.WRONG_CHECKSUM
    if opener is not None and header.key:
        try:
            opener.decrypt(header, record[PAGE_BYTES : PAGE_BYTES + header.stored_length])
        except CopyError as error:
            return None if error.cause is Cause.NO_KEY else error.cause
    return None


def _is_entrys(header: RecordHeader, entry: "np.void") -> bool:
    return (
        header.prefix_hash == entry["prefix_hash"].tobytes()
        and header.sequence == entry["sequence"]
        and header.group == entry["group"]
        and header.stored_length == entry["stored_length"]
        and (header.key != 0 or header.checksum == entry["checksum"].tobytes())
    )


# ------------------------------------------------------------------------------------ without a daemon


class SegmentVerified(NamedTuple):
    """What the verification of one segment of a folder found. `segment` -1: the manifest."""

    segment: int
    num_records: int
    num_bytes: int
    num_encrypted: int
    damaged: list[dict[str, Any]]  # records: page, cause, namespace, prefix_hash, group, is_live
    problems: list[str]  # words: what was unsealed, footers


def verify_store(directory: Path, master_keys: MasterKeys | None = None) -> Iterator[SegmentVerified]:
    """Verify all segments of a folder that no daemon owns. Changes nothing; keeps daemons out meanwhile.

    Encrypted records are verified over their ciphertext, with `master_keys` also by their tags. Raises
    DirectoryOwned, IncompatibleFormat, KeyringError, OSError.
    """
    with reading_lock(directory):
        state, reasons = load_manifest(directory)
        problems = [f"{name}: {times}" for name, times in reasons.items()]
        if problems or state is None:
            yield SegmentVerified(-1, 0, 0, 0, [], problems or ["there is none"])
        if state is not None:
            yield from _verify_lives(directory, state, Keyring(directory, master_keys))


def _verify_lives(directory: Path, state: ManifestState, keyring: Keyring) -> Iterator[SegmentVerified]:
    namespaces = state.namespaces
    opener = None
    if keyring.can_encrypt:
        opener = Opener(namespaces, RecordCodecs(namespaces), Envelopes(keyring))
    found = {}
    for number, life in state.lives.items():
        with _opened(directory, state, number) as file:
            found[number] = examine(file, sealed=life.sealed)
    known = known_namespaces(list(namespaces.values()), keyring.trust_of_file)
    trusted = assemble([read_columns(one, known) for one in found.values()], list(namespaces.values()))
    live = set(trusted.records["place"].tolist())
    for number, examined in found.items():
        with _opened(directory, state, number) as file:
            yield _verify_examined(file, examined, live, opener)


@contextmanager
def _opened(directory: Path, state: ManifestState, number: int) -> Iterator[SegmentFile]:
    footer_bytes = footer_bytes_for(state.segment_bytes)
    data_pages = (state.segment_bytes - footer_bytes) // PAGE_BYTES
    io = ReadOnlyIo()
    fd = io.open(segment_path(directory, number))
    try:
        yield SegmentFile(io, fd, number, state.lives[number].epoch, data_pages, footer_bytes)
    finally:
        io.close(fd)


def _verify_examined(
    file: SegmentFile, examined: ExaminedSegment, live: set[int], opener: Opener | None
) -> SegmentVerified:
    """Verify the records that a start would take from a segment. `live`: places of those that count."""
    problems = [f"{name}: {times}" for name, times in examined.reasons.items()]
    footer = examined.footer
    if footer is None:
        return SegmentVerified(file.number, 0, 0, 0, [], problems)
    report = SegmentVerified(
        file.number, len(footer.entries), 0, int((footer.entries["key"] != 0).sum()), [], problems
    )
    num_bytes = 0
    for step in verify_records(file, footer.entries, opener):
        num_bytes += step.num_bytes
        for one in step.damaged:
            page = slot_of(one.place)
            entry = footer.entries[np.searchsorted(footer.entries["page"], page)]
            report.damaged.append(
                {
                    "segment": file.number,
                    "page": page,
                    "cause": one.cause.value,
                    "namespace": footer.namespaces[entry["namespace_index"]].hex(),
                    "prefix_hash": entry["prefix_hash"].tobytes().hex(),
                    "group": int(entry["group"]),
                    "is_live": one.place in live,
                }
            )
    return report._replace(num_bytes=num_bytes)
