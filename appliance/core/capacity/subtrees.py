"""Subtrees: what would leave the cold store with a block, looked at and dropped in steps of bounded size.

A block in the cold store takes all that continues it along, however much that is. So before anything leaves,
every block of the subtree is looked at: one that must stay (read, written, pinned, in memory) keeps the
first block; and where chains fork of which more than a segment would leave, the first block is a *beginning*,
which reclaim copies forward if it can. Then the ends of the chains leave first: in between, what is left is
a tree that can be read from its start, and a block that came meanwhile keeps what it continues.
"""

from enum import Enum

from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency

#: Blocks that could be looked at while one is dropped.
DROP_STEPS = 2


class Fate(Enum):
    """What becomes of the first block of a subtree."""

    UNKNOWN = "not all of it was looked at, or dropped"
    SHARED = "two chains or more begin with it, and more than a segment hangs on them"
    STAYS = "something in it must stay"
    DROPPED = "all of it was dropped"


class Subtree:
    """A block of the cold store with all that continues it."""

    def __init__(self, core: CoreState, residency: Residency, row: int) -> None:
        self._core = core
        self._residency = residency
        self._log_tier, self._memory_tiers = core.ladder.log_tier, core.ladder.memory_tiers
        self._first = core.catalog.handle(row)
        self._order = [self._first]  # handles, parents before their children
        self._num_seen = 0
        self._next_child = -1  # handle of the next one to append of the block that was seen last
        self._num_shared = 0  # of them, up to the first fork
        self._shared_bytes = 0  # of what hangs on that

    def step(self, num_steps: int, shared_bytes: int | None) -> tuple[Fate, int]:
        """Look at or drop up to `num_steps` blocks. `shared_bytes`: SHARED from more than so many on; None:
        never. Returns what is known now, and how many steps are left."""
        catalog, order = self._core.catalog, self._order
        while num_steps > 0 and (self._next_child >= 0 or self._num_seen < len(order)):
            num_steps -= 1
            if self._next_child >= 0:  # one at a time: a hundred thousand may continue one block
                row = catalog.row_of(self._next_child)
                self._next_child = -1  # of one that is gone the siblings are not known, and keep the parent
                if row != NO_ROW:
                    order.append(catalog.handle(row))
                    self._follow(catalog.next_sibling[row])
                continue
            row = catalog.row_of(order[self._num_seen])
            self._num_seen += 1
            if row == NO_ROW:
                continue
            if self._must_stay(row):
                return Fate.STAYS, num_steps
            child = catalog.first_child[row]
            self._follow(child)
            if self._num_shared:
                self._shared_bytes += catalog.block_bytes(row) if self._is_stored(row) else 0
            elif child != NO_ROW and catalog.next_sibling[child] != NO_ROW:
                self._num_shared = self._num_seen
            if shared_bytes is not None and self._shared_bytes > shared_bytes:
                return Fate.SHARED, num_steps
        while num_steps > 0 and order:
            num_steps -= DROP_STEPS
            row = catalog.row_of(order.pop())
            if row != NO_ROW and self._is_stored(row):
                if self._must_stay(row) or not self._residency.may_leave(row, self._log_tier):
                    return Fate.STAYS, num_steps  # it was used since it was looked at, or is continued
                self.drop(row)
        return Fate.UNKNOWN if order else Fate.DROPPED, num_steps

    def _follow(self, child: int) -> None:
        if child != NO_ROW:
            self._next_child = self._core.catalog.handle(child)

    def _is_stored(self, row: int) -> bool:
        return self._core.catalog.num_resident[self._log_tier][row] > 0

    def _must_stay(self, row: int) -> bool:
        """Whether a block is read, written or pinned, or in memory; the first one may be there alone."""
        catalog = self._core.catalog
        if catalog.num_holds[self._log_tier][row] or catalog.num_keepers[row]:
            return True
        if row in self._core.pin_floors:
            return True
        is_alone = row == catalog.row_of(self._first) and catalog.first_child[row] == NO_ROW
        return not is_alone and any(catalog.num_placed[tier][row] for tier in self._memory_tiers)

    def beginning(self) -> list[int]:
        """Return handles of the blocks of a SHARED subtree up to its first fork: each of them is SHARED."""
        return self._order[: self._num_shared]

    def drop(self, row: int) -> None:
        """Evict a block that may leave from the cold store, and what is left of it and cannot be read."""
        handle, catalog = self._core.catalog.handle(row), self._core.catalog
        self._residency.evict(row, self._log_tier, "segment reclaimed")
        for tier in self._core.ladder.host_tiers:
            row = catalog.row_of(handle)
            if row != NO_ROW and catalog.tier_of(row) is None and self._residency.may_leave(row, tier):
                self._residency.evict(row, tier, "incomplete")
