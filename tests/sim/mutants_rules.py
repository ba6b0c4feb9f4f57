"""Mutants of the rules that keep a block where it is."""

from typing import Any

from kvtier.appliance.core.catalog.rules import Rules
from kvtier.tiers.block import Tier

from .ladder import CXL

Patch = tuple[Any, str, Any]


def _without(column: str) -> list[Patch]:
    """`is_candidate` that does not look at one column of the catalog."""
    candidate = Rules.is_candidate

    def blind(self: Any, row: int, tier: Tier) -> bool:
        columns = getattr(self._catalog, column)
        is_per_tier = column != "num_keepers"
        saved = [c[row] for c in columns] if is_per_tier else columns[row]
        if is_per_tier:
            for c in columns:
                c[row] = 0
        else:
            columns[row] = 0
        answer = candidate(self, row, tier)
        if is_per_tier:
            for c, value in zip(columns, saved, strict=True):
                c[row] = value
        else:
            columns[row] = saved
        return answer

    return [(Rules, "is_candidate", blind)]


def eviction_ignores_holds() -> list[Patch]:
    """What somebody reads leaves."""
    return _without("num_holds")


def eviction_ignores_children() -> list[Patch]:
    """What others continue leaves."""

    def may_leave(self: Any, row: int, tier: Tier) -> bool:
        return bool(self.is_candidate(row, tier))

    return [*_without("num_children_placed"), (Rules, "may_leave", may_leave)]


def slower_memory_ignores_children() -> list[Patch]:
    """What is continued in a faster tier leaves the second memory tier, and is nowhere else."""
    may_leave = Rules.may_leave

    def careless(self: Any, row: int, tier: Tier) -> bool:
        return bool(self.is_candidate(row, tier) if tier is CXL else may_leave(self, row, tier))

    return [(Rules, "may_leave", careless)]


def any_part_below_is_enough() -> list[Patch]:
    """A block of which one fragment is in a slower tier counts as safe there."""

    def careless(self: Any, row: int, tier: Tier, others: Any) -> bool:
        return bool(sum(self._catalog.num_resident[other][row] for other in others))

    return [(Rules, "is_covered", careless)]


#: Name, what is broken, how.
PLANTED = [
    ("evict held", "eviction does not look at holds", eviction_ignores_holds),
    ("evict parent", "eviction does not look at children", eviction_ignores_children),
    ("evict parent below", "so does eviction from slower memory", slower_memory_ignores_children),
    ("half below is enough", "a block of which a part is below is clean", any_part_below_is_enough),
]
