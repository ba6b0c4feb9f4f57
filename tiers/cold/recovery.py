"""Recovery: the records of segments after a restart, from footers or else from headers.

Footers are read for sealed segments, a few large reads each. A segment without a footer, because the
daemon died before sealing it, or with a damaged one, is read through and its records are believed one by
one, payload hash included, since nothing says that they were ever complete. Either way the result is the
same array of entries; no Python runs per record of a sealed segment.
"""

import logging
import mmap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ...v1.shm import PAGE_BYTES
from ..base import CopyError
from ..block import NamespaceIdentity, tenant_of
from ..codecs.base import PROFILED_ID
from ..codecs.registry import KNOWN_CODECS
from ..encryption.keyring import PLAIN
from .direct_io import DirectIo, Scratch, read_fully
from .footer import (
    Entries,
    Footer,
    FooterError,
    is_tombstone,
    pages_of,
    unpack_footer,
    unpack_head,
)
from .record import (
    CODEC_IDENTITY,
    ENTRY,
    ENTRY_BYTES,
    ENTRY_OFFSET,
    HAS_PARENT,
    IS_SPENT,
    MAGIC_WORD,
    PAGE_PROLOGUE,
    RecordError,
    RecordHeader,
    unpack_header,
)

log = logging.getLogger(__name__)

WINDOW_BYTES = 32 << 20  # read at a time when a segment is scanned

#: The columns of what recovery finds: as much is done with a million records in a column, one behind the
#: other, as with a quarter of them in rows.
RECORD = np.dtype(
    [
        ("namespace_index", "<u4"),  # in RecoveredStore.namespaces
        ("prefix_hash", "V32"),
        ("parent_hash", "V32"),
        ("has_parent", "?"),
        ("position", "<u4"),
        ("group", "<u4"),
        ("place", "<i8"),
        ("raw_length", "<u8"),
        ("stored_length", "<u8"),
        ("checksum", "V16"),
        ("codec", "<u2"),
        ("is_spent", "?"),
    ]
)
#: Fields that a record has from its entry, as they are.
COPIED = (
    "prefix_hash",
    "parent_hash",
    "position",
    "group",
    "raw_length",
    "stored_length",
    "checksum",
    "codec",
)
Records = dict[str, npt.NDArray[Any]]  # by name: RECORD's fields, each (num_records,)


class KnownNamespace(NamedTuple):
    """A namespace's number in the result, and which of its records count."""

    number: int
    key: int
    erased_before: int


_UNKNOWN = KnownNamespace(-1, PLAIN, 0)
_KNOWN = np.dtype([("number", "<i8"), ("key", "<u4"), ("erased_before", "<u8")])


@dataclass(slots=True)
class SegmentSummary:
    """A segment for SegmentLog.adopt."""

    number: int
    next_page: int
    num_live: int
    live_bytes: int


@dataclass(slots=True)
class RecoveredStore:
    """The cold store's contents at start.

    `segments` are in order of sealing; `reasons` counts what was found damaged, lost or doubled, by name.
    """

    namespaces: list[NamespaceIdentity]
    records: Records
    segments: list[SegmentSummary]
    reasons: Counter[str] = field(default_factory=Counter)
    unreadable: list[int] = field(default_factory=list)  # segments that a later start may read

    @property
    def num_records(self) -> int:
        """How many there are."""
        return len(self.records["place"])


class SegmentColumns(NamedTuple):
    """What the records of one segment say, in page order."""

    number: int
    next_page: int  # behind the last one
    records: Records
    keep: npt.NDArray[np.bool_]  # which of them count
    sequences: npt.NDArray[np.uint64]
    pages: npt.NDArray[np.int64]  # that each takes
    reasons: Counter[str]


@dataclass(slots=True)
class SegmentFile:
    """A segment as recovery sees it: an open file, and the life the manifest says it is in."""

    io: DirectIo
    fd: int
    number: int
    epoch: int
    data_pages: int
    footer_bytes: int


@dataclass(slots=True)
class ExaminedSegment:
    """Contents of one segment. `footer` is None when its life is over or nothing in it is whole."""

    number: int
    footer: Footer | None
    scanned: bool  # it has no valid footer on disk
    reasons: Counter[str]

    @property
    def is_unreadable(self) -> bool:
        """Whether there may be more in it than could be read now."""
        return self.reasons["window_unreadable"] > 0


def examine(file: SegmentFile, scratch: Scratch | None = None, *, sealed: bool) -> ExaminedSegment:
    """Read one segment. Never raises for what is on the disk. What a footer says stays in `scratch`."""
    reasons: Counter[str] = Counter()
    try:
        footer = read_footer(file, scratch)
        if footer is None or not len(footer.entries):
            return ExaminedSegment(file.number, None, False, reasons)
        return ExaminedSegment(file.number, footer, False, reasons)
    except FooterError:
        reasons["footer_damaged" if sealed else "segment_unsealed"] += 1
    except CopyError:
        reasons["footer_unreadable"] += 1
    footer = scan(file, reasons)
    return ExaminedSegment(file.number, footer if len(footer.entries) else None, True, reasons)


def read_footer(file: SegmentFile, scratch: Scratch | None = None) -> Footer | None:
    """Return the segment's footer, with its entries in `scratch`; None when a tombstone ends this life.
    Raises FooterError, CopyError."""
    scratch, start = scratch or Scratch(), file.data_pages * PAGE_BYTES
    scratch.reset(PAGE_BYTES)
    page = scratch.take(PAGE_BYTES)
    read_fully(file.io, file.fd, [page], start)
    if is_tombstone(page, file.number, file.epoch):
        return None
    head = unpack_head(page, file.number, file.epoch, file.data_pages)
    rounded = -(-head.body_bytes // PAGE_BYTES) * PAGE_BYTES
    if PAGE_BYTES + rounded > file.footer_bytes:
        raise FooterError("longer than its place")
    scratch.reset(rounded)
    body = scratch.take(rounded)
    read_fully(file.io, file.fd, [body], start + PAGE_BYTES)
    return unpack_footer(head, body, file.number, file.epoch, file.data_pages)


def scan(file: SegmentFile, reasons: Counter[str]) -> Footer:
    """Read a whole segment and return the footer it should have.

    Skips holes, ghosts of former lives and torn records; windows that cannot be read are counted and skipped.
    """
    window_pages = min(file.data_pages, WINDOW_BYTES // PAGE_BYTES)
    window = memoryview(mmap.mmap(-1, window_pages * PAGE_BYTES))
    namespaces: dict[bytes, int] = {}
    entries: list[bytes] = []
    owner_epoch = 0
    page = 0
    while page < file.data_pages:
        num_pages = min(window_pages, file.data_pages - page)
        view = window[: num_pages * PAGE_BYTES]
        try:
            read_fully(file.io, file.fd, [view], page * PAGE_BYTES)
        except CopyError:
            reasons["window_unreadable"] += 1
            page += num_pages
            continue
        next_page = page + num_pages
        done = page  # everything before belongs to a record already taken
        for start in _header_pages(view, file, page):
            if start < done:
                continue
            try:
                header = unpack_header(view[(start - page) * PAGE_BYTES :][:PAGE_BYTES])
            except RecordError:
                reasons["header_damaged"] += 1
                continue
            end = start + 1 + -(-header.stored_length // PAGE_BYTES)
            is_encoded = header.codec != CODEC_IDENTITY
            if end > file.data_pages or (header.stored_length != header.raw_length and not is_encoded):
                reasons["header_damaged"] += 1
                continue
            if end > page + num_pages:
                if start == page:  # larger than the window
                    window_pages = end - start
                    window = memoryview(mmap.mmap(-1, window_pages * PAGE_BYTES))
                next_page = start
                break
            offset = (start - page) * PAGE_BYTES
            if not is_whole(view, offset, header):
                reasons["record_torn"] += 1
                continue
            entries.append(bytes(view[offset + ENTRY_OFFSET : offset + ENTRY_OFFSET + ENTRY_BYTES]))
            index = namespaces.setdefault(header.namespace_digest, len(namespaces))
            entries[-1] = _with_namespace(entries[-1], index)
            owner_epoch = header.owner_epoch
            done = end
        page = max(next_page, done)
    array = np.frombuffer(b"".join(entries), ENTRY)
    return Footer(file.number, file.epoch, owner_epoch, list(namespaces), array)


def _header_pages(view: memoryview, file: SegmentFile, first_page: int) -> list[int]:
    """Return the pages that look like headers of this segment's present life, in order."""
    pages = np.frombuffer(view, PAGE_PROLOGUE)
    numbers = np.arange(first_page, first_page + len(pages), dtype=np.uint32)
    is_header = pages["magic"] == np.uint64(MAGIC_WORD)
    is_header &= pages["segment"] == np.uint32(file.number)
    is_header &= pages["epoch"] == np.uint64(file.epoch)
    is_header &= pages["page"] == numbers
    found: list[int] = numbers[is_header].tolist()
    return found


def is_whole(view: memoryview, offset: int, header: RecordHeader) -> bool:
    """Whether the payload of the record at `offset` in `view` has the hash that `header` names."""
    payload = view[offset + PAGE_BYTES : offset + PAGE_BYTES + header.stored_length]
    if header.codec != CODEC_IDENTITY or header.key != PLAIN:
        return bool(xxhash.xxh3_64_intdigest(payload) == header.stored_hash)
    return bool(xxhash.xxh3_128_digest(payload) == header.checksum)


_NAMESPACE_OFFSET = ENTRY.fields["namespace_index"][1] if ENTRY.fields else 0


def _with_namespace(entry: bytes, index: int) -> bytes:
    return entry[:_NAMESPACE_OFFSET] + index.to_bytes(4, "little") + entry[_NAMESPACE_OFFSET + 4 :]


def known_namespaces(
    namespaces: list[NamespaceIdentity], trust: Callable[[str], tuple[int, int]] = lambda tenant: (PLAIN, 0)
) -> dict[bytes, KnownNamespace]:
    """Return what `read_columns` has to know of namespaces, by digest.

    `trust` returns a tenant's key id, and the sequence number from which on its records count.
    """
    return {
        one.digest: KnownNamespace(index, *trust(tenant_of(one.domain)))
        for index, one in enumerate(namespaces)
    }


def assemble(found: list[SegmentColumns], namespaces: list[NamespaceIdentity]) -> RecoveredStore:
    """Put the segments' records together, in the order of `found`. `namespaces`: those that were known.

    Of several records of one fragment only the newest is kept.
    """
    reasons: Counter[str] = Counter()
    for segment in found:
        reasons.update(segment.reasons)
    found = [segment for segment in found if len(segment.keep)]
    if not found:
        nothing = {name: np.empty(0, RECORD[name]) for name in RECORD.names or ()}
        return RecoveredStore(namespaces, nothing, [], +reasons)
    records = {name: np.concatenate([one.records[name] for one in found]) for name in found[0].records}
    keep = np.concatenate([one.keep for one in found])
    reasons["duplicate"] += _drop_duplicates(records, np.concatenate([one.sequences for one in found]), keep)
    segments = []
    start = 0
    for segment in found:
        live = keep[start : start + len(segment.keep)]
        live_bytes = int(segment.pages[live].sum()) * PAGE_BYTES
        segments.append(SegmentSummary(segment.number, segment.next_page, int(live.sum()), live_bytes))
        start += len(live)
    if not keep.all():
        records = {name: column[keep] for name, column in records.items()}
    return RecoveredStore(namespaces, records, segments, +reasons)


def count_unreadable(recovered: RecoveredStore, can_read: Callable[[NamespaceIdentity], bool]) -> None:
    """Add to `recovered.reasons` the records that are kept although their profile is missing, and warn."""
    is_profiled = recovered.records["codec"] == PROFILED_ID
    for index, namespace in enumerate(recovered.namespaces):
        if can_read(namespace):
            continue
        count = int((is_profiled & (recovered.records["namespace_index"] == index)).sum())
        if count:
            recovered.reasons["profile_missing"] += count
            log.warning(
                "%d records name profile %s, which is not there: misses until its file is back in the "
                "directory compression.profiles",
                count,
                namespace.profile_digest.hex(),
            )


def read_columns(segment: ExaminedSegment, known: dict[bytes, KnownNamespace]) -> SegmentColumns:
    """Return what a segment's records say, copied, and which of them count.

    Those of unknown namespaces and keys do not, nor what was erased.
    """
    reasons = Counter(segment.reasons)
    footer = segment.footer
    if footer is None:
        keep, sequences, pages = np.empty(0, np.bool_), np.empty(0, np.uint64), np.empty(0, np.int64)
        return SegmentColumns(segment.number, 0, {}, keep, sequences, pages, reasons)
    entries: Entries = footer.entries
    records = {name: entries[name].copy() for name in COPIED}
    records["has_parent"] = (entries["flags"] & HAS_PARENT) != 0
    records["is_spent"] = (entries["flags"] & IS_SPENT) != 0
    records["place"] = entries["page"].astype(np.int64) | footer.segment << 32
    table = np.array([known.get(digest, _UNKNOWN) for digest in footer.namespaces], _KNOWN)
    mine = table[entries["namespace_index"]]
    is_known = (mine["number"] >= 0) & np.isin(records["codec"], sorted(KNOWN_CODECS))
    is_erased = is_known & (entries["sequence"] < mine["erased_before"])
    has_key = (entries["key"] == PLAIN) | (entries["key"] == mine["key"])
    reasons["namespace_unknown"] += int((~is_known).sum())
    reasons["tenant_erased"] += int(is_erased.sum())
    reasons["key_unknown"] += int((is_known & ~is_erased & ~has_key).sum())
    records["namespace_index"] = np.maximum(mine["number"], 0).astype(np.uint32)
    pages = pages_of(entries)
    next_page = int(entries["page"][-1]) + int(pages[-1])
    keep = is_known & ~is_erased & has_key
    sequences = entries["sequence"].copy()
    return SegmentColumns(segment.number, next_page, records, keep, sequences, pages, reasons)


def _drop_duplicates(records: Records, sequences: npt.NDArray[np.uint64], keep: npt.NDArray[np.bool_]) -> int:
    """Clear `keep` of all but the newest record of each fragment; return how many were cleared.

    Sorting by a 64-bit digest of the key finds the few candidates; only those are compared in Python.
    """
    names = records["prefix_hash"]
    tags = (
        names.view(np.uint64)[:: names.itemsize // 8]
        ^ (records["group"].astype(np.uint64) << np.uint64(32))
        ^ records["namespace_index"]
    )
    order = np.argsort(tags)
    ordered = tags[order]
    equal = ordered[1:] == ordered[:-1]
    suspects = np.zeros(len(tags), np.bool_)
    suspects[order[1:][equal]] = True
    suspects[order[:-1][equal]] = True
    found = np.flatnonzero(suspects & keep)
    newest: dict[tuple[int, int, bytes], int] = {}
    for index in found[np.lexsort((-found, sequences[found]))].tolist():  # the newest last
        newest[records["namespace_index"][index], records["group"][index], names[index].tobytes()] = index
    keep[found] = False
    keep[list(newest.values())] = True
    return len(found) - len(newest)
