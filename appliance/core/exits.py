"""Exits: a run of blocks that leaves a memory tier at once, in columns; the counterpart of runs.py.

When a tier is full, every new prompt pushes out about as many blocks as it brings, and those are the tail of
some older prompt: a leaf and the blocks above it that nobody else continues. One at a time each costs
forty scalar writes and a dozen calls; together they cost thirty vector writes. The steps are those of
residency.py, and the simulator runs both.
"""

from collections.abc import Callable
from typing import cast

import numpy as np

from ...tiers.base import MemoryRoom
from ...tiers.block import NO_PLACE, Tier
from .catalog import NO_ROW, TIERS
from .events import BlockChange, Notify, RetractRun
from .residency import EVICTED_FROM, Residency
from .runs import MIN_RUN, column
from .states import State


def run_above(
    residency: Residency, leaf: int, tier: Tier, limit: int, goes: Callable[[int], bool]
) -> list[int]:
    """Return `leaf` and the blocks above it that may leave `tier` with it in one step, deepest first.

    `leaf` must be allowed to leave. A block goes along when `goes(row)` says so, nothing but the run
    keeps it, and it is as safe as the leaf: all of them are nowhere else, or all of them are complete in the
    cold store.
    """
    catalog = residency.catalog
    num_groups = catalog.namespace_of(leaf).num_groups
    placed = [catalog.num_placed[other] for other in TIERS if other is not tier]
    complete = catalog.num_resident[tier]
    is_only_here = not any(counts[leaf] for counts in placed)
    is_cold = _is_cold(residency, leaf, num_groups)
    if complete[leaf] != num_groups or not (is_only_here or is_cold):
        return [leaf]
    faster = [catalog.num_children_placed[other] for other in TIERS[:tier]]
    here, holds, keepers = catalog.num_children_placed[tier], catalog.num_holds[tier], catalog.num_keepers
    run, child, row = [leaf], leaf, catalog.parent[leaf]
    while row != NO_ROW and len(run) < limit:
        if (
            keepers[row]
            or holds[row]
            or here[row] != 1
            or complete[row] != num_groups
            or row in residency.floors
        ):
            break
        if any(counts[row] for counts in faster):
            break
        if is_only_here:
            has_one_child = catalog.first_child[row] == child and catalog.next_sibling[child] == NO_ROW
            if not has_one_child or any(counts[row] for counts in placed):
                break
        elif not _is_cold(residency, row, num_groups):
            break
        if not goes(row):
            break
        run.append(row)
        child, row = row, catalog.parent[row]
    return run


def evict_run(
    residency: Residency, rows: list[int], tier: Tier, reason: str, price: float, next_price: float
) -> int:
    """These blocks, as `run_above` returned them, leave a tier. Returns the bytes freed."""
    if len(rows) < MIN_RUN:
        return sum(residency.evict(row, tier, reason, price, next_price) for row in rows)
    catalog = residency.catalog
    namespace = catalog.namespace_of(rows[0])
    num_groups = namespace.num_groups
    r = np.array(rows, np.int32)
    firsts = column(catalog.first_fragment)[r]
    f = (firsts[:, None] + np.arange(num_groups, dtype=np.int32)).ravel()
    states = column(catalog.state[tier])
    assert (states[f] == State.RESIDENT).all()
    assert not column(catalog.num_keepers)[r].any()
    assert not column(catalog.num_holds[tier])[r].any()
    states[f] = State.ABSENT
    del states
    places = column(catalog.place[tier])[f].tolist()
    column(catalog.place[tier])[f] = NO_PLACE
    column(catalog.num_placed[tier])[r] = 0
    column(catalog.num_resident[tier])[r] = 0
    column(catalog.num_children_placed[tier])[r[1:]] = 0
    cast(MemoryRoom, residency.rooms[tier]).release_many(places, namespace.fragment_bytes)
    num_bytes = len(rows) * namespace.block_bytes
    residency.resident_bytes[tier] -= num_bytes
    residency.num_resident[tier] -= len(places)
    residency.out.append(RetractRun(tier, places))
    names = [catalog.prefix_hash[row] for row in rows]
    residency.add_notice(Notify(BlockChange.REMOVED, namespace.id, tier, names, reason))
    residency.story.tell_many(residency.now, names, EVICTED_FROM[tier], reason, price, next_price)
    residency.audience.left(rows, tier)
    _leave_parent(residency, rows, tier)
    return num_bytes


def _leave_parent(residency: Residency, rows: list[int], tier: Tier) -> None:
    """What follows for the block above the run, and for the run itself when it is nowhere now."""
    catalog = residency.catalog
    parent = catalog.parent[rows[-1]]
    if not any(catalog.num_placed[other][rows[0]] for other in TIERS):
        residency.audience.forgotten(rows)
        catalog.remove_run(rows)
    if parent == NO_ROW:
        return
    catalog.num_children_placed[tier][parent] -= 1
    if catalog.num_children_placed[tier][parent] == 0:
        for slower in TIERS[tier:]:
            residency.offer(parent, slower)
    residency.forget_if_nowhere(parent)


def _is_cold(residency: Residency, row: int, num_groups: int) -> bool:
    """Whether a block is complete in the cold store, and that is in order."""
    return residency.catalog.num_resident[Tier.NVME][row] == num_groups and Tier.NVME not in residency.offline
