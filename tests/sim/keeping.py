"""Memory that outlives the daemon: in half of the seeds what the host's memory held is there after a crash.

As the supervisor keeps it (docs/decisions/0021-kept-memory.md): extents come back one by one, at once or
while requests are served, with the fragments that were readable; then their bytes are verified, a few at a
time, and some are damaged. What was being written is gone. Clients of the dead daemon may still view the
memory of some isolation domains for a while: until that has ended none of their slots may be written or
retracted, found or not.

Where there are two isolation domains, the header and bytes of a fragment of one may stand in an extent of the
other. No daemon makes such an extent, but each of them could map it, so nothing of it may be believed.

Checked: what was readable, is right, and is not stored otherwise is readable again, in its place; what
continues it is linked to it; what is damaged, or of a tenant that was erased, is not readable.

Drawn from a source of randomness of its own, so that a seed without is the same seed as ever.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.catalog.catalog import NO_ROW
from kvtier.appliance.core.catalog.states import State
from kvtier.tiers.block import FragmentLabel, NamespaceIdentity, Tier
from kvtier.v1.shm import extent_of, place_of, slot_bytes_for, slot_of

from .daemon import Daemon
from .ladder import MAPPED
from .memory import Slot
from .oracle import Contents
from .world import Violation, World

KEEPING_FRACTION = 0.5
VIEWED_FRACTION = 0.3
MAX_DELAY_S = 0.05
MAX_VERIFIED = 3  # fragments at a time
DAMAGED_FRACTION = 0.05
STRAY_FRACTION = 0.5  # of the extents


@dataclass(slots=True)
class Kept:
    """What a daemon left behind."""

    identities: dict[int, NamespaceIdentity]  # by number
    #: By tier and extent: slot -> label and token.
    extents: dict[tuple[Tier, int], dict[int, tuple[FragmentLabel, int]]] = field(default_factory=dict)


class Keeping:
    """Keeps memory over the crashes of one world."""

    def __init__(self, world: World, contents: Contents) -> None:
        self._world = world
        self._contents = contents
        self._rng = Random(f"kept memory of {world.seed}")
        self._strays = Random(f"strays of {world.seed}")
        self.is_on = self._rng.random() < KEEPING_FRACTION
        #: What the living daemon, the first, was handed over and has not verified yet, by tier and place.
        self._unread: tuple[Daemon | None, dict[tuple[Tier, int], tuple[FragmentLabel, int]]] = (None, {})

    def keep(self, daemon: Daemon, erased: set[int]) -> Kept:
        """Return what a daemon that just died has in the host's memory, without tokens that were erased."""
        namespaces = daemon.planner.catalog.namespaces
        kept = Kept({number: namespaces[number].identity for number in sorted(namespaces)})
        for tier, memory in daemon.memories.items():
            if tier in MAPPED.host_tiers:
                for place, label, token in memory.published():
                    if token in erased:
                        continue
                    extent = kept.extents.setdefault((tier, extent_of(place)), {})
                    extent[slot_of(place)] = _as_found(label), token
        self._keep_unread(kept, daemon, erased)
        self._plant_strays(kept)
        return kept

    def _keep_unread(self, kept: Kept, daemon: Daemon, erased: set[int]) -> None:
        """Add what a daemon that died once more had not come to: the headers stand as they were found."""
        owner, unread = self._unread
        for (tier, place), (label, token) in unread.items() if owner is daemon else ():
            slot = daemon.memories[tier].slot(place)
            is_there = slot.label is None and slot.token == token and token not in erased
            if is_there and label.namespace_id in kept.identities:
                kept.extents.setdefault((tier, extent_of(place)), {})[slot_of(place)] = label, token
                self._world.counts["kept_twice"] += 1

    def _plant_strays(self, kept: Kept) -> None:
        """Put fragments of one isolation domain into extents of another."""

        def domain_of(label: FragmentLabel) -> str:
            return kept.identities[label.namespace_id].domain

        everything = [one for slots in kept.extents.values() for one in slots.values()]
        for slots in kept.extents.values():
            first, _ = next(iter(slots.values()))
            others = [one for one in everything if domain_of(one[0]) != domain_of(first)]
            size = slot_bytes_for(first.raw_length)
            others = [one for one in others if slot_bytes_for(one[0].raw_length) == size]
            if others and len(slots) > 1 and self._strays.random() < STRAY_FRACTION:
                slots[self._strays.choice(list(slots))] = self._strays.choice(others)
                self._world.counts["strays"] += 1

    def hand_over(self, kept: Kept, daemon: Daemon) -> None:
        """Give a daemon that has just been made what another one left. Before its first event."""
        daemon.planner.name_namespaces(kept.identities)
        for tier, memory in daemon.memories.items():
            mine = [number for one, number in kept.extents if one is tier]
            lost = [number for number in mine if number not in memory.room.extents()]
            for number in lost:
                del kept.extents[tier, number]
            memory.room.hold([number for number in mine if number not in lost])
        for (tier, number), slots in kept.extents.items():
            for slot, (_, token) in slots.items():
                daemon.memories[tier].slot(place_of(number, slot)).token = token
                daemon.unfound.add(token)
        self._unread = (
            daemon,
            {
                (tier, place_of(number, slot)): one
                for (tier, number), slots in kept.extents.items()
                for slot, one in slots.items()
            },
        )

    def adopt(self, kept: Kept, daemon: Daemon) -> None:
        """Let the extents come back, now or bit by bit."""
        viewed = frozenset(extent for extent in kept.extents if self._rng.random() < VIEWED_FRACTION)
        held = []
        taken = {
            extent: daemon.planner.found_memory.takes([(slot, label) for slot, (label, _) in slots.items()])
            for extent, slots in kept.extents.items()
        }
        for (tier, number), found_here in taken.items():
            if (tier, number) in viewed:
                held += [daemon.memories[tier].slot(place_of(number, slot)) for slot, _ in found_here]
        for slot in held:
            slot.num_leases += 1
        extents = list(kept.extents)
        self._rng.shuffle(extents)
        longest_s = self._rng.choice((0.0, MAX_DELAY_S))
        found = []
        at_s = 0.0
        for tier, number in extents:  # first what their headers name
            at_s += self._rng.random() * longest_s
            named = taken[tier, number]
            self._soon(
                at_s, self._find, daemon, ev.ExtentFound(tier, number, named, (tier, number) in viewed)
            )
            found += [(tier, place_of(number, index), label) for index, label in named]
        self._soon(at_s, daemon.planner.found_memory.awaited.clear)
        self._rng.shuffle(found)
        while found:  # then the bytes, in any order: requests have what they wait for verified first
            at_s += self._rng.random() * longest_s
            one = found[: self._rng.randint(1, MAX_VERIFIED)]
            del found[: len(one)]
            for tier in sorted({tier for tier, _, _ in one}):
                mine = [(place, label) for of_tier, place, label in one if of_tier is tier]
                event = self._verified(daemon, tier, mine)
                self._soon(at_s, self._check_verified, daemon, event, kept)
        if viewed:
            ends_s = at_s + self._rng.random() * 2 * MAX_DELAY_S
            self._world.after(ends_s, self._views_ended, daemon, viewed, held)

    def _find(self, daemon: Daemon, event: ev.ExtentFound) -> None:
        """Tell what the headers of an extent name, whose bytes are given back if that is nothing."""
        if not event.fragments:
            daemon.memories[event.tier].forget(event.extent)  # and so not kept once more
        daemon.step(event)
        if daemon.is_alive:
            daemon.oracle.check_domains()

    def _soon(self, delay_s: float, do: Callable[..., None], *arguments: Any) -> None:
        if delay_s:
            self._world.after(delay_s, do, *arguments)
        else:
            do(*arguments)

    def _views_ended(self, daemon: Daemon, viewed: frozenset[tuple[Tier, int]], held: list[Slot]) -> None:
        for slot in held:
            slot.num_leases -= 1
        daemon.step(ev.ViewsEnded(viewed))

    def _verified(
        self, daemon: Daemon, tier: Tier, found: list[tuple[int, FragmentLabel]]
    ) -> ev.FoundVerified:
        """Return what a comparison of bytes will say; some of them were damaged."""
        are_right = [self._rng.random() >= DAMAGED_FRACTION for _ in found]
        for (place, _), is_right in zip(found, are_right, strict=True):
            if not is_right:
                daemon.memories[tier].slot(place).token = self._contents.garbage()
        return ev.FoundVerified(tier, found, are_right)

    def _check_verified(self, daemon: Daemon, event: ev.FoundVerified, kept: Kept) -> None:
        """Bytes were verified: what is right is readable, and linked to what it continues."""
        if not daemon.is_alive:
            return
        catalog = daemon.planner.catalog
        wanted, unknown = [], set()
        seen: set[tuple[int, bytes, int]] = set()  # what was kept twice is taken over once
        for (place, label), is_right in zip(event.fragments, event.are_right, strict=True):
            self._unread[1].pop((event.tier, place), None)
            token = kept.extents[event.tier, extent_of(place)][slot_of(place)][1]
            daemon.unfound.discard(token)
            fragment = label.namespace_id, label.prefix_hash, label.group
            if is_right and fragment not in seen and not self._is_stored(daemon, label):
                seen.add(fragment)
                if token not in self._contents.doomed:
                    wanted.append((place, label))
            if catalog.find(label.namespace_id, label.prefix_hash) == NO_ROW:
                unknown.add((label.namespace_id, label.prefix_hash))

        def check() -> None:
            self._check_there(daemon, event.tier, wanted)
            _check_links(daemon, kept, unknown)

        daemon.step(event, check)

    def _check_there(self, daemon: Daemon, tier: Tier, wanted: list[tuple[int, FragmentLabel]]) -> None:
        catalog = daemon.planner.catalog
        for place, label in wanted:
            row = catalog.find(label.namespace_id, label.prefix_hash)
            fragment = catalog.first_fragment[row] + label.group if row != NO_ROW else -1
            is_there = row != NO_ROW and catalog.state[tier][fragment] == State.RESIDENT
            if not is_there or catalog.place[tier][fragment] != place:
                name = label.prefix_hash.hex()[:8]
                raise Violation("kept memory", f"{name} was kept at {place:#x} and is not there")
            self._world.counts["fragments_kept"] += 1

    def _is_stored(self, daemon: Daemon, label: FragmentLabel) -> bool:
        """Whether anything is known of a fragment already."""
        catalog = daemon.planner.catalog
        row = catalog.find(label.namespace_id, label.prefix_hash)
        if row == NO_ROW:
            return False
        fragment = catalog.first_fragment[row] + label.group
        return any(states[fragment] != State.ABSENT for states in catalog.state)


def _as_found(label: FragmentLabel) -> FragmentLabel:
    """Return what the header of a slot says of a fragment."""
    return FragmentLabel(
        label.namespace_digest,
        label.namespace_id,
        label.prefix_hash,
        label.parent_hash,
        label.position,
        label.group,
        label.raw_length,
        label.checksum,
        is_spent=label.is_spent,
    )


def _check_links(daemon: Daemon, kept: Kept, new: set[tuple[int, bytes]]) -> None:
    """Blocks that became known just now, (namespace, hash), are linked to their kept parents and children."""
    catalog = daemon.planner.catalog
    for slots in kept.extents.values():
        for label, _ in slots.values():
            number = label.namespace_id
            if (number, label.prefix_hash) in new or (number, label.parent_hash) in new:
                row = catalog.find(number, label.prefix_hash)
                parent = catalog.find(number, label.parent_hash) if label.parent_hash else NO_ROW
                if row != NO_ROW and catalog.parent[row] != parent:
                    name = label.prefix_hash.hex()[:8]
                    raise Violation("kept memory", f"{name} is not linked to the block it continues")
