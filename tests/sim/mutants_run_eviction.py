"""Mutants of the column path out of a tier."""

from typing import Any

from kvtier.appliance.core.catalog import run_eviction
from kvtier.appliance.core.catalog.catalog import NO_ROW

from .ladder import DRAM, MAPPED

Patch = tuple[Any, str, Any]


def _climb(self: Any, leaf: int, limit: int, may_pass: Any) -> list[int]:
    """Return leaf and ancestors that `may_pass`; all complete and nowhere else."""
    catalog = self._core.catalog
    tier = DRAM  # where seeds without other tiers keep everything
    others = [catalog.num_placed[other] for other in MAPPED.tiers if other != tier]
    rows, row = [leaf], catalog.parent[leaf]
    if any(placed[leaf] for placed in others) or catalog.first_child[leaf] != NO_ROW:
        return []
    groups = catalog.namespace_of(leaf).num_groups
    while row != NO_ROW and len(rows) < limit and catalog.num_resident[tier][row] == groups:
        if any(placed[row] for placed in others) or not may_pass(catalog, row):
            break
        rows.append(row)
        row = catalog.parent[row]
    return rows if catalog.num_resident[tier][leaf] == groups else []


def run_through_holds() -> list[Patch]:
    """A run takes blocks along that somebody reads, or a decoding session keeps."""

    def reckless(self: Any, victim: Any, tier: Any, limit: int, policy: Any) -> list[int]:
        return _climb(self, victim.row, 64, lambda catalog, row: catalog.num_children_placed[tier][row] == 1)

    return [(run_eviction.RunEviction, "_run_above", reckless)]


def run_past_branches() -> list[Patch]:
    """A run takes a parent along that another child still needs."""

    def reckless(self: Any, victim: Any, tier: Any, limit: int, policy: Any) -> list[int]:
        return _climb(
            self,
            victim.row,
            64,
            lambda catalog, row: not (catalog.num_keepers[row] or catalog.num_holds[tier][row]),
        )

    return [(run_eviction.RunEviction, "_run_above", reckless)]
