"""The engine of the `nvme` tier: append-only segment files, direct I/O, self-describing records.

The room (SegmentLog, owned by the planner) says where a record goes and when a segment is sealed or freed;
ColdStore moves the bytes, verifies them on every read, and keeps across restarts which segments were sealed.
Nothing on the disk is ever trusted: a header, a footer or a manifest that does not check out makes the cache
smaller and a counter larger.

Durability says what an acknowledged write survives, besides the death of the process, which it always
does: `none`, power loss may take anything; `segment`, sealed segments survive power loss; `record`, every
acknowledged record does.

A full segment gets a footer (segment_life.py); what is found after a restart is recovery.py's.
"""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...v1.shm import PAGE_BYTES, extent_of
from ..base import Buffer, Cause, ColdStoreError, CopyError, CopyOutcome, Encryption, EngineStatistics
from ..block import FragmentLabel, NamespaceIdentity, Tier
from ..codecs.records import RecordCodecs
from ..encryption.envelope import Envelopes
from ..encryption.keyring import PLAIN
from ..encryption.master_keys import MasterKeys
from .direct_io import DirectIo, Scratch, groups_of, offset_of, runs_of
from .footer import footer_bytes_for
from .manifest import Kind, namespace_event, segment_event
from .opening import Durability, OpenedDirectory, open_directory
from .record import ENTRY
from .record_io import header_of, stored_bytes
from .recovery import (
    ExaminedSegment,
    RecoveredStore,
    SegmentColumns,
    SegmentFile,
    assemble,
    count_unreadable,
    examine,
    known_namespaces,
    read_columns,
)
from .segment_files import open_segment_files, segment_path
from .segment_io import SegmentTransfers, TransferItem
from .segment_life import NO_FILE, SegmentLife, SegmentSealer, StoreState, check_lives
from .verification import SegmentVerifier

log = logging.getLogger(__name__)

_MAX_RECOVERY_THREADS = 4
#: Reasons that restarts, erasures and copies forward leave behind, in words.
_HARMLESS = {
    "segment_unsealed": "segments that were being written",
    "tenant_erased": "records of erased tenants",
    "duplicate": "older copies of records",
}


class ColdStore:
    """Engine of segment files in one directory, which it owns. Made by `ColdStore.open`.

    Thread-safe: transfers of many threads run side by side. `write`, `seal` and `free` of one segment
    must not overlap; the room sees to that. Call `recover` once, before the first transfer.
    """

    tier = Tier.NVME

    def __init__(self, opened: OpenedDirectory) -> None:
        self.directory, self.segment_bytes = opened.directory, opened.segment_bytes
        self.footer_bytes = footer_bytes_for(opened.segment_bytes)
        self.data_pages = (opened.segment_bytes - self.footer_bytes) // PAGE_BYTES
        self.durability: Durability = opened.durability
        self._directory_lock = opened.lock
        self._io = opened.io
        self._manifest = opened.manifest
        self._reasons = opened.reasons
        self._num_wanted = len(opened.fds)
        self._state = StoreState(
            opened.io,
            opened.manifest,
            [SegmentLife(fd) for fd in opened.fds],
            EngineStatistics(backend=opened.io.backend),
            self.data_pages,
            opened.durability,
        )
        self._segments, self._lock = self._state.segments, self._state.lock
        for number, life in opened.manifest.state.lives.items():
            self._segments[number].epoch = life.epoch
            self._segments[number].sealed = True  # until recover() has looked: not to be appended to
        self._idle = threading.Condition(self._lock)
        self._num_busy = 0
        self._closed = False
        self.keyring = opened.keyring
        self._envelopes = Envelopes(opened.keyring) if opened.keyring.can_encrypt else None
        self._transfers = SegmentTransfers(self._state, self._envelopes)
        self._sealer = SegmentSealer(self._state)
        self.verifier = SegmentVerifier(self._state, self._file, self.directory)

    @property
    def codecs(self) -> RecordCodecs:
        """The codecs of the store's records, with their counters."""
        return self._transfers.codecs

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        segment_bytes: int,
        num_segments: int,
        durability: Durability = "none",
        *,
        master_keys: MasterKeys | None = None,
        io: DirectIo | None = None,
    ) -> "ColdStore":
        """Own the directory `path`, preallocate its segment files, and return the store.
        With `master_keys` records are encrypted (keyring.py, envelope.py). `io` replaces the system calls
        (tests).

        Raises ColdStoreError, naming the fix: the directory has another owner, the disk is too small,
        the sizes make no sense. Damage is not an error: see `recover`.
        """
        return cls(open_directory(Path(path), segment_bytes, num_segments, durability, io, master_keys))

    # ------------------------------------------------------------------------------------ transfers

    def write(self, place: int, label: FragmentLabel, payload: Buffer) -> bytes:
        """Store one record; see Engine.write."""
        outcome = self.write_batch([(place, label, payload)])[0]
        if outcome.cause is not None:
            raise CopyError(outcome.cause, _where(place))
        return outcome.checksum

    def read(self, place: int, label: FragmentLabel, into: Buffer) -> None:
        """Fill `into` with one record's payload; see Engine.read."""
        outcome = self.read_batch([(place, label, into)])[0]
        if outcome.cause is not None:
            raise CopyError(outcome.cause, _where(place))

    def write_batch(
        self,
        items: Sequence[TransferItem],
        *,
        as_stored: bool = False,
        encryptions: Sequence[Encryption | None] = (),
    ) -> list[CopyOutcome]:
        """Store records; neighbours share a system call. Outcomes in the order of `items`.
        Never raises for what the disk does. A payload (len == label.raw_length) with a checksum in its label
        must not change during the call; one without is copied first, and the copy is hashed and written.
        `as_stored`: payloads are records' as `read_batch` returned them, with their checksums and
        `encryptions`."""
        outcomes = [CopyOutcome(Cause.TIER_OFFLINE)] * len(items)
        with self._busy() as is_open:
            if is_open:
                for run in _runs(items):
                    self._transfers.write_run(
                        run, items, outcomes, as_stored=as_stored, encryptions=encryptions
                    )
        self._count(outcomes, items, written=True)
        return outcomes

    def read_batch(self, items: Sequence[TransferItem], *, as_stored: bool = False) -> list[CopyOutcome]:
        """Fill each item's view (at least label.raw_length bytes.
        A longer one is overwritten up to the next page) and verify it. Outcomes in the order of `items`;
        never raises for what the disk does. A view is undefined if its outcome has a cause. `as_stored`:
        leave encoded and encrypted what is; views are label.stored_length long then, and outcomes say how it
        is encrypted."""
        outcomes = [CopyOutcome(Cause.TIER_OFFLINE)] * len(items)
        with self._busy() as is_open:
            if is_open:
                for group in groups_of(_runs(items), [stored_bytes(item[1]) for item in items]):
                    self._transfers.read_runs(group, items, outcomes, as_stored=as_stored)
        self._count(outcomes, items, written=False)
        return outcomes

    def whereabouts(self, place: int) -> tuple[Path, int, int]:
        """Return a record's file, its segment's epoch, and the record's offset in bytes:
        for reading it in another way (a device's), to be followed by `confirm`."""
        number = extent_of(place)
        return segment_path(self.directory, number), self._segments[number].epoch, offset_of(place)

    def confirm(self, place: int, label: FragmentLabel, page: Buffer) -> CopyOutcome:
        """Return the checksum to expect of the payload that was read with the header in `page`.
        A cause when that is not the record of `label` any more."""
        number = extent_of(place)
        where = (number, self._segments[number].epoch, offset_of(place) // PAGE_BYTES)
        header = header_of(page, label, where, self.codecs)
        return CopyOutcome(header) if isinstance(header, Cause) else CopyOutcome(None, header.checksum)

    def publish_run(self, places: Sequence[int], labels: Sequence[FragmentLabel]) -> None:
        """Do nothing: clients never read the cold store themselves."""

    def retract(self, place: int) -> None:
        """Do nothing: a place is not reused before its segment was freed."""

    # ------------------------------------------------------------------------------- life of segments

    def seal(self, number: int) -> bool:
        """Write the footer of a segment without open copies, and append that to the manifest.

        Returns False when that failed: the segment is then suspect, still serves its records in this life,
        and is scanned after a restart. Never raises.
        """
        segment = self._segments[number]
        with self._busy() as is_open:
            if not is_open or segment.epoch == 0 or segment.sealed:
                return segment.sealed
            segment.sealed = True
            if segment.suspect:
                return False
            entries = np.frombuffer(bytes(segment.entries), ENTRY)
            return self._sealer.seal(number, entries[np.argsort(entries["page"])])

    def free(self, number: int) -> None:
        """Forget a segment. Idempotent.
        When this returns, no restart will find its records again, power loss or not. Raises CopyError when
        the manifest cannot be written; nothing is freed then, and it may be tried again."""
        segment = self._segments[number]
        with self._busy(must_be_open=True):
            if segment.epoch == 0:
                return
            if self.durability == "segment":
                self._sealer.flush_copies()
            segment.is_ending = True
            try:
                self._append(segment_event(Kind.FREED, number, segment.epoch), durable=True)
            except CopyError:
                segment.is_ending = False
                raise
            self._segments[number] = SegmentLife(segment.fd)
            self._sealer.write_tombstone(number, segment.epoch, segment.fd)

    def store_namespace(self, identity: NamespaceIdentity) -> None:
        """Store a namespace in the manifest, before any of its records. Idempotent. Raises CopyError."""
        with self._busy(must_be_open=True):
            if identity.digest not in self._manifest.state.namespaces:
                self._append(namespace_event(identity), durable=self.durability == "record")

    def forget_namespace(self, identity: NamespaceIdentity) -> None:
        """Leave a namespace without living records out of the next snapshot of the manifest."""
        with self._busy():
            self._manifest.forget_namespace(identity.digest)

    @property
    def is_encrypted(self) -> bool:
        """Whether what is written is encrypted."""
        return self._envelopes is not None

    def has_key(self, tenant: str) -> bool:
        """Whether there is a key that a tenant's records can be read with."""
        return self.keyring.key_id(tenant) != PLAIN

    def erase_tenant(self, tenant: str) -> bool:
        """Destroy a tenant's key; return whether it had one.
        When this returns nothing it ever stored can be read again, here or after a restart; nothing new is
        stored before `keyring.admit`, because what is on its way may be older. Raises CopyError when that
        could not be made durable."""
        with self._busy(must_be_open=True):
            had_key = self.keyring.erase(tenant, self._transfers.next_sequence())
            if self._envelopes is not None:
                self._envelopes.forget(tenant)
            return had_key

    def resize(self, num_segments: int) -> None:
        """Set the number of segment files to `num_segments`. Those beyond stay until they are given back.
        Raises ColdStoreError, naming the fix, when the disk has no room for them; nothing changes then."""
        with self._busy() as is_open:
            if not is_open:
                raise ColdStoreError("the cold store is closed")
            known = len(self._segments)
            missing = [n for n in range(num_segments) if n >= known or self._segments[n].fd == NO_FILE]
            files = open_segment_files(self.directory, self._io, missing, self.segment_bytes)
            self._segments += [SegmentLife(NO_FILE) for _ in range(num_segments - known)]
            for number, fd in zip(missing, files.fds, strict=True):
                self._segments[number] = SegmentLife(fd)
            self._num_wanted = self._manifest.state.num_segments = num_segments

    def give_back(self, number: int) -> None:
        """Remove the file of a free segment, unless it is wanted again meanwhile. Never raises."""
        with self._busy() as is_open:
            segment = self._segments[number]
            if not is_open or number < self._num_wanted or segment.fd == NO_FILE:
                return
            assert segment.epoch == 0, f"segment {number} is in use"
            self._segments[number] = SegmentLife(NO_FILE)
            self._io.close(segment.fd)
            try:
                segment_path(self.directory, number).unlink()
            except OSError as error:
                log.warning("segment %d: its file stays until the next start (%s)", number, error.strerror)

    def recover(self) -> RecoveredStore:
        """Return everything a former owner sealed, or wrote completely before it died.
        Segments found unsealed are sealed, those with nothing whole in them are freed, those that cannot be
        read stay as they are. Damage is counted, never raised. Runs once, before the first transfer."""
        lives, namespaces = dict(self._manifest.state.lives), list(self._manifest.state.namespaces.values())
        known, scratch = known_namespaces(namespaces, self.keyring.trust), Scratch()

        def read(number: int) -> tuple[ExaminedSegment, SegmentColumns]:
            is_sealed = lives[number].sealed
            examined = examine(self._file(number), scratch, sealed=is_sealed)
            found = read_columns(examined, known)
            if examined.footer is not None:  # its entries are in the thread's memory, for the next segment
                kept = examined.footer.entries[: 0 if is_sealed and not examined.scanned else None].copy()
                examined.footer = examined.footer._replace(entries=kept)
            return examined, found

        with ThreadPoolExecutor(_MAX_RECOVERY_THREADS, "kvtier-recovery") as pool:
            found = dict(zip(lives, pool.map(read, lives), strict=True))
        for number, (examined, _) in found.items():
            self._settle_found(number, examined)
        # Those sealed just now stand at the end of the manifest's order.
        in_order = [number for number in self._manifest.state.lives if number in found]
        gone = [number for number in found if number not in self._manifest.state.lives]
        recovered = assemble([found[number][1] for number in in_order + gone], namespaces)
        unread = [number for number, (one, _) in found.items() if one.is_unreadable and one.footer is None]
        recovered.unreadable += unread
        (reasons := recovered.reasons).update(self._reasons)
        if num_locked := reasons["key_unknown"]:
            log.warning(
                "cold store %s: %d records need a key that is not there; set encryption.master_key to what "
                "it was, and start again, before they are overwritten",
                self.directory,
                num_locked,
            )
        if harmless := [f"{words}: {reasons[name]}" for name, words in _HARMLESS.items() if reasons[name]]:
            log.info("cold store %s: no damage, but left behind: %s", self.directory, ", ".join(harmless))
        if damage := {n: reasons[n] for n in reasons if n not in _HARMLESS and n != "key_unknown"}:
            log.warning("cold store %s was damaged: %s", self.directory, damage)
        count_unreadable(recovered, self.codecs.can_read)
        return recovered

    # --------------------------------------------------------------------------------- observation

    def statistics(self) -> EngineStatistics:
        """Return a copy of the counters."""
        with self._lock:
            statistics = self._state.statistics
            return replace(statistics, failures=dict(statistics.failures))

    def check_integrity(self) -> list[str]:
        """Return where lives disagree with the manifest, records overlap, or the lock is not ours."""
        problems = []
        if not self._closed and not self._directory_lock.still_ours():
            problems.append(f"{self.directory}: the lock file was replaced; another owner may be at work")
        return problems + check_lives(self._state)

    def close(self) -> None:
        """Wait for the transfers under way, close all files, give the directory back. Idempotent."""
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: self._num_busy == 0)
        self.verifier.is_closed = True
        self._manifest.close()
        for segment in self._segments:
            if segment.fd != NO_FILE:
                self._io.close(segment.fd)
        self._io.shut_down()
        self._directory_lock.release()

    # ------------------------------------------------------------------------------------- inside

    def _settle_found(self, number: int, item: ExaminedSegment) -> None:
        """Make the store agree with what recovery found in a segment."""
        segment = self._segments[number]
        footer = item.footer
        if item.is_unreadable:
            log.warning("segment %d: cannot be read, or not all of it; the next start tries again", number)
            return
        if footer is None:
            try:
                self.free(number)
            except CopyError as error:
                log.warning("segment %d: cannot be freed (%s)", number, error)
            return
        if not item.scanned and self._manifest.state.lives[number].sealed:
            return
        segment.namespaces = {digest: index for index, digest in enumerate(footer.namespaces)}
        self._sealer.seal(number, footer.entries)

    def _append(self, event: bytes, *, durable: bool) -> None:
        """Append to the manifest; what fails is counted with failed writes. Raises CopyError."""
        try:
            self._manifest.append(event, durable=durable)
        except CopyError as error:
            with self._lock:
                self._state.count_failure(error.cause)
            raise

    def _file(self, number: int) -> SegmentFile:
        segment = self._segments[number]
        return SegmentFile(self._io, segment.fd, number, segment.epoch, self.data_pages, self.footer_bytes)

    @contextmanager
    def _busy(self, *, must_be_open: bool = False) -> Iterator[bool]:
        """Keep the files open meanwhile; yields False, or raises CopyError, when the store is closed."""
        with self._lock:
            is_open = not self._closed
            self._num_busy += is_open
        if must_be_open and not is_open:
            raise CopyError(Cause.TIER_OFFLINE, "the cold store is closed")
        try:
            yield is_open
        finally:
            if is_open:
                with self._idle:
                    self._num_busy -= 1
                    if self._closed:
                        self._idle.notify_all()

    def _count(self, outcomes: list[CopyOutcome], items: Sequence[TransferItem], *, written: bool) -> None:
        good = [
            item[1].raw_length for item, outcome in zip(items, outcomes, strict=True) if not outcome.cause
        ]
        with self._lock:
            statistics = self._state.statistics
            if written:
                statistics.num_writes += len(good)
                statistics.written_bytes += sum(good)
            else:
                statistics.num_reads += len(good)
                statistics.read_bytes += sum(good)
            if len(good) < len(items):
                for outcome in outcomes:
                    if outcome.cause is not None:
                        self._state.count_failure(outcome.cause)


def _where(place: int) -> str:
    return f"segment {extent_of(place)}, page {offset_of(place) // PAGE_BYTES}"


def _runs(items: Sequence[TransferItem]) -> Iterator[list[int]]:
    return runs_of([item[0] for item in items], [stored_bytes(item[1]) for item in items])
