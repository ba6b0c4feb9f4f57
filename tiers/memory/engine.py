"""The engine of a memory tier: sealed extents, slot headers, the shared index.

One class serves `dram` and the host-memory `hbm` tier; they differ in `tier` and in the numbers of
their extents, which are unique in one daemon so that clients map them by number alone.

Workers call `write`, `read`, `view` and `verify`; the event loop calls `publish_run` and `retract`. The room
is the planner's; what the engine reads from it (the slot of a place, the domain of an extent) does not change
while a place is taken, so no lock is shared with the event loop.
"""

import threading
from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from ...v1.shm import extent_of, place_of, slot_of
from ..base import Buffer, Cause, CopyError, CopyItem, EngineStatistics
from ..block import FragmentLabel, Tier
from ..payload import copy, copy_and_checksum, copy_and_checksum_many
from .extent import ExtentReport, SlotExtent, name_of_tier
from .found import has_right_bytes, labelled_slots
from .headers import LabelColumns
from .index import Indexes, IndexWriter
from .keeper import Keeper
from .memfd import SharedMemoryError
from .places import by_extent, slots_of
from .slots import SlotPool
from .verification import ExtentVerifier

#: Numbers of extents a tier may use up in one life of the daemon, growing and shrinking.
MAX_NUMBERS = 1 << 20
_CHECKSUM = attrgetter("checksum")


class ExtentEngine:
    """Implements `MemoryEngine` over the places of `room`.

    `first_extent` is the number of this engine's first extent among all extents of the daemon; up to
    MAX_NUMBERS follow, so that the tier can grow. Extents are made when first touched, or ahead of that by
    `prefault`. Raises SharedMemoryError at once when the host cannot give the first one as configured.
    """

    def __init__(
        self,
        room: SlotPool,
        indexes: Indexes,
        *,
        tier: Tier = Tier.DRAM,
        first_extent: int = 0,
        huge_pages: bool = True,
        numa_nodes: Sequence[int] = (),
        keeper: Keeper | None = None,
    ) -> None:
        self.tier = tier
        self.first_extent = first_extent
        self._room = room
        self.indexes = indexes  # all memory tiers share them
        self._huge_pages = huge_pages
        self.numa_nodes = tuple(numa_nodes)
        self._keeper = keeper
        self._extents: dict[int, SlotExtent] = {}  # by number; those made so far and not given back
        self._given_back: set[int] = set()
        self._index_of_extent: dict[int, IndexWriter] = {}
        self._published: dict[int, int] = {}  # place -> tag
        self._lock = threading.Lock()  # extents being made, statistics
        #: Called with an extent's number before it is unmapped, to unregister it from devices.
        self.before_unmap: Callable[[int], None] = lambda number: None
        self._prefaulting = threading.Lock()
        self.verifier = ExtentVerifier(self._extents, self._published, self._prefaulting)
        self._stop = threading.Event()
        backend = "sealed memfd" if tier is not Tier.HBM else "host memory (sealed memfd)"
        self._statistics = EngineStatistics(backend)
        numbers, kept = room.extents(), keeper.inherited if keeper is not None else {}
        #: Numbers of extents that another daemon filled; `found` says with what.
        self.inherited = [number for number in numbers if self._name(number) in kept]
        for number in {*self.inherited, numbers[0]}:
            self._make(number)

    @property
    def num_extents(self) -> int:
        """Number of extents the tier has now, without those that leave."""
        return self._room.num_extents

    def owns(self, extent_number: int) -> bool:
        """Whether an extent of this number is or was one of this tier."""
        return 0 <= extent_number - self.first_extent < MAX_NUMBERS

    # ------------------------------------------------------------------------------ bytes (any thread)

    def view(self, place: int, length: int) -> Buffer:
        """Return the `length` bytes at `place`, writable, without copying. Valid until `close`.

        Raises CopyError when the tier is closed or the host has no memory for the extent.
        """
        assert 0 < length <= self._room.slot_bytes_of(place), f"{length} bytes are more than the slot has"
        offset = self._room.offset_of(place)
        return self._extent(extent_of(place)).data[offset : offset + length]

    def data_of(self, number: int) -> Buffer:
        """Return all bytes of slots of this tier's extent `number`, made now if need be. Raises CopyError."""
        return self._extent(number).data

    def write(self, place: int, label: FragmentLabel, payload: Buffer) -> bytes:
        """Copy `payload` into the unpublished slot at `place`; see Engine.write."""
        assert len(payload) == label.raw_length
        assert place not in self._published, "a published slot must be retracted before it is written"
        try:
            into = self.view(place, len(payload))
        except CopyError as error:
            self._count_failure(error.cause)
            raise
        # Handing the copy to this thread took locks, which are full barriers: readers have seen the odd
        # generation before any of these bytes, streaming stores included.
        if label.checksum:
            copy(into, payload)
            digest = label.checksum
        else:
            digest = copy_and_checksum(into, payload)
        with self._lock:
            self._statistics.num_writes += 1
            self._statistics.written_bytes += len(payload)
        return digest

    def write_run(self, first_place: int, labels: Sequence[FragmentLabel], payload: Buffer) -> list[bytes]:
        """Write payloads that fill neighbouring slots without a gap; see `run_length` and `write`.

        `payload` holds them back to back, all of one length. Returns their checksums. Raises CopyError.
        """
        length = labels[0].raw_length
        assert length * len(labels) == len(payload)
        assert self._room.slot_bytes_of(first_place) == length, "slots must be filled to the last byte"
        places = range(first_place, first_place + len(labels))
        assert self._published.keys().isdisjoint(places), "retract a published slot before writing it"
        try:
            extent = self._extent(extent_of(first_place))
        except CopyError as error:
            self._count_failure(error.cause)
            raise
        offset = self._room.offset_of(first_place)
        into = extent.data[offset : offset + len(payload)]
        digests = copy_and_checksum_many(into, payload, length)
        with self._lock:
            self._statistics.num_writes += len(labels)
            self._statistics.written_bytes += len(payload)
        return digests

    def run_length(self, items: Sequence[CopyItem], start: int) -> int:
        """Return how many items from `start` on `write_run` can take at once:
        those that lie back to back in the source (its places are offsets) and fill neighbouring slots here to
        the last byte."""
        place, label = items[start].target, items[start].label
        source, length = items[start].source, label.raw_length
        if label.checksum or self._room.slot_bytes_of(place) != length:
            return 1
        count = 1
        for item in items[start + 1 :]:
            if (item.target, item.source) != (place + count, source + count * length):
                break
            if item.label.raw_length != length:
                break
            count += 1
        return count

    def read(self, place: int, label: FragmentLabel, into: Buffer) -> None:
        """Copy the fragment at `place` into `into`, its identity compared before and after.

        Memory does not lose bytes, so no checksum is verified. Raises CopyError.
        """
        assert len(into) == label.raw_length
        generation = self.verify(place, label)
        copy(into, self.view(place, len(into)))
        self.verify(place, label, generation)
        with self._lock:
            self._statistics.num_reads += 1
            self._statistics.read_bytes += len(into)

    def checksum(self, place: int) -> bytes:
        """Return the xxh3-128 of the published fragment at `place`, as it was taken at put."""
        return self._extent(extent_of(place)).headers.checksum(slot_of(place))

    def verify(self, place: int, label: FragmentLabel, generation: int | None = None) -> int:
        """Return the generation of the published fragment at `place`.

        Raises CopyError(WRONG_IDENTITY) when it is not that of `label`, not published, or when its
        generation is no longer `generation`.
        """
        headers, slot = self._extent(extent_of(place)).headers, slot_of(place)
        found = headers.generation(slot)
        if not headers.is_of(slot, label):
            self._count_failure(Cause.WRONG_IDENTITY)
            raise CopyError(Cause.WRONG_IDENTITY, f"slot {place:#x} holds another fragment or none")
        if generation is not None and found != generation:
            self._count_failure(Cause.WRONG_IDENTITY)
            raise CopyError(Cause.WRONG_IDENTITY, f"slot {place:#x} was recycled during the copy")
        return found

    def generations_of(self, places: NDArray[np.int64], labels: LabelColumns) -> NDArray[np.uint64] | None:
        """Return the generations (n,) uint64 of the fragments at `places` (n,) int64.
        None where it is not certain that each is that of its label: `verify` finds which is not, and counts
        it."""
        words, slots = labels.words, slots_of(places)
        if words is None:
            return None
        generations = np.empty(len(places), np.uint64)
        try:
            for number, where in by_extent(places):
                found = self._extent(number).headers.generations_of(slots[where], words[where])
                if found is None:
                    return None
                generations[where] = found
        except CopyError:
            return None
        return generations

    # -------------------------------------------------------------------------- headers (event loop only)

    def publish_run(self, places: Sequence[int], labels: Sequence[FragmentLabel]) -> None:
        """Write the headers of places, make their generations even, enter them in their domain's index."""
        assert self._published.keys().isdisjoint(places), "published twice"
        assert all(map(_CHECKSUM, labels)), "published before its bytes were hashed"
        first = extent_of(min(places))
        if extent_of(max(places)) == first:  # nearly always
            self._publish_in(first, list(places), list(labels))
            return
        numbers = [extent_of(place) for place in places]
        for number in dict.fromkeys(numbers):
            which = [i for i, of in enumerate(numbers) if of == number]
            self._publish_in(number, [places[i] for i in which], [labels[i] for i in which])

    def _publish_in(self, number: int, places: list[int], labels: list[FragmentLabel]) -> None:
        """Publish fragments of one extent."""
        first_place = place_of(number, 0)
        slots = [place - first_place for place in places]
        slot_bytes = self._room.slot_bytes_of(places[0])
        tags = self._extent(number).headers.fill_run(slots, labels, slot_bytes)
        self._published.update(zip(places, tags, strict=True))
        index = self._index_of_extent.get(number) or self._index_of(number)
        if index is not None:
            index.insert_run(tags, place_of(self.first_extent + number, 0), slots)

    def retract(self, place: int) -> None:
        """Make the generation of `place` odd and take it out of the index. No effect when it is."""
        number, slot = extent_of(place), slot_of(place)
        tag = self._published.pop(place, None)
        if tag is None:
            if number in self.inherited:  # readable since before this process
                self._extents[number].headers.empty_if_filled(slot)
            return
        extent, index = self._extents[number], self._index_of_extent.get(number)
        extent.headers.empty(slot)
        if index is not None:
            index.remove(tag, place_of(self.first_extent + number, slot))

    def location(self, place: int) -> tuple[int, int, int]:
        """Return (extent number, offset in it, generation) of a published fragment, for a reply."""
        assert place in self._published
        extent = self._extent(extent_of(place))
        generation = extent.headers.generation(slot_of(place))
        return self.first_extent + extent_of(place), self._room.offset_of(place), generation

    # -------------------------------------------------------------- what another daemon left (any thread)

    def found(self, number: int, digest_of: Callable[[int], bytes | None]) -> list[tuple[int, FragmentLabel]]:
        """Return (slot, label) of what the headers of an inherited extent name; all other slots are emptied.

        `digest_of` returns the digest of a namespace by its number. Reads all headers and no bytes: call it
        in a thread, once.
        """
        extent = self._extent(number)
        extent.headers.resume()
        found = labelled_slots(extent, digest_of)
        extent.headers.empty_all(but=[slot for slot, _ in found])
        return found

    def generation_of(self, number: int) -> int:
        """Return the newest generation in an extent."""
        return self._extent(number).headers.last_generation

    def verify_found(self, fragments: Sequence[tuple[int, FragmentLabel]]) -> list[bool]:
        """Return for each (place, label) that was `found` whether the bytes there have its checksum."""
        return [
            has_right_bytes(self._extent(extent_of(place)), slot_of(place), label)
            for place, label in fragments
        ]

    def forget(self, number: int, but: Sequence[int] = ()) -> None:
        """Make the slots of an inherited extent empty but for these.

        If all are, give its memory back, unless none was ever filled: it may have bytes of any domain."""
        extent = self._extent(number)
        extent.headers.empty_all(but)
        if not but and extent.headers.last_generation:
            with self._prefaulting, self._lock:
                self._extents.pop(number).forget()

    # --------------------------------------------------------------------------------- what clients map

    def domain_of(self, extent_number: int) -> int | None:
        """Return the isolation domain of an extent; None when it is unused or not of this tier."""
        number = extent_number - self.first_extent
        return None if number in self._given_back else self._room.domain_of_extent(number)

    def descriptor(self, extent_number: int) -> int:
        """Return the sealed descriptor of an extent of this tier. It stays the engine's: do not close it."""
        return self._extent(extent_number - self.first_extent).descriptor

    # ---------------------------------------------------------------------------------------- the rest

    def prefault(self) -> None:
        """Make and lock all extents, in the order in which they come into use.

        Blocks for seconds without the GIL: call it in a thread. Ends early when the engine is closed.
        Raises SharedMemoryError when the host has less memory than the tier is configured for.
        """
        for number in self._room.extents():
            with self._prefaulting:
                if self._stop.is_set():
                    return
                if number not in self._given_back:
                    (self._extents.get(number) or self._make(number)).prefault(self._stop)

    def end_prefault(self) -> None:
        """Let `prefault` end early. No extent is made from now on."""
        self._stop.set()

    def give_back(self, number: int) -> None:
        """Unmap and close an extent that the room has no use for any more, a number of the room's.

        Clients that map it keep its memory until they let go of it. Its number is never used again. Takes
        milliseconds, and waits for an extent that is being prefaulted: call it in a thread.
        """
        with self._prefaulting, self._lock:
            self._given_back.add(number)
            self._index_of_extent.pop(number, None)
            extent = self._extents.pop(number, None)
        if extent is not None:
            self.before_unmap(number)
            extent.forget()

    def reports(self) -> list[ExtentReport]:
        """Return the memory that each extent made so far got from the host."""
        return [extent.report() for _, extent in sorted(self._extents.items())]

    def statistics(self) -> EngineStatistics:
        """Return counters; a copy."""
        with self._lock:
            s = self._statistics
            return EngineStatistics(
                s.backend, s.num_reads, s.num_writes, s.read_bytes, s.written_bytes, dict(s.failures)
            )

    def check_integrity(self) -> list[str]:
        """Audit: a slot's generation is even iff it is published, and published slots are taken."""
        problems = []
        for number, extent in sorted(self._extents.items()):
            seen: set[int] = set()
            headers = extent.headers.table()
            even = {place_of(number, int(slot)) for slot in np.flatnonzero(headers["generation"] % 2 == 0)}
            published = {place for place in self._published if extent_of(place) == number}
            if number in self.inherited:  # the planner has not come to some of them
                even = {place for place in even if place in published or not self._room.is_taken(place)}
            for place in even ^ published:
                problems.append(f"slot {place:#x}: readable={place in even}, published={place in published}")
            for place in even & published:
                header = headers[slot_of(place)]
                if not self._room.is_taken(place):
                    problems.append(f"slot {place:#x} is published and free")
                elif header["offset"] != self._room.offset_of(place):
                    problems.append(f"slot {place:#x}: header names offset {header['offset']}")
                generation = int(header["generation"])
                if generation in seen:
                    problems.append(f"slot {place:#x}: generation {generation} is not unique")
                seen.add(generation)
        return problems

    def close(self) -> None:
        """Retract everything, unmap, close. Idempotent. Close the indexes after it, not before.

        What another daemon is to take over stays readable.
        """
        self._stop.set()
        with self._prefaulting:
            is_kept = self._keeper is not None and self._keeper.is_handing_over
            for place in [] if is_kept else list(self._published):
                self.retract(place)
            for number, extent in self._extents.items():
                self.before_unmap(number)
                extent.close()
            self._extents.clear()

    # ------------------------------------------------------------------------------------------ private

    def _extent(self, number: int) -> SlotExtent:
        """Return extent `number` of this tier, made now if need be. Raises CopyError."""
        extent = self._extents.get(number)
        if extent is not None:
            return extent
        if self._stop.is_set() or number in self._given_back:
            raise CopyError(Cause.TIER_OFFLINE, f"tier {self.tier.label} is closed")
        try:
            return self._make(number)
        except SharedMemoryError as error:
            raise CopyError(Cause.NO_SPACE, str(error)) from error

    def _name(self, number: int) -> str:
        return f"{name_of_tier(self.tier, self._room.extent_bytes, self.numa_nodes)}-{number}"

    def _make(self, number: int) -> SlotExtent:
        with self._lock:
            extent = self._extents.get(number)
            if extent is None:
                extent = SlotExtent(
                    self._name(number),
                    self._room.extent_bytes,
                    huge_pages=self._huge_pages,
                    numa_nodes=self.numa_nodes,
                    keeper=self._keeper,
                )
                self._extents[number] = extent
            return extent

    def _index_of(self, number: int) -> IndexWriter | None:
        """Return the index of the domain that extent `number` is bound to, for its whole life.

        None when the host has none to give: an index is a hint, clients then ask the daemon.
        """
        domain = self._room.domain_of_extent(number)
        assert domain is not None
        try:
            index = self.indexes.of(domain)
        except SharedMemoryError:
            return None
        self._index_of_extent[number] = index
        return index

    def _count_failure(self, cause: Cause) -> None:
        with self._lock:
            self._statistics.failures[cause] = self._statistics.failures.get(cause, 0) + 1
