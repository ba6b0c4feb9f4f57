"""Mutants of prefetching and retention: what would go wrong without one of their rules."""

from typing import Any

from kvtier.appliance.core.catalog import catalog
from kvtier.appliance.core.copying import copies
from kvtier.appliance.core.promotion import prefetch
from kvtier.tiers.base import Cause, CopyOutcome

Patch = tuple[Any, str, Any]


def ahead_of_demand() -> list[Patch]:
    """Prefetches begin whoever waits for the edge."""
    run = prefetch.Prefetches.run

    def impatient(self: Any, is_crowded: bool) -> None:
        urgent, self._core.urgent_bytes = self._core.urgent_bytes, {}
        run(self, is_crowded)
        for edge, num_bytes in self._core.urgent_bytes.items():
            urgent[edge] = urgent.get(edge, 0) + num_bytes
        self._core.urgent_bytes = urgent

    return [(prefetch.Prefetches, "run", impatient)]


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
    return [(prefetch.Prefetches, "left", lambda self, rows: None)]
