"""Transfers: runs of records to and from the segment files of one cold store, one call each.

The half of the cold store that touches payloads: writes headers, encodes, encrypts where there is a key, and
verifies every read. It knows nothing of recovery, sealing or access rights.
"""

import logging
import secrets
from collections.abc import Sequence
from contextlib import closing
from itertools import count
from typing import TypeAlias

import xxhash

from ...v1.shm import PAGE_BYTES, extent_of
from ..base import DISK_CAUSES, Buffer, Cause, CopyError, CopyOutcome, Encryption
from ..block import FragmentLabel, tenant_of
from ..codecs.base import CodecError, DoesNotFit
from ..codecs.records import RecordCodecs
from ..encryption.envelope import Envelopes
from .direct_io import Read, Scratch, offset_of, read_cause, write_fully
from .footer import MAX_NAMESPACES
from .log import record_bytes
from .manifest import Kind, segment_event
from .record import RecordHeader, pack_header
from .record_io import (
    Opener,
    StagedRead,
    StagedWrite,
    finish_read,
    scratch_bytes,
    stage_encoded,
    stage_read,
    stage_write,
    stored_bytes,
)
from .segment_life import SegmentLife, StoreState

TransferItem: TypeAlias = tuple[int, FragmentLabel, Buffer]  # place, label, payload or where it goes

log = logging.getLogger(__name__)

_COUNTER_BITS = 40  # of a sequence number; the owner epoch stands above them


class SegmentTransfers:
    """Writes and reads runs of records. Thread-safe."""

    def __init__(self, state: StoreState, envelopes: Envelopes | None) -> None:
        namespaces = state.manifest.state.namespaces
        self.codecs = RecordCodecs(namespaces)
        self._namespaces = namespaces
        self._envelopes = envelopes
        self._opener = Opener(namespaces, self.codecs, envelopes)
        self._state = state
        self._segments = state.segments
        self._scratch = Scratch()
        self._sequence = count(state.manifest.owner_epoch << _COUNTER_BITS)

    def write_run(
        self,
        run: list[int],
        items: Sequence[TransferItem],
        outcomes: list[CopyOutcome],
        *,
        as_stored: bool = False,
        encryptions: Sequence[Encryption | None] = (),
    ) -> None:
        """Write neighbouring records of one segment with one call; set their outcomes.

        `as_stored`: what is given is encoded already, and encrypted where `encryptions` say so.
        """
        place = items[run[0]][0]
        number = extent_of(place)
        done = 0
        try:
            segment = self._life(number)
            indexes = [self._namespace_index(segment, items[i][1].namespace_digest) for i in run]
            self._scratch.reset(sum(scratch_bytes(items[i][1]) for i in run))
            buffers: list[Buffer | bytes] = []
            entries = []
            checksums = []
            page = offset_of(place) // PAGE_BYTES
            for i, namespace_index in zip(run, indexes, strict=True):
                _, label, payload = items[i]
                encryption = encryptions[i] if encryptions else None
                staged, checksum = self._stage(label, payload, as_stored, encryption)
                header = self._header(number, segment.epoch, label, checksum, page, namespace_index)
                header = self._encrypt(header, staged, encryption)
                if header.codec or header.key:
                    header = header._replace(stored_hash=xxhash.xxh3_64_intdigest(staged.stored))
                entries.append(pack_header(staged.page, header))
                buffers += staged.buffers
                checksums.append(checksum)
                page += record_bytes(stored_bytes(label)) // PAGE_BYTES
                done += 1
            assert page <= self._state.data_pages, f"record leaves segment {number}"
            sync_each = self._state.durability == "record"
            write_fully(self._state.io, segment.fd, buffers, offset_of(place), durable=sync_each)
        except (DoesNotFit, CodecError):  # this one is stored as it is another time, the others now
            outcomes[run[done]] = CopyOutcome(Cause.DOES_NOT_FIT)
            for rest in (run[:done], run[done + 1 :]):
                if rest:
                    self.write_run(rest, items, outcomes, as_stored=as_stored, encryptions=encryptions)
            return
        except CopyError as error:
            for i in run:
                outcomes[i] = CopyOutcome(error.cause)
            if error.cause in DISK_CAUSES and not self._state.segments[number].is_failing:
                log.warning("segment %d: %s", number, error)
                self._state.segments[number].is_failing = True
            return
        with self._state.lock:
            segment.entries += b"".join(entries)
            segment.holds_copies |= as_stored
            segment.is_failing = False
        for i, checksum in zip(run, checksums, strict=True):
            outcomes[i] = CopyOutcome(None, checksum)

    def _stage(
        self, label: FragmentLabel, payload: Buffer, as_stored: bool, encryption: Encryption | None
    ) -> tuple[StagedWrite, bytes]:
        """Lay out one record; return it with the checksum of what will be read from it: empty for one that
        is encrypted already, because it is not known here."""
        assert len(payload) == (stored_bytes(label) if as_stored else label.raw_length)
        if encryption is not None:
            return stage_write(self._scratch, payload, private=False), b""
        if not label.codec_id or as_stored:
            assert label.checksum or not label.codec_id
            is_apart = self._envelopes is not None
            staged = stage_write(self._scratch, payload, private=not label.checksum, apart=is_apart)
            return staged, label.checksum or xxhash.xxh3_128_digest(staged.plain)
        if not label.checksum:
            payload = memoryview(bytes(payload))  # a copy that cannot change while it is hashed and encoded
        parameters = self.codecs.parameters(label)
        if label.is_spent and not self.codecs.is_exact(label.codec_id, parameters):
            raise DoesNotFit  # never lossy twice; the planner asks for an exact codec
        staged = stage_encoded(self._scratch, label, payload, self.codecs)
        if self.codecs.is_exact(label.codec_id, parameters):
            return staged, label.checksum or xxhash.xxh3_128_digest(payload)
        decoded = memoryview(bytearray(label.raw_length))
        self.codecs.decode(label, label.codec_id, parameters, staged.stored, decoded)
        return staged, xxhash.xxh3_128_digest(decoded)

    def _encrypt(
        self, header: RecordHeader, staged: StagedWrite, encryption: Encryption | None
    ) -> RecordHeader:
        """Encrypt what is staged, unless it is or nothing is to be; return the header that says so. Raises
        CopyError."""
        if encryption is None and self._envelopes is not None:
            tenant = tenant_of(self._namespaces[header.namespace_digest].domain)
            key, envelope = self._envelopes.seal(
                tenant, header.identity(), header.checksum, staged.plain, staged.stored
            )
            encryption = Encryption(key, envelope.pack())
        if encryption is None:
            return header
        return header._replace(key=encryption.key, envelope=encryption.envelope, checksum=b"")

    def next_sequence(self) -> int:
        """Return a number between those of the records written so far and of those to come."""
        return next(self._sequence)

    def _header(
        self, number: int, epoch: int, label: FragmentLabel, checksum: bytes, page: int, namespace_index: int
    ) -> RecordHeader:
        return RecordHeader(
            number,
            epoch,
            self._state.manifest.owner_epoch,
            label.namespace_digest,
            label.prefix_hash,
            label.parent_hash,
            checksum,
            next(self._sequence),
            label.raw_length,
            stored_bytes(label),
            page,
            label.position,
            label.group,
            namespace_index,
            label.codec_id,
            self.codecs.parameters(label),
            is_spent=label.is_spent,
        )

    def read_runs(
        self,
        runs: Sequence[list[int]],
        items: Sequence[TransferItem],
        outcomes: list[CopyOutcome],
        *,
        as_stored: bool = False,
    ) -> None:
        """Read runs of neighbours with one call each, verify them while others are read; set their outcomes.
        `as_stored`: leave encoded what is. All take memory at once: see `groups_of`."""
        scratch = self._scratch
        scratch.reset(sum(scratch_bytes(items[i][1]) for run in runs for i in run))
        begun: list[tuple[list[int], SegmentLife, list[StagedRead]]] = []
        reads: list[Read] = []
        for run in runs:
            place = items[run[0]][0]
            segment = self._segments[extent_of(place)]
            if segment.epoch == 0:
                for i in run:
                    outcomes[i] = CopyOutcome(Cause.WRONG_IDENTITY)
                continue
            staged = [stage_read(scratch, items[i][2], items[i][1], as_stored=as_stored) for i in run]
            buffers = tuple(buffer for one in staged for buffer in one.buffers)
            begun.append((run, segment, staged))
            reads.append((segment.fd, offset_of(place), buffers))
        again: list[int] = []
        with closing(self._state.io.read_many(reads)) as ended:
            for number, num_read in ended:
                run, segment, staged = begun[number]
                cause = read_cause(num_read, reads[number][2])
                if cause is None:
                    self._finish(run, segment, staged, items, outcomes, as_stored)
                elif len(run) > 1 or len(reads) > 1:  # a bad sector's neighbours, or what only a ring says
                    again += run
                else:
                    outcomes[run[0]] = CopyOutcome(cause)
        if again:
            scratch.abandon()
        for i in again:
            self.read_runs([[i]], items, outcomes, as_stored=as_stored)

    def _finish(
        self,
        run: list[int],
        segment: SegmentLife,
        staged: list[StagedRead],
        items: Sequence[TransferItem],
        outcomes: list[CopyOutcome],
        as_stored: bool,
    ) -> None:
        """Verify the records of a run that was read; set their outcomes."""
        number = extent_of(items[run[0]][0])
        for i, one in zip(run, staged, strict=True):
            place, label, into = items[i]
            where = (number, segment.epoch, offset_of(place) // PAGE_BYTES)
            outcomes[i] = finish_read(one, into, label, where, self._opener, as_stored=as_stored)
        if self._segments[number] is not segment:  # freed meanwhile, though the planner should have waited
            for i in run:
                outcomes[i] = CopyOutcome(Cause.WRONG_IDENTITY)

    def _life(self, number: int) -> SegmentLife:
        """Return a segment that may be appended to, begun anew when it was free. Raises CopyError."""
        segment = self._segments[number]
        if segment.epoch == 0:
            with self._state.lock:
                segment = self._segments[number]
                if segment.epoch == 0:
                    epoch = secrets.randbits(63) + 1  # never 0
                    # On the medium before its records are only where each record is to be: a segment counts
                    # once it is sealed, which flushes this, too. All transfers wait for this lock.
                    durable = self._state.durability == "record"
                    self._state.manifest.append(segment_event(Kind.OPENED, number, epoch), durable=durable)
                    segment.epoch = epoch
        assert not segment.sealed, f"segment {number} is sealed; it must be freed before it is written again"
        return segment

    def _namespace_index(self, segment: SegmentLife, digest: bytes) -> int:
        """Return the namespace's index in the segment's table. Raises CopyError when that is full."""
        index = segment.namespaces.get(digest)
        if index is None:
            with self._state.lock:
                index = segment.namespaces.setdefault(digest, len(segment.namespaces))
                if index >= MAX_NAMESPACES:
                    del segment.namespaces[digest]
                    raise CopyError(Cause.NO_SPACE, f"{MAX_NAMESPACES} namespaces in one segment")
        return index
