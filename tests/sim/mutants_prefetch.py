"""Mutants of prefetching and retention: what would go wrong without one of their rules."""

from typing import Any

from kvtier.appliance.core import catalog, copies, early, prefetch
from kvtier.tiers.base import Cause, CopyOutcome
from kvtier.tiers.block import Tier

Patch = tuple[Any, str, Any]


def ahead_of_demand() -> list[Patch]:
    """Prefetches begin whoever waits for the edge."""
    run = prefetch.Prefetching.run

    def impatient(self: Any, is_crowded: bool) -> None:
        urgent, self._copies.urgent_bytes = self._copies.urgent_bytes, {}
        run(self, is_crowded)
        for edge, num_bytes in self._copies.urgent_bytes.items():
            urgent[edge] = urgent.get(edge, 0) + num_bytes
        self._copies.urgent_bytes = urgent

    return [(prefetch.Prefetching, "run", impatient)]


def cancelled_is_over() -> list[Patch]:
    """A cancelled copy counts as ended at once; its slots are free while the mover may still write."""
    cancel, finish = copies.Copies.cancel, copies.Copies.finish

    def cancel_at_once(self: Any, fragments: set[int]) -> None:
        before = set(self._background)
        cancel(self, fragments)
        for copy in before - set(self._background):
            finish(self, copy, [CopyOutcome(Cause.CANCELLED)] * len(self._batches[copy].items))

    def finish_if_known(self: Any, copy: int, outcomes: Any) -> None:
        if copy in self._batches:
            finish(self, copy, outcomes)

    return [(copies.Copies, "cancel", cancel_at_once), (copies.Copies, "finish", finish_if_known)]


def priority_outlives_its_block() -> list[Patch]:
    """A row that is used again inherits the priority of the block that was there."""
    remove, remove_run = catalog.Catalog.remove, catalog.Catalog.remove_run

    def keeping(original: Any) -> Any:
        def forget_the_rest(self: Any, *arguments: Any) -> None:
            kept = dict(self.retained)
            original(self, *arguments)
            self.retained.update(kept)

        return forget_the_rest

    return [
        (catalog.Catalog, "remove", keeping(remove)),
        (catalog.Catalog, "remove_run", keeping(remove_run)),
    ]


def awaited_for_ever() -> list[Patch]:
    """What left dram is still awaited there."""
    return [(prefetch.Prefetching, "left", lambda self, rows: None)]


def trimmed_without_a_copy_below() -> list[Patch]:
    """Late layers go although they are nowhere else."""

    def careless(self: Any, row: int) -> bool:
        catalog = self._residency.catalog
        num_groups = catalog.namespace_of(row).num_groups
        is_free = not (catalog.num_keepers[row] or catalog.num_holds[Tier.DRAM][row])
        is_leaf = not any(counts[row] for counts in catalog.num_children_placed[: Tier.NVME])
        is_whole = catalog.num_resident[Tier.DRAM][row] == num_groups
        return is_free and is_leaf and is_whole and self.num_early(num_groups) < num_groups

    return [(early.EarlyLayers, "_is_trimmable", careless)]


def trimmed_before_its_child() -> list[Patch]:
    """Late layers of a block go before those of its child."""
    trimmable = early.EarlyLayers._is_trimmable

    def blind(self: Any, row: int) -> bool:
        catalog = self._residency.catalog
        counts = [column[row] for column in catalog.num_children_placed]
        for column in catalog.num_children_placed:
            column[row] = 0
        answer = trimmable(self, row)
        for column, count in zip(catalog.num_children_placed, counts, strict=True):
            column[row] = count
        return answer

    def climb(self: Any, row: int, price: float, limit: int, price_of: Any) -> int:
        parent = self._residency.catalog.parent[row]
        return original(self, parent if parent >= 0 else row, price, limit, price_of)

    original = early.EarlyLayers._climb
    return [(early.EarlyLayers, "_is_trimmable", blind), (early.EarlyLayers, "_climb", climb)]
