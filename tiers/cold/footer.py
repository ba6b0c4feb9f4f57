"""The footer of a sealed segment: the entries of all its records, in page order, side by side.

    | head page, 4 KiB | num_namespaces digests of 32 bytes | num_records entries | zeros |

It stands at a fixed place, behind the last data page, and is written once, after the data is on the
device. It names its own segment and epoch, so that a footer of a former life, or in a swapped file, is
none; entries name namespaces through the footer's own table, so that a footer needs nothing else to be
understood. A freed segment gets a *tombstone* in the head page: a second witness, beside the manifest,
that its records are gone for good.
"""

import struct
from typing import NamedTuple, TypeAlias

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash

from ...v1.shm import HASH_BYTES, PAGE_BYTES
from .record import CODEC_IDENTITY, ENCRYPTED, ENTRY, ENTRY_BYTES, INCOMPAT_FEATURES

Entries: TypeAlias = npt.NDArray[np.void]  # dtype ENTRY

MAGIC = b"kvtfootr"
TOMBSTONE = b"kvttombs"
VERSION = 1
MAX_NAMESPACES = 1024  # in one segment

# magic, version, padding, incompat, segment, namespaces, epoch, owner epoch, records, xxh3 of the body
_HEAD = struct.Struct("<8sHHIIIQQQ16s")
_CRC = struct.Struct("<I")


class FooterError(ValueError):
    """These bytes are not a valid footer of this segment's life; the message says what is wrong."""


class Footer(NamedTuple):
    """Contents of a footer. `entries` is in page order and its ranges do not overlap."""

    segment: int
    epoch: int
    owner_epoch: int
    namespaces: list[bytes]  # digests; entries point here
    entries: Entries


class FooterHead(NamedTuple):
    """Contents of the head page: it says how much more to read."""

    owner_epoch: int
    num_namespaces: int
    num_records: int
    body_hash: bytes

    @property
    def body_bytes(self) -> int:
        """Bytes of the digests and entries behind the head page."""
        return self.num_namespaces * HASH_BYTES + self.num_records * ENTRY_BYTES


def footer_bytes_for(segment_bytes: int) -> int:
    """Return the bytes to keep for a footer:
    enough for a segment of nothing but one-page payloads (about 1.6 % of the segment)."""
    num_records = segment_bytes // (2 * PAGE_BYTES)
    body = num_records * ENTRY_BYTES + min(num_records, MAX_NAMESPACES) * HASH_BYTES
    return PAGE_BYTES + -(-body // PAGE_BYTES) * PAGE_BYTES


def pack_footer(footer: Footer) -> bytes:
    """Return the footer's bytes, whole pages."""
    assert len(footer.namespaces) <= MAX_NAMESPACES
    body = b"".join(footer.namespaces) + footer.entries.tobytes()
    is_encrypted = bool(len(footer.entries)) and bool(footer.entries["key"].any())
    head = _HEAD.pack(
        MAGIC,
        VERSION,
        0,
        ENCRYPTED if is_encrypted else 0,
        footer.segment,
        len(footer.namespaces),
        footer.epoch,
        footer.owner_epoch,
        len(footer.entries),
        xxhash.xxh3_128_digest(body),
    )
    page = (head + _CRC.pack(google_crc32c.value(head))).ljust(PAGE_BYTES, b"\0")
    return page + body + bytes(-len(body) % PAGE_BYTES)


def pack_tombstone(segment: int, epoch: int) -> bytes:
    """Return the head page, PAGE_BYTES, of a segment that was freed after its life `epoch`."""
    head = _HEAD.pack(TOMBSTONE, VERSION, 0, 0, segment, 0, epoch, 0, 0, bytes(16))
    return (head + _CRC.pack(google_crc32c.value(head))).ljust(PAGE_BYTES, b"\0")


def is_tombstone(page: bytes | memoryview, segment: int, epoch: int) -> bool:
    """Whether `page` says that this life of this segment is over."""
    size = _HEAD.size + _CRC.size
    return bytes(page[:size]) == pack_tombstone(segment, epoch)[:size]


def unpack_head(page: bytes | memoryview, segment: int, epoch: int, data_pages: int) -> FooterHead:
    """Return the head of the footer of `segment` in its life `epoch`. Raises FooterError."""
    if len(page) < PAGE_BYTES:
        raise FooterError(f"{len(page)} bytes cannot hold a footer")
    head = bytes(page[: _HEAD.size])
    fields = _HEAD.unpack(head)
    if fields[0] != MAGIC:
        raise FooterError("no footer here")
    if google_crc32c.value(head) != _CRC.unpack_from(page, _HEAD.size)[0]:
        raise FooterError("head CRC does not match")
    if fields[1] != VERSION or fields[3] & ~INCOMPAT_FEATURES:
        raise FooterError(f"footer version {fields[1]}, incompatible features {fields[3]:#x}")
    if (fields[4], fields[6]) != (segment, epoch):
        raise FooterError(f"footer of segment {fields[4]} in another life or place")
    if fields[5] > MAX_NAMESPACES or fields[8] > data_pages // 2:
        raise FooterError(f"{fields[8]} records of {fields[5]} namespaces cannot be")
    return FooterHead(fields[7], fields[5], fields[8], fields[9])


def unpack_footer(
    head: FooterHead, body: bytes | memoryview, segment: int, epoch: int, data_pages: int
) -> Footer:
    """Return the footer with `head` and `body`, in which its entries stay.
    Raises FooterError unless the hash matches and every entry lies inside the segment, behind its
    predecessor."""
    if len(body) < head.body_bytes:
        raise FooterError(f"body of {len(body)} bytes, {head.body_bytes} announced")
    body = body[: head.body_bytes]
    if xxhash.xxh3_128_digest(body) != head.body_hash:
        raise FooterError("body hash does not match")
    split = head.num_namespaces * HASH_BYTES
    digests = bytes(body[:split])
    namespaces = [digests[i : i + HASH_BYTES] for i in range(0, split, HASH_BYTES)]
    entries = np.frombuffer(body, ENTRY, head.num_records, split)
    check_entries(entries, head.num_namespaces, data_pages)
    return Footer(segment, epoch, head.owner_epoch, namespaces, entries)


def pages_of(entries: Entries) -> npt.NDArray[np.int64]:
    """Return the pages (n,) int64 that each of `entries` (n,) takes, header included."""
    pages: npt.NDArray[np.int64] = (
        1 + (entries["stored_length"].astype(np.int64) + PAGE_BYTES - 1) // PAGE_BYTES
    )
    return pages


def check_entries(entries: Entries, num_namespaces: int, data_pages: int) -> None:
    """Raise FooterError unless `entries` (n,) are in page order, do not overlap, and lie in the segment."""
    limit = data_pages * PAGE_BYTES
    stored, raw = entries["stored_length"], entries["raw_length"]
    if not ((stored > 0) & (stored <= limit) & (raw > 0) & (raw < 1 << 44)).all():
        raise FooterError("a record has an impossible length")
    if not ((entries["codec"] != CODEC_IDENTITY) | (stored == raw)).all():
        raise FooterError("a record without codec has two lengths")
    starts = entries["page"].astype(np.int64)
    ends = starts + pages_of(entries)
    if (starts[1:] < ends[:-1]).any() or (len(ends) and ends[-1] > data_pages):
        raise FooterError("records overlap or leave the segment")
    if (entries["namespace_index"] >= num_namespaces).any():
        raise FooterError("a record points outside the table of namespaces")
