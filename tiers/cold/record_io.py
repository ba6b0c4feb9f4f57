"""Lays out the buffers of one record for a system call, and verifies what was read.

An aligned payload is written from, and read into, where it is: the call's buffers are a header page, the
payload's whole pages, and a page of scratch for its end, because the bytes behind a payload in its slot
may belong to another fragment. Anything unaligned, shorter than a page or encoded takes a detour through
scratch. So does what is encrypted on its way out: its slot is read meanwhile, and must not change. What comes
in encrypted is decrypted where it is to stay.
"""

from collections.abc import Mapping
from typing import NamedTuple

import xxhash

from ...v1.shm import PAGE_BYTES
from ..base import Buffer, Cause, CopyError, CopyOutcome, Encryption
from ..block import FragmentLabel, NamespaceIdentity, tenant_of
from ..codecs.base import CodecError, CodecMissing
from ..codecs.records import RecordCodecs
from ..encryption.envelope import Envelope, Envelopes
from ..payload import copy
from .direct_io import Scratch, is_aligned
from .log import record_bytes
from .record import HEADER_BYTES, RecordError, RecordHeader, unpack_header

_ZEROS = bytes(PAGE_BYTES)


class Opener(NamedTuple):
    """Decrypts and decodes payloads of records. Without `envelopes` nothing can be decrypted."""

    namespaces: Mapping[bytes, NamespaceIdentity]
    codecs: RecordCodecs
    envelopes: Envelopes | None

    def decrypt(self, header: RecordHeader, payload: Buffer) -> bytes:
        """Decrypt `payload` in place; return the checksum of the raw payload. Raises CopyError."""
        namespace = self.namespaces.get(header.namespace_digest)
        if self.envelopes is None or namespace is None:
            raise CopyError(Cause.NO_KEY)
        envelope = Envelope.unpack(header.envelope)
        tenant = tenant_of(namespace.domain)
        return self.envelopes.open(tenant, header.key, header.identity(), envelope, payload)


class StagedWrite(NamedTuple):
    """A record about to be written: fill in `page`, then write `buffers` in turn."""

    page: Buffer  # the header's, zero
    buffers: list[Buffer]
    stored: Buffer  # the payload as it will be written
    plain: Buffer  # and as it is now: the same memory, unless it is still to be encrypted from there


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
    """Lay out the record of an encoded payload.
    Raises DoesNotFit, and CodecError when there is no such codec."""
    length = label.stored_length
    record = scratch.take(record_bytes(length))
    end = PAGE_BYTES + length
    record[HEADER_BYTES:PAGE_BYTES] = _ZEROS[HEADER_BYTES:]
    codecs.encode(label, payload, record[PAGE_BYTES:end])
    record[end:] = _ZEROS[: len(record) - end]
    return StagedWrite(record[:PAGE_BYTES], [record], record[PAGE_BYTES:end], record[PAGE_BYTES:end])


def stage_write(scratch: Scratch, payload: Buffer, *, private: bool, apart: bool = False) -> StagedWrite:
    """Lay out a record of `payload`.
    `private`: from a copy that nothing else can change; `apart`: what is written will be encrypted, and is
    not in the place of `payload`."""
    length = len(payload)
    whole = length - length % PAGE_BYTES
    if private or apart or not whole or not is_aligned(payload):
        record = scratch.take(record_bytes(length))
        end = PAGE_BYTES + length
        stored = record[PAGE_BYTES:end]
        record[HEADER_BYTES:PAGE_BYTES] = _ZEROS[HEADER_BYTES:]
        record[end:] = _ZEROS[: len(record) - end]
        if apart and not private:
            return StagedWrite(record[:PAGE_BYTES], [record], stored, payload)
        copy(stored, payload)
        return StagedWrite(record[:PAGE_BYTES], [record], stored, stored)
    page = scratch.take(PAGE_BYTES)
    page[HEADER_BYTES:] = _ZEROS[HEADER_BYTES:]
    if whole == length:
        return StagedWrite(page, [page, payload], payload, payload)
    last = scratch.take(PAGE_BYTES)
    last[: length - whole] = payload[whole:]
    last[length - whole :] = _ZEROS[length - whole :]
    return StagedWrite(page, [page, payload[:whole], last], payload, payload)


def stage_read(scratch: Scratch, into: Buffer, label: FragmentLabel, *, as_stored: bool) -> StagedRead:
    """Lay out the reading of a fragment's record.
    `into` may be longer than its payload, as a slot is; its last page is then filled up with the record's
    zeros. `as_stored`: not to be decoded."""
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
    opener: Opener,
    *,
    as_stored: bool,
) -> CopyOutcome:
    """Verify that `into` now holds the fragment of `label`; return its payload's checksum, or a cause.

    `where` is (segment, epoch, page). Does the copy, the decrypting and the decoding that staging left over.
    The checksum of what a lossy codec wrote is that of what it decodes to, whatever the label says.
    """
    header = header_of(staged.page, label, where, opener.codecs)
    if isinstance(header, Cause):
        return CopyOutcome(header)
    if staged.detour is not None and (as_stored or not header.codec):
        copy(*staged.detour)
    if as_stored:
        return _as_it_stands(header, into[: header.stored_length])
    stored = staged.detour[1] if header.codec and staged.detour is not None else into[: label.raw_length]
    return CopyOutcome(*_open(header, stored, into[: label.raw_length], label, opener))


def header_of(
    page: Buffer, label: FragmentLabel, where: tuple[int, int, int], codecs: RecordCodecs
) -> RecordHeader | Cause:
    """Return the header in `page` when it is that of the record of `label`, or the cause why it is not."""
    try:
        header = unpack_header(page)
    except RecordError:
        return Cause.WRONG_IDENTITY
    if not _is_asked_for(header, label, where):
        return Cause.WRONG_IDENTITY
    try:
        is_right = _is_expected(header.checksum, header, label, codecs)
    except CodecError:
        return Cause.WRONG_IDENTITY  # a codec that this version does not know
    return header if is_right or header.key else Cause.WRONG_CHECKSUM


def _is_expected(checksum: bytes, header: RecordHeader, label: FragmentLabel, codecs: RecordCodecs) -> bool:
    """Whether a fragment may have this checksum: the one that was taken at put, or that of what a lossy codec
    made of it. Raises CodecError."""
    is_exact = not header.codec or codecs.is_exact(header.codec, header.codec_parameters)
    return not label.checksum or not is_exact or checksum == label.checksum


def _as_it_stands(header: RecordHeader, stored: Buffer) -> CopyOutcome:
    """Verify a payload by the hash of what was written, neither decrypted nor decoded."""
    if header.codec or header.key:
        is_whole = xxhash.xxh3_64_intdigest(stored) == header.stored_hash
    else:
        is_whole = xxhash.xxh3_128_digest(stored) == header.checksum
    if not is_whole:
        return CopyOutcome(Cause.WRONG_CHECKSUM)
    return CopyOutcome(None, header.checksum, Encryption(header.key, header.envelope) if header.key else None)


def _open(
    header: RecordHeader, stored: Buffer, into: Buffer, label: FragmentLabel, opener: Opener
) -> tuple[Cause | None, bytes]:
    """Fill `into` from what was stored, decrypted and decoded where it has to be; succeed when the hashes
    of both match. What was encrypted needs no hash of its own: its tag says more."""
    checksum = header.checksum
    if header.key:
        try:
            checksum = opener.decrypt(header, stored)
        except CopyError as error:
            return error.cause, b""
        if not _is_expected(checksum, header, label, opener.codecs):
            return Cause.WRONG_CHECKSUM, b""
    elif header.codec and xxhash.xxh3_64_intdigest(stored) != header.stored_hash:
        return Cause.WRONG_CHECKSUM, b""
    if header.codec:
        try:
            opener.codecs.decode(label, header.codec, header.codec_parameters, stored, into)
        except CodecMissing:
            return Cause.UNREADABLE, b""
        except CodecError:
            return Cause.WRONG_CHECKSUM, b""
    if xxhash.xxh3_128_digest(into) != checksum:
        return Cause.WRONG_CHECKSUM, b""
    return None, checksum


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
