"""Rules: what protects a block from being evicted from a tier (invariants 3, 4 and 5, and pins).

Questions only; the steps are in residency.py, and every step that evicts asks here. Nothing is remembered
beyond the catalog, so no answer can be out of date. Each is about one block: which of those that may be
evicted is evicted is for policies to say.

A tier has *something* of a block when one fragment can be read there, and blocks are asked about fragment by
fragment: half of one may be in memory and half in the cold store (docs/decisions/0017-half-blocks.md)."""

from collections.abc import Sequence

from ....tiers.block import Tier
from .catalog import NO_ROW
from .core_state import CoreState
from .states import State

#: Why a block left, when it was asked for by hand.
ADMINISTRATOR = "administrator"
#: Why a block stays, then.
READ, KEPT, PINNED = "read or written now", "of decoding sessions or puts", "pinned"
CONTINUED = "needed by blocks that continue them"


class Rules:
    """Questions about what may be evicted where. Reads the catalog; changes nothing."""

    def __init__(self, core: CoreState) -> None:
        self._catalog = core.catalog
        self._ladder = core.ladder
        self._tiers, self._memory_tiers = core.ladder.tiers, core.ladder.memory_tiers
        self._log_tier = core.ladder.log_tier
        #: By tier: how many children a block has in the tiers in which they keep it there.
        children = core.catalog.num_children_placed
        self._children = [children if tier == self._log_tier else [children[tier]] for tier in self._tiers]
        self._offline = core.offline
        self._pin_floors = core.pin_floors

    def is_candidate(self, row: int, tier: Tier) -> bool:
        """Whether a block may be demoted out of a tier.
        Invariants 3 (nothing holds it), 4 (no session decodes on it), the first half of 5 (no child in the
        same tier; in the cold store, which is all there is after a restart, nor in memory), and its pins."""
        catalog = self._catalog
        if catalog.num_keepers[row] or catalog.num_holds[tier][row] or catalog.num_resident[tier][row] == 0:
            return False
        for num_children in self._children[tier]:
            if num_children[row] and not self.is_spare_half(row, tier):
                return False
        # A floor in a slower tier does not forbid the copy that takes the block there.
        return (
            row not in self._pin_floors
            or min(self._pin_floors[row]) > tier
            or self._is_kept_without(row, tier, may_sink=True)
        )

    def may_leave(self, row: int, tier: Tier) -> bool:
        """Whether a block may be evicted from a tier now: a candidate that leaves no child behind.
        That is the second half of invariant 5. What cannot be reached cannot be left behind: the children of
        a block that cannot be read whole, or is in a tier that is offline."""
        if not self.is_candidate(row, tier):
            return False
        if row in self._pin_floors and not self._is_kept_without(row, tier):
            return False
        return (
            self._catalog.first_child[row] == NO_ROW
            or self.is_elsewhere(row, tier)
            or self._catalog.tier_of(row) is None
            or self._log_tier in self._offline
        )

    def why_in_store(self, row: int) -> str:
        """Return why a block stays when an administrator empties the cold store; empty: it may be evicted.

        Less is protected than by `may_leave`: what memory has whole may be evicted although a block in memory
        continues it. After a restart neither would be found."""
        catalog, tier = self._catalog, self._log_tier
        if catalog.num_keepers[row]:
            return KEPT
        if catalog.num_holds[tier][row] or not catalog.num_resident[tier][row]:
            return READ
        if row in self._pin_floors and not self._is_kept_without(row, tier):
            return PINNED
        if catalog.num_children_placed[tier][row]:
            return CONTINUED
        if self.is_elsewhere(row, tier) or catalog.tier_of(row) is None:
            return ""
        is_continued = any(catalog.num_children_placed[faster][row] for faster in self._memory_tiers)
        return CONTINUED if is_continued else ""

    def is_elsewhere(self, row: int, tier: Tier) -> bool:
        """Whether every fragment of a block can also be read from another tier; not all from the same."""
        catalog = self._catalog
        num_groups = catalog.namespace_of(row).num_groups
        others = [other for other in self._tiers if other != tier and other not in self._offline]
        counts = [catalog.num_resident[other][row] for other in others]
        if num_groups in counts or sum(counts) < num_groups:
            return num_groups in counts
        return all(self._is_in_any(fragment, others) for fragment in catalog.fragments(row))

    def is_spare_half(self, row: int, tier: Tier) -> bool:
        """Whether the cold store has only a part of a block that can be read whole without it.
        That part is of no use to what continues the block, neither now nor after a restart."""
        return (
            tier == self._log_tier
            and self._catalog.num_resident[tier][row] < self._catalog.namespace_of(row).num_groups
            and self.is_elsewhere(row, tier)
        )

    def is_below(self, row: int, tier: Tier) -> bool:
        """Whether every fragment that is in `tier` is also in a slower one: giving it up loses nothing."""
        return self.is_covered(row, tier, self._working_below(tier))

    def is_fragment_below(self, fragment: int, tier: Tier) -> bool:
        """Whether a fragment can also be read from a tier slower than `tier`."""
        return self._is_in_any(fragment, self._working_below(tier))

    def is_covered(self, row: int, tier: Tier, others: Sequence[Tier]) -> bool:
        """Whether every fragment of a block that is in `tier` is also in one of `others`."""
        catalog, states = self._catalog, self._catalog.state[tier]
        num_groups = catalog.namespace_of(row).num_groups
        return any(catalog.num_resident[other][row] == num_groups for other in others) or all(
            self._is_in_any(fragment, others)
            for fragment in catalog.fragments(row)
            if states[fragment] == State.RESIDENT
        )

    def _is_kept_without(self, row: int, tier: Tier, *, may_sink: bool = False) -> bool:
        """Whether a pinned block stays as near to its floor as it is, once it left `tier`.

        Where it reached its floor, all that it has there or above stays there. Where it did not, for lack of
        room, it is kept in the tiers that have it; `may_sink`: or in one that it is copied to."""
        floor = min(self._pin_floors[row])
        if tier > floor and may_sink:
            return True
        others = self._tiers if tier > floor else self._tiers[: floor + 1]
        working = [other for other in others if other != tier and other not in self._offline]
        return self.is_covered(row, tier, working)

    def _working_below(self, tier: Tier) -> list[Tier]:
        return [other for other in self._tiers[tier + 1 :] if other not in self._offline]

    def _is_in_any(self, fragment: int, tiers: Sequence[Tier]) -> bool:
        return any(self._catalog.state[tier][fragment] == State.RESIDENT for tier in tiers)
