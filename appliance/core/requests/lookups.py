"""Lookups: how much of a chain is stored, where, and what reading it would cost. Changes nothing."""

from collections.abc import Sequence
from typing import NamedTuple

from ..catalog.catalog import NamespaceEntry
from ..catalog.core_state import CoreState
from ..results import Refusal
from .fetches import Fetches
from .request_registry import unknown_namespace


class LookupResult(NamedTuple):
    """Answer to a lookup: a hint, good for this instant."""

    num_blocks: int
    tiers: bytes  # one Tier per stored block
    load_s: float  # until all of them are readable
    recompute_s: float  # prefill of all of them
    num_worth_loading: int  # blocks, from the start of the chain; computing the rest is quicker
    reason: str  # why that is not all of them
    num_fetchable: int = 0  # blocks behind these that the source is known to hold
    fetch_s: float = 0.0  # until all of those are readable


class Lookups:
    """Answers lookups."""

    def __init__(self, core: CoreState, fetches: Fetches) -> None:
        self._core = core
        self._fetches = fetches
        self._in_memory = [
            (int(tier), core.catalog.num_resident[tier])
            for tier in core.ladder.memory_tiers
            if tier in core.rooms
        ]

    def lookup(self, namespace_id: int, prefix_hashes: Sequence[bytes]) -> LookupResult | Refusal:
        """How much of a chain is stored, where, and how long loading it takes."""
        core = self._core
        namespace = core.catalog.namespaces.get(namespace_id)
        if namespace is None:
            return unknown_namespace(namespace_id)
        tiers = self.stored(namespace, prefix_hashes)
        advice = core.costs.advise(namespace_id, tiers, now=core.now)
        found = LookupResult(
            len(tiers), bytes(tiers), advice.load_s, advice.recompute_s, advice.num_blocks, advice.reason
        )
        if not self._fetches.is_open:
            return found
        price = self._fetches.price(namespace, prefix_hashes, len(tiers))
        return found._replace(num_fetchable=price.num_blocks, fetch_s=price.fetch_s)

    def stored(self, namespace: NamespaceEntry, prefix_hashes: Sequence[bytes]) -> bytearray:
        """Return the tier of each block of a chain that is stored, up to the first that is not."""
        core, num_groups, in_memory = self._core, namespace.num_groups, self._in_memory
        tiers = bytearray()
        for row in namespace.rows.find(prefix_hashes):
            if row < 0:
                break
            for tier, num_resident in in_memory:
                if num_resident[row] == num_groups:
                    tiers.append(tier)
                    break
            else:
                slowest = core.readable_from(row)
                if slowest is None:
                    break
                tiers.append(slowest)
        return tiers
