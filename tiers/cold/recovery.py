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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ...v1.shm import PAGE_BYTES
from ..base import CopyError
from ..block import NamespaceIdentity, tenant_of
from ..codecs.base import PROFILED_ID
from ..codecs.registry import KNOWN_CODECS
from ..encryption.keyring import PLAIN
from .direct_io import DirectIo, read_fully
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

#: One record found at recovery.
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
#: The first 8 bytes of a prefix hash, as a number.
_FIRST_WORD = np.dtype(
    {"names": ["word"], "formats": ["<u8"], "offsets": [4], "itemsize": RECORD.itemsize}  # of RECORD
)
assert RECORD.fields is not None
assert RECORD.fields["prefix_hash"][1] == 4


class _Known(NamedTuple):
    """A namespace's number in the result, and which of its records count."""

    number: int
    key: int
    erased_before: int


_UNKNOWN = _Known(-1, PLAIN, 0)
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

    `records` has dtype RECORD, shape (num_records,); `segments` are in order of sealing; `reasons` counts
    what was found damaged, lost or doubled, by name.
    """

    namespaces: list[NamespaceIdentity]
    records: npt.NDArray[np.void]
    segments: list[SegmentSummary]
    reasons: Counter[str] = field(default_factory=Counter)


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


def examine(file: SegmentFile, *, sealed: bool) -> ExaminedSegment:
    """Read one segment. Never raises for what is on the disk."""
    reasons: Counter[str] = Counter()
    try:
        footer = read_footer(file)
        if footer is None or not len(footer.entries):
            return ExaminedSegment(file.number, None, False, reasons)
        return ExaminedSegment(file.number, footer, False, reasons)
    except FooterError:
        reasons["footer_damaged" if sealed else "segment_unsealed"] += 1
    except CopyError:
        reasons["footer_unreadable"] += 1
    footer = scan(file, reasons)
    return ExaminedSegment(file.number, footer if len(footer.entries) else None, True, reasons)


def read_footer(file: SegmentFile) -> Footer | None:
    """Return the segment's footer; None when a tombstone ends this life. Raises FooterError, CopyError."""
    start = file.data_pages * PAGE_BYTES
    page = memoryview(mmap.mmap(-1, PAGE_BYTES))
    read_fully(file.io, file.fd, [page], start)
    if is_tombstone(page, file.number, file.epoch):
        return None
    head = unpack_head(page, file.number, file.epoch, file.data_pages)
    rounded = -(-head.body_bytes // PAGE_BYTES) * PAGE_BYTES
    if PAGE_BYTES + rounded > file.footer_bytes:
        raise FooterError("longer than its place")
    body = memoryview(mmap.mmap(-1, rounded))
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


def assemble(
    found: list[ExaminedSegment],
    namespaces: list[NamespaceIdentity],
    trust: Callable[[str], tuple[int, int]] = lambda tenant: (PLAIN, 0),
) -> RecoveredStore:
    """Put the segments' entries together, in the order of `found`.

    Of several records of one fragment only the newest is kept. `trust` returns a tenant's key id, and the
    sequence number from which on its records count.
    """
    reasons: Counter[str] = Counter()
    known = {one.digest: _Known(index, *trust(tenant_of(one.domain))) for index, one in enumerate(namespaces)}
    footers = []
    for segment in found:
        reasons.update(segment.reasons)
        if segment.footer is not None:
            footers.append(segment.footer)
    num_records = sum(len(footer.entries) for footer in footers)
    records = np.empty(num_records, RECORD)
    sequences = np.empty(num_records, np.uint64)
    keep = np.ones(num_records, np.bool_)
    spans = []
    start = 0
    for footer in footers:
        end = start + len(footer.entries)
        spans.append((start, end))
        _fill(records[start:end], keep[start:end], footer, known, reasons)
        sequences[start:end] = footer.entries["sequence"]
        start = end
    reasons["duplicate"] += _drop_duplicates(records, sequences, keep)
    segments = []
    for footer, (start, end) in zip(footers, spans, strict=True):
        pages = pages_of(footer.entries)
        live = keep[start:end]
        next_page = int(footer.entries["page"][-1]) + int(pages[-1])
        live_bytes = int(pages[live].sum()) * PAGE_BYTES
        segments.append(SegmentSummary(footer.segment, next_page, int(live.sum()), live_bytes))
    if not keep.all():
        records = records[keep]
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


def _fill(
    records: npt.NDArray[np.void],
    keep: npt.NDArray[np.bool_],
    footer: Footer,
    known: dict[bytes, _Known],
    reasons: Counter[str],
) -> None:
    """Write one segment's entries into its part of the result.

    Marks those of unknown namespaces and keys, and what was erased.
    """
    entries: Entries = footer.entries
    for name in COPIED:
        records[name] = entries[name]
    records["has_parent"] = entries["flags"] & HAS_PARENT
    records["is_spent"] = (entries["flags"] & IS_SPENT) != 0
    records["place"] = entries["page"].astype(np.int64) | footer.segment << 32
    table = np.array([known.get(digest, _UNKNOWN) for digest in footer.namespaces], _KNOWN)
    mine = table[entries["namespace_index"]]
    is_known = (mine["number"] >= 0) & np.isin(entries["codec"], sorted(KNOWN_CODECS))
    is_erased = is_known & (entries["sequence"] < mine["erased_before"])
    has_key = (entries["key"] == PLAIN) | (entries["key"] == mine["key"])
    keep[:] = is_known & ~is_erased & has_key
    reasons["namespace_unknown"] += int((~is_known).sum())
    reasons["tenant_erased"] += int(is_erased.sum())
    reasons["key_unknown"] += int((is_known & ~is_erased & ~has_key).sum())
    records["namespace_index"] = np.maximum(mine["number"], 0)


def _drop_duplicates(
    records: npt.NDArray[np.void], sequences: npt.NDArray[np.uint64], keep: npt.NDArray[np.bool_]
) -> int:
    """Clear `keep` of all but the newest record of each fragment; return how many were cleared.

    Sorting by a 64-bit digest of the key finds the few candidates; only those are compared in Python.
    """
    tags = (
        records.view(_FIRST_WORD)["word"]
        ^ (records["group"].astype(np.uint64) << np.uint64(32))
        ^ records["namespace_index"]
    )
    order = np.argsort(tags)
    ordered = tags[order]
    equal = ordered[1:] == ordered[:-1]
    suspects = np.zeros(len(records), np.bool_)
    suspects[order[1:][equal]] = True
    suspects[order[:-1][equal]] = True
    found = np.flatnonzero(suspects & keep)
    newest: dict[tuple[int, int, bytes], int] = {}
    for index in found[np.lexsort((-found, sequences[found]))].tolist():  # the newest last
        record = records[index]
        key = (int(record["namespace_index"]), int(record["group"]), record["prefix_hash"].tobytes())
        newest[key] = index
    keep[found] = False
    keep[list(newest.values())] = True
    return len(found) - len(newest)
