"""RunEviction: evicts many blocks of a memory tier at once; the counterpart of runs.py.

When a tier is full, every new prompt evicts about as many blocks as it brings, and those are the tails of
some older prompts: a leaf and the blocks above it that no other block continues. One at a time each costs
forty scalar writes and a dozen calls. So they leave in two parts: `take` decides and does what the next
decision depends on (the leaf's parent may be the next victim), `flush` does the rest for all of them in one
pass over the columns. No other step is taken between the two. The steps are those of residency.py, and the
simulator runs both.
"""

from array import array
from collections.abc import Sequence
from typing import cast

from ....policies.base import EvictionPolicy, Victim
from ....tiers.base import MemoryRoom
from ....tiers.block import Tier
from ..instructions import BlockChange, Retract
from .catalog import NO_ROW
from .core_state import CoreState
from .residency import Residency


class RunEviction:
    """Evicts runs of blocks. Empty between events."""

    def __init__(self, core: CoreState, residency: Residency) -> None:
        self._core = core
        self._residency = residency
        self._ladder = core.ladder
        self._tier = core.ladder.put_tier
        #: Where a stored run has to be complete when it leaves a tier: in the next memory of the host, for
        #: blocks go down one memory at a time; below the last one in the log.
        self._stored_in = dict.fromkeys(core.ladder.tiers, core.ladder.log_tier)
        for tier, slower in sorted(core.ladder.host_edges, reverse=True):
            if slower in core.rooms:
                self._stored_in[tier] = slower
        #: By tier: counts of places in the other tiers.
        catalog, rooms = core.catalog, core.rooms
        self._elsewhere = {t: [catalog.num_placed[other] for other in rooms if other != t] for t in rooms}
        self._rows: list[int] = []  # taken, of one namespace and tier
        self._nowhere: list[int] = []  # those of them that are in no other tier
        self._parents: list[int] = []  # of those that were taken last of their run

    def take(self, victim: Victim, tier: Tier, reason: str, limit: int, policy: EvictionPolicy) -> int:
        """A victim leaves a tier, with the blocks above it that cost no more, at most `limit` in all.

        The victim must be allowed to leave. Returns how many blocks leave; `flush` must follow.
        """
        core = self._core
        residency = self._residency
        rows = self._run_above(victim, tier, limit, policy)
        if not rows:
            self.flush()
            residency.evict(victim.row, tier, reason, victim)
            return 1
        catalog = core.catalog
        if self._rows and (
            tier != self._tier or catalog.namespace_id[rows[0]] != catalog.namespace_id[self._rows[0]]
        ):
            self.flush()
        self._tier = tier
        self._rows += rows
        # As safe as the leaf means as stored as the leaf: either all of them are elsewhere, or none is.
        is_only_here = not _is_in_any(self._elsewhere[tier], victim.row)
        if is_only_here:
            self._nowhere += rows
        parent, names = catalog.parent[rows[-1]], catalog.prefix_hash
        num_left = core.transitions.withdraw_run(rows, tier)
        taken = [names[row] for row in rows]
        namespace_id, verdict = catalog.namespace_id[rows[0]], residency.verdict(victim)
        core.story.tell_many(core.now, namespace_id, taken, core.evicted_from[tier], reason, verdict)
        core.outbox.notify(BlockChange.REMOVED, namespace_id, tier, taken, reason)
        if parent != NO_ROW:
            if is_only_here:
                catalog.unlink(rows[-1])
            self._parents.append(parent)
        if num_left == 0:  # the parent may be the next victim
            for slower in (tier, *self._ladder.below(tier)):
                residency.offer(parent, slower)
        return len(rows)

    def flush(self) -> None:
        """What was taken is gone: places, labels, rows."""
        core = self._core
        if not self._rows:
            return
        residency, tier = self._residency, self._tier
        rows, self._rows = self._rows, []
        nowhere, self._nowhere = self._nowhere, []
        parents, self._parents = self._parents, []
        sizes = core.catalog.namespace_of(rows[0]).fragment_bytes
        places = core.transitions.evict_run(rows, tier)
        cast(MemoryRoom, core.rooms[tier]).release_many(places, sizes)
        core.outbox.emit(Retract(tier, places))
        core.listeners.left(rows, tier)
        if nowhere:
            core.listeners.forgotten(nowhere)
            for row in nowhere if core.pin_floors else ():
                core.pin_floors.pop(row, None)
            core.catalog.remove_run(nowhere)
        for parent in parents:
            residency.forget_if_nowhere(parent)

    def _run_above(self, victim: Victim, tier: Tier, limit: int, policy: EvictionPolicy) -> list[int]:
        """Return the victim and the blocks above it that may leave with it in one step, deepest first; empty
        when it must leave by itself.

        A block goes along when nothing but the run keeps it, and it is as safe as the leaf: all of them are
        nowhere else, or all of them are complete in the next slower tier (`_stored_in`).
        """
        core = self._core
        catalog, leaf = core.catalog, victim.row
        num_groups = catalog.namespace_of(leaf).num_groups
        stored_in = self._stored_in[tier]
        elsewhere = self._elsewhere[tier]
        complete, stored = catalog.num_resident[tier], catalog.num_resident[stored_in]
        # A child in a tier that is offline may stay behind; its parent's row then has to.
        is_only_here = catalog.first_child[leaf] == NO_ROW and not _is_in_any(elsewhere, leaf)
        is_stored = stored[leaf] == num_groups and stored_in not in core.offline
        if complete[leaf] != num_groups or not (is_only_here or is_stored):
            return []
        children, holds = catalog.num_children_placed[tier], catalog.num_holds[tier]
        keepers, floors = catalog.num_keepers, core.pin_floors
        parent, first_child, next_sibling = catalog.parent, catalog.first_child, catalog.next_sibling
        run, child, row = [leaf], leaf, parent[leaf]
        while row >= 0 and len(run) < limit:
            if keepers[row] or holds[row] or children[row] != 1 or complete[row] != num_groups:
                break
            if row in floors:
                break
            if is_only_here:
                if first_child[row] != child or next_sibling[child] >= 0:
                    break
                if elsewhere and _is_in_any(elsewhere, row):
                    break
            elif stored[row] != num_groups:
                break
            run.append(row)
            child, row = row, parent[row]
        num_above = policy.num_no_dearer(run[1:], victim.price, core.now) if len(run) > 1 else 0
        return run[: 1 + num_above]


def _is_in_any(columns: "Sequence[array[int]]", row: int) -> bool:
    """Return whether one of these counts of a block is not 0."""
    for counts in columns:  # any() of a generator takes three times as long, and this is asked per block
        if counts[row]:
            break
    else:
        return False
    return True
