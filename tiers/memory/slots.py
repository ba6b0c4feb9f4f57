"""The room of a memory tier: extents cut into equal slots, accounted for in arrays of numbers.

An extent is bound to one isolation domain for its whole life (a client's mapping of it cannot be
revoked) and to one slot size while any of its slots is taken. Fragments of one namespace are all about the
same size, so slabs of equal slots waste less than a general allocator and never fragment; a buddy or
offset allocator was rejected for its worst case just above a power of two.

Freed slots are reused last-in first-out, because their lines and TLB entries are the warmest.

The pool can be resized while it is used. Extents that shall go are *leaving*: nothing new comes in, and once
the last slot is given back the extent is *gone*, its number never used again (a client may still map it).
"""

from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ...v1.shm import MIN_SLOT_BYTES, extent_of, place_of, slot_bytes_for, slot_of
from ..base import RoomStatistics

_UNBOUND = -1


@dataclass(slots=True)
class _Extent:
    """One extent: its domain, the size of its slots, which are free and which taken.

    Arrays, because a list and a dict of numbers were a quarter of what the planner needs for a fragment."""

    domain: int = _UNBOUND
    slot_bytes: int = 0  # 0 while the extent is empty and uncut
    free: "array[int]" = field(default_factory=lambda: array("i"))
    #: Bytes that each slot is taken for; 0: it is free.
    payload: "array[int]" = field(default_factory=lambda: array("Q"))
    num_taken: int = 0


@dataclass(slots=True)
class Share:
    """Extents that some isolation domains may have together, and have. Shared by their entries in a SlotPool.

    Counted in extents, because an extent is bound to one domain for its whole life: what a domain took it
    never gives back to others, so a limit on bytes in use would come too late.
    """

    max_extents: int
    num_extents: int = 0

    @property
    def is_used_up(self) -> bool:
        """Whether no further extent may be bound."""
        return self.num_extents >= self.max_extents


class SlotPool:
    """Allocates slots in `num_extents` extents of `extent_bytes` data bytes each.

    They are numbered by the smallest of `kept`, which have memory, then by the smallest other numbers.
    `check_integrity` proves that every slot is either free or taken and that the byte counts follow.
    """

    def __init__(self, num_extents: int, extent_bytes: int, kept: Collection[int] = ()) -> None:
        assert num_extents > 0
        assert extent_bytes >= MIN_SLOT_BYTES
        self.num_extents = num_extents  # without those that leave
        self.extent_bytes = extent_bytes
        all_numbers = sorted({*kept, *range(num_extents)}, key=lambda number: (number not in kept, number))
        numbers = sorted(all_numbers[:num_extents])
        self._extents = [_Extent() for _ in range(numbers[-1] + 1)]  # by number, gone ones included
        self.leaving: set[int] = set()
        self._gone = set(range(len(self._extents))).difference(numbers)
        self._held: set[int] = set()  # out of use until `adopt`: what their memory holds is being looked at
        self._closed: set[int] = set()  # free slots in them are not used until `open_again`
        self._uncut_unbound = numbers[::-1]
        self._uncut_of_domain: dict[int, list[int]] = {}
        self._share_of: dict[int, Share] = {}  # by domain; others have no limit
        # Extents with a free slot, per (domain, slot_bytes). A dict is used as an ordered set.
        self._open: dict[tuple[int, int], dict[int, None]] = {}
        self._taken_bytes = 0
        self._taken_of: Counter[int] = Counter()  # the same, by domain
        self._payload_bytes = 0

    def can_hold(self, num_bytes: int) -> bool:
        """Whether a fragment of this size fits an extent."""
        return num_bytes > 0 and slot_bytes_for(num_bytes) <= self.extent_bytes

    def reserve(self, domain: int, num_bytes: int) -> int | None:
        """Take a slot of at least `num_bytes` for `domain`; None when no extent has one."""
        slot_bytes = slot_bytes_for(num_bytes)
        key = (domain, slot_bytes)
        candidates = self._open.get(key)
        if not candidates:
            number = self._cut(domain, slot_bytes)
            if number is None:
                return None
            candidates = self._open.setdefault(key, {})
            candidates[number] = None
        number = next(iter(candidates))
        extent = self._extents[number]
        slot = extent.free.pop()
        extent.payload[slot] = num_bytes
        extent.num_taken += 1
        if not extent.free:
            del candidates[number]
        self._taken_bytes += slot_bytes
        self._taken_of[domain] += slot_bytes
        self._payload_bytes += num_bytes
        return place_of(number, slot)

    def reserve_many(self, domain: int, sizes: Sequence[int], count: int) -> list[int]:
        """Take up to `count` times slots of all `sizes`; returns the places, in order, of as many as fit."""
        if count == len(sizes) == 1:
            place = self.reserve(domain, sizes[0])
            return [] if place is None else [place]
        if len(set(sizes)) == 1:
            return self._reserve_equal(domain, sizes[0], count * len(sizes), len(sizes))
        places: list[int] = []
        for _ in range(count):
            for num_bytes in sizes:
                place = self.reserve(domain, num_bytes)
                if place is None:
                    while len(places) % len(sizes):
                        self.release(places.pop(), sizes[len(places) % len(sizes)])
                    return places
                places.append(place)
        return places

    def release(self, place: int, num_bytes: int) -> None:
        """Free a slot. An extent that becomes empty may be cut anew, for the same domain."""
        number, slot = extent_of(place), slot_of(place)
        extent = self._extents[number]
        reserved_bytes = extent.payload[slot] if extent.num_taken else 0
        assert reserved_bytes == num_bytes > 0, f"slot {number}/{slot} was taken for {reserved_bytes}"
        extent.payload[slot] = 0
        extent.num_taken -= 1
        extent.free.append(slot)
        self._taken_bytes -= extent.slot_bytes
        self._taken_of[extent.domain] -= extent.slot_bytes
        self._payload_bytes -= num_bytes
        if not extent.num_taken:
            self._open.get((extent.domain, extent.slot_bytes), {}).pop(number, None)
            extent.slot_bytes = 0
            extent.free, extent.payload = array("i"), array("Q")
        self._make_available(number)

    def release_many(self, places: Sequence[int], sizes: Sequence[int]) -> None:
        """Free many slots: place `i` was reserved for `sizes[i % len(sizes)]` bytes."""
        if len(set(sizes)) > 1:
            for index, place in enumerate(places):
                self.release(place, sizes[index % len(sizes)])
            return
        number = extent_of(places[0]) if places else -1
        if places and number == extent_of(min(places)) == extent_of(max(places)):
            self._release_equal(number, [place & 0xFFFF_FFFF for place in places], sizes[0])
            return
        of_extent: dict[int, list[int]] = {}
        number, slots = -1, []
        for place in places:
            if place >> 32 != number:
                number = extent_of(place)
                slots = of_extent.setdefault(number, [])
            slots.append(place & 0xFFFF_FFFF)
        for number, slots in of_extent.items():
            self._release_equal(number, slots, sizes[0])

    def grow(self, num_extents: int) -> None:
        """Set a larger number of extents:
        those that were leaving stay, the rest is new, under new numbers."""
        assert num_extents >= self.num_extents
        while self.num_extents < num_extents and self.leaving:
            number = min(self.leaving, key=lambda n: (-self._extents[n].num_taken, n))  # the fullest
            self.leaving.remove(number)
            self.num_extents += 1
            extent = self._extents[number]
            if extent.free or not extent.slot_bytes:
                self._make_available(number)
        while self.num_extents < num_extents:
            self._extents.append(_Extent())
            self._uncut_unbound.insert(0, len(self._extents) - 1)
            self.num_extents += 1

    def retire(self, numbers: Sequence[int]) -> None:
        """Retire these extents: nothing new comes in. What is in them stays until it is released."""
        for number in numbers:
            extent = self._extents[number]
            assert number not in self.leaving
            assert number not in self._gone
            self.leaving.add(number)
            self.num_extents -= 1
            if extent.slot_bytes:
                self._open.get((extent.domain, extent.slot_bytes), {}).pop(number, None)
            elif number in self._closed or number in self._held:
                pass
            elif extent.domain == _UNBOUND:
                self._uncut_unbound.remove(number)
            else:
                self._uncut_of_domain[extent.domain].remove(number)
        assert self.num_extents > 0

    def take_gone(self) -> list[int]:
        """Return the leaving extents that became empty since the last call: their memory may go."""
        empty = [number for number in self.leaving if not self._extents[number].num_taken]
        gone = sorted(number for number in empty if number not in self._held | self._closed)
        self.leaving.difference_update(gone)
        self._gone.update(gone)
        for number in gone:
            if (share := self._share_of.get(self._extents[number].domain)) is not None:
                share.num_extents -= 1
        return gone

    def hold(self, numbers: Sequence[int]) -> None:
        """Take uncut extents of no domain out of use, until `adopt` says what is in them."""
        for number in numbers:
            self._uncut_unbound.remove(number)
            self._held.add(number)

    def adopt(self, number: int, domain: int, sizes: Mapping[int, int], is_closed: bool = False) -> None:
        """Bind a held extent to `domain`, its slots taken for `sizes`: slot -> bytes.

        All are cut to the same size of slots. Without any the extent is uncut and of no domain, as before
        `hold`. If it `is_closed`, no slot of it is used again before `open_again`.
        """
        self._held.remove(number)
        if not sizes:
            self._make_available(number)
            return
        if is_closed:
            self._closed.add(number)
        extent = self._extents[number]
        extent.domain, extent.slot_bytes = domain, slot_bytes_for(next(iter(sizes.values())))
        assert all(slot_bytes_for(num_bytes) == extent.slot_bytes for num_bytes in sizes.values())
        self._cut_into_slots(extent)
        for slot, num_bytes in sizes.items():
            extent.payload[slot] = num_bytes
        extent.num_taken = len(sizes)
        extent.free = array("i", [slot for slot in extent.free if slot not in sizes])
        if extent.free:
            self._make_available(number)
        self._taken_bytes += len(sizes) * extent.slot_bytes
        self._taken_of[domain] += len(sizes) * extent.slot_bytes
        self._payload_bytes += sum(sizes.values())
        if (share := self._share_of.get(domain)) is not None:
            share.num_extents += 1

    def open_again(self, number: int) -> None:
        """Use free slots of a closed extent again."""
        self._closed.remove(number)
        extent = self._extents[number]
        if extent.free or not extent.slot_bytes:
            self._make_available(number)

    def share(self, domain: int, share: Share) -> None:
        """Bind no more extents to `domain` than `share` has left. Before the domain has any."""
        assert all(extent.domain != domain for extent in self._extents)
        self._share_of[domain] = share

    def num_extents_of(self, share: Share) -> int:
        """Return how many extents the domains of a share have, those that leave included."""
        domains = {domain for domain, one in self._share_of.items() if one is share}
        return sum(
            extent.domain in domains
            for number, extent in enumerate(self._extents)
            if number not in self._gone
        )

    def extents(self) -> list[int]:
        """Return the numbers of all extents that are not gone, in the order in which `reserve` begins them.
        Those that leave are included."""
        return [number for number in range(len(self._extents)) if number not in self._gone]

    def taken_slots(self, number: int) -> int:
        """Return how many slots of an extent are taken; of one that is held all that may be."""
        if number in self._held:
            return self.extent_bytes // MIN_SLOT_BYTES
        return self._extents[number].num_taken

    def settle(self, place: int) -> None:
        """Do nothing: a slot is the same before and after its copy."""

    def offset_of(self, place: int) -> int:
        """Return the byte offset of a taken slot in its extent."""
        return slot_of(place) * self._extents[extent_of(place)].slot_bytes

    def slot_bytes_of(self, place: int) -> int:
        """Return the size of the slot at `place`; 0 when its extent is not cut."""
        return self._extents[extent_of(place)].slot_bytes

    def is_taken(self, place: int) -> bool:
        """Whether `place` is reserved."""
        extent, slot = self._extents[extent_of(place)], slot_of(place)
        return slot < len(extent.payload) and extent.payload[slot] > 0

    def domain_of_extent(self, number: int) -> int | None:
        """Return the domain an extent is bound to, None before its first use."""
        if not 0 <= number < len(self._extents):
            return None
        domain = self._extents[number].domain
        return None if domain == _UNBOUND else domain

    def unshare(self, domain: int) -> None:
        """Forget the share of a domain that has no extent."""
        assert domain not in self.bound_domains()
        self._share_of.pop(domain, None)

    def bound_domains(self) -> set[int]:
        """Return the domains that have an extent, be it empty."""
        return {extent.domain for extent in self._extents} - {_UNBOUND}

    def taken_by_domain(self) -> dict[int, int]:
        """Return the bytes that each isolation domain has taken, those in leaving extents included."""
        return {domain: num_bytes for domain, num_bytes in self._taken_of.items() if num_bytes}

    def statistics(self) -> RoomStatistics:
        """Return the present numbers; slots of uncut extents count as free in full.
        What is in leaving extents counts as taken, but not to the capacity: it has to find room elsewhere."""
        capacity = self.num_extents * self.extent_bytes
        taken = staying = self._taken_bytes
        for number in self.leaving:
            staying -= self._extents[number].num_taken * self._extents[number].slot_bytes
        return RoomStatistics(capacity, capacity - staying, taken, taken - self._payload_bytes)

    def check_integrity(self) -> list[str]:
        """Audit: slots free xor taken, open sets exact, byte count equal to the sum of slots."""
        problems = []
        total = payload = 0
        uncut = {*self._uncut_unbound, *(n for ns in self._uncut_of_domain.values() for n in ns)}
        for number, extent in enumerate(self._extents):
            taken = [slot for slot, num_bytes in enumerate(extent.payload) if num_bytes]
            total += len(taken) * extent.slot_bytes
            payload += sum(extent.payload)
            if len(taken) != extent.num_taken:
                problems.append(f"extent {number}: {extent.num_taken} slots taken, counted {len(taken)}")
            is_leaving = number in self.leaving or number in self._gone
            if number in self._gone and taken:
                problems.append(f"extent {number}: gone with {len(taken)} slots taken")
            is_unused = is_leaving or number in self._held or number in self._closed
            if (extent.slot_bytes == 0 and not is_unused) != (number in uncut):
                problems.append(
                    f"extent {number}: cut={extent.slot_bytes != 0}, listed uncut={number in uncut}"
                )
            if extent.slot_bytes == 0:
                continue
            slots = sorted([*extent.free, *taken])
            if slots != list(range(self.extent_bytes // extent.slot_bytes)):
                problems.append(f"extent {number}: free + taken are not each slot once")
            is_open = number in self._open.get((extent.domain, extent.slot_bytes), {})
            if is_open != (bool(extent.free) and not is_unused):
                problems.append(f"extent {number}: open={is_open}, free slots={len(extent.free)}")
        if self.num_extents != len(self._extents) - len(self.leaving) - len(self._gone):
            problems.append(f"{self.num_extents} extents are not those that neither leave nor are gone")
        if total != self._taken_bytes:
            problems.append(f"taken_bytes {self._taken_bytes} != sum over slots {total}")
        by_domain = Counter[int]()
        for extent in self._extents:
            by_domain[extent.domain] += extent.num_taken * extent.slot_bytes
        if +by_domain != +self._taken_of:
            problems.append(f"taken by domain: {+self._taken_of}, sums over slots {+by_domain}")
        if payload != self._payload_bytes:
            problems.append(f"payload_bytes {self._payload_bytes} != sum over slots {payload}")
        return problems

    def _reserve_equal(self, domain: int, num_bytes: int, count: int, multiple: int) -> list[int]:
        """Take up to `count` slots of one size, a multiple of `multiple`, extent by extent."""
        slot_bytes = slot_bytes_for(num_bytes)
        candidates = self._open.setdefault((domain, slot_bytes), {})
        places: list[int] = []
        while len(places) < count:
            number = next(iter(candidates), None)
            if number is None:
                number = self._cut(domain, slot_bytes)
                if number is None:
                    break
                candidates[number] = None
            extent = self._extents[number]
            slots = extent.free[: -(count - len(places)) - 1 : -1]
            del extent.free[-len(slots) :]
            payload = extent.payload
            for slot in slots:
                payload[slot] = num_bytes
            extent.num_taken += len(slots)
            if not extent.free:
                del candidates[number]
            first = place_of(number, 0)
            places += [first + slot for slot in slots]
        self._taken_bytes += len(places) * slot_bytes
        self._taken_of[domain] += len(places) * slot_bytes
        self._payload_bytes += len(places) * num_bytes
        while len(places) % multiple:
            self.release(places.pop(), num_bytes)
        return places

    def _release_equal(self, number: int, slots: list[int], num_bytes: int) -> None:
        """Give slots of one extent back that were taken for the same number of bytes."""
        extent = self._extents[number]
        if len(slots) == extent.num_taken:  # the extent becomes empty: `release` knows what follows
            for slot in slots:
                self.release(place_of(number, slot), num_bytes)
            return
        payload = extent.payload
        for slot in slots:
            assert payload[slot] == num_bytes, f"slot {number}/{slot} was taken for {payload[slot]}"
            payload[slot] = 0
        extent.num_taken -= len(slots)
        extent.free.extend(slots)
        self._taken_bytes -= extent.slot_bytes * len(slots)
        self._taken_of[extent.domain] -= extent.slot_bytes * len(slots)
        self._payload_bytes -= num_bytes * len(slots)
        self._make_available(number)

    def _make_available(self, number: int) -> None:
        """List an extent that has free slots, or is uncut, where `reserve` looks. Not one that leaves, is
        closed or is held."""
        if number in self.leaving or number in self._closed or number in self._held:
            return
        extent = self._extents[number]
        if extent.slot_bytes:
            self._open.setdefault((extent.domain, extent.slot_bytes), {})[number] = None
        elif extent.domain == _UNBOUND:
            self._uncut_unbound.append(number)
        else:
            self._uncut_of_domain.setdefault(extent.domain, []).append(number)

    def _cut(self, domain: int, slot_bytes: int) -> int | None:
        """Cut an empty extent into slots, one already of this domain if there is any."""
        if slot_bytes > self.extent_bytes:
            return None
        of_domain = self._uncut_of_domain.get(domain)
        if of_domain:
            number = of_domain.pop()
        elif self._uncut_unbound:
            share = self._share_of.get(domain)
            if share is not None:
                if share.is_used_up:
                    return None
                share.num_extents += 1
            number = self._uncut_unbound.pop()
        else:
            return None
        extent = self._extents[number]
        extent.domain = domain
        extent.slot_bytes = slot_bytes
        self._cut_into_slots(extent)
        return number

    def _cut_into_slots(self, extent: _Extent) -> None:
        """Let all slots of an extent be free; the first one is taken first."""
        num_slots = self.extent_bytes // extent.slot_bytes
        extent.free = array("i", range(num_slots - 1, -1, -1))
        extent.payload = array("Q", bytes(8 * num_slots))
