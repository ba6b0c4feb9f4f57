"""Residency: takes the steps of transitions.py with what follows from each of them.

That is: the place goes back to its room, the shell gets an instruction, routers a notice, policies hear of
new candidates and of what left, and a line is added to the story. The rules that protect blocks (invariants
3, 4 and 5 of the design) are in rules.py.
"""

from collections.abc import Callable, Sequence

from ....policies.base import Victim
from ....tiers.base import Cause
from ....tiers.block import FragmentLabel, Tier
from ....tiers.cold.log import SegmentLog
from ..encodings import AS_IT_IS
from ..instructions import BlockChange, Publish, Retract, SealSegment
from .catalog import NO_ROW
from .core_state import CoreState
from .rules import ADMINISTRATOR, Rules
from .states import State
from .story import NO_VERDICT, Verdict
from .transitions import Vacated

INCOMPLETE = "incomplete"
SPARE_HALF = "half of it, and memory has all"


class Residency(Rules):
    """Moves fragments between states, with instructions, notices and offers to policies."""

    def __init__(self, core: CoreState, on_cold_lost: Callable[[int], object]) -> None:
        """`on_cold_lost`: told of a block of which memory has something when a record of it left the cold
        store."""
        super().__init__(core)
        self.core = core
        self._on_cold_lost = on_cold_lost

    # --------------------------------------------------------------------------------------- steps

    def arrive(self, fragment: int, tier: Tier, place: int, encoding: int = AS_IT_IS) -> None:
        """Note that a place was reserved and its copy is queued or promised; takes the copy's hold.
        `encoding`: of the record, when the tier is the cold store."""
        self.core.transitions.reserve(fragment, tier, place, encoding)

    def land(self, fragments: Sequence[int], tier: Tier, labels: Sequence[FragmentLabel]) -> None:
        """Make fragments readable: their bytes arrived, with the checksums in `labels`.
        Gives the copies' holds back."""
        catalog = self._catalog
        for fragment, label in zip(fragments, labels, strict=True):
            self.core.transitions.land(fragment, tier, label)
        places = [catalog.place[tier][fragment] for fragment in fragments]
        if tier != self._log_tier:
            self.core.outbox.emit(Publish(tier, places, labels))
        else:
            for place in places:
                self._settle(tier, place)
        for fragment in fragments:
            self.drop(fragment, tier)
        for row in dict.fromkeys(catalog.block_of[fragment] for fragment in fragments):
            if catalog.num_resident[tier][row] == catalog.namespace_of(row).num_groups:
                self._tell_landed(row, tier)

    def _tell_landed(self, row: int, tier: Tier) -> None:
        """Tell routers and the story of a block that can be read from a tier."""
        catalog, name = self._catalog, self._catalog.prefix_hash[row]
        num_resident = catalog.num_resident[tier][row]
        is_moved = any(
            catalog.num_resident[other][row] == num_resident for other in self._tiers if other != tier
        )
        change = BlockChange.MOVED if is_moved else BlockChange.STORED
        self.core.outbox.notify(change, catalog.namespace_id[row], tier, [name])
        self.core.tell(row, self.core.stored_in[tier])

    def fail(self, fragment: int, tier: Tier, cause: Cause) -> None:
        """Give a place back into which the bytes will not arrive, with the copy's hold."""
        catalog = self._catalog
        row = catalog.block_of[fragment]
        if cause is Cause.DOES_NOT_FIT:
            catalog.unfit.add(fragment)
        vacated = self.core.transitions.fail(fragment, tier)
        if tier == self._log_tier:
            self._settle(tier, vacated.place)
        self.core.tell(row, f"copy_failed_{tier.label}", cause.value)
        self._give_back(row, tier, vacated)
        self.forget_if_nowhere(row)
        self.offer(row, tier)  # its other fragments, if any: this copy was the last thing to hold it

    def evict(self, row: int, tier: Tier, reason: str, victim: Victim | None = None) -> int:
        """Evict a block from a tier. Returns the bytes freed.

        `may_leave` must hold, or of the cold store `why_in_store` be empty. `victim`: what the policy said of
        it, when a policy chose. `reason`: for the story; a block that could not be read any more has another
        one, and so has a spare half, which leaves although blocks continue it."""
        is_asked = tier == self._log_tier and reason == ADMINISTRATOR
        may_leave = not self.why_in_store(row) if is_asked else self.may_leave(row, tier)
        assert may_leave, self.core.words(row)
        if self._catalog.tier_of(row) is None:
            reason = INCOMPLETE
        elif not is_asked and self.is_spare_half(row, tier):
            reason = SPARE_HALF
        freed = 0
        for fragment in self._catalog.fragments(row):
            if self._catalog.state[tier][fragment] == State.RESIDENT:
                freed += self._evict(row, fragment, tier, is_unwanted=is_asked)
        self._notify_removed(row, tier, reason)
        self.core.tell(row, self.core.evicted_from[tier], reason, self.verdict(victim))
        self.forget_if_nowhere(row)
        return freed

    def verdict(self, victim: Victim | None) -> Verdict:
        """Return what a policy said, for the story."""
        if victim is None:
            return NO_VERDICT
        row = victim.runner_up_row
        return Verdict(victim.price, victim.runner_up, self._catalog.prefix_hash[row] if row >= 0 else b"")

    def condemn(self, fragment: int, tier: Tier, reason: str, verb: str = "condemned") -> None:
        """Make a fragment unreadable in a tier (it failed verification).
        Its place is freed when the last hold on it ends. `verb`: what the story and the counters call it."""
        catalog = self._catalog
        if catalog.state[tier][fragment] != State.RESIDENT:
            return
        row = catalog.block_of[fragment]
        self.core.transitions.condemn(fragment, tier)
        if tier != self._log_tier:
            self.core.outbox.emit(Retract(tier, (catalog.place[tier][fragment],)))
        self._notify_removed(row, tier, reason)
        self.core.tell(row, f"{verb}_{tier.label}", reason)
        if catalog.holds[tier][fragment] == 0:
            self._quiet(row, fragment, tier)

    def may_move(self, fragment: int, tier: Tier) -> bool:
        """Whether a fragment that was copied inside its tier may be there from now on.
        In memory only when nothing but the copy holds the old place: a reader was told where that is."""
        catalog = self._catalog
        if tier == self._log_tier:
            return True
        return catalog.state[tier][fragment] == State.RESIDENT and catalog.holds[tier][fragment] == 1

    def move(self, fragment: int, tier: Tier, place: int) -> None:
        """Give a fragment that was copied inside its tier its new place: same bytes."""
        catalog = self._catalog
        old = self.core.transitions.move(fragment, tier, place)
        if tier != self._log_tier:
            self.core.outbox.emit(Retract(tier, (old,)))
        self.core.rooms[tier].release(old, catalog.stored_length(fragment, tier))
        if tier != self._log_tier:
            label = catalog.label_of(fragment)
            label.is_spent = fragment in catalog.spent
            self.core.outbox.emit(Publish(tier, (place,), (label,)))
        else:
            self._settle(tier, place)

    def abandon_place(self, fragment: int, tier: Tier, place: int) -> None:
        """Give back the new place of a fragment that was not copied inside its tier after all."""
        if tier == self._log_tier:
            self._settle(tier, place)
        self.core.rooms[tier].release(place, self._catalog.stored_length(fragment, tier))

    # --------------------------------------------------------------------------------------- holds

    def drop(self, fragment: int, tier: Tier) -> None:
        """Undo one hold on a fragment. A condemned place is freed by the last one."""
        if self.core.transitions.drop(fragment, tier):
            return
        catalog = self._catalog
        row = catalog.block_of[fragment]
        if catalog.state[tier][fragment] == State.CONDEMNED:
            self._quiet(row, fragment, tier)
        elif catalog.num_holds[tier][row] == 0:
            self.offer(row, tier)

    def drop_block(self, row: int, fragments: range, tier: Tier) -> None:
        """`drop` for all fragments of a block, the last one first."""
        if self._catalog.num_resident[tier][row] != len(fragments):  # some are condemned
            for fragment in reversed(fragments):
                self.drop(fragment, tier)
        elif self.core.transitions.drop_block(row, fragments, tier) == 0:
            self.offer(row, tier)

    def unkeep(self, row: int) -> None:
        """Undo one `Transitions.keep`."""
        if self.core.transitions.unkeep(row) == 0:
            for tier in self.core.policies.evictions:
                if self._catalog.num_resident[tier][row]:
                    self.offer(row, tier)
            self.forget_if_nowhere(row)

    def adopt_child(self, row: int, parent: int | None) -> None:
        """Link a block found at start without its parent, now that the parent is known again.

        No other block is ever linked anew, and this one only under its predecessor in the chain: a client
        that names a wrong parent must not make a circle.
        """
        catalog = self._catalog
        if parent is None or parent == NO_ROW or catalog.lost_parent.get(row) != catalog.prefix_hash[parent]:
            return
        if catalog.position[row] != catalog.position[parent] + 1:
            return
        del catalog.lost_parent[row]
        self.core.transitions.link(row, parent)

    def offer(self, row: int, tier: Tier) -> None:
        """Tell the tier's eviction policy that a block may be a candidate now."""
        policy = self.core.policies.evictions.get(tier)
        if policy is not None and self.is_candidate(row, tier):
            policy.offer((row,), self.core.now)

    def _evict(self, row: int, fragment: int, tier: Tier, *, is_unwanted: bool = False) -> int:
        """A fragment leaves a tier. Returns the bytes freed. `is_unwanted`: it is not to be brought back."""
        vacated = self.core.transitions.evict(fragment, tier)
        if tier != self._log_tier:
            self.core.outbox.emit(Retract(tier, (vacated.place,)))
        self._give_back(row, tier, vacated, is_unwanted=is_unwanted)
        return vacated.num_bytes

    def _quiet(self, row: int, fragment: int, tier: Tier) -> None:
        self._give_back(row, tier, self.core.transitions.quiet(fragment, tier))
        self.forget_if_nowhere(row)

    def _give_back(self, row: int, tier: Tier, vacated: Vacated, *, is_unwanted: bool = False) -> None:
        """A fragment of a block is ABSENT now: gives its place back. `is_unwanted`: it is not to be brought
        back."""
        catalog = self._catalog
        self.core.rooms[tier].release(vacated.place, vacated.num_bytes)
        if tier == self._log_tier and not is_unwanted and self._is_in_memory(row):
            self._on_cold_lost(row)
        if not vacated.is_last:
            return
        self.core.listeners.left((row,), tier)
        parent = catalog.parent[row]
        if parent != NO_ROW and catalog.num_children_placed[tier][parent] == 0:
            for slower in self._tiers[tier:]:
                self.offer(parent, slower)

    def _is_in_memory(self, row: int) -> bool:
        num_resident = self._catalog.num_resident
        return any(num_resident[tier][row] for tier in self._memory_tiers)

    def forget_if_nowhere(self, row: int) -> None:
        """Remove rows that have nothing left, upwards: a parent may have waited for its last child."""
        catalog = self._catalog
        while row != NO_ROW and catalog.prefix_hash[row]:
            if catalog.first_child[row] != NO_ROW or catalog.num_keepers[row]:
                return
            for placed in catalog.num_placed:
                if placed[row]:
                    return
            parent = catalog.parent[row]
            self._pin_floors.pop(row, None)
            self.core.listeners.forgotten((row,))
            catalog.remove(row)
            if parent != NO_ROW:
                for tier in self.core.policies.evictions:
                    self.offer(parent, tier)
            row = parent

    def _notify_removed(self, row: int, tier: Tier, reason: str) -> None:
        namespace_id, names = self._catalog.namespace_id[row], [self._catalog.prefix_hash[row]]
        self.core.outbox.notify(BlockChange.REMOVED, namespace_id, tier, names, reason)

    def _settle(self, tier: Tier, place: int) -> None:
        room = self.core.rooms[tier]
        room.settle(place)
        if isinstance(room, SegmentLog):
            self.seal_full_segments(room)

    def seal_full_segments(self, log: SegmentLog) -> None:
        """Seal the segments that are full and quiet.
        One may become both when a copy ends, and when a record finds no room in it any more."""
        for number in log.take_segments_to_seal():
            self.core.outbox.emit(SealSegment(number))
