"""Taking over what an earlier daemon left in memory, extent by extent, while requests are served.

An extent arrives with the fragments that its headers name. Its slots are taken at once, so that nothing else
gets them; a fragment becomes readable when its bytes have been verified, by the steps of a put. One that has
other bytes, was put again meanwhile, is none of its namespace, or is of a tenant that was erased meanwhile
gives its slot back.

Leases ended with the daemon that granted them, views did not: while a client still has some of an extent,
nothing of that extent is written to or evicted.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

from ....tiers.base import MemoryRoom
from ....tiers.block import FragmentLabel, Tier
from ....v1.shm import extent_of, place_of
from ..catalog.catalog import NO_ROW, NamespaceEntry
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..catalog.states import State
from ..events import ExtentFound, FoundVerified, ViewsEnded
from ..instructions import Retract

Extent: TypeAlias = tuple[Tier, int]


class FoundMemory:
    """Makes found fragments readable."""

    def __init__(self, core: CoreState, residency: Residency, note_dirty: Callable[[int], None]) -> None:
        """`note_dirty` is called with every block that is whole again; the cold store may not have it."""
        self._core = core
        self._residency = residency
        self._note_dirty = note_dirty
        #: Extents that clients of an earlier daemon may still view; they are closed, their fragments held.
        self._viewed: dict[Extent, list[int]] = {}
        #: Namespaces that extents may name which were not taken yet.
        self.awaited: set[int] = set()
        #: Fragments with bytes that are not verified yet, by namespace and hash.
        self._unverified: dict[tuple[int, bytes], list[tuple[Tier, int, FragmentLabel]]] = {}
        #: Blocks found before the one they continue, in memory or in the cold store: (namespace, hash of that
        #: one) -> their handles.
        self._orphans: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)

    def takes(self, fragments: Sequence[tuple[int, FragmentLabel]]) -> list[tuple[int, FragmentLabel]]:
        """Return those of an extent's fragments, (slot, label), that `take` may be given.

        They are of namespaces that there are; none are given when they are of two isolation domains, of which
        each could map the other's bytes."""
        found = [(self._domain_of(label), slot, label) for slot, label in fragments]
        domains = {domain for domain, _, _ in found if domain is not None}
        return [(slot, label) for domain, slot, label in found if domains == {domain}]

    def take(self, event: ExtentFound) -> None:
        """Take the slots of an extent's fragments, which are all of one isolation domain.

        Without any the extent's bytes were given back."""
        domains = {self._domain_of(label) for _, label in event.fragments}
        assert None not in domains
        assert len(domains) <= 1, "an extent is of one domain"
        domain = next(iter(domains), 0) or 0
        room = cast(MemoryRoom, self._core.rooms[event.tier])
        sizes = {slot: label.raw_length for slot, label in event.fragments}
        room.adopt(event.extent, domain, sizes, event.is_viewed)
        if event.is_viewed and sizes:
            self._viewed[event.tier, event.extent] = []
        if not self._orphans:
            self._note_orphans()
        for slot, label in event.fragments:
            waiting = self._unverified.setdefault((label.namespace_id, label.prefix_hash), [])
            waiting.append((event.tier, place_of(event.extent, slot), label))

    def unverified(
        self, namespace_id: int, prefix_hashes: Sequence[bytes]
    ) -> list[tuple[Tier, int, FragmentLabel]]:
        """Return (tier, place, label) of the fragments of these blocks that `verified` is to be told of."""
        unverified = self._unverified
        if not unverified:
            return []
        return [one for name in prefix_hashes for one in unverified.get((namespace_id, name), ())]

    def waits_for(self, tier: Tier, place: int, label: FragmentLabel) -> bool:
        """Whether `verified` is to be told of this fragment."""
        waiting = self._unverified.get((label.namespace_id, label.prefix_hash), ())
        return (tier, place, label) in waiting

    def verified(self, event: FoundVerified) -> None:
        """Make fragments readable, or give their slots back. Those that were verified before are left out."""
        for (place, label), is_right in zip(event.fragments, event.are_right, strict=True):
            key, found = (label.namespace_id, label.prefix_hash), (event.tier, place, label)
            waiting = self._unverified.get(key, [])
            if found not in waiting:
                continue
            waiting.remove(found)
            if not waiting:
                del self._unverified[key]
            if is_right and self._adopt(*found):
                self._core.story.count("fragments_kept")
            else:
                self._core.outbox.emit(Retract(event.tier, (place,)))
                self._core.rooms[event.tier].release(place, label.raw_length)
                self._core.story.count("fragments_kept_in_vain")
        if not self._unverified:
            self._orphans.clear()

    @property
    def is_settled(self) -> bool:
        """Whether all that an earlier daemon left has been taken and verified."""
        return not self.awaited and not self._unverified

    def namespaces(self) -> set[int]:
        """Return the namespaces of fragments that wait to be taken or verified."""
        return self.awaited | {namespace_id for namespace_id, _ in self._unverified}

    def held(self) -> list[tuple[Tier, int]]:
        """Return the fragments that are held because clients of an earlier daemon may view them."""
        return [(tier, fragment) for (tier, _), held in self._viewed.items() for fragment in held]

    def views_ended(self, event: ViewsEnded) -> None:
        """Let extents be written again."""
        for tier, number in event.extents & self._viewed.keys():
            held = self._viewed.pop((tier, number))
            cast(MemoryRoom, self._core.rooms[tier]).open_again(number)
            for fragment in held:
                self._residency.drop(fragment, tier)

    def _note_orphans(self) -> None:
        """Note the blocks of the cold store that may continue what is found."""
        catalog = self._core.catalog
        for row, parent_hash in catalog.lost_parent.items():
            self._orphans[catalog.namespace_id[row], parent_hash].append(catalog.handle(row))

    def _domain_of(self, label: FragmentLabel) -> int | None:
        """Return the domain of a fragment; None if it is none of a namespace."""
        namespace = self._core.catalog.namespaces.get(label.namespace_id)
        if namespace is None or label.group >= namespace.num_groups:
            return None
        return namespace.domain if namespace.fragment_bytes[label.group] == label.raw_length else None

    def _adopt(self, tier: Tier, place: int, label: FragmentLabel) -> bool:
        """Make a fragment readable at `place`; False if it is not wanted there."""
        catalog = self._core.catalog
        namespace = catalog.namespaces[label.namespace_id]
        if self._core.is_erased(namespace):
            return False
        row = namespace.rows.get(label.prefix_hash, NO_ROW)
        if row == NO_ROW:
            row = self._add(namespace, label)
        elif catalog.position[row] != label.position:
            return False
        fragment = catalog.first_fragment[row] + label.group
        if catalog.state[tier][fragment] != State.ABSENT:
            return False
        if any(states[fragment] == State.ARRIVING for states in catalog.state):
            return False  # with bytes and a checksum of its own
        if catalog.fastest(fragment) is not None and catalog.label_of(fragment).checksum != label.checksum:
            return False
        self._residency.arrive(fragment, tier, place)
        if label.is_spent:
            catalog.spent.add(fragment)
        if (held := self._viewed.get((tier, extent_of(place)))) is not None:
            self._core.transitions.hold(fragment, tier)
            held.append(fragment)
        self._residency.land((fragment,), tier, (label,))
        if catalog.tier_of(row) is not None:
            self._note_dirty(row)
        return True

    def _add(self, namespace: NamespaceEntry, label: FragmentLabel) -> int:
        """Return the new row of a block, linked to those that are known of its chain."""
        catalog = self._core.catalog
        parent = namespace.rows.get(label.parent_hash, NO_ROW) if label.parent_hash else NO_ROW
        if parent != NO_ROW and catalog.position[parent] + 1 != label.position:
            parent = NO_ROW
        row = catalog.add(namespace, label.prefix_hash, parent, self._core.now)
        if parent == NO_ROW and label.parent_hash:
            catalog.position[row] = label.position
            catalog.lost_parent[row] = label.parent_hash
            self._orphans[namespace.id, label.parent_hash].append(catalog.handle(row))
        for handle in self._orphans.pop((namespace.id, label.prefix_hash), ()):
            if (child := catalog.row_of(handle)) != NO_ROW:
                self._residency.adopt_child(child, row)
        return row
