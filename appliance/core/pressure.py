"""Pressure: finding room in a tier, by giving up what is safe below and spilling what is not.

A block that is also in a slower tier is *clean*: leaving costs nothing but a later promotion. Spilling
makes blocks clean ahead of need (from the high watermark down to the low one), so that a put finds room
without waiting for a device. Nothing acknowledged is dropped while a slower tier can take it.
"""

from collections import deque
from collections.abc import Mapping

from ...tiers.base import Room
from ...tiers.block import Tier, Urgency
from .catalog import NO_ROW, TIERS
from .copies import Copies, Move
from .options import PlannerOptions
from .reclaim import Reclaim
from .residency import MEMORY_TIERS, Residency
from .states import State


class Pressure:
    """Decides who leaves a memory tier, and when."""

    def __init__(
        self,
        residency: Residency,
        copies: Copies,
        reclaim: Reclaim,
        rooms: Mapping[Tier, Room],
        options: PlannerOptions,
    ) -> None:
        self._residency = residency
        self._copies = copies
        self._reclaim = reclaim
        self._rooms = rooms
        self.options = options
        self._relieving: set[Tier] = set()
        #: Handles of blocks to demote because their session ended.
        self._to_archive: deque[int] = deque()

    def place_for(self, tier: Tier, domain: int, num_bytes: int) -> int | None:
        """Reserve a place, evicting clean blocks and queueing spills as needed; None: not yet.

        After None, somebody must wait: room appears when a spill finishes or a hold ends.
        """
        room = self._rooms[tier]
        while (place := room.reserve(domain, num_bytes)) is None:
            if not self._give_up_one(tier):
                return None
        return place

    def relieve(self) -> None:
        """Bring every memory tier from its high watermark to its low one; keep cold segments free."""
        for tier in MEMORY_TIERS:
            if tier in self._rooms:
                self._relieve(tier)
        self._reclaim.keep_free_segments()
        self._archive()

    def archive(self, row: int) -> bool:
        """Queue the demotion of a block into the cold store; False when it is there or cannot go."""
        if Tier.NVME not in self._rooms or self._residency.catalog.tier_of(row) is None:
            return False
        if any(self._residency.is_below(row, t) for t in MEMORY_TIERS if self._is_in(row, t)):
            return False
        self._to_archive.append(self._residency.catalog.handle(row))
        return True

    def flush(self) -> int:
        """Queue the demotion of everything that is only in memory (drain). Returns the blocks queued."""
        catalog = self._residency.catalog
        rows = [row for ns in catalog.namespaces.values() for row in ns.rows.values()]
        return sum(self.archive(row) for row in rows)

    def evict(self, tier: Tier, num_bytes: int) -> tuple[int, int]:
        """Give up unpinned blocks of a tier, coldest first, until `num_bytes` are free (0: all).

        Returns (blocks, bytes). Dirty blocks go too: an administrator asked for it.
        """
        num_blocks = freed = 0
        policy = self._residency.evictions[tier]
        while (num_bytes == 0 or freed < num_bytes) and (row := policy.choose()) is not None:
            if self._residency.may_leave(row, tier):
                freed += self._residency.evict(row, tier, "administrator")
                num_blocks += 1
        return num_blocks, freed

    # ------------------------------------------------------------------------------------ internals

    def _is_in(self, row: int, tier: Tier) -> bool:
        return self._residency.catalog.num_resident[tier][row] > 0

    def _lower(self, tier: Tier) -> Tier | None:
        """Return the next slower tier that works, None when there is none."""
        for slower in TIERS[tier + 1 :]:
            if slower in self._rooms and slower not in self._residency.offline:
                return slower
        return None

    def _give_up_one(self, tier: Tier) -> bool:
        """Take one step towards room: evict a clean block, or queue a spill. False: nothing to do now."""
        residency = self._residency
        policy = residency.evictions[tier]
        while (row := policy.choose()) is not None:
            if not residency.is_candidate(row, tier):
                continue  # in use again; it is offered anew when that ends
            reason = self._reason_to_evict(row, tier)
            if reason and residency.may_leave(row, tier):
                residency.evict(row, tier, reason)
                return True
            if self._lower(tier) is None:
                continue  # incomplete, with children: it goes when they have gone
            if not self._may_spill(tier) or not self._spill(row, tier, Urgency.IDLE):
                policy.offer(row)
                return False
        return False

    def _reason_to_evict(self, row: int, tier: Tier) -> str:
        """Say why a block may be given up at once; empty when it must be spilled first."""
        if self._residency.catalog.tier_of(row) is None:
            return "incomplete"
        if self._residency.is_below(row, tier):
            return "coldest"
        return "" if self._lower(tier) is not None else "coldest, no slower tier"

    def _may_spill(self, tier: Tier) -> bool:
        lower = self._lower(tier)
        assert lower is not None
        return self._copies.bytes_in_flight.get((tier, lower), 0) < self.options.max_spill_bytes

    def _spill(self, row: int, tier: Tier, urgency: Urgency, target: Tier | None = None) -> bool:
        """Queue the copy of a block one tier down (or to `target`). False when there is no room there."""
        lower = target if target is not None else self._lower(tier)
        assert lower is not None
        residency = self._residency
        catalog = residency.catalog
        namespace = catalog.namespace_of(row)
        moves = []
        for fragment in catalog.fragments(row):
            is_here = catalog.state[tier][fragment] == State.RESIDENT
            if not is_here or catalog.state[lower][fragment] != State.ABSENT:
                continue
            length = catalog.length_of(fragment)
            if lower is Tier.NVME:
                place = self._reclaim.place_for(namespace.domain, length)
            else:
                place = self.place_for(lower, namespace.domain, length)
            if place is None:
                break
            residency.arrive(fragment, lower, place)
            moves.append(Move(fragment, catalog.place[tier][fragment], place))
        if moves:
            self._copies.start(tier, lower, moves, urgency)
            residency.story.tell(residency.now, catalog.prefix_hash[row], f"spill_{tier.label}")
        return bool(moves)

    def _relieve(self, tier: Tier) -> None:
        books = self._rooms[tier].statistics()
        taken = books.taken_bytes
        if taken > self.options.high_watermark * books.capacity_bytes:
            self._relieving.add(tier)
        while tier in self._relieving:
            lower = self._lower(tier)
            spilling = self._copies.bytes_in_flight.get((tier, lower), 0) if lower is not None else 0
            if taken - spilling <= self.options.low_watermark * books.capacity_bytes:
                if taken <= self.options.low_watermark * books.capacity_bytes:
                    self._relieving.discard(tier)
                return
            if not self._give_up_one(tier):
                return
            taken = self._rooms[tier].statistics().taken_bytes

    def _archive(self) -> None:
        while self._to_archive and Tier.NVME not in self._residency.offline:
            in_flight = sum(self._copies.bytes_in_flight.get((t, Tier.NVME), 0) for t in MEMORY_TIERS)
            if in_flight >= self.options.max_spill_bytes:
                return
            row = self._residency.catalog.row_of(self._to_archive[0])
            tiers = [tier for tier in MEMORY_TIERS if row != NO_ROW and self._is_in(row, tier)]
            is_dirty = tiers and not self._residency.is_below(row, tiers[-1])
            if is_dirty and not self._spill(row, tiers[-1], Urgency.ENDED, target=Tier.NVME):
                return
            self._to_archive.popleft()
