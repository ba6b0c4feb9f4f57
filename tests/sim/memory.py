"""VirtualMemory: a memory tier whose slots hold tokens; publishes and retracts as tiers/memory/engine.py.

The slot model screams: a slot that is written while somebody reads or writes it, published before its
content is there, or retracted under a lease, is a violation at that instant, whatever is read later.
"""

from itertools import count

from kvtier.tiers.block import FragmentLabel, Tier
from kvtier.tiers.memory.slots import SlotPool
from kvtier.v1.shm import extent_of

from .oracle import Contents, Key, checksum_of
from .world import Violation


class Slot:
    """One place. `generation` is even while it is published."""

    __slots__ = ("generation", "label", "num_leases", "num_readers", "num_writers", "token")

    def __init__(self) -> None:
        self.token = 0
        self.generation = 1
        self.label: FragmentLabel | None = None
        self.num_writers = 0  # copies writing it now
        self.num_readers = 0  # copies queued to read it or reading it
        self.num_leases = 0  # local clients that were told they may read it


class VirtualMemory:
    """One memory tier of one life of the daemon. `room` is the planner's own."""

    def __init__(self, tier: Tier, room: SlotPool, contents: Contents) -> None:
        self.tier = tier
        self.room = room
        self.is_lost = False
        self.index: dict[int, dict[Key, dict[int, None]]] = {}  # by domain
        self._contents = contents
        self._slots: dict[int, Slot] = {}
        self._generations = count(2, 2)

    def slot(self, place: int) -> Slot:
        """Return the slot at `place`, whatever its state."""
        slot = self._slots.get(place)
        if slot is None:
            slot = self._slots[place] = Slot()
        return slot

    def begin_write(self, place: int) -> None:
        """A copy starts to write: what stood there is gone."""
        slot = self.slot(place)
        name = f"{self.tier.label} slot {place:#x}"
        if not self.room.is_taken(place):
            raise Violation("slot model", f"{name} is written but free")
        if slot.label is not None:
            raise Violation("slot model", f"{name} is written while published")
        if slot.num_writers or slot.num_readers:
            raise Violation("slot model", f"{name} is written under another copy")
        if slot.num_leases:
            raise Violation("slot model", f"{name} is written under a lease")
        slot.num_writers += 1
        slot.token = self._contents.garbage()

    def end_write(self, place: int, token: int) -> None:
        """The copy's last byte is there."""
        slot = self.slot(place)
        slot.num_writers -= 1
        if slot.label is not None or not self.room.is_taken(place):
            raise Violation("slot model", f"{self.tier.label} slot {place:#x} was reused during a write")
        slot.token = token

    def tokens_of(self, namespace_id: int) -> set[int]:
        """Return what of a namespace can be read here."""
        return {
            slot.token
            for slot in self._slots.values()
            if slot.label is not None and slot.label.namespace_id == namespace_id
        }

    def tokens(self) -> list[tuple[int, int]]:
        """Return (place, token) of everything that stands here, whether it may be read or not."""
        return [(place, slot.token) for place, slot in self._slots.items()]

    def forget(self, number: int) -> None:
        """Give the bytes of an extent back that nothing was found in."""
        for place, slot in self._slots.items():
            if extent_of(place) == number:
                slot.token = 0

    def published(self) -> list[tuple[int, FragmentLabel, int]]:
        """Return (place, label, token) of everything that can be read here."""
        return [
            (place, slot.label, slot.token) for place, slot in self._slots.items() if slot.label is not None
        ]

    def matches(self, place: int, label: FragmentLabel) -> bool:
        """Whether the fragment published here is that of `label`: what ExtentEngine.verify compares."""
        found = self.slot(place).label
        return found is not None and (
            found.prefix_hash == label.prefix_hash
            and found.namespace_id == label.namespace_id
            and found.group == label.group
            and found.raw_length == label.raw_length
            and (not label.checksum or found.checksum == label.checksum)
        )

    def publish(self, place: int, label: FragmentLabel) -> None:
        """Make the slot readable; everything about it must be true by now."""
        slot = self.slot(place)
        name = f"{self.tier.label} slot {place:#x}"
        if slot.label is not None:
            raise Violation("publish", f"{name} is published twice")
        if slot.num_writers:
            raise Violation("publish", f"{name} is published while it is written")
        self._contents.must_be(slot.token, key_of(label), f"{name} is published")
        if label.checksum != checksum_of(slot.token):
            raise Violation("publish", f"{name} is published under a checksum of other content")
        slot.label = label
        slot.generation = next(self._generations)
        self._entries(place).setdefault(key_of(label), {})[place] = None

    def retract(self, place: int) -> None:
        """Make the slot unreadable."""
        slot = self.slot(place)
        if slot.label is None:
            return
        is_excused = self.is_lost or slot.token in self._contents.doomed  # lost, or its tenant was erased
        if slot.num_leases and not is_excused:
            raise Violation("slot model", f"{self.tier.label} slot {place:#x} is retracted under a lease")
        entries = self._entries(place)
        places = entries[key_of(slot.label)]
        del places[place]
        if not places:
            del entries[key_of(slot.label)]
        slot.label = None
        slot.generation += 1

    def _entries(self, place: int) -> dict[Key, dict[int, None]]:
        domain = self.room.domain_of_extent(extent_of(place))
        assert domain is not None
        return self.index.setdefault(domain, {})

    def give_back(self, number: int) -> None:
        """An extent's memory goes back to the host: nobody may touch it any more."""
        for place in [place for place in self._slots if extent_of(place) == number]:
            slot = self._slots.pop(place)
            if slot.label is not None or slot.num_writers or slot.num_readers or slot.num_leases:
                raise Violation("slot model", f"{self.tier.label} slot {place:#x} is given back while in use")
        if number in self.room.extents():
            raise Violation("slot model", f"{self.tier.label} extent {number} is given back and still there")

    def check_quiet(self) -> None:
        """Nobody touches any slot any more."""
        for place, slot in self._slots.items():
            if slot.num_writers or slot.num_readers or slot.num_leases:
                raise Violation("quiescence", f"{self.tier.label} slot {place:#x} is still in use")
            if slot.label is not None and not self.room.is_taken(place):
                raise Violation("slot model", f"{self.tier.label} slot {place:#x} is published and free")


def key_of(label: FragmentLabel) -> Key:
    """Return the key of a label's content."""
    return (label.namespace_digest, label.prefix_hash, label.group)
