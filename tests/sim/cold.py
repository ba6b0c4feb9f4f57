"""VirtualColdStore: segments of records on a medium that survives the daemon, and lies when told to.

Mirrors tiers/cold/engine.py: records name themselves and the life (epoch) of their segment, sealed segments
have a footer, unsealed ones are scanned at recovery and their records believed one by one. What stood in a
segment before it was freed stays on the medium until it is overwritten.
"""

from collections import Counter, defaultdict

import numpy as np

from kvtier.tiers.base import Cause
from kvtier.tiers.block import FragmentLabel, NamespaceIdentity, tenant_of
from kvtier.tiers.codecs.base import PROFILED_ID
from kvtier.tiers.cold.footer import Footer
from kvtier.tiers.cold.log import record_bytes
from kvtier.tiers.cold.record import ENTRY
from kvtier.tiers.cold.recovery import (
    ExaminedSegment,
    RecoveredStore,
    assemble,
    known_namespaces,
    read_columns,
)
from kvtier.v1.shm import PAGE_BYTES, extent_of, slot_of

from .oracle import Contents, checksum_of
from .world import Violation, World


class Record:
    """One record as it lies on the medium. `token` is its payload."""

    __slots__ = ("checksum", "epoch", "key", "label", "page", "sequence", "token")

    def __init__(
        self, label: FragmentLabel, page: int, epoch: int, sequence: int, token: int, key: int
    ) -> None:
        self.label = label
        self.page = page
        self.epoch = epoch
        self.sequence = sequence
        self.key = key  # its tenant's, when it was encrypted
        self.token = token
        is_lossy = label.codec_id == PROFILED_ID  # its checksum is that of what it decodes to
        self.checksum = checksum_of(token) if is_lossy else label.checksum or checksum_of(token)

    @property
    def is_whole(self) -> bool:
        """Whether the payload is what the header's checksum says."""
        return checksum_of(self.token) == self.checksum


class VirtualSegment:
    """One segment. `epoch` is 0 while it is free."""

    def __init__(self) -> None:
        self.epoch = 0
        self.is_sealed = False  # nothing may be appended any more
        self.has_footer = False
        self.order = 0  # of sealing
        self.entries: list[Record] = []  # written well in this life: the footer to be
        self.medium: dict[int, Record] = {}  # by page, former lives included
        self.written: set[int] = set()  # pages taken in this life, well or not
        self.num_readers = 0  # copies queued to read here


class VirtualColdStore:
    """The medium and the store on it. Lives as long as the world."""

    def __init__(self, world: World, contents: Contents, num_segments: int, rates: dict[str, float]) -> None:
        self._world = world
        self._contents = contents
        self._rates = rates
        self.segments = [VirtualSegment() for _ in range(num_segments)]
        self._num_wanted = num_segments
        self._gone: set[int] = set()  # segments whose file was given back
        self.namespaces: dict[bytes, NamespaceIdentity] = {}
        self._tenants: dict[bytes, str] = {}  # by namespace, forgotten ones included
        #: Records that an injected fault damaged: a mismatch there is no surprise. (segment, page, epoch)
        self.damaged: set[tuple[int, int, int]] = set()
        self._epochs = 0
        self._sequence = 0
        self._orders = 0
        self._keys: defaultdict[str, int] = defaultdict(lambda: 1)  # by tenant
        self._barred: set[str] = set()  # tenants that are being erased
        self._key_of_token: dict[int, int] = {}  # that it was encrypted with last

    # ------------------------------------------------------------------------------- transfers

    def write(
        self, place: int, label: FragmentLabel, token: int, *, as_stored: bool = False, is_torn: bool = False
    ) -> Cause | None:
        """Store one record; return why not. `as_stored`: a record's payload, copied forward. `is_torn`: only
        half of it gets there."""
        number, page = extent_of(place), slot_of(place)
        segment = self.segments[number]
        if number in self._gone:
            raise Violation("cold store", f"segment {number} was given back and is written")
        if segment.is_sealed:
            raise Violation("cold store", f"segment {number} is sealed and written")
        if label.namespace_digest not in self.namespaces:
            raise Violation("cold store", "a record was written before its namespace")
        if segment.epoch == 0:
            self._epochs += 1
            segment.epoch = self._epochs
        pages = range(page, page + record_bytes(label.stored_length or label.raw_length) // PAGE_BYTES)
        if not segment.written.isdisjoint(pages):
            raise Violation("cold store", f"record {place:#x} is overwritten")
        segment.written.update(pages)
        if label.codec_id and self._fault("does_not_fit"):
            return Cause.DOES_NOT_FIT
        if label.codec_id == PROFILED_ID and not as_stored:
            if label.is_spent:
                raise Violation("quantised twice", f"{place:#x} would lose more than its budget")
            token = self._contents.decoded(token)
        tenant = self._tenant(label)
        if not as_stored:
            if tenant in self._barred:
                return Cause.NO_KEY
            self._key_of_token[token] = self._keys[tenant]
        self._sequence += 1
        key = self._key_of_token.get(token, self._keys[tenant])
        record = Record(label, page, segment.epoch, self._sequence, token, key)
        if self._fault("write_error"):
            return Cause.IO_ERROR
        if is_torn or self._fault("short_write") or self._fault("torn_write"):
            record.token = self._contents.garbage()
            segment.medium[page] = record
            return Cause.SHORT_TRANSFER
        where = (number, page, segment.epoch)
        if self._fault("misdirected_write"):
            self._misdirect(record)
            self.damaged.add(where)
        else:
            segment.medium[page] = record
        if self._fault("bit_rot"):
            record.token = self._contents.garbage()
            self.damaged.add(where)
        segment.entries.append(record)
        return None

    def read(self, place: int, label: FragmentLabel, verify: bool) -> tuple[Cause | None, int]:
        """Read one record; return why not, and its payload. What is not verified is whatever is there."""
        number, page = extent_of(place), slot_of(place)
        segment = self.segments[number]
        if self._fault("read_error"):
            return Cause.IO_ERROR, 0
        record = segment.medium.get(page)
        is_excused = (number, page, segment.epoch) in self.damaged
        if self._fault("stale_read"):
            record, is_excused = None, True
        if record is not None and record.key != self._keys[self._tenant(record.label)]:
            return Cause.NO_KEY, 0
        if not verify:
            return None, record.token if record is not None else self._contents.garbage()
        cause = self._verify(record, label, segment.epoch)
        if cause is not None and not is_excused:
            raise Violation(
                "unexplained mismatch", f"{cause.value} at {place:#x}: nothing was injected there"
            )
        return cause, record.token if record is not None and cause is None else 0

    def _verify(self, record: Record | None, label: FragmentLabel, epoch: int) -> Cause | None:
        if record is None or epoch == 0 or record.epoch != epoch:
            return Cause.WRONG_IDENTITY
        found = record.label
        if (
            found.prefix_hash != label.prefix_hash
            or found.namespace_digest != label.namespace_digest
            or found.group != label.group
            or found.position != label.position
            or found.parent_hash != label.parent_hash
            or found.raw_length != label.raw_length
            or found.codec_id != label.codec_id
            or found.stored_length != label.stored_length
        ):
            return Cause.WRONG_IDENTITY
        is_lossy = label.codec_id == PROFILED_ID
        if label.checksum and record.checksum != label.checksum and not is_lossy:
            return Cause.WRONG_CHECKSUM
        return None if record.is_whole else Cause.WRONG_CHECKSUM

    def _misdirect(self, record: Record) -> None:
        """The record lands on top of another one."""
        number = self._world.rng.randrange(len(self.segments))
        victim = self.segments[number]
        if victim.medium:
            page = self._world.rng.choice(list(victim.medium))
            victim.medium[page] = record
            self.damaged.add((number, page, victim.epoch))

    def _fault(self, name: str) -> bool:
        if self._world.chance(self._rates[name]):
            self._world.counts[name] += 1
            return True
        return False

    # ------------------------------------------------------------------------- life of segments

    def store_namespace(self, identity: NamespaceIdentity) -> None:
        """Remember a namespace."""
        self.namespaces[identity.digest] = identity
        self._tenants[identity.digest] = tenant_of(identity.domain)

    def forget_namespace(self, identity: NamespaceIdentity) -> None:
        """Let a namespace be unknown to the next recovery."""
        del self.namespaces[identity.digest]

    def seal(self, number: int) -> None:
        """Write the footer, unless that fails."""
        segment = self.segments[number]
        if segment.epoch == 0 or segment.is_sealed:
            return
        segment.is_sealed = True
        self._orders += 1
        segment.order = self._orders
        segment.has_footer = not self._fault("seal_error")

    def free(self, number: int) -> None:
        """Forget a segment; its bytes stay until they are overwritten."""
        segment = self.segments[number]
        if segment.num_readers:
            raise Violation("cold store", f"segment {number} is freed under {segment.num_readers} readers")
        segment.epoch = 0
        segment.is_sealed = segment.has_footer = False
        segment.entries = []
        segment.written = set()

    def resize(self, num_segments: int) -> None:
        """Have the files of so many segments; more than that stay until they are given back."""
        self._num_wanted = num_segments
        while len(self.segments) < num_segments:
            self.segments.append(VirtualSegment())
        for number in sorted(self._gone):
            if number < num_segments:
                self.segments[number] = VirtualSegment()
                self._gone.remove(number)

    def give_back(self, number: int) -> None:
        """Remove the file of a segment, unless it is wanted again meanwhile."""
        segment = self.segments[number]
        if segment.num_readers or segment.epoch:
            raise Violation("cold store", f"segment {number} is given back while it is in use")
        if number >= self._num_wanted:
            self._gone.add(number)

    # ------------------------------------------------------------------------------------- keys

    def erase(self, tenant: str) -> set[int]:
        """Destroy a tenant's key, and give it no other for now; return what can be read no more."""
        self._keys[tenant] += 1
        self._barred.add(tenant)
        return {
            record.token
            for segment in self.segments
            for record in segment.medium.values()
            if self._tenant(record.label) == tenant
        }

    def admit(self, tenant: str) -> None:
        """Let an erased tenant have another key."""
        self._barred.discard(tenant)

    def has_key(self, place: int) -> bool:
        """Whether the record at a place can be decrypted."""
        record = self.segments[extent_of(place)].medium.get(slot_of(place))
        return record is not None and record.key == self._keys[self._tenant(record.label)]

    def _tenant(self, label: FragmentLabel) -> str:
        return self._tenants[label.namespace_digest]

    # ---------------------------------------------------------------------------------- recovery

    def power_cut(self, kept: float) -> None:
        """What was not sealed survives record by record, or half."""
        for number, segment in enumerate(self.segments):
            for page, record in list(segment.medium.items()):
                if segment.has_footer or record.epoch != segment.epoch or self._world.random() < kept:
                    continue
                if self._world.random() < 0.5:
                    del segment.medium[page]
                else:
                    record.token = self._contents.garbage()
                self.damaged.add((number, page, segment.epoch))

    def is_whole(self, record: Record) -> bool:
        """What recovery asks of a record that no footer vouches for."""
        return record.is_whole

    def recover(self) -> RecoveredStore:
        """Return what is still there, through the production `assemble`. Ends all other segments' lives."""
        self._barred.clear()
        found = []
        for number, segment in enumerate(self.segments):
            segment.num_readers = 0
            if number >= self._num_wanted:  # the next owner opens with its own geometry
                self.free(number)
                self._gone.add(number)
            if segment.epoch == 0:
                continue
            if not segment.has_footer:
                records = [r for p, r in segment.medium.items() if r.epoch == segment.epoch and r.page == p]
                segment.entries = [record for record in records if self.is_whole(record)]
            if not segment.entries:
                self.free(number)
                continue
            if not segment.has_footer:
                self._orders += 1
                segment.order = self._orders
            segment.is_sealed = segment.has_footer = True
            found.append((segment.order, number))
        namespaces = list(self.namespaces.values())
        known = known_namespaces(namespaces, lambda tenant: (self._keys[tenant], 0))
        segments = [
            read_columns(ExaminedSegment(number, self._footer(number), False, Counter()), known)
            for _, number in sorted(found)
        ]
        return assemble(segments, namespaces)

    def _footer(self, number: int) -> Footer:
        segment = self.segments[number]
        digests = list(dict.fromkeys(record.label.namespace_digest for record in segment.entries))
        table = {digest: index for index, digest in enumerate(digests)}
        records = sorted(segment.entries, key=lambda record: record.page)
        entries = np.array([_entry(record, table) for record in records], ENTRY)
        return Footer(number, segment.epoch, 1, digests, entries)


def _entry(record: Record, table: dict[bytes, int]) -> tuple[bytes | int, ...]:
    label = record.label
    return (
        label.prefix_hash,
        label.parent_hash.ljust(32, b"\0"),
        record.checksum,
        record.sequence,
        label.raw_length,
        label.stored_length or label.raw_length,
        record.page,
        label.position,
        label.group,
        table[label.namespace_digest],
        label.codec_id,
        (1 if label.parent_hash else 0) | (2 if label.is_spent else 0),
        record.key,
    )
