"""How one record becomes buffers of a system call, and how what was read is believed.

An aligned payload is written from, and read into, where it is: the call's buffers are a header page, the
payload's whole pages, and a page of scratch for its end, because what stands behind a payload in its slot
may belong to somebody else. Anything unaligned, or shorter than a page, takes a detour through scratch.
"""

from typing import NamedTuple

import xxhash

from ..v1.shm import PAGE_BYTES
from .base import Buffer, Cause
from .block import FragmentLabel
from .direct import Scratch, copy_bytes, is_aligned
from .log import record_bytes
from .record import CODEC_IDENTITY, HEADER_BYTES, RecordError, unpack_header

_ZEROS = bytes(PAGE_BYTES)


CopyResult = tuple[Cause | None, bytes]  # why not, or None and the checksum


class StagedWrite(NamedTuple):
    """A record about to be written: fill in `page`, then write `buffers` in turn."""

    page: Buffer  # the header's, zero
    buffers: list[Buffer]
    stored: Buffer  # the payload as it will be written


class StagedRead(NamedTuple):
    """A record about to be read: fill `buffers`, then `finish` it."""

    page: Buffer  # the header's
    buffers: list[Buffer]
    detour: tuple[Buffer, Buffer] | None  # (target, source) of the copy that remains to be done


def scratch_bytes(length: int) -> int:
    """Return an upper bound of the scratch that staging `length` payload bytes takes."""
    return record_bytes(length) + PAGE_BYTES


def stage_write(scratch: Scratch, payload: Buffer, *, private: bool) -> StagedWrite:
    """Lay out a record of `payload`. `private`: from a copy that nobody else can change."""
    length = len(payload)
    whole = length - length % PAGE_BYTES
    if private or not whole or not is_aligned(payload):
        record = scratch.take(record_bytes(length))
        end = PAGE_BYTES + length
        record[HEADER_BYTES:PAGE_BYTES] = _ZEROS[HEADER_BYTES:]
        copy_bytes(record[PAGE_BYTES:end], payload)
        record[end:] = _ZEROS[: len(record) - end]
        return StagedWrite(record[:PAGE_BYTES], [record], record[PAGE_BYTES:end])
    page = scratch.take(PAGE_BYTES)
    page[HEADER_BYTES:] = _ZEROS[HEADER_BYTES:]
    if whole == length:
        return StagedWrite(page, [page, payload], payload)
    last = scratch.take(PAGE_BYTES)
    last[: length - whole] = payload[whole:]
    last[length - whole :] = _ZEROS[length - whole :]
    return StagedWrite(page, [page, payload[:whole], last], payload)


def stage_read(scratch: Scratch, into: Buffer, length: int) -> StagedRead:
    """Lay out the reading of a record of `length` payload bytes. `into` may be longer, as a slot is;
    its last page is then filled up with the record's zeros."""
    whole = length - length % PAGE_BYTES
    rounded = record_bytes(length) - PAGE_BYTES
    if not whole or not is_aligned(into):
        record = scratch.take(PAGE_BYTES + rounded)
        source = record[PAGE_BYTES : PAGE_BYTES + length]
        return StagedRead(record[:PAGE_BYTES], [record], (into[:length], source))
    page = scratch.take(PAGE_BYTES)
    if len(into) >= rounded:
        return StagedRead(page, [page, into[:rounded]], None)
    last = scratch.take(PAGE_BYTES)
    return StagedRead(page, [page, into[:whole], last], (into[whole:length], last[: length - whole]))


def finish_read(
    staged: StagedRead, into: Buffer, label: FragmentLabel, where: tuple[int, int, int]
) -> CopyResult:
    """Decide whether `into` now holds the fragment asked for; return why not, and its checksum.

    `where` is (segment, epoch, page). Does the copy that staging left over.
    """
    try:
        header = unpack_header(staged.page)
    except RecordError:
        return Cause.WRONG_IDENTITY, b""
    found = (header.segment, header.epoch, header.page)
    if (
        found != where
        or header.prefix_hash != label.prefix_hash
        or header.namespace_digest != label.namespace_digest
        or header.group != label.group
        or header.position != label.position
        or header.parent_hash != label.parent_hash
        or header.raw_length != label.raw_length
        or header.codec != CODEC_IDENTITY
    ):
        return Cause.WRONG_IDENTITY, b""
    if label.checksum and header.checksum != label.checksum:
        return Cause.WRONG_CHECKSUM, b""
    if staged.detour is not None:
        copy_bytes(*staged.detour)
    if xxhash.xxh3_128_digest(into[: label.raw_length]) != header.checksum:
        return Cause.WRONG_CHECKSUM, b""
    return None, header.checksum
