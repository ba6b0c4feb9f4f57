"""How one record becomes buffers of a system call, and how what was read is believed.

An aligned payload is written from, and read into, where it is: the call's buffers are a header page, the
payload's whole pages, and a page of scratch for its end, because what stands behind a payload in its slot
may belong to somebody else. Anything unaligned, shorter than a page or encoded takes a detour through
scratch.
"""

from typing import NamedTuple

import xxhash

from ..v1.shm import PAGE_BYTES
from .base import Buffer, Cause
from .block import FragmentLabel
from .codecs.base import CodecError, CodecMissing
from .codecs.records import RecordCodecs
from .direct import Scratch, copy_bytes, is_aligned
from .log import record_bytes
from .record import HEADER_BYTES, RecordError, RecordHeader, unpack_header

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


def stored_bytes(label: FragmentLabel) -> int:
    """Return the payload bytes of a fragment's record."""
    return label.stored_length or label.raw_length


def scratch_bytes(label: FragmentLabel) -> int:
    """Return an upper bound of the scratch that staging a fragment's record takes."""
    return record_bytes(stored_bytes(label)) + PAGE_BYTES


def stage_encoded(
    scratch: Scratch, label: FragmentLabel, payload: Buffer, codecs: RecordCodecs
) -> StagedWrite:
    """Lay out the record of an encoded payload. Raises DoesNotFit, and CodecError when there is no such
    codec."""
    length = label.stored_length
    record = scratch.take(record_bytes(length))
    end = PAGE_BYTES + length
    record[HEADER_BYTES:PAGE_BYTES] = _ZEROS[HEADER_BYTES:]
    codecs.encode(label, payload, record[PAGE_BYTES:end])
    record[end:] = _ZEROS[: len(record) - end]
    return StagedWrite(record[:PAGE_BYTES], [record], record[PAGE_BYTES:end])


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


def stage_read(scratch: Scratch, into: Buffer, label: FragmentLabel, *, as_stored: bool) -> StagedRead:
    """Lay out the reading of a fragment's record. `into` may be longer than its payload, as a slot is;
    its last page is then filled up with the record's zeros. `as_stored`: not to be decoded."""
    length = stored_bytes(label)
    if label.codec_id and not as_stored:
        record = scratch.take(record_bytes(length))
        return StagedRead(record[:PAGE_BYTES], [record], (into, record[PAGE_BYTES : PAGE_BYTES + length]))
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
    staged: StagedRead,
    into: Buffer,
    label: FragmentLabel,
    where: tuple[int, int, int],
    codecs: RecordCodecs,
    *,
    as_stored: bool,
) -> CopyResult:
    """Decide whether `into` now holds the fragment asked for; return why not, and its payload's checksum.

    `where` is (segment, epoch, page). Does the copy, or the decoding, that staging left over. The checksum
    of what a lossy codec wrote is that of what it decodes to, whatever the label says.
    """
    try:
        header = unpack_header(staged.page)
    except RecordError:
        return Cause.WRONG_IDENTITY, b""
    if not _is_asked_for(header, label, where):
        return Cause.WRONG_IDENTITY, b""
    try:
        is_lossy = header.codec and not codecs.is_exact(header.codec, header.codec_parameters)
    except CodecError:
        return Cause.WRONG_IDENTITY, b""  # a codec that this version does not know
    if label.checksum and header.checksum != label.checksum and not is_lossy:
        return Cause.WRONG_CHECKSUM, b""
    if header.codec and not as_stored:
        assert staged.detour is not None
        return _decode(header, staged.detour[1], into[: label.raw_length], label, codecs)
    if staged.detour is not None:
        copy_bytes(*staged.detour)
    stored = into[: header.stored_length]
    if header.codec:
        is_whole = xxhash.xxh3_64_intdigest(stored) == header.stored_hash
    else:
        is_whole = xxhash.xxh3_128_digest(stored) == header.checksum
    return (None, header.checksum) if is_whole else (Cause.WRONG_CHECKSUM, b"")


def _decode(
    header: RecordHeader, stored: Buffer, into: Buffer, label: FragmentLabel, codecs: RecordCodecs
) -> CopyResult:
    """Fill `into` from an encoded payload; believe it when both hashes are right."""
    if xxhash.xxh3_64_intdigest(stored) != header.stored_hash:
        return Cause.WRONG_CHECKSUM, b""
    try:
        codecs.decode(label, header.codec, header.codec_parameters, stored, into)
    except CodecMissing:
        return Cause.UNREADABLE, b""
    except CodecError:
        return Cause.WRONG_CHECKSUM, b""
    if xxhash.xxh3_128_digest(into) != header.checksum:
        return Cause.WRONG_CHECKSUM, b""
    return None, header.checksum


def _is_asked_for(header: RecordHeader, label: FragmentLabel, where: tuple[int, int, int]) -> bool:
    return (
        (header.segment, header.epoch, header.page) == where
        and header.prefix_hash == label.prefix_hash
        and header.namespace_digest == label.namespace_digest
        and header.group == label.group
        and header.position == label.position
        and header.parent_hash == label.parent_hash
        and header.raw_length == label.raw_length
        and header.codec == label.codec_id
        and header.stored_length == stored_bytes(label)
    )
